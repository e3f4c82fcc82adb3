"""Find the units of a network that can be replaced by new ones.

They are followed through one forward pass to the layers that read them, then proven.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fastlr.estimator.eval_mode import eval_mode
from fastlr.experiments.continual.interventions.units import ReadingLayer, Units
from fastlr.ghost.trust.copies import add_noise, deep_copy
from fastlr.metrics.activation_hooks import FUNCTIONS, Watch, name_of
from fastlr.metrics.unit_axes import CONVOLUTIONS, MOVES, named, place_of, tensors_in
from fastlr.metrics.written_relus import ELEMENTWISE
from fastlr.ops.torch_private import BatchNorm, Convolution, tree_leaves

_ELEMENTWISE = {*FUNCTIONS, *ELEMENTWISE} | named(
    "sigmoid hardsigmoid logsigmoid tanh softplus softsign square dropout dropout1d dropout2d "
    "dropout3d alpha_dropout feature_dropout feature_alpha_dropout"
)
_POOL_KINDS = ("max", "avg", "lp", "adaptive_max", "adaptive_avg")
_POOLS = named(" ".join(f"{kind}_pool{n}d" for kind in _POOL_KINDS for n in (1, 2, 3))) | {F.pad}
_SHAPES = named("flatten view reshape squeeze unsqueeze")
_MEANS = named("mean amax sum")
_PRODUCTS = named("mul multiply div divide truediv true_divide")
_SUMS = named("add sub subtract rsub")


@dataclasses.dataclass(frozen=True)
class _Tag:
    """Marks a tensor that holds units along ``axis``, ``repeat`` elements for each unit.

    ``raw`` is the name of the layer that returned the tensor.
    """

    units: Units
    axis: int
    repeat: int = 1
    raw: str = ""


class _Trace(Watch):
    """Follows units through a forward pass; those that meet an unknown operation are left alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.modules = dict(model.named_modules())
        self.holders = Counter(
            id(p) for module in self.modules.values() for p in module._parameters.values()
        )
        self.tags = WeakTensorKeyDictionary()
        self.made: dict[str, Units] = {}  # by the name of the layer
        # Units whose weights a layer holds, those it reads included.
        self.called: dict[str, list[Units]] = {}
        self.depthwise: list[tuple[Units, Units, str]] = []  # (read, made, layer)
        self.norm_of: dict[str, Any] = {}
        # Layers whose output something other than a batch norm has read.
        self.seen_raw: set[str] = set()

    def _add(self, kind: str, a: Tensor) -> None:
        """Do nothing: activations are not measured here."""

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch and follow the units."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = tensors_in(result)
        if not results:
            return result
        operands = tensors_in((args, kwargs))
        tags = [self.tags[t] for t in operands if t in self.tags]
        if func is not F.batch_norm:
            self.seen_raw |= {tag.raw for tag in tags}
        new: _Tag | None = None
        if func in CONVOLUTIONS or func is F.linear:
            new = self._layer(func, args, kwargs)
        elif tags:
            new = self._passed(func, args, kwargs, operands, tags, results[0])
            if new is None:
                for tag in tags:
                    tag.units.exclude(
                        f"goes through {name_of(func)}, behind which its weights are not known"
                    )
        if new is not None:
            self.tags[results[0]] = new
        else:
            for t in results:
                self.tags.pop(t, None)
        return result

    def _layer(self, func: Any, args: tuple, kwargs: dict) -> _Tag | None:
        """Return the tag of the units that a convolution or linear layer makes.

        Those that it reads get it as a reader. None if its weights are not known.
        """
        name = self.module_name
        layer: Any = self.modules.get(name)
        x = args[0] if args else kwargs["input"]
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        tag: _Tag | None = self.tags.get(x)
        expected = isinstance(layer, nn.Linear if func is F.linear else Convolution)
        if not expected or layer.weight is not weight or not isinstance(weight, nn.Parameter):
            if tag is not None:
                tag.units.exclude(
                    f"goes through {name_of(func)} in {name or 'the model'}, whose weights are not "
                    "its own"
                )
            return None
        made = Units(name, len(weight), {name: layer})
        if not weight.requires_grad:
            made.exclude("is frozen")
        taking_part = [made]
        if tag is not None:
            taking_part = [tag.units.root(), made]
            self._read(name, layer, x, tag, made)
        if name in self.called or self.holders[id(weight)] > 1:
            for units in (*self.called.get(name, ()), *taking_part):
                units.exclude(f"has weights of {name}, which is used more than once")
        self.called.setdefault(name, []).extend(taking_part)
        self.made.setdefault(name, made)
        return _Tag(made, _feature_axis(layer, x), raw=name)

    def _read(self, name: str, layer: Any, x: Tensor, tag: _Tag, made: Units) -> None:
        """Note that a layer reads units and makes others of them; leave alone what is not known."""
        units, weight, linear = tag.units.root(), layer.weight, isinstance(layer, nn.Linear)
        filters_channels = not linear and layer.groups > 1 and weight.shape[1] == 1
        if tag.axis != _feature_axis(layer, x) or x.ndim < 2 or (not linear and tag.repeat > 1):
            units.exclude(f"is rearranged before {name}")
        elif not weight.requires_grad:
            units.exclude(f"goes into {name}, which is frozen")
        elif filters_channels and layer.groups == len(weight):
            self.depthwise.append((units, made, name))
        elif filters_channels:
            units.exclude(
                f"goes into {name}, a depthwise convolution with several filters a channel"
            )
        else:
            units.readers.append(ReadingLayer(name, layer, tag.repeat))

    def _passed(
        self,
        func: Any,
        args: tuple,
        kwargs: dict,
        operands: list[Tensor],
        tags: list[_Tag],
        result: Tensor,
    ) -> _Tag | None:
        """Where units are in the result of any other function; None if that is not known."""
        tag, source = tags[0], next(t for t in operands if t in self.tags)
        plain = dataclasses.replace(tag, raw="")
        if func is F.batch_norm:
            return self._batch_norm(tag, plain)
        if func in _PRODUCTS | _SUMS:
            return self._combined(func, [t for t in operands if t.numel() > 1], tags, plain)
        if len({t.units.root() for t in tags}) > 1 or isinstance(source, nn.Parameter):
            return None
        if func in _ELEMENTWISE | _POOLS:
            keeps_axis = (
                result.ndim == source.ndim and result.shape[tag.axis] == source.shape[tag.axis]
            )
            return plain if keeps_axis else None
        if func in MOVES:
            axis = place_of(tag.axis, func, args, kwargs, source)
            return None if axis is None else dataclasses.replace(plain, axis=axis)
        if func in _MEANS:
            return _reduced(args, kwargs, source, plain)
        return _reshaped(source, plain, result) if func in _SHAPES else None

    def _batch_norm(self, tag: _Tag, plain: _Tag) -> _Tag:
        name = self.module_name
        norm, units = self.modules.get(name), tag.units.root()
        if not isinstance(norm, BatchNorm) or tag.axis != 1 or tag.repeat > 1:
            units.exclude(
                f"goes through a batch norm in {name or 'the model'} that is not a module of its "
                "own"
            )
        elif name in self.called:
            for user in (*self.called[name], units):
                user.exclude(f"goes through {name}, which is used more than once")
        else:
            units.norms[name] = norm
            self.norm_of.setdefault(tag.raw, norm)
        self.called.setdefault(name, []).append(units)
        return plain

    def _combined(
        self, func: Any, operands: list[Tensor], tags: list[_Tag], plain: _Tag
    ) -> _Tag | None:
        """Return the tag of an elementwise product or sum, or leave its units alone.

        Units are followed through an operation with a number, with themselves, or with factors of
        their own.
        """
        groups = {tag.units.root() for tag in tags}
        lies = {(t.ndim, tag.axis, tag.repeat) for t, tag in zip(operands, tags, strict=False)}
        alike = len(lies) == 1
        alone = len(groups) == 1 and len(operands) == len(tags) and alike
        if len(operands) == 1 or alone:
            return plain
        if func in _PRODUCTS and len(tags) == len(operands) == 2 and alike:
            units, factors = (tag.units.root() for tag in tags)
            if units.count == factors.count:
                units.join(factors)
                return plain
        reason = f"meets other features in {name_of(func)}"
        if func in _SUMS:
            reason = "is a channel of a residual sum"
        for units in groups:
            units.exclude(reason)
        return plain

    def finish(self, result: Any) -> list[Units]:
        """Return all units, those of joined layers once, after checks that need the whole pass."""
        for t in tensors_in(result):
            if t in self.tags:
                self.tags[t].units.exclude("makes the model's output")
        for read, made, name in self.depthwise:
            source, filtered = read.root(), made.root()
            times_filtered = sum(other.root() is source for other, _, _ in self.depthwise)
            if source.readers or times_filtered > 1:
                source.exclude(f"goes into {name}, a depthwise convolution, and elsewhere")
            elif not source.reason and source is not filtered:
                source.join(filtered)
        roots = {id(units.root()): units.root() for units in self.made.values()}
        for units in roots.values():
            if not units.readers:
                units.exclude("goes into no layer")
            for reader in units.readers:
                if reader.name not in self.seen_raw:
                    reader.norm = self.norm_of.get(reader.name)
        return list(roots.values())


