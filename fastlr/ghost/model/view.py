"""Any model as it is measured: without wrappers, called with its inputs, one output picked."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import FastlrError, InputError, ModelError, NonFiniteError
from fastlr.ghost.model.arguments import arguments
from fastlr.ghost.model.batch import Batch, as_inputs, copied, require_pickable
from fastlr.ghost.model.writes import forward_pass, passes_have_written
from fastlr.ops.compiled_parts import uncompiled
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.modules import all_modules
from fastlr.ops.torch_private import holds_fully_sharded

OutputSelector = str | int | Callable[[Any], Tensor] | None
# What models raise for a dtype, values or a number of samples that they cannot take.
FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    StopIteration,
)
_NONE_TRAINABLE = (
    "the model has no trainable parameters: call requires_grad_(True) on those that count; of a "
    "quantised model measure the one that it was made from"
)
_OUTPUT_FIELDS = ("logits", "prediction_outputs")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile wrappers."""
    if not issubclass(type(model), nn.Module):  # nor a mock of one
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    while True:
        if type(model).__name__ == "FullyShardedDataParallel":
            raise ModelError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), whose parameters are "
                "sharded between forward passes; shard it by torch.distributed.fsdp.fully_shard, "
                "which fastlr measures, or measure the unwrapped model with its full state dict "
                "loaded"
            )
        wrapped: Any
        if "_orig_mod" in model._modules:  # compiled
            wrapped = model._modules["_orig_mod"]
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            wrapped = model.module
        else:
            return model
        model = wrapped


