"""The two public functions of the engine, with plans kept for as long as the model lives."""

from __future__ import annotations

from operator import attrgetter, itemgetter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.distributed.fully_sharded import full_params
from fastlr.errors import InputError
from fastlr.ghost.engine import Cotangent, Engine
from fastlr.ghost.model.view import ModelView, OutputSelector
from fastlr.ghost.norms.cotangents import generic_cotangent
from fastlr.ghost.report import SupportReport
from fastlr.ops.model_lock import locks_model
from fastlr.ops.objects import PLAIN, number, weakly_by_module
from fastlr.ops.recent import Recent

# A new function as ``output`` at every call must not pile up plans.
_OPTIONS = 8
_BY_TEXT = PLAIN | {slice, torch.dtype, torch.device, itemgetter, attrgetter}
_ENGINES = weakly_by_module()  # model -> options -> engine


def engine_of(view: ModelView) -> Engine:
    """Return the engine of a model and its options: made once, dropped with the model.

    One whose ``output`` holds the model is kept as long as the process lives.

    A function as ``output`` is known by its code and what it holds: one that is defined again in a
    later call finds the same engine.
    """
    engines = _ENGINES.get(view.module)
    if engines is None:
        engines = _ENGINES[view.module] = Recent(_OPTIONS)
    key = (_output_key(view.output), view.in_dim, view.out_dim)
    engine: Engine = engines.get(key) or engines.put(key, Engine(view))
    engine.view = view  # what the function of an earlier call holds may have changed
    return engine


def _output_key(output: Any) -> tuple:
    """Return the key of ``output``: of a function its code and what it holds."""
    if isinstance(output, MethodType):
        return _key(output.__self__), _key(output.__func__)
    if not isinstance(output, FunctionType):
        return (_key(output),)
    try:
        held = *(cell.cell_contents for cell in output.__closure__ or ()), output.__defaults__
    except ValueError:  # a cell is empty yet
        return (_key(output),)
    named = (output.__kwdefaults__ or {}).items()
    return output.__code__, id(output.__globals__), _key((*held, *named))


def _key(value: Any) -> Any:
    """Return the text of a plain value, the keys in a tuple, or the number of an object.

    An engine keeps its function, so that no other object gets the number of one that it holds.
    """
    if type(value) is tuple:
        return tuple(map(_key, value))
    return repr(value) if type(value) in _BY_TEXT else number(value)


def engine_for(
    model: nn.Module, output: OutputSelector = None, in_dim: int = 0, out_dim: int = 0
) -> Engine:
    """Return the engine of a model and these options (see `engine_of`)."""
    return engine_of(ModelView.of(model, output, in_dim, out_dim))


@locks_model
def per_sample_grad_sq_norms(
    model: nn.Module,
    x: Any,
    cotangent: Cotangent,
    *,
    output: OutputSelector = None,
    in_dim: int = 0,
    out_dim: int = 0,
    per_parameter: bool = False,
    check: bool | None = None,
) -> Tensor | dict[str, Tensor]:
    """Return the squared norm of each sample's gradient of <v_b, output_b>.

    The gradient is with respect to all trainable parameters, for each sample b.

    With v_b the gradient of a loss at the output, this is the squared norm of that loss's
    per-sample gradient. The gradients themselves are not formed: a walk over the autograd graph
    finds every use of every parameter, and one backward pass turns what arrives there into norms.
    Three samples of a new structure or shape are compared with plain autograd. The model is taken
    as it is (call ``model.eval()`` yourself) and left as it was.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through. One under
            ``fully_shard`` on every rank at once, each with inputs of its own (see
            `fastlr.distributed.full_params`).
        x: inputs: a tensor, a tuple (positional) or a dict (keywords).
        cotangent: v, shaped like the output, or a function of the detached output that returns it;
            any scale.
        output: picks the output tensor from what the model returns (a key, attribute, index or
            function); default the tensor itself, ``.logits`` or ``.prediction_outputs``.
        in_dim: sample axis of the batched inputs.
        out_dim: sample axis of the output.
        per_parameter: return one tensor for each trainable parameter instead of their sum.
        check: Whether this call runs a random sample of the batch alone, by plain autograd, and
            compares its output and norms. None: as often as costs at most 3 % of the time of these
            calls. True: always. False: only where the graph or a shape is new, when three samples
            are compared whatever ``check`` says.

    Returns:
        Tensor [B], float64, or a dict from parameter name to such tensors.

    Raises:
        InputError: inputs on another device or of another dtype, empty batch, output not a tensor,
            cotangent of another shape.
        InteractionError: samples influence each other (batch norm in train mode).
            RandomForwardError: dropout is active.
        HiddenParameterError: a parameter moves the output outside the autograd graph (reentrant
            checkpointing).
        NonlinearBackwardError: gradients do not scale as the one at the output does (a hook that
            clips them).
        NonFiniteError: output or gradient not finite. ModelError: anything else that makes the
            norms meaningless.

    Source: the quantity under the mean in Theorem 3.4 of the paper; ghost norms: Goodfellow 2015
    (arXiv:1510.01799).

    Example:
        >>> import torch, fastlr
        >>> model, x = torch.nn.Linear(3, 2, bias=False), torch.randn(4, 3)
        >>> norms = fastlr.per_sample_grad_sq_norms(model, x, torch.ones(4, 2))
        >>> torch.allclose(norms, 2 * x.double().square().sum(1), rtol=1e-5)
        True
    """
    if check is not None and not isinstance(check, bool):
        raise InputError(f"check={check!r}: choose True, False or None")
    with full_params(model):
        result = engine_for(model, output, in_dim, out_dim).run(x, cotangent, check)
    return result.per_parameter if per_parameter else result.total


@locks_model
def support_report(
    model: nn.Module, x: Any, *, output: OutputSelector = None, in_dim: int = 0, out_dim: int = 0
) -> SupportReport:
    """Report for every trainable parameter how it is measured for these inputs.

    Args and errors as for `per_sample_grad_sq_norms`. Prints as a table (parameter, node kind,
    sample axis, route, largest deviation from the exact gradients of three samples); the rows are
    in ``.parameters``. Its notes name the inputs that all samples share.
    """
    with full_params(model):
        engine = engine_for(model, output, in_dim, out_dim)
        engine.run(x, generic_cotangent)
        return SupportReport.of(engine, engine.view.inputs(x))
