"""The inputs of a model, and the batch of them from which samples are picked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fastlr.errors import InputError
from fastlr.ops.objects import PLAIN
from fastlr.ops.torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten


def as_inputs(x: Any, require: Callable[[Tensor], None] = lambda t: None) -> Any:
    """Normalise ``x`` (tensor, tuple, list or mapping), detached.

    So no input takes part in the graph. ``require`` raises for tensors that it refuses.
    """
    refuse_packed(x)
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
        require(t)
        return t.clone() if t.is_inference() else t.detach()

    with torch.inference_mode(False):
        return tree_map(clean, x)


_SMALL = 16  # elements of an input without samples whose values are part of its key


def inputs_key(x: Any, count: int, in_dim: int) -> tuple:
    """Return the key of the inputs of ``count`` samples along ``in_dim``.

    It holds plain values, dtypes and shapes. For tensors without samples that have few elements and
    are on the CPU, it also holds their values.
    """
    leaves, spec = tree_flatten(x)
    batched = along(x, count, in_dim)
    return repr(spec), *(_key_of(leaf, i in batched) for i, leaf in enumerate(leaves))


def _key_of(leaf: Any, is_batched: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return (type(leaf), repr(leaf)) if type(leaf) in PLAIN else type(leaf)
    if leaf.is_nested:
        return leaf.dtype
    is_plain = leaf.device.type == "cpu" and leaf.layout == torch.strided
    has_values = is_plain and not is_batched and leaf.numel() <= _SMALL
    return leaf.dtype, leaf.shape, repr(leaf.tolist()) if has_values else None


def copied(x: Any) -> Any:
    """Return the inputs with copies of their tensors, for a model that writes to them.

    Expanded tensors are not copied: torch lets no model write to them.
    """

    def copy(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and not _expanded(leaf) else leaf

    return tree_map(copy, x)


def _expanded(t: Tensor) -> bool:
    return t.layout == torch.strided and any(
        n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True)
    )


def along(x: Any, count: int, in_dim: int) -> list[int]:
    """Places among the flattened inputs of the tensors of size ``count`` along ``in_dim``."""
    leaves = enumerate(tree_leaves(x))
    return [
        i
        for i, t in leaves
        if isinstance(t, Tensor) and -t.ndim <= in_dim < t.ndim and t.shape[in_dim] == count
    ]


# Remedy for inputs of nn.EmbeddingBag.
FLAT_IDS = (
    "flat ids with offsets (nn.EmbeddingBag) have no row for each sample: give ids [B, L], padded "
    "with its padding_idx"
)


def refuse_packed(x: Any) -> None:
    """Raise InputError for a PackedSequence, or for inputs that hold one."""
    values = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else ()
    if any(isinstance(value, PackedSequence) for value in (x, *values)):
        raise InputError(
            "a PackedSequence holds the steps of all samples together, so none can be picked: give "
            "the padded sequences and their lengths as inputs, and pack them in the model's forward"
        )


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
        for i, leaf in enumerate(leaves if dtype else ()):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaves[i] = leaf.to(dtype)
        return tree_unflatten(leaves, self.spec)

    def part(self, samples: Sequence[int], dtype: torch.dtype | None = None) -> Batch:
        """Return the batch of these samples; floating-point leaves cast to ``dtype`` if given."""
        return Batch(self.pick(samples, dtype), len(samples), self.in_dim, self.batched)

    def scaled(self, factors: Sequence[float]) -> Batch:
        """Return the first samples, with floating-point values of each times a factor."""
        part = self.part(range(len(factors)))
        for i in part.batched:
            if part.leaves[i].is_floating_point():
                for row, factor in zip(part.leaves[i].movedim(part.in_dim, 0), factors):
                    row.mul_(factor)
        return part


def _index(samples: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers of samples as a tensor on a device.

    Ranges and copies of one sample are made on the device: a copy from the host would wait for it.
    """
    if len(set(samples)) == 1:
        return torch.full((len(samples),), samples[0], device=device)
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
