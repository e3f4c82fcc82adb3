"""Samples in other company: what they give there is held to what they give in their batch.

In: the output of a batch, and a function that runs some of its samples. Out: the first samples that
give something else. Each check that samples do not depend on each other is one of these, by another
company: the rest of the batch shuffled and halved, copies of the sample itself, every sample twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastlr.ghost.batch import Batch
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.verification.agreement import agree, model_noise, noise_by_truth, unexplained
from fastlr.ghost.verification.noise import Noise

_MEASURED = 8  # samples at most by which rounding is measured


class OtherOutput(NamedTuple):
    """Samples that give something else in other company than in their batch.

    Attributes:
        samples: their numbers in the batch, in the order of the company.
        output: what they give there.
    """

    samples: Sequence[int]
    output: Tensor


@dataclass(frozen=True, eq=False)
class InBatch:
    """What the samples of a batch give in it.

    Attributes:
        output: of the batch.
        out_dim: the samples' axis of it.
        relative: difference, in parts of an element's size, that needs no explanation.
        noise: asked where that is exceeded (see `agree`).
        noise_by_truth: asked, for the company at hand, where that does not explain it either.
    """

    output: Tensor
    out_dim: int
    relative: float
    noise: Callable[[], Noise | None]
    noise_by_truth: Callable[[Sequence[int]], Noise | None] | None = None

    def holds(self, samples: Sequence[int], output: Tensor) -> bool:
        """Return True if samples that gave ``output`` give the same in the batch, but for rounding.

        A sample may be named several times: as often as it was run.
        """
        numbers = torch.tensor(samples, device=output.device)
        in_batch = self.output.detach().index_select(self.out_dim, numbers)
        if agree(in_batch, output, self.relative, self.noise, self.out_dim):
            return True
        measured = self.noise_by_truth and self.noise_by_truth(samples)
        if measured is None:
            return False
        return agree(in_batch, output, self.relative, lambda: measured, self.out_dim)

    def first_difference(
        self, companies: Iterable[Sequence[int]], run: Callable[[Sequence[int]], Tensor]
    ) -> OtherOutput | None:
        """Run samples in other companies until some give something else; None if none do."""
        for samples in companies:
            output = run(samples)
            if not self.holds(samples, output):
                return OtherOutput(samples, output)
        return None


def in_batch_of(view: ModelView, batch: Batch, output: Tensor) -> InBatch:
    """Return what the samples of a batch give in it, by the model as it is."""
    some = range(min(batch.count, _MEASURED))

    @cache  # each company asks for it
    def noise() -> Noise | None:
        return model_noise(view, batch.pick(some))

    relative = unexplained(output, view.parameters.values())
    truth = partial(noise_by_truth, view, batch)
    return InBatch(output, view.out_dim, relative, noise, truth)


def copies_of_each(samples: Iterable[int]) -> list[list[int]]:
    """Return the companies in which each sample is alone with a copy of itself."""
    return [[sample, sample] for sample in samples]