def trainable(
    model: nn.Module, *, shards: bool = False, named: Mapping[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """Return the parameters that require grad, by name; a parameter held twice is counted once.

    ``named``: all of the model's parameters, where they are known already.

    Raises ModelError if there is none, or if one is uninitialised or complex; sharded, unless
    ``shards`` lets them be where the model is under ``fully_shard``.
    """
    under = holds_fully_sharded(model)
    if under and not shards:
        raise ModelError(
            "the model is under fully_shard: measure within "
            "fastlr.distributed.full_params(model), entered on every rank (those of "
            "fastlr.integrations do so, but for Avalanche's)"
        )
    parameters = {}
    for name, parameter in (named or dict(model.named_parameters())).items():
        if not parameter.requires_grad:
            continue
        if nn.parameter.is_lazy(parameter):
            raise ModelError(
                f"parameter {name} is not initialised (a lazy module); run one forward pass first"
            )
        if parameter.is_meta:
            raise ModelError(
                f"parameter {name} is on the meta device, which holds no values; load or "
                "initialise the model first (model.to_empty(device=...))"
            )
        if hasattr(parameter, "placements") and not under:
            raise ModelError(
                f"parameter {name} is a sharded DTensor, but the model is not under "
                "torch.distributed.fsdp.fully_shard (tensor parallelism, or a part of a sharded "
                "model: give the whole); measure a model with whole parameters"
            )
        if parameter.is_complex():
            raise ModelError(f"parameter {name} is complex; only real parameters are supported")
        parameters[name] = parameter
    if not parameters:
        raise ModelError(_NONE_TRAINABLE)
    return parameters


@dataclass(frozen=True, eq=False)
class ModelView:
    """A model as it is measured.

    It holds the module without wrappers, its trainable parameters, and where its samples are.

    The module is held weakly: what is kept about a model (its plans) does not keep the model.
    The parameters are those that require grad when they are first asked for; `renewed` looks again.

    Attributes:
        reference: the module inside DDP and torch.compile wrappers.
        output: picks the output tensor (see `select_output`).
        in_dim: sample axis of the batched input tensors.
        out_dim: sample axis of the output.
    """

    reference: weakref.ref[nn.Module]
    output: OutputSelector = None
    in_dim: int = 0
    out_dim: int = 0

    @classmethod
    def of(
        cls, model: nn.Module, output: OutputSelector = None, in_dim: int = 0, out_dim: int = 0
    ) -> ModelView:
        """View a model, wrapped or not.

        Raises InputError or ModelError where it is none that can be measured.
        """
        axes = [_axis("in_dim", in_dim), _axis("out_dim", out_dim)]
        module = unwrap(model)
        _refuse_hooks_of_opacus(module)
        return cls(weakref.ref(module), output, *axes)

    def renewed(self) -> ModelView:
        """Return the view of the model as it is now: other parameters may require grad."""
        return replace(self)

    @property
    def module(self) -> nn.Module:
        """The module; ModelError once it no longer exists."""
        module = self.reference()
        if module is None:
            raise ModelError("the model of this engine no longer exists")
        return module

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name.

        ModelError if there is none, or one that cannot be measured.
        """
        return trainable(self.module, named=self.named)

    @cached_property
    def named(self) -> dict[str, nn.Parameter]:
        """All parameters by name."""
        return dict(self.module.named_parameters())

    @cached_property
    def _first(self) -> nn.Parameter:
        """A parameter, which may be sharded; ModelError if there is none."""
        first = next(self.module.parameters(), None)
        if first is None:
            raise ModelError(_NONE_TRAINABLE)
        return first

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self._first.device

    def inputs(self, x: Any) -> Any:
        """Return inputs detached (see `as_inputs`), checked.

        Raises:
            InputError: an input tensor is empty, nested or on another device.
            NonFiniteError: one holds NaN. ModelError: the model has no parameters.
        """
        return as_inputs(x, self._require_usable)

    def _require_usable(self, t: Tensor) -> None:
        if t.is_nested:
            require_pickable(t, "an input tensor")
        if t.numel() == 0:
            raise InputError(f"an input tensor is empty (shape {tuple(t.shape)})")
        device = self.device
        if t.device != device and t.ndim > 0:
            raise InputError(f"an input is on {t.device}, the model on {device}; move one of them")
        # The sum is NaN if an element is, or for infinities. It takes half the time.
        may_have_nan = t.is_floating_point() and math.isnan(t.float().sum())
        if may_have_nan and bool(t.isnan().any()):
            raise NonFiniteError("an input tensor has values that are not a number")

    def forward(self, x: Any, *, copies: bool = True) -> Tensor:
        """Return the output for inputs, with its graph.

        Args:
            x: Inputs.
            copies: Whether the graph has copies of what the pass writes, as another pass may run
                before its backward pass.
        """
        with torch.enable_grad():
            return select_output(call(self.module, x, copies=copies), self.output)

    def outputs(self, x: Any) -> Tensor:
        """Return the output for inputs, without its graph."""
        return self.forward(x).detach()

    @property
    def has_hooked_parameters(self) -> bool:
        """True if hooks of parameters may change their gradients: rules do not take such hooks."""
        return any([p._backward_hooks for p in self.parameters.values()])

    def sample_count(self, z: Tensor) -> int:
        """Return the number of samples in an output (see `sample_count`)."""
        return sample_count(z, self.out_dim)

    def row(self, t: Tensor, sample: int) -> Tensor:
        """Return one sample of a tensor shaped like the output, of size 1 along ``out_dim``."""
        return t.narrow(self.out_dim, sample, 1)

    def batch(self, x: Any, count: int, batched: Sequence[int] | None = None) -> Batch:
        """Return the inputs of ``count`` samples so that samples can be picked (see `Batch`)."""
        return Batch(x, count, self.in_dim, batched)


def _refuse_hooks_of_opacus(model: nn.Module) -> None:
    """Raise ModelError if a GradSampleModule keeps gradients of samples of this model."""
    for module in all_modules(model):
        for hook in module._forward_hooks.values():
            if getattr(getattr(hook, "__self__", None), "hooks_enabled", False):
                raise ModelError(
                    "the hooks of Opacus' GradSampleModule take part in every backward pass: call "
                    "its disable_hooks() before the measurement, and enable_hooks() after it"
                )


def _axis(name: str, given: Any) -> int:
    """Return the number of an axis, or raise InputError naming it."""
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise InputError(f"{name}={given!r} is no number of an axis: give an integer, such as 0")
    return given.__index__()


def call(model: Callable, x: Any, *, copies: bool = True) -> Any:
    """Call the model with a tensor, a tuple (positional) or a dict (keywords).

    What torch.compile has compiled of it runs as it was written.
    """

    def run(x: Any, copies: bool) -> Any:
        args, kwargs = arguments(model, x)
        with forward_pass(model, copies=copies), uncompiled():
            return model(*args, **kwargs)

    if copies and passes_have_written():
        try:
            return run(copied(x), True)
        except RuntimeError as error:  # torch.func takes no hooks of saved tensors
            if isinstance(error, FastlrError) or out_of_memory(error):
                raise
    return run(x, False)


def select_output(result: Any, output: OutputSelector) -> Tensor:
    """Pick the output tensor: ``output`` is a key, an attribute, an index or a function.

    Default: the tensor itself, ``.logits`` or ``.prediction_outputs``. Raises InputError otherwise.
    """
    if callable(output):
        z = output(result)
    elif output is not None:
        try:
            z = (
                result[output]
                if isinstance(output, int) or isinstance(result, Mapping)
                else getattr(result, output)
            )
        except (KeyError, AttributeError, IndexError, TypeError) as error:
            raise InputError(
                f"output={output!r} picks nothing from what the model returns, a "
                f"{_describe(result)}"
            ) from error
    elif isinstance(result, Tensor):
        z = result
    else:
        fields = [getattr(result, name, None) for name in _OUTPUT_FIELDS]
        z = next((f for f in fields if isinstance(f, Tensor)), result)
    if not isinstance(z, Tensor):
        raise InputError(
            f"the model's output is not a tensor but a {_describe(z)}; "
            "pass output= (a key, an attribute, an index, or a function of what the model returns)"
        )
    if z.is_nested:
        raise InputError(
            "the model's output is a nested tensor; pass output=, a function that gives it padded "
            "(lambda z: z.to_padded_tensor(0.0))"
        )
    if not z.is_floating_point():
        raise InputError(
            f"the selected output is {z.dtype}, not a floating-point tensor; pass output="
        )
    if z.layout != torch.strided:
        raise InputError(
            "the model's output is sparse; pass output=, a function that gives it dense "
            "(lambda z: z.to_dense())"
        )
    if not z.numel():
        raise InputError(
            f"the selected output is empty (shape {tuple(z.shape)}): there is nothing to "
            "differentiate; pass output="
        )
    return z


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def sample_count(z: Tensor, out_dim: int) -> int:
    """Return the number of samples in an output, checked: at least one, axis in range."""
    if not -z.ndim <= out_dim < z.ndim:
        raise InputError(
            f"out_dim={out_dim} is not an axis of the output of shape {tuple(z.shape)}"
        )
    if z.shape[out_dim] == 0:
        raise InputError(f"the batch is empty: the output has shape {tuple(z.shape)}")
    return z.shape[out_dim]


def require_graph(z: Tensor) -> None:
    """Raise ModelError if no trainable parameter acts on the output z.

    As far as autograd can see.
    """
    if not z.requires_grad:
        raise ModelError(
            "the output depends on no trainable parameter that autograd can see (no_grad, "
            "inference_mode, detach or .data?)"
        )
    if z.grad_fn is None:
        raise ModelError(
            "the output is a parameter itself, or a tensor that requires grad, and nothing is "
            "computed of the inputs; pass output="
        )
