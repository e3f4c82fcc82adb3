"""Copies of a model to prove on.

They are functional or deep, in float64, with every parameter and buffer perturbed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.distributed import on_demand
from fastlr.ghost.batch import cast_inputs
from fastlr.ghost.model_io import call, call_with
from fastlr.ghost.verification.stand_in import StandIn


@dataclass
class Subject:
    """Something that computes like the model: the model itself or a perturbed copy.

    Attributes:
        name: for the report.
        model: the module that is run, or that a stand-in runs for.
        tensors: parameters and buffers to run it with; None: its own.
        parameters: those that are measured.
        dtype: of the copy; None: the model's own.
        stand_in: runs it with the tensors; None: the model itself.
    """

    name: str
    model: nn.Module
    tensors: dict[str, Tensor] | None
    parameters: dict[str, Tensor]
    dtype: torch.dtype | None
    stand_in: StandIn | None = None

    @property
    def running(self) -> nn.Module:
        """The module that runs."""
        return self.model if self.stand_in is None else self.stand_in.running

    @property
    def named(self) -> dict[str, Tensor]:
        """Every parameter that the forward pass uses, trainable or not, by name."""
        return dict(self.model.named_parameters()) if self.tensors is None else self.tensors

    @property
    def state(self) -> dict[str, Tensor]:
        """Every parameter and buffer, by name."""
        return (
            {**self.named, **dict(self.model.named_buffers())}
            if self.tensors is None
            else self.tensors
        )

    def __call__(self, x: Any) -> Any:
        """Run the forward pass."""
        x = cast_inputs(x, self.dtype)
        if self.tensors is None:
            return call(self.model, x, dtype=self.dtype)
        if self.stand_in is None:
            return call_with(self.model, self.tensors, x, dtype=self.dtype)
        return self.stand_in.call_with(self.tensors, x, dtype=self.dtype)


def _noise(t: Tensor, generator: torch.Generator) -> Tensor:
    """Normal noise like ``t``, in float64 of a float32's digits: drawn three times as fast."""
    return torch.randn(t.shape, generator=generator, device=generator.device).to(
        t.device, torch.float64
    )


def _perturbed(
    t: Tensor, name: str, scale: float, generator: torch.Generator, *, trainable: bool
) -> Tensor:
    """A parameter or buffer moved at random, in float64.

    Trainable ones by additive noise, so that nothing is zero; buffers and frozen parameters by a
    factor, so that signs, zeros and infinities stay, and what they switch off stays off.
    """
    if not t.is_floating_point():
        return t.detach().clone()
    noise = _noise(t, generator)
    if trainable:
        width = 0.3 / math.sqrt(max(1, t[0].numel())) if t.ndim > 1 else 0.1
        return noise.mul_(scale * width).add_(t.detach()).requires_grad_()
    moved = t.detach().double() * torch.exp(0.1 * scale * noise)
    return moved + 0.1 * scale * noise if name.endswith("running_mean") else moved


def _perturbed_state(
    model: nn.Module, trainable: Collection[str], scale: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """All parameters and buffers of a model by name, perturbed."""
    state = {}
    for n, t in (*model.named_parameters(), *model.named_buffers()):
        if on_demand.is_on_demand(t):
            # Noise of its own seed, drawn again whenever the values are made.
            seed = int(torch.randint(1 << 60, (), generator=generator))
            state[n] = on_demand.derived(
                t, torch.float64, partial(_perturbed_anew, n, scale, seed, n in trainable)
            )
            state[n].requires_grad_(n in trainable)
        else:
            state[n] = _perturbed(t, n, scale, generator, trainable=n in trainable)
    return state


def _perturbed_anew(name: str, scale: float, seed: int, trainable: bool, t: Tensor) -> Tensor:
    return _perturbed(
        t, name, scale, torch.Generator(t.device).manual_seed(seed), trainable=trainable
    )


def with_buffers_moved(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    scale: float,
    seed: int,
    stand_in: StandIn | None = None,
) -> Subject | None:
    """Return a perturbed float64 copy in which buffers that are all zero have noise.

    The noise is additive; None where no buffer is all zero.

    The noise of the other subjects is multiplicative and leaves a zero where it is, so a buffer
    that switches something on (``h - alpha * h.mean(0)``) is not exercised by them. A failure here
    says that the model could be another program, not that it is one: look at it in every batch,
    never refuse it.
    """
    zero = {
        n: t
        for n, t in (*model.named_buffers(), *model.named_parameters())
        if n not in parameters and t.is_floating_point() and t.numel()
        if not n.endswith("running_mean") and not bool(t.any())
    }
    if not zero:
        return None
    generator = torch.Generator().manual_seed(seed)
    tensors = _perturbed_state(model, parameters, scale, generator)
    tensors |= {n: _noise(t, generator).abs() + 0.1 for n, t in zero.items()}
    chosen = {n: tensors[n] for n in parameters}
    return Subject(
        "float64 copy with zero buffers moved", model, tensors, chosen, torch.float64, stand_in
    )


def subjects(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    scale: float,
    seed: int,
    stand_in: StandIn | None = None,
) -> Iterator[Subject]:
    """Yield copies to prove on, the strictest first.

    The functional one is run by the stand-in, else by the model.
    """
    tensors = _perturbed_state(model, parameters, scale, torch.Generator().manual_seed(seed))
    chosen = {n: tensors[n] for n in parameters}
    if stand_in is not None:
        stand_in.find_clone(tensors, torch.float64)
    yield Subject("perturbed float64 copy", model, tensors, chosen, torch.float64, stand_in)
    clone = None
    if not any(map(on_demand.is_on_demand, model.parameters())):  # else there is no room for one
        with suppress(Exception):  # whatever objects that it holds raise when they are copied
            clone = copy.deepcopy(model).double()
    if clone is not None:
        with torch.no_grad():
            for n, t in (*clone.named_parameters(), *clone.named_buffers()):
                t.copy_(tensors[n])
        chosen = {n: p for n, p in clone.named_parameters() if n in parameters}
        yield Subject("perturbed float64 deep copy", clone, None, chosen, torch.float64)
    del clone, tensors, chosen
    yield Subject("model itself, in its own dtype", model, None, dict(parameters), None)