def _feature_axis(layer: nn.Module, x: Tensor) -> int:
    """Return the axis of the input features of a linear layer or a convolution."""
    return x.ndim - 1 if isinstance(layer, nn.Linear) else 1


def _reduced(args: tuple, kwargs: dict, source: Tensor, tag: _Tag) -> _Tag | None:
    """Units after a mean over other axes."""
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dims is None:
        return None
    if isinstance(dims, int):
        dims = [dims]
    reduced = {d % source.ndim for d in dims}
    if tag.axis in reduced:
        return None
    if kwargs.get("keepdim", args[2] if len(args) > 2 else False):
        return tag
    return dataclasses.replace(tag, axis=tag.axis - sum(d < tag.axis for d in reduced))


def _reshaped(source: Tensor, tag: _Tag, result: Tensor) -> _Tag | None:
    """Return the tag of units after a change of shape; None if they cannot be followed.

    They can where the change leaves their axis as it is, or flattens all axes behind it into it.
    """
    ahead, behind = source.shape[: tag.axis].numel(), source.shape[tag.axis + 1 :].numel()
    size = source.shape[tag.axis]
    before = 1
    for axis, length in enumerate(result.shape):
        if before == ahead and length in (size, size * behind):
            return dataclasses.replace(tag, axis=axis, repeat=tag.repeat * (length // size))
        before *= length
    return None


def find_units(model: nn.Module, example: Tensor) -> tuple[list[Units], dict[str, str]]:
    """Find the units of a model that can be replaced.

    Args:
        model: Left as it is.
        example: A batch of at least two inputs, on the model's device.

    Returns:
        The units that can be replaced, in the order in which they are made, and the layers left
        alone, by name, with reasons. The first are proven on a perturbed copy in float64: with the
        outgoing weights of every other unit at zero, new incoming weights of those units leave the
        outputs as they are.
    """
    trace = _Trace(model)
    with eval_mode(model, example.device), torch.no_grad():
        with trace.watching():
            result = model(example)
        units = trace.finish(result)
        replaceable = [u for u in units if not u.reason]
        if replaceable and not _isolated(model, replaceable, example):
            for u in replaceable:
                if not _isolated(model, [u], example):
                    u.exclude("has an influence beside its outgoing weights")
    layers = {
        name: "was not reached in a way that can be followed"
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Convolution))
    }
    layers |= {name: made.root().reason for name, made in trace.made.items()}
    left_alone = {name: reason for name, reason in layers.items() if reason}
    return [u for u in units if not u.reason], left_alone


