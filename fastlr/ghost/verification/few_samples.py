"""On how many samples a model is proven: on three, or on four where it does not take three.

A model that halves its batch (``x.chunk(2)``, ``x.view(2, -1)``) takes even batches only; another
may need at least four samples. Three are tried first: they need less, and an odd number shows what
depends on its being even.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastlr.errors import ModelError
from fastlr.ghost.batch import Batch
from fastlr.ghost.fusion.conv_bn import FoldRefuted
from fastlr.ghost.model_io import FAILURES, ModelView
from fastlr.ghost.verification.forward_checks import EVEN_SAMPLES, SAMPLES
from fastlr.ghost.verification.prover import Prover
from fastlr.ops.deferred_checks import out_of_memory


class FewSamples:
    """Chooses the samples of one model's proofs.

    Attributes:
        count: how many.
    """

    def __init__(self) -> None:
        self.count = SAMPLES

    def step_on_three_or_four(
        self, prover: Prover, batch: Batch, step: Callable[[Batch], None], start: int = 0
    ) -> None:
        """Take a step of the proof on a few samples.

        From then on on four, where the model does not take three.

        Args:
            prover: of the model.
            batch: the samples to choose from.
            step: of the prover, for these samples.
            start: number of the first one.
        """
        ledger = prover.ledger
        notes = list(ledger.notes)
        try:
            step(_few(batch, start, self.count))
        except (FoldRefuted, ModelError):
            if self.count == EVEN_SAMPLES or not takes_even_only(prover.view, batch):
                raise
            self.count, ledger.notes = EVEN_SAMPLES, notes
            step(_few(batch, start, self.count))

    def spread(self, count: int) -> list[int]:
        """Numbers of the samples of a proof, from the first to the last of a batch."""
        return sorted({k * (count - 1) // (self.count - 1) for k in range(self.count)})


def _few(batch: Batch, start: int, need: int) -> Batch:
    """Samples of the batch from number ``start`` on, made to differ."""
    picked = [(start + k) % batch.count for k in range(min(batch.count, need))]
    return batch.part(picked).distinct(need, torch.Generator().manual_seed(5))


def takes_even_only(view: ModelView, batch: Batch) -> bool:
    """Return True if the model runs on four samples and not on three."""
    return _takes(view, batch, EVEN_SAMPLES) and not _takes(view, batch, SAMPLES)


def _takes(view: ModelView, batch: Batch, count: int) -> bool:
    """Return True if the model gives as many outputs for so many samples."""
    try:
        z = view.outputs(_few(batch, 0, count).pick(range(count)))
        return view.sample_count(z) == count
    except FAILURES as error:
        if out_of_memory(error):
            raise
        return False
