"""What a `Folding` does with the calls of a forward pass: a table of call -> handler.

A handler gets a call, and what is known of the model's blocks. Gradients are enabled. It returns
the call's result, or None for a call that is to run as the model says. Handlers build blocks of
`Pending` results (a convolution begins one, batch norm, additions and activations are taken in),
and run some other calls by nodes of our own. They note what they did, by the name of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr.ghost.fusion import recurrent
from fastlr.ghost.fusion.arguments import by_name
from fastlr.ghost.fusion.attention import ATTENTION, self_attention_without_copies
from fastlr.ghost.fusion.batch_norm import FixedNorm
from fastlr.ghost.fusion.blocks import Blocks
from fastlr.ghost.fusion.pending import (
    Convolution,
    Lazy,
    Pending,
    Product,
    computed,
    result_dtype,
    version_of,
)
from fastlr.ghost.fusion.squeeze_excitation import (
    MEANS,
    PRODUCTS,
    channel_means,
    is_gate,
    is_whole_mean,
    keeps_axes,
)
from fastlr.ops.geometry import ConvGeometry, kind_of

NO_NORM = "no batch norm follows"
# To the number of their spatial axes.
CONVOLUTIONS: dict[Callable, int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
ADDITIONS: set[Callable] = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__}


class Call(NamedTuple):
    """A call of a torch function; its arguments may be pending results."""

    func: Callable
    args: tuple
    kwargs: dict[str, Any]

    @property
    def operand(self) -> Any:
        """The first argument."""
        return self.args[0] if self.args else self.kwargs.get("input")

    def with_values(self) -> Call:
        """Return the same call with pending results computed."""
        return Call(self.func, computed(self.args), computed(self.kwargs))

    def run(self) -> Any:
        """Make the call as the model says."""
        return self.func(*computed(self.args), **computed(self.kwargs))


Handler = Callable[[Blocks, Call], Any]


# --------------------------------------------------------------------------------------------------
# blocks
def convolution(blocks: Blocks, call: Call) -> Pending | None:
    """Begin a block with a convolution of the model's own weight."""
    return _begun(blocks, call, *call.args[:1], *computed(call.args[1:]), **computed(call.kwargs))


