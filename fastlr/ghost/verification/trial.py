"""A copy of a model on the few samples of a proof: what runs it, how exact its outputs are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import ModelError
from fastlr.ghost.batch import Batch
from fastlr.ghost.fusion.mode import Folding
from fastlr.ghost.model_io import FAILURES, ModelView, select_output
from fastlr.ghost.recurrent import Unfused
from fastlr.ghost.verification.agreement import measured_noise
from fastlr.ghost.verification.company import InBatch
from fastlr.ghost.verification.copies import Subject
from fastlr.ghost.verification.noise import Noise, RoundingProbe, gap

# Relative difference of outputs of a few samples that needs no explanation, by dtype.
_UNEXPLAINED = {torch.float64: 1e-9, torch.float32: 1e-3}
_UNEXPLAINED_IN_FEW_DIGITS = 5e-2


@dataclass(eq=False)
class Trial:
    """A copy of a model on the few samples of a proof.

    Attributes:
        subject: the copy.
        batch: the samples.
        folding: what runs otherwise than the model says when it is measured; None: nothing.
    """

    subject: Subject
    batch: Batch
    folding: Folding | None = None

    @property
    def view(self) -> ModelView:
        """The model of which the subject is a copy."""
        return self.subject.view

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.batch.count

    @property
    def all(self) -> list[int]:
        """Numbers of all samples."""
        return list(range(self.count))

    @property
    def is_folded(self) -> bool:
        """True if the last forward pass ran otherwise than the model says."""
        return self.folding is not None and self.folding.blocks.has_folded

    def run(self, samples: Sequence[int]) -> Tensor:
        """Return the output for some samples, by the model as it is.

        Args:
            samples: their numbers, each as often as it is to be run.
        """
        with Unfused():
            return self._output(samples, None)

    def run_folded(self, samples: Sequence[int]) -> Tensor:
        """Return the output for some samples, by the model as it will be measured."""
        return self._output(samples, self.folding)

    def _output(self, samples: Sequence[int], folding: Folding | None) -> Tensor:
        x = self.batch.pick(samples)

        def forward() -> Any:
            return self.subject(x)

        with torch.enable_grad():
            result = folding.run(self.subject.named, forward) if folding else forward()
            z = select_output(result, self.view.output)
        if self.view.sample_count(z) != len(samples):
            raise ModelError(
                f"{len(samples)} samples give an output of shape {tuple(z.shape)}, which does not "
                f"have that size along out_dim={self.view.out_dim}: pass in_dim= and out_dim="
            )
        return z

    def in_batch(self, z: Tensor) -> InBatch:
        """Return what the samples give together, to which they are held in other company."""
        relative = _UNEXPLAINED.get(z.dtype, _UNEXPLAINED_IN_FEW_DIGITS)
        return InBatch(z, self.view.out_dim, relative, self.noise)

    def noise(self) -> Noise | None:
        """Measure how far outputs of the samples may be off by rounding."""
        with Unfused():
            probe = RoundingProbe(self.subject, self.batch.pick(self.all))
            return measured_noise(probe, self._bits_vary)

    def _bits_vary(self) -> bool:
        """Return True if a sample's bits depend on its company.

        That is the number of its copies, or its place among them.
        """
        out_dim = self.view.out_dim
        with torch.no_grad():
            for sample in self.all:
                first: Tensor | None = None
                for count in (1, 2, self.count, 2 * self.count):
                    try:
                        z = self.run([sample] * count)
                    except (ModelError, *FAILURES):  # too many for the model, or too few
                        continue
                    if first is None:
                        first = z.narrow(out_dim, 0, 1)
                    if bool(gap(first.expand_as(z), z).any()):
                        return True
        return False
