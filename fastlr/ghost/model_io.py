"""Calling any model and slicing its inputs.

This covers wrappers, output selection and the sample axis of inputs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fastlr.errors import InputError, ModelError, NonFiniteError
from fastlr.ghost.introspection import attribute, is_instance
from fastlr.ghost.state import attributes_kept
from fastlr.ghost.surroundings import refuse_transformed
from fastlr.ghost.tokens import version
from fastlr.ops.compiled_parts import uncompiled
from fastlr.ops.torch_private import holds_fully_sharded, tree_flatten, tree_map, tree_unflatten

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
_OUTPUT_FIELDS = ("logits", "prediction_outputs")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile wrappers."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    while True:
        if type(model).__name__ == "FullyShardedDataParallel":
            raise ModelError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), whose parameters are "
                "sharded between forward passes; shard it by torch.distributed.fsdp.fully_shard, "
                "which fastlr measures, or measure the unwrapped model with its full state dict "
                "loaded"
            )
        compiled = attribute(model, "_orig_mod")
        if is_instance(compiled, nn.Module):
            model = compiled
        elif is_instance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            wrapped: Any = model.module
            model = wrapped
        else:
            return model


def trainable(model: nn.Module, *, shards: bool = False) -> dict[str, nn.Parameter]:
    """Return the parameters that require grad, by name; a parameter held twice is counted once.

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
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name} is not initialised (a lazy module); run one forward pass first"
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
        raise ModelError(
            "the model has no trainable parameters: call requires_grad_(True) on those that count"
        )
    return parameters


