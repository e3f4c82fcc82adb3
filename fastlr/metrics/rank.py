"""The singular values of a representation, and the ranks that are read off them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastlr.errors import InputError, NonFiniteError
from fastlr.metrics.value import Measure


def effective_rank(values: Tensor, delta: float) -> int:  # [k], largest first
    """Return the smallest k whose k largest values make up 1 - delta of the sum.

    It is 0 where all are zero.
    """
    sums = values.cumsum(0)
    if float(sums[-1]) <= 0:
        return 0
    return int((sums < (1 - delta) * sums[-1]).sum()) + 1


class Spectrum:
    """The singular values of a matrix [n, d] that comes in pieces of rows.

    Its QR factor R stands for the rows so far, so that no more than some multiple of d are held.
    """

    def __init__(self) -> None:
        self.n, self.layer = 0, ""
        self.rows: Tensor | None = None
        self._values: Tensor | None = None

    def add(self, features: Tensor, layer: str) -> None:  # [..., d]
        """Take in features; every axis but the last is rows."""
        self.layer = layer
        rows = features.detach()
        flat = rows.flatten(0, -2) if rows.ndim > 1 else rows[None]
        if self.rows is not None and flat.shape[1] != self.rows.shape[1]:
            raise InputError(
                f"{layer} had {self.rows.shape[1]} features in one batch and {flat.shape[1]} in "
                "another: give batches of one shape"
            )
        if not bool(flat.isfinite().all()):
            raise NonFiniteError(
                f"the features that go into {layer} are not finite: the training has diverged"
            )
        self.n += len(flat)
        d = flat.shape[1]
        for part in flat.split(max(4 * d, 256)):
            rows = part.double()
            if self.rows is not None:
                rows = torch.cat([self.rows, rows])
            if len(rows) > 2 * d:
                rows = torch.linalg.qr(rows, mode="r").R
            self.rows = rows

    @property
    def values(self) -> Tensor:  # [min(n, d)]
        """The singular values, float64, largest first."""
        if self._values is None:
            assert self.rows is not None
            self._values = torch.linalg.svdvals(self.rows)
        return self._values

    def srank(self, delta: float) -> Measure:
        """Return the smallest k whose largest k singular values make up 1 - delta of the sum."""
        rank = effective_rank(self.values, delta)
        return self._measure(rank, f"effective rank: srank with delta = {delta:g} of the features")

    def entropy_rank(self) -> Measure:
        """Return exp of the entropy of the normalised singular values."""
        total = self.values.sum()
        p = self.values / total
        rank = float(torch.special.entr(p).sum().exp()) if float(total) > 0 else 0.0
        return self._measure(
            rank, "effective rank: exp of the entropy of the features' normalised singular values"
        )

    def feature_rank(self, epsilon: float) -> Measure:
        """Return the number of singular values of the matrix over sqrt(n) above epsilon."""
        rank = int((self.values / math.sqrt(self.n) > epsilon).sum())
        return self._measure(
            rank, f"feature rank: singular values of features / sqrt(n) above {epsilon:g}"
        )

    def _measure(self, value: float, definition: str) -> Measure:
        d = self.rows.shape[1] if self.rows is not None else 0
        return Measure(value, definition, {"n": self.n, "d": d, "layer": self.layer})
