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

    def due(self, *, fresh: bool) -> bool:
        """Return True for the first batch of every shape, for more within their share of the time, and after a failure."""
        return fresh or self.failed > 0 or self._spent + self._last <= SHARE * self._measured

    def draw(self, count: int) -> int:
        """The sample to audit among ``count``: random, another at every call; once more the one that failed."""
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

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add what happens inside to the time that audits took."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._last = time.perf_counter() - begun
            self._spent += self._last