@dataclass(frozen=True, eq=False)
class ModelView:
    """A model as it is measured.

    It holds the module without wrappers, its trainable parameters, and where its samples are.

    The module is held weakly: what is kept about a model (plans, proofs) does not keep the model.
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
        return cls(weakref.ref(unwrap(model)), output, in_dim, out_dim)

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
        return trainable(self.module)

    @cached_property
    def held(self) -> dict[str, nn.Parameter]:
        """Return `parameters`, but those of a model under ``fully_shard`` may be sharded.

        This serves for their names, dtypes and device.
        """
        return (
            trainable(self.module, shards=True)
            if holds_fully_sharded(self.module)
            else self.parameters
        )

    @cached_property
    def named(self) -> dict[str, nn.Parameter]:
        """All parameters by name."""
        return dict(self.module.named_parameters())

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self.held.values())).device

    def inputs(self, x: Any) -> Any:
        """Return inputs detached (see `as_inputs`), checked.

        Raises:
            InputError: an input tensor is empty, nested, on another device or within a transform of
                torch.func.
            NonFiniteError: one holds NaN.
        """
        x = as_inputs(x)
        device = next(iter(self.named.values())).device
        for leaf in tree_flatten(x)[0]:
            if not isinstance(leaf, Tensor):
                continue
            refuse_transformed(leaf, "an input tensor")
            if leaf.is_nested:
                require_pickable(leaf, "an input tensor")
            if leaf.numel() == 0:
                raise InputError(f"an input tensor is empty (shape {tuple(leaf.shape)})")
            if leaf.device != device and leaf.ndim > 0:
                raise InputError(
                    f"an input is on {leaf.device}, the model on {device}; move one of them"
                )
            if leaf.is_floating_point() and _holds_nan(leaf):
                raise NonFiniteError("an input tensor has values that are not a number")
        return x

    def forward(self, x: Any) -> Tensor:
        """Return the output for inputs, with its graph (see `forward`)."""
        return forward(self.module, x, self.output)

    def sample_count(self, z: Tensor) -> int:
        """Return the number of samples in an output (see `sample_count`)."""
        return sample_count(z, self.out_dim)

    def row(self, t: Tensor, sample: int) -> Tensor:
        """Return one sample of a tensor shaped like the output, of size 1 along ``out_dim``."""
        return t.narrow(self.out_dim, sample, 1)

    def batch(self, x: Any, count: int, batched: Sequence[int] | None = None) -> Batch:
        """Return the inputs of ``count`` samples so that samples can be picked (see `Batch`)."""
        return Batch(x, count, self.in_dim, batched)


def _holds_nan(t: Tensor) -> bool:
    """Return True if a tensor holds NaN, by its sum, in a quarter of the time.

    The sum hides no NaN. Where infinities cancel, each value is looked at.
    """
    # Torch adds up no bytes.
    return (t.itemsize == 1 or math.isnan(t.sum())) and bool(torch.isnan(t).any())


def as_inputs(x: Any) -> Any:
    """Normalise ``x`` (tensor, tuple, list or mapping), detached.

    So no input takes part in the graph.
    """
    if isinstance(x, Mapping) and not isinstance(x, dict):
        x = dict(x)
    if isinstance(x, list):
        x = tuple(x)
    if not isinstance(x, (Tensor, tuple, dict)):
        raise InputError(
            f"x must be a tensor, a tuple (positional) or a dict (keywords), got {type(x).__name__}"
        )

    def clean(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.clone() if t.is_inference() else t.detach()

    with torch.inference_mode(False):
        return clean(x) if isinstance(x, Tensor) else tree_map(clean, x)


def times_written(x: Any) -> list[int]:
    """How often each tensor among the inputs has been written to."""
    return [version(leaf) for leaf in tree_flatten(x)[0] if isinstance(leaf, Tensor)]


def copied(x: Any) -> Any:
    """Return the inputs with copies of their tensors, for a model that writes to them.

    Expanded tensors are not copied: torch lets no model write to them.
    """
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) and not _expanded(t) else t, x)


def _expanded(t: Tensor) -> bool:
    return t.layout == torch.strided and any(
        n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True)
    )


def call(model: Callable, x: Any, *, dtype: torch.dtype | None = None) -> Any:
    """Call the model with a tensor, a tuple (positional) or a dict (keywords).

    Its modules' attributes stay as they were.

    What torch.compile has compiled of it runs as it was written.

    Args:
        model: the model.
        x: its inputs.
        dtype: of plain floating-point tensors among the modules' attributes meanwhile.
    """
    args, kwargs = _arguments(x)
    with attributes_kept(model, dtype=dtype), uncompiled():
        return model(*args, **kwargs)


def call_with(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    x: Any,
    *,
    dtype: torch.dtype | None = None,
    within: AbstractContextManager[Any] | None = None,
) -> Any:
    """Make a `call` with other parameters and buffers, wherever the model holds them.

    ``within``: a context in which the call runs, and nothing else.

    Each module is named once: of two names of one module, torch would put back the tensors of this
    call, not the model's.
    """
    held = {
        id(t): tensors[n]
        for n, t in (*model.named_parameters(), *model.named_buffers())
        if n in tensors
    }
    places = {
        f"{prefix}.{key}" if prefix else key: held[id(tensor)]
        for prefix, module in model.named_modules()
        for entries in (module._parameters, module._buffers)
        for key, tensor in entries.items()
        if tensor is not None and id(tensor) in held
    }
    with attributes_kept(model, dtype=dtype), uncompiled(), within or nullcontext():
        return functional_call(model, places, *_arguments(x), tie_weights=False)


def _arguments(x: Any) -> tuple[tuple, dict]:
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}


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
    if not z.is_floating_point():
        raise InputError(
            f"the selected output is {z.dtype}, not a floating-point tensor; pass output="
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


def forward(model: nn.Module, x: Any, output: OutputSelector) -> Tensor:
    """Run the model with gradients and pick its output."""
    with torch.enable_grad():
        result = call(model, x)
    return select_output(result, output)


def along(x: Any, count: int, in_dim: int) -> list[int]:
    """Places among the flattened inputs of the tensors of size ``count`` along ``in_dim``."""
    leaves = enumerate(tree_flatten(x)[0])
    return [
        i
        for i, t in leaves
        if isinstance(t, Tensor) and -t.ndim <= in_dim < t.ndim and t.shape[in_dim] == count
    ]


def require_pickable(tensor: Tensor, name: str) -> None:
    """Raise InputError for a tensor whose samples cannot be picked: a nested or a sparse one."""
    if tensor.is_nested:
        raise InputError(
            f"{name} is nested: its samples cannot be picked; pad it (x.to_padded_tensor)"
        )
    if tensor.layout != torch.strided:
        raise InputError(
            f"{name} is sparse: its samples cannot be picked; make it dense (x.to_dense())"
        )


class Batch:
    """The inputs of one call, from which samples can be picked.

    The leaves that carry the sample axis are known.

    ``batched`` lists the indices of the flattened leaves of size ``count`` along ``in_dim``; the
    others are shared.
    """

    def __init__(
        self, x: Any, count: int, in_dim: int, batched: Sequence[int] | None = None
    ) -> None:
        self.leaves, self.spec = tree_flatten(x)
        self.count, self.in_dim = count, in_dim
        self.batched = list(along(x, count, in_dim) if batched is None else batched)
        if not self.batched:
            shapes = [tuple(t.shape) for t in self.leaves if isinstance(t, Tensor)]
            raise InputError(
                f"the output has {count} samples, but no input of shapes {shapes} has that size "
                f"along in_dim={in_dim}; pass in_dim= and out_dim="
            )
        for i in self.batched:
            require_pickable(self.leaves[i], "an input with samples")

    def pick(self, samples: Sequence[int], dtype: torch.dtype | None = None) -> Any:
        """Return the inputs of these samples; floating-point leaves cast to ``dtype`` if given."""
        batched = set(self.batched)
        # Models may write to them.
        leaves = [leaf if i in batched else copied(leaf) for i, leaf in enumerate(self.leaves)]
        for i in self.batched:
            index = _index(samples, leaves[i].device)
            leaves[i] = _ordered_like(
                self.leaves[i], self.leaves[i].index_select(self.in_dim, index)
            )
        return cast(tree_unflatten(leaves, self.spec), dtype)

    def part(self, samples: Sequence[int]) -> Batch:
        """Return the batch of these samples."""
        return Batch(self.pick(samples), len(samples), self.in_dim, self.batched)

    def otherwise(self, factors: Sequence[float]) -> Iterator[Batch]:
        """Yield the batch with other values: floats times a factor, then other integers.

        Each sample's floating-point inputs have a factor; the other integers are in the last
        sample.

        Inputs that are all zero become the factors. The last row of the last sample becomes zero,
        as padding is.
        """
        scaled, changed = list(self.leaves), list(self.leaves)
        for i in self.batched:
            leaf = self.leaves[i]
            if leaf.is_floating_point():
                shape = [1] * leaf.ndim
                shape[self.in_dim] = self.count
                factor = torch.tensor(factors, device=leaf.device).view(shape).to(leaf.dtype)
                scaled[i] = leaf * factor if leaf.any() else torch.zeros_like(leaf) + factor
                last = scaled[i].select(self.in_dim, -1)
                wide = next((axis for axis, size in enumerate(last.shape) if size > 1), None)
                if wide is not None:
                    last.select(wide, -1).zero_()
            elif not leaf.is_complex():
                # Comparisons of unsigned ones are not implemented.
                whole = leaf.to(torch.int64, copy=True)
                _change(whole.select(self.in_dim, -1))
                changed[i] = whole.to(leaf.dtype)
        for leaves in (scaled, changed):
            if any(one is not other for one, other in zip(leaves, self.leaves, strict=True)):
                yield Batch(
                    tree_unflatten(leaves, self.spec), self.count, self.in_dim, self.batched
                )

    def distinct(self, need: int, generator: torch.Generator) -> Batch:
        """Return a batch of at least ``need`` samples that differ.

        Where there are too few, jittered copies are added.
        """
        picked = list(range(min(self.count, need)))
        x = self.pick(picked)
        leaves = tree_flatten(x)[0]
        copies = need - len(picked)
        same = len(picked) > 1 and all(
            torch.equal(leaves[i].select(self.in_dim, 0), leaves[i].select(self.in_dim, k))
            for i in self.batched
            for k in range(1, len(picked))
        )
        if copies <= 0 and not same:
            return Batch(x, need, self.in_dim, self.batched)
        start = 1 if same else len(picked)
        for i in self.batched:
            rows = [leaves[i].select(self.in_dim, min(k, len(picked) - 1)) for k in range(need)]
            for k in range(start, need):
                rows[k] = _jitter(rows[k], k, generator)
            leaves[i] = _ordered_like(leaves[i], torch.stack(rows, self.in_dim))
        return Batch(tree_unflatten(leaves, self.spec), need, self.in_dim, self.batched)


def _change(sample: Tensor) -> None:
    """Halve a sample's integers; of a mask (0 and 1) turn the last entry instead.

    It is turned only if its row then has both values: no mask is left empty.
    """
    if bool((sample > 1).any()):
        sample.div_(2, rounding_mode="trunc")
    else:
        row = torch.atleast_1d(sample)[(-1,) * (sample.ndim - 1)]
        if sample.numel() == 1 or bool((row[:-1] == row[-1]).any()):
            row[-1:] = row[-1:] == 0


def _index(samples: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers of samples as a tensor on a device.

    Those of a range are made on the device, as a copy from the host would wait for it.
    """
    if isinstance(samples, range):
        return torch.arange(samples.start, samples.stop, samples.step, device=device)
    return torch.as_tensor(list(samples), device=device)


def _ordered_like(original: Tensor, t: Tensor) -> Tensor:
    """Give ``t`` the order of axes in memory that ``original`` has.

    Some operations take another path by it.
    """
    strides = original.stride()
    order = sorted(range(t.ndim), key=lambda d: -strides[d])
    if order == list(range(t.ndim)):
        return t
    return t.permute(order).contiguous().permute([order.index(d) for d in range(t.ndim)])


def _jitter(row: Tensor, shift: int, generator: torch.Generator) -> Tensor:
    if row.is_floating_point():
        noise = torch.randn(row.shape, generator=generator, dtype=torch.float64).to(row)
        return row + (0.25 * row.abs().mean().nan_to_num(1.0, 1.0, 1.0) + 0.1) * noise
    return row.roll(shift, -1) if row.ndim else row


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors of a nested structure."""
    if dtype is None:
        return x
    return tree_map(
        lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, x
    )
