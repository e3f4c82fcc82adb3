"""What a `Folding` does with the calls of a forward pass: a table of call -> handler.

A handler gets the folding and a call, and returns the call's result, or None for a call that is to
run as the model says. Handlers build blocks of `Pending` results (a convolution begins one, batch
norm, additions and activations are taken in), and run some other calls by nodes of our own. They
tell the folding what they did, by the name of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr.ghost import recurrent
from fastlr.ghost.fusion.attention import ATTENTION, self_attention
from fastlr.ghost.fusion.batch_norm import FixedNorm, norm_arguments
from fastlr.ghost.fusion.pending import (
    METADATA,
    Convolution,
    Lazy,
    Norm,
    Pending,
    Product,
    computed,
    loaded_of,
    result_dtype,
)
from fastlr.ghost.fusion.squeeze_excitation import (
    MEANS,
    PRODUCTS,
    gate,
    is_gate,
    squeeze,
    whole_mean,
)
from fastlr.ops.geometry import ConvGeometry, kind_of
from fastlr.ops.torch_private import no_torch_function_of_subclasses

if TYPE_CHECKING:
    from fastlr.ghost.fusion.mode import Folding

ALONE = "no batch norm follows"
CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}  # to the number of their spatial axes
ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__}


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


Handler = Callable[["Folding", Call], Any]


def metadata(folding: Folding, call: Call) -> Any:
    """Answer for a pending result what asks for no numbers, such as its shape."""
    if not isinstance(call.operand, Lazy):
        return None
    with no_torch_function_of_subclasses():
        return call.func(*call.args, **call.kwargs)


# --------------------------------------------------------------------------------------------------
# blocks
def convolution(folding: Folding, call: Call) -> Pending | None:
    """Begin a block with a convolution of the model's own weight."""
    axes = CONVOLUTIONS[call.func]
    return _begun(folding, axes, *call.args[:1], *computed(call.args[1:]), **computed(call.kwargs))


