"""Copies of a model to prove on.

They are functional or deep, in float64, with every parameter and buffer perturbed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.ghost.batch import cast_inputs
from fastlr.ghost.model_io import ModelView, call, call_with, select_output
from fastlr.ghost.verification.clone_or_model import CloneOrModel


@dataclass
class Subject:
    """Something that computes like the model: the model itself or a perturbed copy.

    Attributes:
        name: for the report.
        view: the model, and where its samples are.
        model: the module that is run, or that a clone runs for.
        tensors: parameters and buffers to run it with; None: its own.
        parameters: those that are measured.
        dtype: of the copy; None: the model's own.
        clone_or_model: runs it with the tensors; None: the model itself.
    """

    name: str
    view: ModelView
    model: nn.Module
    tensors: dict[str, Tensor] | None
    parameters: Mapping[str, Tensor]
    dtype: torch.dtype | None = None
    clone_or_model: CloneOrModel | None = None

    @staticmethod
    def of(view: ModelView, clone_or_model: CloneOrModel | None = None) -> Subject:
        """Return the model itself, for which a clone may run with other tensors."""
        name = "model itself, in its own dtype"
        return Subject(
            name, view, view.module, None, view.parameters, clone_or_model=clone_or_model
        )

    @property
    def running(self) -> nn.Module:
        """The module that runs."""
        return self.model if self.clone_or_model is None else self.clone_or_model.running

    @property
    def named(self) -> dict[str, Tensor]:
        """Every parameter that the forward pass uses, trainable or not, by name."""
        return dict(self.model.named_parameters()) if self.tensors is None else self.tensors

    @property
    def state(self) -> dict[str, Tensor]:
        """Every parameter and buffer, by name."""
        if self.tensors is not None:
            return self.tensors
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def with_tensors(self, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> Subject:
        """Return the same subject run with other parameters and buffers, inputs of this dtype."""
        return replace(self, tensors=tensors, dtype=dtype)

    def state_in(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return every parameter and buffer without its graph, floating-point ones in a dtype.

        Default: each in its own.
        """
        return {
            name: t.detach().to(dtype) if dtype and _has_numbers(t) else t.detach()
            for name, t in self.state.items()
        }

    def state_moved(self, step: float, seed: int) -> dict[str, Tensor]:
        """Return parameters moved by random parts of themselves, at most ``step``, and buffers.

        Buffers stay: their values may be places.
        """
        state = dict(self.state)
        for name, _ in self.model.named_parameters():
            state[name] = _moved(state[name], step, seed)
        return state

    @property
    def is_copy(self) -> bool:
        """True unless it is the model itself, as it is."""
        return self.dtype is not None

    def precision(self) -> AbstractContextManager[Any]:
        """Return a context without autocast for a copy; the model itself runs as it is."""
        if not self.is_copy:
            return nullcontext()
        return torch.autocast(self.view.device.type, enabled=False)

    def __call__(self, x: Any) -> Any:
        """Run the forward pass."""
        x = cast_inputs(x, self.dtype)
        if self.tensors is None:
            return call(self.model, x, dtype=self.dtype, copies=True)
        if self.clone_or_model is None:
            return call_with(self.model, self.tensors, x, dtype=self.dtype)
        return self.clone_or_model.call_with(self.tensors, x, dtype=self.dtype)

    def output(self, x: Any) -> Tensor:
        """Run the forward pass with gradients and pick the output."""
        with torch.enable_grad():
            return select_output(self(x), self.view.output)


def _has_numbers(t: Tensor) -> bool:
    """Return True for floating-point numbers that any operation takes.

    Those of a quantised tensor's subclass go through few.
    """
    dispatches_itself = type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return t.is_floating_point() and not dispatches_itself


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
    if not trainable and not _has_numbers(t):
        return t.detach().clone()
    noise = _noise(t, generator)
    if trainable:
        width = 0.3 / math.sqrt(max(1, t.shape[1:].numel())) if t.ndim > 1 else 0.1
        return noise.mul_(scale * width).add_(t.detach()).requires_grad_()
    moved = t.detach().double() * torch.exp(0.1 * scale * noise)
    return moved + 0.1 * scale * noise if name.endswith("running_mean") else moved


def _moved(t: Tensor, step: float, seed: int) -> Tensor:
    """A parameter whose every value is moved by a random part of itself."""
    if not _has_numbers(t):
        return t.detach()
    generator = torch.Generator(t.device).manual_seed(seed)
    parts = torch.rand(t.shape, generator=generator, device=t.device).double()
    return (t.detach() * (1 + step * (2 * parts - 1))).to(t.dtype)


def _perturbed_state(
    view: ModelView, scale: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """All parameters and buffers of a model by name, perturbed."""
    return {
        n: _perturbed(t, n, scale, generator, trainable=n in view.parameters)
        for n, t in Subject.of(view).state.items()
    }


def _float64(
    name: str, view: ModelView, tensors: dict[str, Tensor], clone_or_model: CloneOrModel | None
) -> Subject:
    """The functional copy: the model, or its clone, run with these tensors in float64."""
    chosen = {n: tensors[n] for n in view.parameters}
    return Subject(name, view, view.module, tensors, chosen, torch.float64, clone_or_model)


def _deep_copy(model: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    clone = copy.deepcopy(model).double()
    with torch.no_grad():
        for n, t in (*clone.named_parameters(), *clone.named_buffers()):
            t.copy_(tensors[n])
    return clone


def subjects(
    view: ModelView, scale: float, seed: int, clone_or_model: CloneOrModel | None = None
) -> Iterator[Subject]:
    """Yield copies to prove on, the strictest first.

    The functional one is run by the clone, else by the model.
    """
    model = view.module
    tensors = _perturbed_state(view, scale, torch.Generator().manual_seed(seed))
    if clone_or_model is not None:
        clone_or_model.find_clone(tensors, torch.float64)
    yield _float64("perturbed float64 copy", view, tensors, clone_or_model)
    clone = None
    with suppress(Exception):  # whatever objects and tensors that it holds raise
        clone = _deep_copy(model, tensors)
    if clone is not None:
        chosen = {n: p for n, p in clone.named_parameters() if n in view.parameters}
        yield Subject("perturbed float64 deep copy", view, clone, None, chosen, torch.float64)
        del chosen
    del clone, tensors
    yield Subject.of(view)
