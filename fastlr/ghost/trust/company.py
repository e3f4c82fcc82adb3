"""Samples in other company: their outputs there are compared with those in their batch.

In: the output of a batch, and companies, which are lists of some of its samples. Out: the first
company in which samples give something else. Rounding is measured where a difference exceeds the
tolerance: among copies of one sample, where company cannot matter, and as the distance from a deep
copy of the model in more digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastlr.ghost.graph.walk import walk
from fastlr.ghost.model.batch import Batch
from fastlr.ghost.model.view import FAILURES, ModelView
from fastlr.ghost.trust.agreement import (
    LARGEST_TOLERANCE_OF_FLOAT32,
    agree,
    gap,
    median_size,
    output_tolerance,
    rounding,
)
from fastlr.ghost.trust.copies import running_copies
from fastlr.ops.deferred_checks import out_of_memory

MEASURED = 8  # samples at most by which rounding is measured
# Differences of this many times the measured rounding are rounding.
MARGIN_OF_COPIES, MARGIN_OF_DIGITS = 4, 32


class OtherOutput(NamedTuple):
    """Samples that give something else in other company than in their batch.

    Attributes:
        samples: Numbers of the samples in the batch, in the order of the company.
        output: Output of the company.
    """

    samples: Sequence[int]
    output: Tensor


@dataclass(frozen=True, eq=False)
class BatchOutput:
    """The output of a batch, and its inputs.

    Attributes:
        view: Model.
        batch: Inputs of the batch.
        output: Output of the batch.
    """

    view: ModelView
    batch: Batch
    output: Tensor

    def run(self, samples: Sequence[int]) -> Tensor:
        """Return the model's output for some samples, each as often as it is named."""
        return self.view.outputs(self.batch.pick(samples))

    def first_difference(self, companies: Iterable[Sequence[int]]) -> OtherOutput | None:
        """Run samples in other companies until some give something else; None if none do."""
        for samples in companies:
            output = self.run(samples)
            if not self.matches(samples, output):
                return OtherOutput(samples, output)
        return None

    def matches(self, samples: Sequence[int], output: Tensor) -> bool:
        """Return True if ``output`` is that of these samples in the batch, but for rounding."""
        out_dim = self.view.out_dim
        numbers = torch.tensor(samples, device=output.device)
        in_batch = self.output.detach().index_select(out_dim, numbers)
        relative = self._tolerance(output)
        if agree(in_batch, output, relative, out_dim):
            return True
        if in_batch.shape != output.shape:
            return False
        off = gap(in_batch, output).movedim(out_dim, 0).flatten(1).amax(1)
        doubtful = dict.fromkeys(samples[row] for row in off.argsort(descending=True).tolist())
        ways = [self._rounding_among_copies, self._rounding_to_more_digits]
        if relative > LARGEST_TOLERANCE_OF_FLOAT32:  # in few digits
            ways.reverse()
        allowed = torch.zeros((), device=output.device)
        for way in ways:
            measured = way(list(doubtful)[:MEASURED])
            if measured is not None:
                allowed = torch.maximum(allowed, measured)
                if agree(in_batch, output, relative, out_dim, allowed):
                    return True
        return False

    def _tolerance(self, output: Tensor) -> float:
        return output_tolerance(output, self.view.parameters.values())

    def _repeats(self, samples: Sequence[int], z: Tensor) -> bool:
        """Return True if another pass over samples gives the same: nothing is drawn at random."""
        return agree(z, self.run(samples), self._tolerance(z), self.view.out_dim)

    def _rounding_among_copies(self, samples: Sequence[int]) -> Tensor | None:
        """Return by how much a sample's output differs among copies of it in batches of any size.

        The result is at most what the least precise dtype in the graph rounds. Copies of a sample
        differ by more if the model depends on their places. None: the rounding cannot be measured.
        """
        view, largest = self.view, None
        for sample in samples:
            first: Tensor | None = None
            for size in sorted({2, self.batch.count // 2, self.batch.count} - {0}):
                try:
                    z = view.forward(self.batch.pick([sample] * size))
                except FAILURES as error:  # the model may take no such number
                    if out_of_memory(error):
                        raise
                    continue
                if largest is None and not self._repeats([sample] * size, z):
                    return None
                if first is None:
                    first = view.row(z.detach(), 0)
                    lowest = walk(z, {}).lowest_dtype() if z.requires_grad else z.dtype
                    most = rounding(lowest) * median_size(first)
                if view.row(z, 0).shape != first.shape:
                    return None
                apart = gap(z.detach(), first.expand_as(z)).nan_to_num(posinf=0.0)
                here = (MARGIN_OF_COPIES * apart.amax(view.out_dim)).clamp_(max=most)
                largest = here if largest is None else torch.maximum(largest, here)
        return largest

    def _rounding_to_more_digits(self, samples: Sequence[int]) -> Tensor | None:
        """Return by how much outputs differ from those of a deep copy in more digits."""
        samples = list(dict.fromkeys([*samples, *range(self.batch.count)]))[:MEASURED]
        own = self.run(samples)
        if not self._repeats(samples, own):
            return None
        digits = min(p.dtype.itemsize for p in self.view.parameters.values())
        for _, _, exact in running_copies(self.view, self.batch, samples):
            if exact.shape != own.shape:
                continue
            if exact.dtype.itemsize <= digits:
                return None
            off = gap(own, exact).nan_to_num(posinf=0.0).amax(self.view.out_dim)
            if own.dtype.itemsize < 4:  # an element may have little of it by chance
                return MARGIN_OF_DIGITS * off.clamp(min=float(off.median()))
            most = rounding(own.dtype) * median_size(own)
            return (MARGIN_OF_DIGITS * off).clamp_(max=most)
        return None
