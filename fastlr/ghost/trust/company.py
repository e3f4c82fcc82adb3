"""Samples in other company: what they give there is compared with what they give in their batch.

In: the output of a batch, and a function that runs some of its samples. Out: the first samples that
give something else. Companies are halves of the shuffled batch, one sample as often as fills the
batch, and a sample beside a copy of itself.

Where a difference is beyond the tolerance, rounding is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastlr.ghost.model.batch import Batch
from fastlr.ghost.model.view import ModelView
from fastlr.ghost.trust.agreement import agree, gap, has_few_digits, unexplained
from fastlr.ghost.trust.rounding import MEASURED, among_copies, by_more_digits


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
        doubtful = list(dict.fromkeys(samples[row] for row in largest))[:MEASURED]
        ways = [among_copies, by_more_digits]
        if has_few_digits(self.view.parameters.values(), self.view.device):
            ways.reverse()
        allowed: Tensor | None = None
        for measure in ways:
            measured = measure(self.view, self.batch, doubtful)
            if measured is None:
                continue
            allowed = measured if allowed is None else torch.maximum(allowed, measured)
            if agree(in_batch, output, relative, out_dim, allowed):
                return True
        return False

    def first_difference(
        self,
        companies: Iterable[Sequence[int]],
    ) -> OtherOutput | None:
        """Run samples in other companies until some give something else; None if none do."""
        for samples in companies:
            output = self.run(samples)
            if not self.holds(samples, output):
                return OtherOutput(samples, output)
        return None