def _begun(
    folding: Folding,
    axes: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Pending | None:
    """Return the result of a convolution, not computed; None where no block can begin.

    After ``axes`` the arguments are those of torch's functions.
    """
    name = folding.names.get(id(weight))
    if name is None or name in folding.refused or not torch.is_grad_enabled():
        return None
    if id(weight) in folding.seen:
        folding.refuse(weight, "it is used more than once")
        return None
    folding.seen.add(id(weight))
    if not weight.is_leaf or not weight.is_floating_point():
        return None
    if bias is not None and id(bias) not in folding.names:
        return None
    if input.ndim != axes + 2 or input.shape[1] != weight.shape[1] * groups:
        return None
    if not torch.is_autocast_enabled(input.device.type) and input.dtype != weight.dtype:
        return None  # an error that the model is to raise itself
    geometry = ConvGeometry.of(weight.shape[2:], stride, padding, dilation, groups=groups)
    if geometry is None:
        return None
    size = geometry.output_size(input.shape[2:], weight.shape[2:])
    if min(size) < 1:
        return None
    folding.plain[name] = ALONE
    if isinstance(input, Lazy):
        # Only blocks with kernels, which do not change its dtype, apply what it leaves to them.
        applies = kind_of(weight, geometry) is not None and input.dtype == result_dtype(input)
        if not (applies and input.leaves_steps()):
            input = input.compute()
    made = Convolution(input, weight, bias, geometry)
    return Pending(folding, made, [len(input), len(weight), *size])


def batch_norm(folding: Folding, call: Call) -> Tensor | None:
    """Fold batch norm into the convolution before it; elsewhere run it as a scaling and a shift."""
    if isinstance(call.operand, Pending) and call.operand.batch_norm is None:
        result = _folded_norm(folding, norm_arguments(call.args, call.kwargs))
        if result is not None:
            return result
    values = call.with_values()
    return _fixed_norm(folding, norm_arguments(values.args, values.kwargs))


def _folded_norm(folding: Folding, given: dict[str, Any]) -> Pending | None:
    """Return a block that has taken in batch norm; None, and why in ``plain``, if it cannot."""
    pending, mean, var = given["input"], given["running_mean"], given["running_var"]
    gamma, beta = given["weight"], given["bias"]
    name = folding.names[id(pending.convolution.weight)]
    if given["training"] or mean is None or var is None:
        folding.plain[name] = "batch norm uses the batch's statistics"
        return None
    if any(folding.is_computed(t) for t in (mean, var, gamma, beta)):
        folding.plain[name] = "batch norm's parameters are computed"
        return None
    own = [id(t) for t in (gamma, beta, pending.convolution.bias) if t is not None]
    if not folding.seen.isdisjoint(own):
        folding.plain[name] = "a parameter is used more than once"
        return None
    if pending.absorbed or pending.value is not None or not torch.is_grad_enabled():
        folding.plain[name] = "something else uses its result"
        return None
    if pending.dtype != result_dtype(pending.convolution.x):
        return None
    folding.seen.update(own)
    del folding.plain[name]
    folding.folded[name] = "none"
    result = pending.next_step()
    result.batch_norm = Norm(mean, var, gamma, beta, float(given["eps"]))
    return result


def _fixed_norm(folding: Folding, given: dict[str, Any]) -> Tensor | None:
    """Run a batch norm after something else than a convolution as a scaling and a shift.

    This pays on a CPU; None where it is not possible.
    """
    x, gamma, beta = given["input"], given["weight"], given["bias"]
    affine = [t for t in (gamma, beta) if t is not None]
    statistics = [given["running_mean"], given["running_var"]]
    if given["training"] or not affine or any(t is None for t in statistics):
        return None
    name = folding.names.get(id(affine[0]))
    if name is None or name in folding.refused or not torch.is_grad_enabled():
        return None
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return None
    if x.ndim < 2 or x.shape[1] != len(affine[0]):
        return None
    if any(t.dtype != x.dtype or folding.is_computed(t) for t in affine + statistics):
        return None
    folding.fixed.add(name)
    return FixedNorm.apply(x, gamma, beta, *statistics, float(given["eps"]))


def addition(folding: Folding, call: Call) -> Pending | None:
    """Take the addition of a tensor of its shape, the residual, into a block."""
    if len(call.args) != 2 or call.kwargs or not torch.is_grad_enabled():
        return None
    pending, other = call.args
    in_place = call.func is Tensor.add_
    if not in_place and not _takes_addition(pending):
        pending, other = other, pending
    if not _takes_addition(pending) or not isinstance(other, Tensor):
        return None
    loaded = loaded_of(other) if pending.may_leave_activation else None
    if loaded is None or not loaded.gradient_at_output or loaded.gate is not None:
        other = computed(other)
    alike = other.shape == pending.shape and other.dtype == pending.dtype
    if not alike or other.device != pending.device or id(other) in folding.names:
        return None
    if not pending.takes_addition:  # computing the other has needed its numbers
        return None
    folding.folded[folding.names[id(pending.convolution.weight)]] = "add"
    result = pending if in_place else pending.next_step()
    result.take_residual(other)
    return result


def _takes_addition(t: Any) -> bool:
    return isinstance(t, Pending) and t.takes_addition


def activation(folding: Folding, call: Call) -> Pending | None:
    """Take an activation into the block of whose result it is."""
    pending, found = call.operand, _activation_of(call)
    if found is None or not torch.is_grad_enabled():
        return None
    if not isinstance(pending, Pending) or pending.batch_norm is None:
        return None
    if pending.activation != "none" or not pending.untouched or pending.absorbed:
        return None
    name, in_place = found
    follows = name if pending.residual is None else f"add, {name}"
    folding.folded[folding.names[id(pending.convolution.weight)]] = follows
    # In place: whoever holds it sees the change.
    result = pending if in_place else pending.next_step()
    result.activation = name
    return result


# Activations that may have an argument ``inplace``, and others that are told by their function
# alone: (name, whether it works in place).
_WITH_INPLACE = {F.relu: "relu", F.relu6: "relu6", F.hardswish: "hardswish", F.silu: "silu"}
_OF_NOTHING_ELSE: dict[Callable, tuple[str, bool]] = {
    torch.relu: ("relu", False),
    Tensor.relu: ("relu", False),
    torch.relu_: ("relu", True),
    Tensor.relu_: ("relu", True),
}


def _activation_of(call: Call) -> tuple[str, bool] | None:
    """Return (the name of the activation that a call is, whether it works in place).

    None if the call is none of ours.
    """
    func, more = call.func, call.args[1:]
    if func in _WITH_INPLACE:
        in_place = more[0] if more else call.kwargs.get("inplace", False)
        return _WITH_INPLACE[func], bool(in_place)
    if func is F.hardtanh:
        options = {"min_val": -1.0, "max_val": 1.0, "inplace": False}
        options |= dict(zip(options, more, strict=False)) | call.kwargs
        is_relu6 = (options["min_val"], options["max_val"]) == (0, 6)
        return ("relu6", bool(options["inplace"])) if is_relu6 else None
    if more:
        return None
    if func is F.gelu:
        kinds = {"none": ("gelu", False), "tanh": ("gelu_tanh", False)}
        return kinds.get(call.kwargs.get("approximate", "none"))
    return _OF_NOTHING_ELSE.get(func)


# --------------------------------------------------------------------------------------------------
# calls that run by nodes of our own
def product(folding: Folding, call: Call) -> Tensor | None:
    """Run a product with one factor a sample and channel as a `Gate`, or by its readers."""
    if not folding.replaces_calls:
        return None
    result = _product_of_block(call)
    if result is None:
        result = gate(*call.with_values())
    return folding.counted("gate", result)


def _product_of_block(call: Call) -> Product | None:
    """Return the product of a block's result, for its readers to apply; None if it is none.

    That is by kernels, where the block leaves its activation to them too.
    """
    if len(call.args) != 2 or call.kwargs:
        return None
    factors, x = call.args if isinstance(call.args[1], Pending) else call.args[::-1]
    if not isinstance(x, Pending) or isinstance(factors, Lazy) or not is_gate(factors, x):
        return None
    return Product(x, factors) if x.leaves_steps() else None


def mean(folding: Folding, call: Call) -> Tensor | None:
    """Run a mean over all positions as a `Squeeze`, or take it from where a block is computed."""
    if not folding.replaces_calls:
        return None
    result = _mean_of_block(call)
    if result is None:
        result = squeeze(*call.with_values())
    return folding.counted("squeeze", result)


def _mean_of_block(call: Call) -> Tensor | None:
    """Return the mean of a block's result over all positions as its kernel gives it, or None."""
    pending = call.args[0] if call.args else None
    if not isinstance(pending, Pending):
        return None
    keeps_axes = whole_mean(*call)
    if keeps_axes is None:
        return None
    result = pending.mean_over_positions()
    return result if result is None or keeps_axes else result.flatten(1)


def attention(folding: Folding, call: Call) -> Any:
    """Run self-attention without torch's copies around it."""
    if not folding.replaces_calls:
        return None
    return folding.counted("attention", self_attention(*call.with_values()))


def recurrent_layer(folding: Folding, call: Call) -> Any:
    """Run a recurrent layer as one scan, or else by torch's own steps, which rules cover."""
    if not torch.is_grad_enabled():
        return None
    values = call.with_values()
    if folding.replaces_calls:
        result = folding.counted("recurrent", recurrent.scanned(*values))
        if result is not None:
            return result
    return folding.unfused.call(*values)


# Each call that is of interest. Other calls run as the model says.
HANDLERS: dict[Callable, Handler] = {
    **dict.fromkeys(METADATA, metadata),
    **dict.fromkeys(CONVOLUTIONS, convolution),
    F.batch_norm: batch_norm,
    **dict.fromkeys(ADDITIONS, addition),
    **dict.fromkeys((*_WITH_INPLACE, *_OF_NOTHING_ELSE, F.gelu, F.hardtanh), activation),
    **dict.fromkeys(PRODUCTS, product),
    **dict.fromkeys(MEANS, mean),
    ATTENTION: attention,
    **dict.fromkeys(recurrent.CALLS, recurrent_layer),
}
