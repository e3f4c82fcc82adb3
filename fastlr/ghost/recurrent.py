"""Recurrent layers with each parameter in one ordinary product over all steps.

The fused nodes of nn.LSTM, nn.GRU and nn.RNN hide their parameters, and torch's own steps use each once a step. Here the
call runs as it is, for its values. From these the gates of all steps are two linear layers, of the inputs and of the
previous states, the latter as constants; `Scan` stands for the recursion, and its backward pass hands both layers the
whole gradient at each step's gates. So the rule for linear layers gives the norms, and autograd the same gradients.

Calls that `scanned` leaves alone (packed sequences, dropout in train mode) are run by torch step by step: see `Unfused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastlr.torch_ops import raised

_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CALLS: dict[Callable, str] = {getattr(torch, kind): kind for kind in _KINDS}


def expected(names: Iterable[str]) -> bool:
    """Whether a model with parameters of these names may have recurrent layers, by torch's names of their weights."""
    return any("weight_hh" in name for name in names)


class Unfused(TorchFunctionMode):
    """Recurrent layers run by torch's own steps: their gradients exist in eval mode, and rules cover their nodes.

    Attributes:
        calls: how many calls ran so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        if func in CALLS and torch.is_grad_enabled():
            return self.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def call(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run one call."""
        self.calls += 1
        with _fused_off():
            return func(*args, **kwargs)


@contextmanager
def _fused_off() -> Iterator[None]:
    """Neither oneDNN nor cuDNN takes a recurrent layer within this context."""
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


def scanned(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """What a call of torch.lstm, gru, rnn_tanh or rnn_relu returns; None if it is not one over a padded sequence.

    Args:
        func: one of CALLS.
        args: (input [T, B, I] or [B, T, I], initial states [layers * directions, B, H], weights, has biases, layers,
            dropout, train, bidirectional, batch first).
        kwargs: None are expected.
    """
    if kwargs or len(args) != 9 or not isinstance(args[2], (list, tuple)) or isinstance(args[3], (list, tuple)):
        return None
    x, hx, weights, biases, layers, dropout, train, both, batch_first = args
    h0, c0 = hx if CALLS[func] == "lstm" else (hx, None)
    if type(x) is not Tensor or x.ndim != 3 or (dropout and train):
        return None
    directions = 2 if both else 1
    per = len(weights) // (layers * directions)
    x = x.transpose(0, 1).contiguous() if batch_first else x
    last: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            states = (h0[k],) if c0 is None else (h0[k], c0[k])
            own = weights[k * per : (k + 1) * per]
            out, *cell = _layer(func, x.flip(0) if direction else x, states, own, biases)
            last.append((out[-1], *cell))
            outputs.append(out.flip(0) if direction else out)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    ends = (torch.stack(tensors) for tensors in zip(*last, strict=True))
    return (x.transpose(0, 1) if batch_first else x), *ends


def _layer(
    func: Callable, x: Tensor, states: tuple[Tensor, ...], weights: list[Tensor], biases: bool
) -> tuple[Tensor, ...]:
    """One layer in one direction: (outputs [T, B, H], and an LSTM's last cell state [B, C])."""
    with torch.no_grad(), _fused_off() if x.is_cuda else nullcontext():
        first = tuple(s.detach()[None].contiguous() for s in states)
        hx = first if len(first) == 2 else first[0]
        out, *ends = func(x.detach(), hx, [w.detach() for w in weights], biases, 1, 0.0, False, False, False)
        before = torch.cat([first[0].to(out.dtype), out[:-1]])
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:4] if biases else (None, None)
    w_hr = weights[-1] if len(weights) % 2 else None
    x_gates, h_gates = F.linear(x, w_ih, b_ih), F.linear(before, w_hh, b_hh)
    projected = None
    with torch.no_grad():
        by_x, by_h = (raised(t.detach()).unflatten(-1, (-1, _cell_size(func, w_hh))) for t in (x_gates, h_gates))
        if len(states) == 2:
            steps, hidden = _lstm(by_x, by_h, raised(first[1][0]), raised(out) if w_hr is None else None)
        else:
            steps = _gru(by_x, by_h, raised(before)) if CALLS[func] == "gru" else _rnn(CALLS[func], raised(out))
        steps.weight = raised(w_hh.detach())
    if w_hr is not None:
        steps.projection = raised(w_hr.detach())
        projected = F.linear(hidden.to(before.dtype), w_hr)
    values = [out, *(end[0] for end in ends[1:])]
    return Scan.apply(steps, values, x_gates, h_gates, projected, *states)


def _cell_size(func: Callable, w_hh: Tensor) -> int:
    return len(w_hh) // {"lstm": 4, "gru": 3}.get(CALLS[func], 1)


@dataclass
class Steps:
    """What going back through time needs, for each step: all [T, B, ...].

    ``local`` [T, B, gates, H]: derivatives of the state, or of an LSTM's cell, by the gates. ``keep``: the part of the
    state (cell) that is carried over. ``cell``: derivative of an LSTM's output by its cell.
    """

    local: Tensor
    keep: Tensor | None = None
    cell: Tensor | None = None
    weight: Tensor | None = None
    projection: Tensor | None = None

    def factors(self) -> list[Tensor]:
        """Those of ``keep`` and ``cell`` that there are."""
        return [t for t in (self.keep, self.cell) if t is not None]


