"""How far a model's outputs are off by rounding: measured, where nothing else tells.

In: a model, or a copy of it, and a few samples. Out: a `Noise` of the shape of their output. It is
the difference from what another precision gives. A model that casts to a dtype itself runs in no
other, or only seems to: its float64 copy works in float32 within. There its parameters are moved at
random by as much as that dtype rounds. What this does to the outputs is what rounding does to them;
as the samples stay in one company, it knows nothing of samples that interact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastlr.distributed import on_demand
from fastlr.ghost.batch import cast_inputs, copied
from fastlr.ghost.graph import walk
from fastlr.ghost.model_io import FAILURES, OutputSelector, call_with, select_output
from fastlr.ghost.verification.stand_in import StandIn

# Differences measured in each column, of samples or of moves: the largest of fewer may be small by
# chance.
_VALUES = 16
# Float64's rounding in parts of the difference from float32, with a margin.
_SINGLE_TO_DOUBLE = 2.0**-26


class Noise(NamedTuple):
    """What is taken for rounding in the outputs of a few samples.

    Attributes:
        allowed: distances, shaped like the output; in each column the largest counts.
        own: no other precision tells; the model's parameters were moved in its own.
    """

    allowed: Tensor
    own: bool


class OtherPrecision(NamedTuple):
    """What another precision tells of rounding.

    Attributes:
        off: distances, shaped like the output.
        whole: the whole forward pass took that precision, as far as its graph shows.
    """

    off: Tensor
    whole: bool


@dataclass
class RoundingProbe:
    """A model, or a copy of it, on a few samples, run with other parameters.

    Attributes:
        model: the module that is run.
        x: inputs of the samples.
        output: picks the output tensor.
        tensors: parameters and buffers to run it with; None: its own.
        dtype: of the copy; None: the model's own.
        stand_in: runs it; None: the model itself.
    """

    model: nn.Module
    x: Any
    output: OutputSelector
    tensors: Mapping[str, Tensor] | None = None
    dtype: torch.dtype | None = None
    stand_in: StandIn | None = None

    @cached_property
    def state(self) -> Mapping[str, Tensor]:
        """Every parameter and buffer, by name."""
        if self.tensors is not None:
            return self.tensors
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _with_graph(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors; parameters require grad, frozen ones too: the graph shows what uses them."""
        for name, _ in self.model.named_parameters():
            if tensors[name].is_floating_point():
                tensors[name].requires_grad_()
        return tensors

    def _run(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor | None:
        x = cast_inputs(copied(self.x), dtype)
        try:
            with torch.enable_grad():
                if self.stand_in is None:
                    result = call_with(self.model, tensors, x, dtype=dtype)
                else:
                    result = self.stand_in.call_with(tensors, x, dtype=dtype)
            return select_output(result, self.output)
        except FAILURES:
            return None

    def run(self) -> Tensor | None:
        """The output, with the graph of all parameters; None if the model does not run so."""
        tensors = {n: on_demand.cast(t, t.dtype) for n, t in self.state.items()}
        return self._run(self._with_graph(tensors), self.dtype)

    def in_other_precision(self, own: Tensor) -> OtherPrecision | None:
        """How far an output is off by what another precision gives.

        None if the model does not run in it, or where the output is finite gives what is not.
        """
        dtype = torch.float32 if own.dtype == torch.float64 else torch.float64
        tensors = self._with_graph({n: on_demand.cast(t, dtype) for n, t in self.state.items()})
        with torch.autocast(own.device.type, enabled=False):
            other = self._run(tensors, dtype)
        if other is None or other.shape != own.shape:
            return None
        if bool((own.isfinite() & ~other.isfinite()).any()):
            return None
        part = _SINGLE_TO_DOUBLE if own.dtype == torch.float64 else 1.0
        return OtherPrecision(_distance(own, other.detach()) * part, lowest_dtype(other) == dtype)

    def with_moves(self, own: Tensor, step: float, samples: int) -> Tensor | None:
        """How far an output moves with parameters moved by parts of themselves.

        These are at most ``step``.

        Buffers stay: their values may be places. Of fewer ``samples`` there are more moves, each
        element's largest distance counts. None if the model does not run so.
        """
        names = {n for n, _ in self.model.named_parameters()}
        off = torch.zeros_like(own, dtype=torch.float64)
        for seed in range(-(-_VALUES // samples)):
            moved = {n: _moved(t, step, seed) if n in names else t for n, t in self.state.items()}
            z = self._run(moved, self.dtype)
            if z is None:
                return None
            off = torch.maximum(off, _distance(own, z.detach()))
        return off


def gap(a: Tensor, b: Tensor) -> Tensor:
    """Distances of elements; none where both are no number or the same infinity."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a.double() - b.double()).abs().masked_fill(same, 0.0).nan_to_num(torch.inf)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Finite distances of elements; none where one is not finite."""
    return gap(a, b).nan_to_num(posinf=0.0)


def lowest_dtype(z: Tensor) -> torch.dtype:
    """The least precise dtype that an output went through, as far as its graph shows."""
    return walk(z, {}).lowest_dtype() if z.requires_grad else z.dtype


def _moved(t: Tensor, step: float, seed: int) -> Tensor:
    """A parameter whose every value is moved by a random part of itself."""
    if not t.is_floating_point():
        return t.detach()

    def make(values: Tensor) -> Tensor:
        generator = torch.Generator(values.device).manual_seed(seed)
        parts = torch.rand(values.shape, generator=generator, device=values.device).double()
        return (values.detach() * (1 + step * (2 * parts - 1))).to(values.dtype)

    return on_demand.derived(t, t.dtype, make)
