"""Recognise a ReLU that is written out, such as ``x.clamp(min=0)`` or ``x * (x > 0)``.

Elementwise functions of a layer's output run on a few numbers in its place, too. Where they turn
these into what ReLU would, they count as one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fastlr.ghost.model.view import FAILURES
from fastlr.metrics.unit_axes import named, tensors_in
from fastlr.ops.torch_private import no_torch_function, tree_map

# Powers of two: sums and products of them are exact.
_NUMBERS = "-512 -4 -1 -0.25 0 0.25 1 4 512"
# What the numbers were in a layer's output first, then step by step; what they are now last. All
# are [2, numbers], with a row each for the least and the largest value of other tensors.
_Trace = tuple[Tensor, ...]

_SAME = named("to type type_as float double half bfloat16 clone contiguous detach")
# Their other operands are read, which waits for the device.
_BOUNDS = named(
    "gt greater ge greater_equal lt less le less_equal threshold clamp clamp_min clamp_max clip "
    "maximum minimum max min fmax fmin where masked_fill heaviside"
)
ELEMENTWISE = {*_SAME, *_BOUNDS} | named(
    "abs absolute neg negative sign leaky_relu hardtanh logical_not invert zeros_like setitem "
    "add sub subtract rsub mul multiply div divide truediv true_divide"
)


class WrittenReLUs:
    """Finds the ReLUs of a forward pass that are written out.

    Args:
        holds_units: tells tensors that come from a layer from others.
    """

    def __init__(self, holds_units: Callable[[Tensor], Any]) -> None:
        self._holds_units = holds_units
        self._traces = WeakTensorKeyDictionary()

    def kind(self, func: Any, args: Any, kwargs: Any, result: Any) -> str | None:
        """Follow a function that has run; return "relu" or "relu6" where its result is one's."""
        trace = None
        if func in ELEMENTWISE and isinstance(result, Tensor):
            with suppress(*FAILURES), no_torch_function(), torch.no_grad():
                trace = self._after(func, args, kwargs, result)
        for t in tensors_in(result):
            self._traces.pop(t, None)
        if trace is None:
            return None
        kind = _relu(trace) if result.is_floating_point() else None
        if kind is None:
            self._traces[result] = trace
        return kind

    def _after(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> _Trace | None:
        """Return the trace of a result; None if it is of no layer's output, or of several."""
        found = [self._of(t) for t in tensors_in((args, kwargs))]
        traces = [trace for trace in found if trace is not None]
        first, *steps = dict.fromkeys(sum(traces, ()))  # ValueError where there is none
        if any(trace[0] is not first for trace in traces):
            return None

        def stand_in(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            trace = self._of(t)
            if trace is not None:
                return trace[-1].clone()  # which the function may write to
            if func not in _BOUNDS:
                raise ValueError("it is not read")
            return torch.stack(torch.aminmax(t)).cpu().double()[:, None]

        given = tree_map(stand_in, args)
        values = given[0]
        if func not in _SAME:
            made = func(*given, **tree_map(stand_in, kwargs))
            values = values if made is None else made
        if result.is_floating_point():
            values = values.cpu().double()
        return (first, *steps[-8:], values) if values.shape == first.shape else None

    def _of(self, t: Tensor) -> _Trace | None:
        """Return the trace of a tensor, a new one for a layer's output; None for others."""
        trace: _Trace | None = self._traces.get(t)
        starts = t.is_floating_point() and not isinstance(t, nn.Parameter)
        if trace is None and starts and self._holds_units(t):
            numbers = torch.tensor(
                [float(n) for n in _NUMBERS.split()], dtype=torch.float64, device="cpu"
            )
            trace = self._traces[t] = (numbers.repeat(2, 1),)
        return trace


def _relu(trace: _Trace) -> str | None:
    """Return "relu" or "relu6" if the last values are those of ReLU, or of one with a bound."""
    *before, values = trace
    most = values.amax(1, keepdim=True)
    for v in before:
        relu = v.double().clamp(min=0)
        signed = bool((v.amin(1) < 0).all())
        if signed and (most > 0).all() and torch.equal(values, relu.minimum(most)):
            return "relu" if torch.equal(values, relu) else "relu6"
    return None
