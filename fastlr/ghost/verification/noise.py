"""How far a model's outputs are off by rounding: measured, where nothing else tells.

In: a model, or a copy of it, and a few samples. Out: a `Noise` of the shape of their output. It is
the difference from what another precision gives. A model that casts to a dtype itself runs in no
other, or only seems to: its float64 copy works in float32 within. There its parameters are moved at
random by as much as that dtype rounds. What this does to the outputs is what rounding does to them;
as the samples stay in one company, it knows nothing of samples that interact.

Moves of parameters do not show the rounding of a number that the model adds itself: after
``x + 1e4`` a float32 lies on a grid of 1e-3, where a move of 1e-7 mostly changes no bit and seldom
a whole step. That shows in float64, with the model's casts to fewer digits lifted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastlr.ghost.batch import copied
from fastlr.ghost.graph import walk
from fastlr.ghost.model_io import FAILURES
from fastlr.ghost.verification.copies import Subject

# Differences measured in each column, of samples or of moves: the largest of fewer may be small by
# chance.
_VALUES = 16
# Float64's rounding in parts of the difference from float32, with a margin.
_SINGLE_TO_DOUBLE = 2.0**-26


_CASTS = {getattr(Tensor, name) for name in ("bfloat16", "float", "half", "to", "type", "type_as")}


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
        subject: the model or its copy.
        x: inputs of the samples.
    """

    subject: Subject
    x: Any

    @property
    def out_dim(self) -> int:
        """The samples' axis of the output."""
        return self.subject.view.out_dim

    def _run(self, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> Tensor | None:
        """Return the output by these parameters and buffers; None if the model does not run so."""
        try:
            return self.subject.with_tensors(tensors, dtype).output(copied(self.x))
        except FAILURES:
            return None

    def _state_with_graph(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the subject's state; parameters require grad, frozen ones too.

        So the graph of an output shows all that use them.
        """
        tensors = self.subject.state_in(dtype)
        for name, _ in self.subject.model.named_parameters():
            if tensors[name].is_floating_point():
                tensors[name].requires_grad_()
        return tensors

    def run(self) -> Tensor | None:
        """The output, with the graph of all parameters; None if the model does not run so."""
        return self._run(self._state_with_graph(), self.subject.dtype)

    def in_other_precision(self, own: Tensor) -> OtherPrecision | None:
        """How far an output is off by what another precision gives.

        None if the model does not run in it, or where the output is finite gives what is not.
        """
        dtype = torch.float32 if own.dtype == torch.float64 else torch.float64
        with torch.autocast(own.device.type, enabled=False):
            other = self._run(self._state_with_graph(dtype), dtype)
        if other is None or other.shape != own.shape:
            return None
        if bool((own.isfinite() & ~other.isfinite()).any()):
            return None
        part = _SINGLE_TO_DOUBLE if own.dtype == torch.float64 else 1.0
        return OtherPrecision(distance(own, other.detach()) * part, lowest_dtype(other) == dtype)

    def with_casts_lifted(self) -> Tensor | None:
        """The output in float64 where no cast takes digits away; None if it does not run so."""
        with torch.autocast(self.subject.view.device.type, enabled=False), _CastsLifted():
            z = self._run(self._state_with_graph(torch.float64), torch.float64)
        return z if z is not None and lowest_dtype(z) == torch.float64 else None

    def with_moves(self, own: Tensor, step: float) -> Tensor | None:
        """How far an output moves with parameters moved by parts of themselves.

        These are at most ``step``. Of fewer samples there are more moves, each element's largest
        distance counts. None if the model does not run so.
        """
        off = torch.zeros_like(own, dtype=torch.float64)
        for seed in range(-(-_VALUES // own.shape[self.out_dim])):
            z = self._run(self.subject.state_moved(step, seed), self.subject.dtype)
            if z is None:
                return None
            off = torch.maximum(off, distance(own, z.detach()))
        return off


class _CastsLifted(TorchFunctionMode):
    """Leave tensors of float64 in it where a model casts them to fewer digits."""

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        kwargs = dict(kwargs or {})
        double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if double and func not in _CASTS and _has_fewer_digits(kwargs.get("dtype")):
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        if double and func in _CASTS and _has_fewer_digits(result.dtype):
            return args[0].to(result.device)
        return result


def _has_fewer_digits(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 8


def kinds_but_casts(z: Tensor) -> list[str]:
    """Return the kinds of the nodes of an output's graph, but for casts."""
    names = walk(z, {}).names if z.requires_grad else []
    return [name for name in names if name != "ToCopyBackward0"]


def gap(a: Tensor, b: Tensor) -> Tensor:
    """Distances of elements; none where both are no number or the same infinity."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a.double() - b.double()).abs().masked_fill(same, 0.0).nan_to_num(torch.inf)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Finite distances of elements; none where one is not finite."""
    return gap(a, b).nan_to_num(posinf=0.0)


def lowest_dtype(z: Tensor) -> torch.dtype:
    """The least precise dtype that an output went through, as far as its graph shows."""
    return walk(z, {}).lowest_dtype() if z.requires_grad else z.dtype
