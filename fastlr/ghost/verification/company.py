"""Samples in other company: what they give there is compared with what they give in their batch.

In: the output of a batch, and a function that runs some of its samples. Out: the first samples that
give something else. Companies are halves of the shuffled batch, one sample as often as fills the
batch, and a sample beside a copy of itself.

Where a difference is beyond the tolerance, rounding is measured: the sample runs among copies of
itself, in batches of other sizes. There company cannot matter, so whatever differs is rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastlr.ghost.batch import Batch
from fastlr.ghost.graph import lowest_dtype
from fastlr.ghost.model_io import FAILURES, ModelView
from fastlr.ghost.verification.agreement import (
    agree,
    gap,
    has_few_digits,
    rounding,
    typical_size,
    unexplained,
)
from fastlr.ghost.verification.deep_copy import deep_copies
from fastlr.ops.deferred_checks import out_of_memory

SAMPLES, EVEN_SAMPLES = 3, 4  # the latter for a model that does not take three
_MEASURED = 8  # samples at most by which rounding is measured
_MARGIN = 4  # differences of this many times the measured rounding are rounding
_MARGIN_OF_FEW_DIGITS = 32


class OtherOutput(NamedTuple):
    """Samples that give something else in other company than in their batch.

    Attributes:
        samples: Their numbers in the batch, in the order of the company.
        output: Their output there.
    """

    samples: Sequence[int]
    output: Tensor


@dataclass(frozen=True, eq=False)
class InBatch:
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

    def holds(self, samples: Sequence[int], output: Tensor) -> bool:
        """Return True if samples that gave ``output`` give the same in the batch, but for rounding.

        A sample may be named several times: as often as it was run.
        """
        out_dim = self.view.out_dim
        numbers = torch.tensor(samples, device=output.device)
        in_batch = self.output.detach().index_select(out_dim, numbers)
        relative = unexplained(output, self.view.parameters.values())
        if agree(in_batch, output, relative, out_dim):
            return True
        if in_batch.shape != output.shape:
            return False
        off = gap(in_batch, output).movedim(out_dim, 0).flatten(1).amax(1)
        largest = off.argsort(descending=True).tolist()
        doubtful = list(dict.fromkeys(samples[row] for row in largest))[:_MEASURED]
        measured = self._rounding(doubtful, relative)
        return measured is not None and agree(in_batch, output, relative, out_dim, measured)

    def _rounding(self, samples: Sequence[int], relative: float) -> Tensor | None:
        """Measure by how much elements of one sample's output differ by rounding.

        In few digits a deep copy in more digits shows it, elsewhere copies of the samples.
        """
        if has_few_digits(self.view.parameters.values(), self.view.device):
            more = list(dict.fromkeys([*samples, *range(self.batch.count)]))[:_MEASURED]
            for clone in deep_copies(self.view.module):
                off = self._off_of(clone, more)
                if off is not None:  # an element may have little of it by chance
                    return _MARGIN_OF_FEW_DIGITS * off.clamp(min=float(off.median()))
        return self._rounding_among_copies(samples, relative)

    def _off_of(self, clone: nn.Module, samples: Sequence[int]) -> Tensor | None:
        """Return the largest distance of each element from what a copy of the model gives.

        None where the copy does not run, or gives what is not finite.
        """
        view, dtype = self.view, next(clone.parameters()).dtype
        copied_view = ModelView.of(clone, view.output, view.in_dim, view.out_dim)
        try:
            with torch.autocast(view.device.type, enabled=False):
                exact = copied_view.outputs(self.batch.pick(samples, dtype))
        except Exception:  # whatever a copy raises
            return None
        own = self.run(samples)
        if own.shape != exact.shape or bool((own.isfinite() & ~exact.isfinite()).any()):
            return None
        return gap(own, exact).nan_to_num(posinf=0.0).amax(view.out_dim)

    def _rounding_among_copies(self, samples: Sequence[int], relative: float) -> Tensor | None:
        """Measure by how much elements of a sample's output differ among copies of the sample.

        It is at most what the least precise dtype in the graph rounds: copies of a sample differ
        by more where the model goes by their places. None where that cannot be measured: the model
        takes no copies, or is random.
        """
        count, off = self.batch.count, None
        most = 0.0
        for sample in samples:
            first: Tensor | None = None
            for size in sorted({2, count // 2, count} - {0}):
                try:
                    z = self.view.forward(self.batch.pick([sample] * size))
                except FAILURES as error:  # the model may take no such number
                    if out_of_memory(error):
                        raise
                    continue
                outputs = z.detach()
                if first is None:
                    first = self.view.row(outputs, 0)
                    most = rounding(lowest_dtype(z)) * typical_size(first)
                    if not agree(outputs, self.run([sample] * size), relative, self.view.out_dim):
                        return None
                if self.view.row(outputs, 0).shape != first.shape:
                    return None
                distance = gap(outputs, first.expand_as(outputs)).nan_to_num(posinf=0.0)
                largest = distance.amax(self.view.out_dim).mul_(_MARGIN).clamp_(max=most)
                off = largest if off is None else torch.maximum(off, largest)
        return off

    def first_difference(
        self,
        companies: Iterable[Sequence[int]],
        run: Callable[[Sequence[int]], Tensor] | None = None,
    ) -> OtherOutput | None:
        """Run samples in other companies until some give something else; None if none do.

        Args:
            companies: Numbers of samples.
            run: Function that runs them; by default the model as it is.
        """
        for samples in companies:
            output = (run or self.run)(samples)
            if not self.holds(samples, output):
                return OtherOutput(samples, output)
        return None


def copies_of_each(samples: Iterable[int]) -> list[list[int]]:
    """Return the companies in which each sample is alone with a copy of itself."""
    return [[sample, sample] for sample in samples]


def takes_even_only(view: ModelView, batch: Batch) -> bool:
    """Return True if the model runs on four samples and not on three."""
    return _takes(view, batch, EVEN_SAMPLES) and not _takes(view, batch, SAMPLES)


def _takes(view: ModelView, batch: Batch, count: int) -> bool:
    """Return True if the model gives as many outputs for so many samples."""
    samples = [k % batch.count for k in range(count)]
    try:
        return view.sample_count(view.outputs(batch.pick(samples))) == count
    except FAILURES as error:
        if out_of_memory(error):
            raise
        return False