def _isolated(model: nn.Module, units: Sequence[Units], example: Tensor) -> bool:
    """Return True if units whose outgoing weights are zero have no influence on the output.

    This is tried on every other unit of each layer.
    """
    subject, example = deep_copy(model, torch.float64), example.double()
    add_noise(subject.parameters())
    tensors = {**dict(subject.named_parameters()), **dict(subject.named_buffers())}
    tried = [torch.arange(0, u.count, 2, device=example.device) for u in units]
    for u, rows in zip(units, tried, strict=True):
        for reader in u.readers:
            view, index = reader.outgoing_columns(
                tensors[f"{reader.name}.weight"], reader.features(rows)
            )
            view[index] = 0
    before = subject(example)
    generator = torch.Generator().manual_seed(1)
    for u, rows in zip(units, tried, strict=True):
        for name in _incoming(u):
            if name in tensors:
                shape = tensors[name][rows].shape
                noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(rows.device)
                tensors[name][rows] += noise.abs() if name.endswith("running_var") else noise
    outputs = zip(tree_leaves(before), tree_leaves(subject(example)), strict=True)
    return all(bool(((a - b).abs() <= 1e-9 * a.abs().max()).all()) for a, b in outputs)


def _incoming(units: Units) -> Iterable[str]:
    """Names of the tensors whose row i belongs to unit i."""
    for name in (*units.layers, *units.norms):
        for part in ("weight", "bias", "running_mean", "running_var"):
            yield f"{name}.{part}"
