"""A local redundancy that one can train with: differentiable, for batches of one's own inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fastlr.errors import FastlrError, InputError, InteractionError, ModelError, first_line, warn
from fastlr.estimator.eval_mode import eval_mode
from fastlr.estimator.padding import padding_mask
from fastlr.estimator.passes import default_predictive, ends_in_sigmoid, warn_of_sigmoid
from fastlr.estimator.predictive import Predictive
from fastlr.estimator.whole_batch import refuse_mixed_gradients, require_hooks_to_add
from fastlr.ghost.api import engine_of
from fastlr.ghost.engine import Engine
from fastlr.ghost.fusion.recurrent import Unfused
from fastlr.ghost.graph.formulas import dense
from fastlr.ghost.graph.walk import walk
from fastlr.ghost.model.batch import copied
from fastlr.ghost.model.refusals import refusals
from fastlr.ghost.model.view import FAILURES, ModelView, OutputSelector
from fastlr.ghost.model.writes import LARGE, saving_copies
from fastlr.ghost.trust.company import BatchOutput
from fastlr.ops.autocast import autocast_dtype
from fastlr.ops.compiled_parts import uncompiled
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.fisher import power_of_two, signs
from fastlr.ops.model_lock import locks_model
from fastlr.ops.objects import weakly_by_module
from fastlr.ops.philox import check_seed
from fastlr.ops.torch_private import tree_leaves, weight_norm

# Nodes whose derivative jumps where a unit switches, and nodes that have no second derivative.
_JUMPS = (
    "Abs Amax Amin AdaptiveMaxPool ClampBackward ClampMax ClampMin Hardshrink Hardsigmoid "
    "Hardswish Hardtanh LeakyRelu MaxBackward MaxPool Maximum Min Prelu Relu Rrelu Softshrink "
    "Sort Threshold Topk"
).split()
_ONCE = "CudnnRnn MiopenRnn MkldnnRnnLayer ThnnFused WeightNormInterface".split()

_checked = weakly_by_module()  # model -> engine, key of a checked loss -> inputs with samples


@locks_model
def redundancy_loss(
    model: torch.nn.Module,
    x: Any,
    *,
    predictive: Predictive | None = None,
    probe: Literal["rademacher", "exact"] = "rademacher",
    seed: int | None = None,
    output: OutputSelector = None,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    r"""Return the local redundancy of a model on inputs x, as a differentiable scalar.

    It can be differentiated with respect to the parameters.

    With z_b the output for input b, J_b its Jacobian with respect to the trainable parameters, F_b
    the Fisher matrix of the predictive distribution at z_b and random v_b with ``E v_b v_b^T =
    F_b``, independent and with mean zero, it is

        ``(1/B) || sum_b J_b^T v_b ||^2``,  whose expectation is  ``(1/B) sum_b tr(J_b^T F_b J_b)``,

    the mean over x of the local redundancy. The gradient goes through J_b and v_b, so its
    expectation is the gradient of that mean where the model is smooth. At a ReLU the redundancy
    *jumps* as a unit switches; the gradient sees the smooth part alone, and a warning names such
    nodes. One value has a relative standard deviation of about 1, as the squared length of a random
    vector: average over steps. It costs a forward, a backward and a double backward pass.

    The model runs in eval mode (its flags, buffers and random states are put back), attention by
    its plain formula and recurrent layers step by step, as the fused kernels have no second
    derivative.

    Args:
        model: any module whose samples do not interact in eval mode. In every call, a random sample
            must give its output alone. Gradients are checked when dtypes or the shapes of x are
            new.
        x: inputs of B samples on axis 0: a tensor, a tuple (positional) or a dict (keywords).
        predictive: Categorical, Bernoulli or Gaussian; default as for `estimate`.
        probe: "rademacher" draws one v for each sample; "exact" sums over the columns of F^(1/2),
            with random signs of the samples alone.
        seed: Seed of the draws. None draws one from torch's generator in every call.
        output: picks the output tensor from what the model returns: key, attribute, index or
            function.
        reduction: "mean", or "none" for the value of each sample, [B]: no cross terms, for small
            batches: it takes B backward passes of the batch, by vmap, and the memory of B
            gradients.

    Returns:
        A scalar, or [B], in nats per input per unit step size: float32, or float64 where the output
            is.

    Raises:
        InputError: arguments that are wrong; ``probe="sampled"``, as the gradient would lack the
            part of the drawn labels.
        ModelError: a node without a second derivative, by name; and the errors of `estimate`.

    Source: paper, Theorem 3.4; the square of a sum with random signs is Hutchinson's estimator of
    its trace.

    Example:
        >>> import torch, fastlr
        >>> layers = torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2)
        >>> model, x = torch.nn.Sequential(*layers), torch.randn(8, 3)
        >>> fastlr.redundancy_loss(model, x, seed=0).backward()
        >>> model[0].weight.grad.shape
        torch.Size([4, 3])
    """
    if not torch.is_grad_enabled():
        raise InputError(
            "redundancy_loss is called under torch.no_grad(), where nothing is trained: leave "
            "no_grad, or measure with fastlr.estimate"
        )
    if probe not in ("rademacher", "exact"):
        why = ": the gradient would lack the part that the labels' probabilities have in it" * (
            probe == "sampled"
        )
        raise InputError(f"probe={probe!r}{why}; choose 'rademacher' or 'exact'")
    _check_arguments(reduction, predictive)
    view = ModelView.of(model, output)
    _refuse_scripts(view.module)
    x = view.inputs(x)
    seed = int(torch.randint(1 << 62, ())) if seed is None else check_seed(seed)
    parameters = list(view.parameters.values())
    with eval_mode(view.module, view.device), uncompiled():
        engine, key = engine_of(view), _key(view, x)
        carriers = _checked.setdefault(view.module, {}).get((engine, key))
        if carriers is None:
            refuse_mixed_gradients(engine, x)
        require_hooks_to_add(view)
        with sdpa_kernel(SDPBackend.MATH), Unfused(), PlainWeightNorm(), refusals(view, x):
            z = _output_with_copies_of_buffers(view, x)
        if carriers is not None:
            _refuse_another_output(engine, x, z, carriers)
        _look_at(z, view.parameters)
        distribution = default_predictive(z, 0, x, view) if predictive is None else predictive
        if ends_in_sigmoid(z):
            warn_of_sigmoid(distribution)
        made = distribution.differentiable_cotangent(
            z, probe, range(len(z)), seed, counted=padding_mask(x, z, 0)
        )
        columns = [made] if isinstance(made, Tensor) else list(made)
        if probe == "exact" and reduction == "mean":
            sign = signs(torch.arange(len(z), device=z.device), 1, seed).view(
                -1, *[1] * (z.ndim - 1)
            )
            columns = [v * sign for v in columns]
        with _second_derivatives_named():
            norms = [_sq_norms(z, parameters, v, reduction == "none") for v in columns]
            values = torch.stack(norms).sum(0)
            if carriers is None:
                _differentiate_once_more(values, parameters)
                _checked[view.module][engine, key] = engine.plan.carriers
    return (values if reduction == "none" else values / len(z)).to(
        torch.promote_types(z.dtype, torch.float32)
    )


def _output_with_copies_of_buffers(view: ModelView, x: Any) -> Tensor:
    """Return the output. Its graph has copies of small buffers, which training may write first."""
    small = [buffer for buffer in view.module.buffers() if buffer.numel() <= LARGE]
    try:
        with saving_copies(small):
            return view.forward(copied(x))
    except RuntimeError as error:
        if isinstance(error, FastlrError) or out_of_memory(error):
            raise
    return view.forward(copied(x))  # torch.func takes no hooks of saved tensors


def _check_arguments(reduction: Any, predictive: Any) -> None:
    if reduction not in ("mean", "none"):
        raise InputError(f"reduction={reduction!r}: choose 'mean' or 'none'")
    if predictive is not None and not isinstance(predictive, Predictive):
        raise InputError(
            f"predictive is {predictive!r}: give a fastlr.Categorical(), Bernoulli() or Gaussian()"
        )


def _refuse_scripts(model: torch.nn.Module) -> None:
    """Refuse scripted modules: torch may give them wrong second derivatives."""
    scripted = [name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        raise ModelError(
            f"module {scripted[0] or '(root)'} is scripted or traced by torch.jit, which "
            "redundancy_loss does not take: give the module that it was made from, or measure with "
            "fastlr.estimate"
        )


def _key(view: ModelView, x: Any) -> tuple:
    """Return the key of what is checked once of a model: shapes, dtypes, autocast."""
    shapes = tuple(t.shape for t in tree_leaves(x) if isinstance(t, Tensor))
    dtypes = tuple((name, p.dtype) for name, p in view.parameters.items())
    return shapes, autocast_dtype(view.device), dtypes


def _refuse_another_output(engine: Engine, x: Any, z: Tensor, carriers: list[int]) -> None:
    """Refuse interaction if a random sample gives another output beside a copy of itself.

    A model that does not take two samples is checked by the engine.
    """
    view = engine.view
    batch, pair = view.batch(x, len(z), carriers), engine.audits.samples(len(z), check=True) * 2
    try:
        row = view.outputs(batch.pick(pair))
    except FAILURES:
        return refuse_mixed_gradients(engine, x)
    if not BatchOutput(view, batch, z).matches(pair, row):
        refuse_mixed_gradients(engine, x)  # names what is to blame, if its own sample shows it
        raise InteractionError(f"sample {pair[0]} gives another output alone than in its batch")


def _differentiate_once_more(values: Tensor, parameters: Sequence[Tensor]) -> None:
    """Raise what the caller's own backward pass would raise."""
    if values.requires_grad:
        torch.autograd.grad(values.sum(), parameters, retain_graph=True, allow_unused=True)


