"""Forward passes on a few samples.

Do they interact, is a pass random, does a parameter move the output outside the graph?

In: a copy of the model (fastlr.ghost.verification.copies) and a batch of three or four. Out: errors
that name the module, or notes in the ledger. Samples are run in other company and must give what
they gave; parameters that are not in the graph are moved, and the output must stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.distributed import on_demand
from fastlr.errors import (
    HiddenParameterError,
    InteractionError,
    ModelError,
    RandomForwardError,
    few,
)
from fastlr.ghost.batch import Batch
from fastlr.ghost.fusion.conv_bn import FoldRefuted
from fastlr.ghost.fusion.mode import Folding
from fastlr.ghost.graph import Graph
from fastlr.ghost.model_io import FAILURES, OutputSelector, sample_count, select_output
from fastlr.ghost.recurrent import Unfused
from fastlr.ghost.verification.agreement import agree, measured_noise
from fastlr.ghost.verification.copies import Subject, with_buffers_moved
from fastlr.ghost.verification.noise import Noise, RoundingProbe, gap
from fastlr.ghost.verification.record import Ledger, ParameterProof
from fastlr.ghost.verification.stand_in import StandIn

SAMPLES = 3
EVEN_SAMPLES = 4  # for a model that does not take three
OTHER_VALUES = (
    30.0,
    -1 / 30,
    1.0,
    1.0,
)  # factors of the samples' inputs: do they interact where values differ?


class ForwardChecks:
    """Forward passes of a model's copies on three samples, compared.

    Args:
        model: the model.
        parameters: those that are measured, by name.
        output: picks the output tensor.
        out_dim: the samples' axis of the output.
        folding: what runs otherwise than the model says when it is measured.
        count: number of samples.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        output: OutputSelector,
        out_dim: int,
        folding: Folding | None = None,
        count: int = SAMPLES,
    ):
        self.count, self.all = count, tuple(range(count))
        self.model, self.parameters, self.output, self.out_dim = model, parameters, output, out_dim
        self.folding = folding

    @property
    def companies(self) -> list[list[int]]:
        """Copies of one sample each: two, and of the last one twice the number of samples.

        That may be too many for the model.
        """
        *others, last = self.all
        return [*([sample] * 2 for sample in others), [last] * 2 * self.count]

    @property
    def is_folded(self) -> bool:
        """True if the last forward pass ran otherwise than the model says."""
        return self.folding is not None and self.folding.active

    @contextmanager
    def _precision(self, subject: Subject) -> Iterator[None]:
        device = next(iter(self.parameters.values())).device.type
        with torch.autocast(device, enabled=False) if subject.dtype is not None else nullcontext():
            yield

    def _forward(
        self, subject: Subject, batch: Batch, samples: Sequence[int], *, fold: bool = False
    ) -> Tensor:
        """Return the output for some samples.

        ``fold``: as it will be measured, otherwise as the model is.
        """
        with torch.enable_grad():
            x = batch.pick(samples)
            with nullcontext() if fold else Unfused():
                result = (
                    self.folding.run(subject.named, lambda: subject(x))
                    if fold and self.folding
                    else subject(x)
                )
            z = select_output(result, self.output)
        if sample_count(z, self.out_dim) != len(samples):
            raise ModelError(
                f"{len(samples)} samples give an output of shape {tuple(z.shape)}, which does not "
                f"have that size along out_dim={self.out_dim}: pass in_dim= and out_dim="
            )
        return z

    def _otherwise(
        self,
        subject: Subject,
        stand_in: StandIn,
        batch: Batch,
        scale: float,
        seed: int,
        ledger: Ledger,
    ) -> None:
        """Try if samples interact where something is otherwise.

        Where they do, the model is looked at in every batch from then on.

        Tried are buffers that are zero, moved; samples whose values are far apart; and several
        copies of one sample, which go the same way and may be too many for it.
        """
        moved = with_buffers_moved(self.model, self.parameters, scale, seed, stand_in)
        if moved is not None and not self._separate(moved, batch, on_error=False):
            ledger.by_data = "a buffer that is zero now"
            return
        others = batch.otherwise(OTHER_VALUES[: self.count])
        if not all(self._separate(subject, other, on_error=True) for other in others):
            ledger.by_data = "samples that would interact with other values"

    @on_demand.structure_only()
    def _separate(self, subject: Subject, batch: Batch, *, on_error: bool) -> bool:
        """Return True if samples give in other company what they give in the batch of three.

        Return ``on_error`` where the model fails on them.
        """
        try:
            with self._precision(subject), torch.no_grad():
                z = self._forward(subject, batch, self.all)
                for samples in self.companies:
                    got = self._forward(subject, batch, samples)
                    want = z.narrow(self.out_dim, samples[0], 1).expand_as(got)
                    noise = partial(self._noise, subject, batch)
                    if not agree(want, got, _unexplained(z.dtype), noise, self.out_dim):
                        return False
        except (FoldRefuted, *FAILURES):
            return on_error
        return True

    @on_demand.structure_only()
    def _apart(self, subject: Subject, batch: Batch, _ledger: Ledger) -> None:
        """Require that samples give in other company what they give in the batch of three."""
        with torch.no_grad():
            z = self._forward(subject, batch, self.all)
            for samples in self.companies:
                got = self._forward(subject, batch, samples)
                self._same(
                    subject, batch, z, z.narrow(self.out_dim, samples[0], 1).expand_as(got), got
                )

    def _same(self, subject: Subject, batch: Batch, z: Tensor, want: Tensor, got: Tensor) -> None:
        """Require that samples give what they gave in the batch of three.

        If they do not, the error says what is wrong.
        """
        close = _unexplained(z.dtype)
        alike = partial(
            agree, relative=close, noise=partial(self._noise, subject, batch), out_dim=self.out_dim
        )
        if alike(want, got):
            return
        with torch.no_grad():
            plain = self._forward(subject, batch, self.all)
            repeatable = alike(plain, self._forward(subject, batch, self.all))
            if repeatable and alike(z, plain):
                raise InteractionError(self._interaction_message(subject, batch, close))
        if repeatable and self.is_folded:
            raise FoldRefuted([], "the folded model gives another output")
        active = [
            n
            for n, m in self.model.named_modules()
            if m.training and "dropout" in type(m).__name__.lower()
        ]
        where = f"; in train mode: {', '.join(active[:5])}" if active else ""
        message = f"two forward passes on the same inputs differ (dropout, sampling){where}"
        if any(m.training for m in self.model.modules()):
            raise RandomForwardError(f"{message}: call model.eval()")
        raise RandomForwardError(
            f"{message}, although the model is in eval mode: its forward pass draws at random "
            "whatever the mode. Give F.dropout training=self.training, or draw only where "
            "self.training is true"
        )

    @on_demand.structure_only()
    def _noise(self, subject: Subject, batch: Batch) -> Noise | None:
        """How far outputs of the few samples may be off by rounding."""
        with Unfused():
            x = batch.pick(self.all)
            probe = RoundingProbe(
                subject.model, x, self.output, subject.tensors, subject.dtype, subject.stand_in
            )
            return measured_noise(probe, self.out_dim, partial(self._varies, subject, batch))

    def _varies(self, subject: Subject, batch: Batch) -> bool:
        """Return True if a sample's bits depend on its company.

        That is the number of its copies, or its place among them.
        """
        with torch.no_grad():
            for sample in self.all:
                first: Tensor | None = None
                for count in (1, 2, self.count, 2 * self.count):
                    try:
                        z = self._forward(subject, batch, [sample] * count)
                    except (ModelError, *FAILURES):  # too many for the model, or too few
                        continue
                    first = z.narrow(self.out_dim, 0, 1) if first is None else first
                    if bool(gap(first.expand_as(z), z).any()):
                        return True
        return False

    def _interaction_message(self, subject: Subject, batch: Batch, close: float) -> str:
        """Name the first module whose output for sample 0 changes when the other samples do."""
        records: list[list[tuple[str, Tensor]]] = []

        def hook_for(name: str) -> Callable:
            def hook(_module: nn.Module, _inputs: Any, result: Any) -> None:
                if isinstance(result, Tensor) and result.ndim and result.shape[0] % self.count == 0:
                    records[-1].append((name, result.detach()[: len(result) // self.count].clone()))

            return hook

        modules = dict(subject.running.named_modules())
        handles = [
            module.register_forward_hook(hook_for(name)) for name, module in modules.items() if name
        ]
        try:
            for samples in (self.all, [0] * self.count):
                records.append([])
                with torch.no_grad():
                    self._forward(subject, batch, samples)
        finally:
            for handle in handles:
                handle.remove()
        pairs = zip(*records, strict=False)
        name = next(
            (n for (n, a), (_, b) in pairs if a.shape == b.shape and not agree(a, b, close)), None
        )
        message = "samples of the batch interact: what one gives depends on the others"
        if name is None:
            return f"{message}. Make the forward pass work on each sample alone"
        module = modules[name]
        message += f", first seen in module {name} ({type(module).__name__})"
        if module.training and "Norm" in type(module).__name__:
            return f"{message}, which is in train mode and uses batch statistics: call model.eval()"
        return f"{message}. Make it work on each sample alone"

    def _absent(
        self, subject: Subject, batch: Batch, z: Tensor, graph: Graph, ledger: Ledger
    ) -> None:
        """Record parameters that are not in the graph as zero, or refuse them.

        They are zero if they do not move the output; otherwise they are an error.
        """
        present = set(graph.parameters.values())
        absent = [n for n in self.parameters if n not in present]
        if not absent or any(set(absent) <= tested for tested in ledger.absent):
            return
        if self._moves(subject, batch, z, absent):
            culprits = [n for n in absent if self._moves(subject, batch, z, [n])] or absent
            module = culprits[0].rpartition(".")[0]
            while (
                module
                and "checkpoint" not in repr(type(self.model.get_submodule(module))).lower()
                and "." in module
            ):
                if sum(n.startswith(module + ".") for n in culprits) == len(culprits):
                    break
                module = module.rpartition(".")[0]
            kind = type(self.model.get_submodule(module)).__name__
            raise HiddenParameterError(
                f"parameter {few(culprits, 1)} of module {module or '(root)'} ({kind}) "
                "change the output but are not in its autograd graph: reentrant activation "
                "checkpointing (use use_reentrant=False or switch it off), no_grad, detach or "
                ".data in the forward pass; or freeze them with requires_grad_(False) if they "
                "should not count"
            )
        ledger.absent.append(frozenset(absent))
        for n in absent:
            ledger.parameters.setdefault(
                n, ParameterProof("zero", reason="not used by the output", alive=True)
            )

    def _moves(self, subject: Subject, batch: Batch, z: Tensor, names: list[str]) -> bool:
        """Return True if parameters move the output, and not by a choice alone.

        Scores of hard routing move it by such a choice alone.

        Such a choice has no gradient: it does not move with the least of changes.
        """
        double = z.dtype == torch.float64
        return all(
            self._moves_by(subject, batch, z, names, size)
            for size in (0.5, 1e-6 if double else 1e-3)
        )

    @on_demand.structure_only()
    def _moves_by(
        self, subject: Subject, batch: Batch, z: Tensor, names: list[str], size: float
    ) -> bool:
        generator = torch.Generator().manual_seed(2)
        saved = {n: subject.parameters[n].detach().clone() for n in names}
        with torch.no_grad():
            try:
                for n in names:
                    p = subject.parameters[n]
                    noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
                    p.add_(noise * size * (p.abs().mean() + 0.2))
                again = self._forward(subject, batch, self.all, fold=True)
            finally:
                for n in names:
                    subject.parameters[n].copy_(saved[n])
        return not agree(z, again, 1e-12 if z.dtype == torch.float64 else 1e-6, None, self.out_dim)


def _unexplained(dtype: torch.dtype) -> float:
    """Relative difference of outputs of three samples that needs no explanation."""
    return {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 5e-2)
