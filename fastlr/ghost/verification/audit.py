"""Audits: randomly drawn samples of what is measured, held to their exact gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SHARE = 0.03  # of the measured time, spent on audits beyond the first of every shape


class Disproved(Exception):
    """A sample's output or exact norms are not what an earlier proof and this batch say."""

    def __init__(self, sample: int, text: str) -> None:
        super().__init__(text)
        self.sample = sample


class Audits:
    """The audits of one engine.

    Attributes:
        passed: samples whose output and norms were right.
        failed: samples that refuted what was known of the model.
    """

    def __init__(self) -> None:
        self.passed = self.failed = 0
        self._measured = self._spent = self._last = 0.0
        self._drawn = 0
        self._again: int | None = None
        self._owed = False

    def due(self) -> bool:
        """Return True if the next batch is to be audited, be its plan new or not.

        So are some within their share of the time, and any after a failure.
        """
        within_share = self._spent + self._last <= SHARE * self._measured
        return within_share or self._owed or self.failed > 0

    def owe(self) -> None:
        """Make the next batch that runs as it is due for an audit, whatever the time.

        For a sample of what was replayed was not right.
        """
        self._owed = True

    def draw(self, count: int) -> int:
        """Return the number of the sample to audit among ``count``.

        It is random, another at every call; once more the one that failed.
        """
        self._owed = False
        again, self._again = self._again, None
        if again is not None and again < count:
            return again
        self._drawn += 1
        return int(torch.randint(count, (), generator=torch.Generator().manual_seed(self._drawn)))

    def fail(self, failure: Disproved) -> None:
        """Count a failure; its sample is audited again next."""
        self.failed += 1
        self._again = failure.sample

    def measured(self, seconds: float) -> None:
        """Add to the time that measuring took."""
        self._measured += seconds

    def clock(self) -> tuple[float, float]:
        """Return the time, for `measured_since`."""
        return time.perf_counter(), self._measured

    def measured_since(self, clock: tuple[float, float]) -> None:
        """Add the time since then, but for what was added meanwhile."""
        begun, measured = clock
        elapsed = time.perf_counter() - begun
        self.measured(max(0.0, elapsed - (self._measured - measured)))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add what happens inside to the time that audits took."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._last = time.perf_counter() - begun
            self._spent += self._last