def _begun(
    blocks: Blocks,
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Pending | None:
    """Return the result of a convolution, not computed; None where no block can begin.

    After ``call`` the arguments are those of torch's functions.
    """
    name = blocks.names.get(id(weight))
    if name is None or name in blocks.refused:
        return None
    if id(weight) in blocks.used:
        blocks.refuse(weight, "it is used more than once")
        return None
    blocks.used.add(id(weight))
    plain = weight.is_leaf and weight.is_floating_point()
    if not plain or (bias is not None and id(bias) not in blocks.names):
        return None
    if input.ndim != CONVOLUTIONS[call.func] + 2 or input.shape[1] != weight.shape[1] * groups:
        return None
    # What torch refuses is an error that the model is to raise itself.
    if not torch.is_autocast_enabled(input.device.type) and input.dtype != weight.dtype:
        return None
    geometry = ConvGeometry.of(weight.shape[2:], stride, padding, dilation, groups=groups)
    size = [] if geometry is None else geometry.output_size(input.shape[2:], weight.shape[2:])
    if geometry is None or min(size) < 1:
        return None
    blocks.not_folded[name] = NO_NORM
    x = _as_input(input, weight, geometry) if isinstance(input, Lazy) else input
    made = Convolution(x, weight, bias, geometry, call.run)
    return Pending(blocks, made, [len(input), len(weight), *size])


def _as_input(input: Lazy, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """Compute the pending input of a block, but for last steps that the block itself can apply.

    Only blocks with kernels can, and only in the dtype that the input has.
    """
    has_kernel = kind_of(weight, geometry) is not None
    same_dtype = input.dtype == result_dtype(input)
    if has_kernel and same_dtype and input.try_to_leave_steps():
        return input
    return input.compute()


def batch_norm(blocks: Blocks, call: Call) -> Tensor | None:
    """Fold batch norm into the convolution before it; elsewhere run it as a scaling and a shift."""
    given = by_name(*call)
    x = given["input"]
    folds = isinstance(x, Pending) and x.batch_norm is None
    result = _folded_norm(blocks, given) if folds else None
    return _fixed_norm(blocks, computed(given)) if result is None else result


def _folded_norm(blocks: Blocks, given: dict[str, Any]) -> Pending | None:
    """Return a block that has taken in batch norm; None, and why, if it cannot."""
    pending, mean, var = given["input"], given["running_mean"], given["running_var"]
    gamma, beta = given["weight"], given["bias"]
    name = pending.weight_name
    if given["training"] or mean is None or var is None:
        blocks.not_folded[name] = "batch norm uses the batch's statistics"
        return None
    if any(blocks.is_computed(t) for t in (mean, var, gamma, beta)):
        blocks.not_folded[name] = "batch norm's parameters are computed"
        return None
    own = [id(t) for t in (gamma, beta, pending.convolution.bias) if t is not None]
    if not blocks.used.isdisjoint(own):
        blocks.not_folded[name] = "a parameter is used more than once"
        return None
    if pending.absorbed or pending.value is not None:
        blocks.not_folded[name] = "something else uses its result"
        return None
    if pending.dtype != result_dtype(pending.convolution.x):
        return None
    blocks.used.update(own)
    del blocks.not_folded[name]
    blocks.folded[name] = "none"
    return pending.next_step(batch_norm=given)


def _fixed_norm(blocks: Blocks, given: dict[str, Any]) -> Tensor | None:
    """Run a batch norm after something else than a convolution as a scaling and a shift.

    This pays on a CPU; None where it is not possible.
    """
    x, gamma, beta = given["input"], given["weight"], given["bias"]
    affine = [t for t in (gamma, beta) if t is not None]
    statistics = [given["running_mean"], given["running_var"]]
    uses_the_batchs_own = given["training"] or any(t is None for t in statistics)
    if uses_the_batchs_own or not affine:
        return None
    name = blocks.names.get(id(affine[0]))
    if name is None or name in blocks.refused:
        return None
    pays = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    fits = x.ndim >= 2 and x.shape[1] == len(affine[0])
    casts_none = all(t.dtype == x.dtype for t in affine + statistics)
    if not (pays and fits and casts_none) or any(map(blocks.is_computed, affine + statistics)):
        return None
    blocks.fixed.add(name)
    return FixedNorm.apply(x, gamma, beta, *statistics, float(given["eps"]), name)


def addition(blocks: Blocks, call: Call) -> Pending | None:
    """Take the addition of a tensor of its shape, the residual, into a block."""
    if len(call.args) != 2 or call.kwargs:
        return None
    pending, other = call.args
    in_place = call.func is Tensor.add_
    if not in_place and not _takes_addition(pending):
        pending, other = other, pending
    if not _takes_addition(pending) or not isinstance(other, Tensor):
        return None
    other = _as_residual(other, pending)
    alike = other.shape == pending.shape and other.dtype == pending.dtype
    if not alike or other.device != pending.device or id(other) in blocks.names:
        return None
    if not pending.takes_addition:  # the other was made from it: that has needed its numbers
        return None
    blocks.folded[pending.weight_name] = "add"
    versions = [*pending.versions, version_of(other)]
    return pending.next_step(in_place=in_place, residual=other, versions=versions)


def _as_residual(other: Tensor, block: Pending) -> Tensor:
    """Compute what is added to a block, but for an activation that the block itself can apply.

    By kernels it can, but not a gate, nor the activation's derivative: another reader has to.
    """
    if not block.runs_by_kernel or not isinstance(other, Lazy):
        return computed(other)
    loaded = other.loaded()
    another_reader_applies_derivative = loaded.gradient_at_output
    block_can_load_it = another_reader_applies_derivative and loaded.gate is None
    return other if block_can_load_it else other.compute()


def _takes_addition(t: Any) -> bool:
    return isinstance(t, Pending) and t.takes_addition


def activation(blocks: Blocks, call: Call) -> Pending | None:
    """Take an activation into the block of whose result it is."""
    pending = call.operand
    if not isinstance(pending, Pending) or not pending.can_be_folded:
        return None
    found = _activation_of(call)
    if found is None or pending.activation != "none":
        return None
    name, in_place = found
    follows = name if pending.residual is None else f"add, {name}"
    blocks.folded[pending.weight_name] = follows
    return pending.next_step(in_place=in_place, activation=name)


# Functions written in Python, whose options have names, and others without options: whether these
# work in place.
_WITH_OPTIONS: dict[Callable, str] = {
    F.relu: "relu",
    F.relu6: "relu6",
    F.hardtanh: "relu6",
    F.hardswish: "hardswish",
    F.silu: "silu",
}
_RELU = {torch.relu: False, Tensor.relu: False, torch.relu_: True, Tensor.relu_: True}


def _activation_of(call: Call) -> tuple[str, bool] | None:
    """Return (the name of the activation that a call is, whether it works in place).

    None if the call is none of ours.
    """
    if call.func in _RELU:
        return "relu", _RELU[call.func]
    if call.func is F.gelu:
        kinds = {"none": ("gelu", False), "tanh": ("gelu_tanh", False)}
        return kinds.get(call.kwargs.get("approximate", "none"))
    given = by_name(*call)
    if call.func is F.hardtanh and (given["min_val"], given["max_val"]) != (0, 6):
        return None
    return _WITH_OPTIONS[call.func], bool(given["inplace"])


# --------------------------------------------------------------------------------------------------
# calls that run by nodes of our own
def product(blocks: Blocks, call: Call) -> Product | None:
    """Leave the product of a block's result with one number per channel to its readers.

    Blocks by kernels can, as they leave their activation to them too.
    """
    if len(call.args) != 2 or call.kwargs:
        return None
    factors, x = call.args if isinstance(call.args[1], Pending) else call.args[::-1]
    if not isinstance(x, Pending) or isinstance(factors, Lazy) or not is_gate(factors, x):
        return None
    if not x.try_to_leave_steps():
        return None
    blocks.replaced["gate"] += 1
    return Product(x, factors)


def mean(blocks: Blocks, call: Call) -> Tensor | None:
    """Run a mean over all positions so that its gradient stays small.

    By kernels a block gives the mean of its own result.
    """
    if not is_whole_mean(*call):
        return None
    x = call.args[0]
    result = x.mean_over_positions() if isinstance(x, Pending) else None
    if result is None:
        result = channel_means(*call.with_values())
    elif not keeps_axes(call.func, call.kwargs):
        result = result.flatten(1)
    if result is not None:
        blocks.replaced["squeeze"] += 1
    return result


def attention(blocks: Blocks, call: Call) -> tuple[Tensor, None] | None:
    """Run a self-attention without the copies that torch makes around it."""
    result = self_attention_without_copies(*call.with_values())
    if result is not None:
        blocks.replaced["attention"] += 1
    return result


def recurrent_layer(blocks: Blocks, call: Call) -> Any:
    """Run a recurrent layer as one scan, or else by torch's own steps, which rules cover."""
    values = call.with_values()
    result = recurrent.scanned(*values)
    if result is None:
        return blocks.unfused.run_by_steps(*values)
    blocks.replaced["recurrent"] += 1
    return result


# Each call that is of interest. Other calls run as the model says.
HANDLERS: dict[Callable, Handler] = {
    **dict.fromkeys(CONVOLUTIONS, convolution),
    F.batch_norm: batch_norm,
    **dict.fromkeys(ADDITIONS, addition),
    **dict.fromkeys((*_WITH_OPTIONS, *_RELU, F.gelu), activation),
    **dict.fromkeys(PRODUCTS, product),
    **dict.fromkeys(MEANS, mean),
    ATTENTION: attention,
    **dict.fromkeys(recurrent.CALLS, recurrent_layer),
}
