"""When samples are audited, and which."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

SHARE = 0.03  # of the time of raw calls, spent on audits beyond those of new plans
SAMPLES = 3  # audited in the first chunk of a measurement, and where a plan is new


class Draw(NamedTuple):
    """Samples of a batch that are audited.

    Attributes:
        random: Number of randomly drawn samples.
        last: Whether the last sample of the batch is audited.
    """

    random: int
    last: bool = False

    @staticmethod
    def of_chunk(first: bool, last: bool) -> Draw:
        """Return the draw for a chunk of a measurement, which may be its first or last one."""
        return Draw(SAMPLES if first else int(last), last)


Check = bool | Draw | None  # None: as often as costs at most `SHARE` of the time


class Disproved(Exception):
    """A sample's output or exact norms refute an earlier plan."""

    def __init__(self, sample: int, text: str) -> None:
        super().__init__(text)
        self.sample = sample


class Audits:
    """The audits of one engine.

    Attributes:
        passed: Number of samples whose output and norms were right.
        failed: Number of samples that refuted what was known of the model.
    """

    def __init__(self) -> None:
        self.passed = self.failed = 0
        self._measured = self._spent = self._last = 0.0
        self._drawn = 0
        self._again: int | None = None

    def samples(self, count: int, check: Check, at_least: int = 0) -> list[int]:
        """Return the numbers of the samples to audit, another draw in every call.

        Args:
            count: Number of samples in the batch.
            check: Samples that the caller wants audited. After a failure, every batch is audited.
            at_least: Number of randomly drawn samples to audit whatever the caller wants.
        """
        if isinstance(check, Draw):
            random, last = check
        else:
            keeps_within_share = self._spent + self._last <= SHARE * self._measured
            random, last = int(keeps_within_share if check is None else check), False
        random = max(random, at_least, int(self.failed > 0))
        if not (random or last):
            return []
        self._drawn += 1
        most = min(random + last, count)
        chosen = [count - 1] * last
        if self._again is not None and self._again < count:
            chosen.append(self._again)
        self._again = None
        chosen += Random(self._drawn).sample(range(count), most)
        return list(dict.fromkeys(chosen))[:most]

    def fail(self, failure: Disproved) -> None:
        """Count a failure; its sample is audited again next."""
        self.failed += 1
        self._again = failure.sample

    def measured(self, seconds: float) -> None:
        """Add to the time that raw calls took."""
        self._measured += seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add what happens inside to the time that audits of raw calls took."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._last = time.perf_counter() - begun
            self._spent += self._last