def _lstm(x_gates: Tensor, h_gates: Tensor, c0: Tensor, out: Tensor | None) -> tuple[Steps, Tensor]:
    """Gates in torch's order: input, forget, cell, output. Also returns the outputs before the projection.

    Works in the memory of the gates: the linear layers' results, whose values nothing else needs. ``out``: the outputs, if
    there is no projection; then tanh enters derivatives only, which need no digits beyond the rounding of 1.
    """
    tanh = torch.tanh if out is None else _quick_tanh
    gates = x_gates.add_(h_gates)
    g = tanh(gates[:, :, 2])
    gates.sigmoid_()
    i, f, _, o = gates.unbind(2)
    cells = c0.new_empty(len(g) + 1, *c0.shape)
    cells[0] = c0
    added, steps = i * g, cells.unbind()
    for new, kept, old, cell in zip(added.unbind(), f.unbind(), steps[:-1], steps[1:], strict=True):
        torch.addcmul(new, kept, old, out=cell)
    bent = tanh(cells[1:])
    hidden = o * bent if out is None else out
    local = torch.addcmul(gates, gates, gates, value=-1, out=h_gates)
    local[:, :, 0].mul_(g)
    local[:, :, 1].mul_(cells[:-1])
    torch.addcmul(i, added, g, value=-1, out=local[:, :, 2])
    local[:, :, 3].mul_(bent)
    return Steps(local, f, torch.addcmul(o, hidden, bent, value=-1)), hidden


def _quick_tanh(t: Tensor) -> Tensor:
    """By the sigmoid, which takes a fifth of tanh's time on a CPU: to the rounding of 1, not of the result."""
    return (2 * t).sigmoid_().mul_(2).sub_(1)


def _gru(x_gates: Tensor, h_gates: Tensor, before: Tensor) -> Steps:
    """Gates in torch's order: reset, update, new. The new gate takes two places in ``local``: first by x, last by h."""
    r, z = (x_gates[:, :, :2] + h_gates[:, :, :2]).sigmoid_().unbind(2)
    n = torch.addcmul(x_gates[:, :, 2], r, h_gates[:, :, 2]).tanh_()
    new = (1 - z) * (1 - n * n)
    local = new.new_empty(*new.shape[:2], 4, new.shape[2])
    local[:, :, 0] = new
    torch.mul(new * h_gates[:, :, 2], r * (1 - r), out=local[:, :, 1])
    torch.mul(before - n, z * (1 - z), out=local[:, :, 2])
    torch.mul(new, r, out=local[:, :, 3])
    return Steps(local, z)


def _rnn(kind: str, out: Tensor) -> Steps:
    return Steps((1 - out * out if kind == "rnn_tanh" else (out > 0).to(out.dtype))[:, :, None])


class Scan(torch.autograd.Function):
    """The outputs of a recurrent layer, given as ``values``, as a function of its gates and initial states.

    ``projected``: an LSTM's outputs as products with its projection (proj_size), which takes their whole gradient.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, steps: Steps, values: list[Tensor], x_gates: Tensor, h_gates: Tensor, *_: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.steps = steps
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_cell: Tensor | None = None) -> tuple:  # noqa: D102
        if torch.is_grad_enabled():
            raise RuntimeError("a model that differentiates its recurrent layers twice needs torch's own steps")
        s = ctx.steps
        gates, outputs = torch.empty_like(s.local), []
        carry = None if g_cell is None else raised(g_cell)
        gated = carry is None and s.keep is not None  # a GRU
        by_h = gates[:, :, 1 if gated else 0 :].flatten(2)
        given = raised(g).unbind()
        given, at_state = (torch.zeros_like(given[0]), *given[:-1]), given[-1]
        own = (t.unbind() for t in (s.local, gates, by_h, *s.factors()))
        for before, local, at_gates, to_state, *factors in reversed([*zip(given, *own, strict=True)]):
            outputs.append(at_state)
            at_hidden = at_state if s.projection is None else at_state @ s.projection
            if carry is None:
                torch.mul(at_hidden[:, None], local, out=at_gates)
            else:
                keep, cell = factors
                carry = torch.addcmul(carry, at_hidden, cell)
                torch.mul(carry[:, None], local[:, :3], out=at_gates[:, :3])
                torch.mul(at_hidden, local[:, 3], out=at_gates[:, 3])
                carry = carry * keep
            at_state = torch.addmm(before, to_state, s.weight)
            if gated:
                at_state.addcmul_(at_hidden, *factors)
        by_x = torch.cat([gates[:, :, 1:3], gates[:, :, :1]], 2).flatten(2) if gated else by_h
        projected = None if s.projection is None else torch.stack(outputs[::-1])
        return None, None, by_x, by_h, projected, at_state, *([] if carry is None else [carry])