@contextmanager
def _second_derivatives_named() -> Iterator[None]:
    """Turn what an operation without a second derivative raises into an error that says so."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FastlrError) or out_of_memory(error):
            raise
        raise ModelError(
            f"the model cannot be differentiated twice ({first_line(error)[:200]}): replace that "
            "operation, or measure with fastlr.estimate, which needs one derivative"
        ) from error


class PlainWeightNorm(TorchFunctionMode):
    """Run weight normalisation by plain operations: torch's own has a wrong second derivative."""

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # noqa: D105
        if func is not weight_norm:
            return func(*args, **(kwargs or {}))
        return _plain_weight_norm(*args, **(kwargs or {}))


def _plain_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _look_at(z: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Refuse nodes that have no second derivative, and warn of those whose first one jumps."""
    names = sorted({name.removesuffix("Backward0") for name in walk(z, parameters).names})
    once = [name for name in names if name.startswith(tuple(_ONCE))]
    if once:
        raise ModelError(
            f"{', '.join(once)} cannot be differentiated twice: build the recurrent layer from "
            "torch.nn.LSTMCell or GRUCell on this device (a weight norm within a script from plain "
            "operations), or measure it with fastlr.estimate"
        )
    jumps = [name for name in names if f"{name}Backward0".startswith(tuple(_JUMPS))]
    if jumps:
        warn(
            f"the local redundancy of this model jumps where a unit of {', '.join(jumps)} "
            "switches, and the gradient of redundancy_loss does not see the jumps: its value is "
            "right, its slope the smooth part's (GELU, SiLU, tanh and average pooling have none)"
        )


def sample_gradients(
    z: Tensor, parameters: Sequence[Tensor], v: Tensor, *, create_graph: bool = False
) -> list[Tensor | None]:
    """Return the gradients of each <z_b, v_b>, [B, *shape] for each parameter.

    None for a parameter that has no part. They take B backward passes: by vmap, or one by one where
    an operation does not go by it (sparse gradients, group norm differentiated twice).
    """
    rows = (
        torch.eye(len(z), dtype=z.dtype, device=z.device).view(len(z), len(z), *[1] * (z.ndim - 1))
        * v
    )
    options = {
        "create_graph": create_graph,
        "retain_graph": True,
        "allow_unused": True,
    }
    try:
        return list(torch.autograd.grad(z, parameters, rows, is_grads_batched=True, **options))
    except RuntimeError as error:
        if out_of_memory(error):
            raise
    by_sample = [torch.autograd.grad(z, parameters, row, **options) for row in rows]
    return [
        None if gradients[0] is None else torch.stack(list(map(dense, gradients)))
        for gradients in zip(*by_sample, strict=True)
    ]


def _sq_norms(z: Tensor, parameters: Sequence[Tensor], v: Tensor, of_samples: bool) -> Tensor:
    """Return the squared norm of the gradient of <z, v>, or of each <z_b, v_b> [B].

    It is in float64; gradients flow through it, also by v.

    v is brought to unit size by a power of two, which has no gradient: small ones keep their bits.
    (torch.ldexp would do, but gives no gradient for negative exponents.)
    """
    exponent = torch.frexp(v.detach().abs().amax()).exponent.clamp(-500, 500)
    unit = (v * power_of_two(-exponent)).to(z.dtype)
    if of_samples:
        grads = sample_gradients(z, parameters, unit, create_graph=True)
        norms = [g.double().square().reshape(len(g), -1).sum(1) for g in grads if g is not None]
    else:
        whole = torch.autograd.grad(z, parameters, unit, create_graph=True, allow_unused=True)
        norms = [dense(g).double().square().sum() for g in whole if g is not None]
    return torch.stack(norms).sum(0) * power_of_two(2 * exponent)
