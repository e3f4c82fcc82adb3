"""Copies of a model to prove on: functional or deep, in float64, every parameter and buffer perturbed."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.ghost import adapt


@dataclass
class Subject:
    """Something that computes like the model: the model itself or a perturbed copy."""

    name: str
    model: nn.Module
    tensors: dict[str, Tensor] | None  # for functional calls
    parameters: dict[str, Tensor]
    dtype: torch.dtype | None

    @property
    def named(self) -> dict[str, Tensor]:
        """Every parameter that the forward pass uses, trainable or not, by name."""
        return dict(self.model.named_parameters()) if self.tensors is None else self.tensors

    @property
    def state(self) -> dict[str, Tensor]:
        """Every parameter and buffer, by name."""
        return {**self.named, **dict(self.model.named_buffers())} if self.tensors is None else self.tensors

    def __call__(self, x: Any) -> Any:
        """Run the forward pass."""
        x = adapt.cast(x, self.dtype)
        if self.tensors is None:
            return adapt.call(self.model, x, dtype=self.dtype)
        return adapt.call_with(self.model, self.tensors, x, dtype=self.dtype)


def _noise(t: Tensor, generator: torch.Generator) -> Tensor:
    """Normal noise like ``t``, in float64 of a float32's digits: drawn three times as fast."""
    return torch.randn(t.shape, generator=generator).to(t.device, torch.float64)


def _perturbed(t: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    noise = _noise(t, generator)
    width = 0.3 / math.sqrt(max(1, t[0].numel())) if t.ndim > 1 else 0.1
    return (t.detach().double() + scale * width * noise) if t.is_floating_point() else t.detach().clone()


def _perturbed_buffer(t: Tensor, name: str, scale: float, generator: torch.Generator) -> Tensor:
    if not t.is_floating_point():
        return t.detach().clone()
    noise = _noise(t, generator)
    new = t.detach().double() * torch.exp(0.1 * scale * noise)  # keeps signs, zeros and infinities
    return new + 0.1 * scale * noise if name.endswith("running_mean") else new


def _moved(
    p: Tensor, name: str, parameters: dict[str, nn.Parameter], scale: float, generator: torch.Generator
) -> Tensor:
    """A parameter, perturbed; a frozen one as a buffer is, so that what it switches off stays off."""
    if name not in parameters:
        return _perturbed_buffer(p, name, scale, generator)
    return _perturbed(p, scale, generator).requires_grad_()


def with_buffers_moved(
    model: nn.Module, parameters: dict[str, nn.Parameter], scale: float, seed: int
) -> Subject | None:
    """A perturbed float64 copy in which buffers that are all zero have additive noise; None where no buffer is all zero.

    The noise of the other subjects is multiplicative and leaves a zero where it is, so a buffer that switches something
    on (``h - alpha * h.mean(0)``) is not exercised by them. A failure here says that the model could be another program,
    not that it is one: look at it in every batch, never refuse it.
    """
    held = {n: t for n, t in (*model.named_buffers(), *model.named_parameters()) if n not in parameters}
    zero = [
        n
        for n, t in held.items()
        if t.is_floating_point() and t.numel() and not n.endswith("running_mean") and not bool(t.any())
    ]
    if not zero:
        return None
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: _moved(p, n, parameters, scale, generator) for n, p in model.named_parameters()}
    tensors |= {n: _perturbed_buffer(b, n, scale, generator) for n, b in model.named_buffers()}
    for n in zero:
        tensors[n] = _noise(held[n], generator).abs() + 0.1
    return Subject("float64 copy with zero buffers moved", model, tensors, {n: tensors[n] for n in parameters}, torch.float64)


def subjects(model: nn.Module, parameters: dict[str, nn.Parameter], scale: float, seed: int) -> Iterator[Subject]:
    """Copies to prove on, the strictest first."""
    generator = torch.Generator().manual_seed(seed)
    held = {n: _moved(p, n, parameters, scale, generator) for n, p in model.named_parameters()}
    buffers = {n: _perturbed_buffer(b, n, scale, generator) for n, b in model.named_buffers()}
    own = {n: held[n] for n in parameters}
    yield Subject("perturbed float64 copy", model, {**held, **buffers}, own, torch.float64)
    try:
        clone = copy.deepcopy(model).double()
    except adapt.FAILURES:
        clone = None
    if clone is not None:
        with torch.no_grad():
            for n, p in clone.named_parameters():
                p.copy_(held[n])
            for n, b in clone.named_buffers():
                b.copy_(buffers[n])
        own = {n: p for n, p in clone.named_parameters() if n in parameters}
        yield Subject("perturbed float64 deep copy", clone, None, own, torch.float64)
    del clone, held, buffers, own
    yield Subject("model itself, in its own dtype", model, None, dict(parameters), None)
