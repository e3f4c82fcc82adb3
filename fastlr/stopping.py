"""How many inputs an estimate uses: all that were asked for, or as many as reach a relative standard error."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fastlr.errors import InputError
from fastlr.result import count, ratio
from fastlr.stats import Moments

CHECK_EVERY = 128  # samples between two looks at target_rel_stderr, whatever the chunk


class Stopping:
    """Takes in values in the order of the inputs, and says where the target is reached.

    Args:
        target: relative standard error to stop at, or None.
        min_n: fewest inputs.
        batch: inputs in a value where values are those of whole batches, else None.
    """

    def __init__(self, target: float | None, min_n: int, batch: int | None = None) -> None:
        self.target, self.min_n, self.batch, self.moments = target, min_n, batch, Moments()

    def look(self, values: Tensor, done: int, stop: int) -> tuple[int, bool]:
        """Add the values of inputs done .. stop - 1 up to where the target is reached: (values to keep, whether it is)."""
        moments = self.moments
        if self.target is None:
            moments.add(values)
            return len(values), False
        if self.batch is not None:
            for k in range(len(values)):
                moments.add(values[k : k + 1])
                if min(done + (k + 1) * self.batch, stop) >= self.min_n and self._reached():
                    return k + 1, True
            return len(values), False
        at = done
        first = self.min_n + max(0, -(-(done + 1 - self.min_n) // CHECK_EVERY)) * CHECK_EVERY
        for point in range(first, stop + 1, CHECK_EVERY):
            moments.add(values[at - done : point - done])
            at = point
            if self._reached():
                return at - done, True
        moments.add(values[at - done :])
        return len(values), False

    def _reached(self) -> bool:
        return self.target is not None and ratio(self.moments.stderr, self.moments.mean) <= self.target


def total_inputs(n: int, inputs: Any, target: float | None, min_n: int, max_n: int | None) -> int:
    """Return the most inputs to use, from n, the length of the inputs and the options of early stopping."""
    length = len(inputs) if hasattr(inputs, "__len__") else None
    if target is None:
        if max_n is not None:
            raise InputError("max_n goes with target_rel_stderr: pass n for a fixed number of inputs")
        total = n
    else:
        if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 < target < math.inf:
            raise InputError(f"target_rel_stderr must be positive and finite, such as 0.05, not {target!r}")
        if max_n is None:
            total = n if length is None else min(n, length)
        elif count("max_n", max_n) < min_n:
            raise InputError(f"max_n = {max_n} is less than min_n = {min_n}: raise max_n or lower min_n")
        else:
            total = count("max_n", max_n)
    if length is not None and total > length:
        raise InputError(f"{total} inputs are asked for but there are {length}: lower n (or max_n)")
    return count("the number of inputs", total)
