"""Recurrent layers with each parameter in one ordinary product over all steps.

In: a call of torch.lstm, gru, rnn_tanh or rnn_relu. Out: the same results, by two nodes of the
graph for each layer and direction: a linear layer that gives the inputs' part of the gates of all
steps, and a `Scan` over the steps with its rule.

The fused nodes of nn.LSTM, nn.GRU and nn.RNN hide their parameters, and torch's own steps use each
once per step. Here the call runs as it is, for its values. From these the derivatives of every step
are computed at once. Going back through time then gives the gradients g_t at the gates of all
steps. The gradient of the recurrent weight is sum_t g_t h_t^T, with h_t the states before each
step, as for a linear layer on a sequence.

Calls that `scanned` leaves alone (packed sequences, dropout in train mode, projections) are run by
torch step by step: see `Unfused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastlr import ops
from fastlr.ghost.fusion.checkpoints import is_checkpointed
from fastlr.ghost.fusion.precomputed import take_precomputed
from fastlr.ghost.graph.layouts import Regular, Unsupported
from fastlr.ghost.graph.rows import Step
from fastlr.ghost.norms.factors import Dense, Factor, Outer
from fastlr.ghost.norms.rules import Site, rule
from fastlr.ops.autocast import full_precision
from fastlr.ops.cudnn import never_cudnn
from fastlr.ops.held import SharedContext
from fastlr.ops.linear import raised
from fastlr.ops.torch_private import enable_mkldnn, mkldnn_enabled

NODE = "ScanBackward"
CALLS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def expected(names: Iterable[str]) -> bool:
    """Return True if a model with parameters of these names may have recurrent layers.

    It goes by torch's names of their weights.
    """
    return any("weight_hh" in name for name in names)


class Unfused(TorchFunctionMode):
    """Run recurrent layers by torch's own steps.

    Then their gradients exist in eval mode, and rules cover their nodes. In a checkpointed part
    they run as they are: so they do when it is run again.

    Attributes:
        calls: how many calls ran so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        if func in CALLS and torch.is_grad_enabled() and not is_checkpointed():
            return self.run_by_steps(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def run_by_steps(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run one call, and count it."""
        self.calls += 1
        with _mkldnn_off.held(), never_cudnn():
            return func(*args, **kwargs)


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    before = mkldnn_enabled()
    enable_mkldnn(False)
    try:
        yield
    finally:
        enable_mkldnn(before)


_mkldnn_off = SharedContext(_without_mkldnn)


def scanned(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """Return the result of a call of torch.lstm, gru, rnn_tanh or rnn_relu.

    None if the call is not one over a padded sequence.

    Args:
        func: one of CALLS.
        args: (input [T, B, I] or [B, T, I], initial states [layers * directions, B, H], weights,
            has biases, layers, dropout, train, bidirectional, batch first).
        kwargs: None are expected.
    """
    if kwargs or len(args) != 9 or not isinstance(args[3], bool):  # packed
        return None
    x, hx, weights, biases, layers, dropout, train, both, batch_first = args
    initial = hx if func is torch.lstm else (hx,)
    if type(x) is not Tensor or x.ndim != 3 or (dropout and train):
        return None
    directions = 2 if both else 1
    per = len(weights) // (layers * directions)
    if per != (4 if biases else 2):  # with a projection
        return None
    x = x.transpose(0, 1).contiguous() if batch_first else x
    last: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            states = [state[k] for state in initial]
            chosen = weights[k * per : (k + 1) * per]
            out, *cell = _layer(func, x.flip(0) if direction else x, states, chosen)
            last.append((out[-1], *cell))
            outputs.append(out.flip(0) if direction else out)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    ends = (torch.stack(tensors) for tensors in zip(*last, strict=True))
    return (x.transpose(0, 1) if batch_first else x), *ends


def _layer(
    func: Callable, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the outputs of one layer in one direction, and an LSTM's last cell."""
    w_ih, w_hh, *biases = weights
    initial = [state[None].contiguous() for state in states]
    hx = initial if func is torch.lstm else initial[0]
    with torch.no_grad(), never_cudnn() if x.is_cuda else nullcontext():
        results = func(x, hx, weights, bool(biases), 1, 0.0, False, False, False)
    with full_precision(x.device):
        gates = F.linear(*map(raised, (x, w_ih, *biases[:1])))
    return Scan.apply(gates, *states, w_hh, *biases[1:], func, results)


@dataclass
class Steps:
    """Everything that going back through time needs, for each step: all [T, B, ...].

    ``before``: the states that the steps begin with. ``local`` [T, B, gates, H]: derivatives of the
    state, or of an LSTM's cell, by the gates. ``keep``: the part of the state (cell) that is
    carried over. ``cell``: derivative of an LSTM's output by its cell.
    """

    before: Tensor
    local: Tensor
    keep: Tensor | None = None
    cell: Tensor | None = None

    @staticmethod
    def of(func: Callable, t: dict[str, Tensor], before: Tensor, out: Tensor) -> Steps:
        """Compute the steps from the inputs of a `Scan`, the states and the outputs.

        The tensors are named by role; all are float32 or float64.
        """
        if func is torch.lstm:
            return _lstm(t, before, out)
        if func is torch.gru:
            return _gru(t, before)
        local = 1 - out * out if func is torch.rnn_tanh else (out > 0).to(out.dtype)
        return Steps(before, local[:, :, None])


def _lstm(t: dict[str, Tensor], before: Tensor, out: Tensor) -> Steps:
    """Gates in torch's order: input, forget, cell, output.

    Tanh enters only what needs no digits beyond the rounding of 1 (not so the derivative by the
    output gate, h (1 - o), where cells are small): these 2 sigmoid(2x) - 1 has, in a fifth of
    tanh's time on a CPU.
    """
    gates = F.linear(before, t["w_hh"], t.get("b_hh")).add_(t["gates"]).unflatten(2, (4, -1))
    i, f, g, o = gates.unbind(2)
    g.mul_(2)
    gates.sigmoid_()
    g = torch.rsub(g, -1, alpha=-2)
    cells = torch.cat([t["c0"][None], i * g])
    local = torch.addcmul(gates, gates, gates, value=-1)
    local[:, :, 0].mul_(g)
    torch.addcmul(i, cells[1:], g, value=-1, out=local[:, :, 2])
    steps = cells.unbind()
    for kept, old, cell in zip(f.unbind(), steps[:-1], steps[1:], strict=True):
        cell.addcmul_(kept, old)
    bent = torch.rsub((2 * cells[1:]).sigmoid_(), -1, alpha=-2)
    local[:, :, 1].mul_(cells[:-1])
    torch.addcmul(out, out, o, value=-1, out=local[:, :, 3])
    return Steps(before, local, f, torch.addcmul(o, out, bent, value=-1))


def _gru(t: dict[str, Tensor], before: Tensor) -> Steps:
    """Return the steps of a GRU, with gates in torch's order: reset, update, new.

    The new gate takes two places in ``local``: first by x, last by h.
    """
    x_gates = t["gates"].unflatten(2, (3, -1))
    h_gates = F.linear(before, t["w_hh"], t.get("b_hh")).unflatten(2, (3, -1))
    r, z = (x_gates[:, :, :2] + h_gates[:, :, :2]).sigmoid_().unbind(2)
    n = torch.addcmul(x_gates[:, :, 2], r, h_gates[:, :, 2]).tanh_()
    new = (1 - z) * (1 - n * n)
    local = new.new_empty(*new.shape[:2], 4, new.shape[2])
    local[:, :, 0] = new
    torch.mul(new * h_gates[:, :, 2], r * (1 - r), out=local[:, :, 1])
    torch.mul(before - n, z * (1 - z), out=local[:, :, 2])
    torch.mul(new, r, out=local[:, :, 3])
    return Steps(before, local, z)


class Scan(torch.autograd.Function):
    """The outputs of a recurrent layer in one direction, and an LSTM's last cell.

    They are a function of the inputs' part of the gates [T, B, gates * H], of the initial states
    and of the recurrent weight and bias.

    Attributes of a node: ``roles`` names its inputs; ``ready`` hands over what the rule has
    computed before the backward pass reaches the node (the gradients at the outputs and what
    `Scan.sweep` gives for them); ``norms_only`` says that the gradients of the parameters will not
    be looked at.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:  # noqa: D102
        *tensors, func, (out, *ends) = given
        states = ("h0", "c0")[: len(ends)]
        ctx.roles = ("gates", *states, "w_hh", "b_hh")[: len(tensors)]
        with full_precision(out.device):
            t = {r: raised(x.detach()) for r, x in zip(ctx.roles, tensors, strict=True)}
            before = torch.cat([t["h0"][None], raised(out[:-1])])
            ctx.steps = Steps.of(func, t, before, raised(out))
        ctx.save_for_backward(tensors[ctx.roles.index("w_hh")])
        ctx.set_materialize_grads(False)
        ctx.ready, ctx.norms_only = None, False
        return out, *(end[0] for end in ends[1:])

    @staticmethod
    def sweep(
        ctx: Any, g: Tensor | None, g_cell: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
        """Go back through time.

        Returns:
            The gradients at the inputs' part and at the states' part of the gates [T, B, O], and at
            the initial states by role.
        """
        s, weight = ctx.steps, raised(ctx.saved_tensors[0])
        gates = torch.empty_like(s.local)
        gated = s.keep is not None and s.cell is None  # a GRU
        carry = None
        if s.cell is not None:
            carry = torch.zeros_like(s.cell[0]) if g_cell is None else raised(g_cell).clone()
        by_h = gates[:, :, 1 if gated else 0 :].flatten(2)
        if g is None:
            states = s.before.new_zeros(len(gates) + 1, *s.before.shape[1:])
        else:
            # The initial one first, each whole once the next is done.
            states = F.pad(raised(g), (0, 0, 0, 0, 1, 0))
        at_states, all_gates = states.unbind(), gates.flatten(2).unbind()
        to_states = by_h.unbind() if gated else all_gates
        columns = (t.unbind() for t in (s.local.flatten(2), s.keep, s.cell) if t is not None)
        steps = [*zip(at_states[:-1], at_states[1:], all_gates, to_states, *columns, strict=True)]
        for prior, at_hidden, at_gates, to_state, local, *factors in reversed(steps):
            if carry is not None:
                carry.addcmul_(at_hidden, factors[1])
                torch.cat([carry, carry, carry, at_hidden], 1, out=at_gates).mul_(local)
                carry.mul_(factors[0])
            elif gated:
                torch.cat([at_hidden] * 4, 1, out=at_gates).mul_(local)
            else:
                torch.mul(at_hidden, local, out=at_gates)
            prior.addmm_(to_state, weight)
            if gated:
                prior.addcmul_(at_hidden, factors[0])
        by_x = torch.cat([gates[:, :, 1:3], gates[:, :, :1]], 2).flatten(2) if gated else by_h
        return by_x, by_h, {"h0": states[0], "c0": carry}

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:  # noqa: D102
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a model that differentiates its recurrent layers twice needs torch's own steps"
            )
        by_x, by_h, found = take_precomputed(ctx, gradients) or Scan.sweep(ctx, *gradients)
        found["gates"] = by_x
        if not ctx.norms_only:
            rows = by_h.flatten(0, 1)
            found["w_hh"] = rows.mT @ ctx.steps.before.flatten(0, 1)
            found["b_hh"] = rows.sum(0)
        return *map(found.get, ctx.roles), None, None


def _rows_of_steps(s: Step) -> Regular | None:
    """Sequences are [T, B, .], states [B, .]; weights are all samples'."""
    dim = {"gates": 1, "h0": 0, "c0": 0}.get(s.role)
    if dim is None or s.layout.dim != (1 if len(s.out_shape) == 3 else 0):
        return None
    return s.at(dim)


@rule(
    NODE,
    rows=_rows_of_steps,
    about=(
        "recurrent layers, of nn.LSTM, nn.GRU and nn.RNN: each weight by one product over all steps"
    ),
)
def recurrent_layer(site: Site, slots: Sequence[int]) -> dict[int, Factor]:
    """Recurrent weight and bias, from a sweep back through time that is kept for the node."""
    node = site.node
    # Samples are along axis 1 of the outputs [T, B, .] and axis 0 of the last cell state [B, .].
    layouts = set()
    for output, g in enumerate(site.gradients):
        if g is not None:
            found = site.layouts.get(output)
            layouts.add(found and replace(found, dim=found.dim + output))
    layout = layouts.pop()
    if layouts or layout is None or layout.dim != 1:
        raise Unsupported("the rows of the samples are not the same in all outputs of the layer")
    _, by_h, _ = swept = Scan.sweep(node, *site.gradients)
    node.ready = site.gradients, swept
    before, g = (layout.split(t, 1, site.count).flatten(1, 2) for t in (node.steps.before, by_h))
    factors: dict[int, Factor] = {}
    for slot in slots:
        if node.roles[slot] == "w_hh":
            factors[slot] = Outer(before[:, None], g[:, None], tuple(site.shapes[slot]))
        elif node.roles[slot] == "b_hh":
            factors[slot] = Dense(ops.run("broadcast_sums", g, None, [1]))
        else:
            raise Unsupported("inputs or initial states that are computed of parameters alone")
    return factors
