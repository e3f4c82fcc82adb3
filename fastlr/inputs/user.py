"""Inputs that the user has: tensors and data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fastlr.errors import InputError
from fastlr.ghost.model.batch import FLAT_IDS, refuse_packed, require_pickable
from fastlr.inputs.base import Batch, Inputs
from fastlr.ops.objects import number, version
from fastlr.ops.torch_private import tree_map_only

_PLAIN = (bool, int, float, str, type(None))
_HASHED = 1 << 24  # numbers hashed at once


class TensorInputs(Inputs):
    """The user's own inputs, in their order; the seed changes nothing.

    Args:
        tensors: a tensor, a tuple of positional or a dict of keyword arguments of the model, or a
            map-style torch Dataset whose items are tensors, tuples or dicts of them (with the same
            item at every access: no random augmentation). Values other than tensors are passed on
            as they are; a tensor of size 1 along ``in_dim`` beside longer ones (such as position
            ids) is not batched and is passed on whole.
        in_dim: the sample axis of the batched tensors.
        item: for a Dataset, the part of an item that the model takes: an index or key, such as 0
            where items are (image, label), or a function of the item. None: the whole item.

    Batches own their memory. Floating-point tensors are cast to ``dtype`` if one is given, others
    keep theirs.

    Raises:
        InputError: no tensor, no samples, a sparse or nested one, lengths that differ, or (in
            ``batch``) more samples than there are, or a tensor without values.

    >>> TensorInputs((torch.zeros(10, 3), torch.ones(10, 2))).batch(2, 6)[0].shape
    torch.Size([4, 3])
    """

    limit: int

    def __init__(
        self, tensors: Any, in_dim: int = 0, *, item: int | str | Callable[[Any], Any] | None = None
    ):
        if type(in_dim) is not int:
            raise InputError(f"in_dim must be an integer, got {in_dim!r}")
        self.tensors, self.in_dim, self.item = tensors, in_dim, item
        self.dataset: Any = None
        refuse_packed(tensors)
        self._hashes: dict[int, tuple[list, str]] = {}  # samples -> the tensors' versions, the hash
        if isinstance(tensors, (Tensor, tuple, Mapping)):
            if item is not None:
                raise InputError(
                    "item= picks from the items of a Dataset: leave it out for tensors"
                )
            self.limit = self._common_length(tensors)
        elif (
            hasattr(tensors, "__getitem__")
            and hasattr(tensors, "__len__")
            and not isinstance(tensors, (list, str))
        ):
            self.dataset, self.limit = tensors, len(tensors)
        else:
            raise InputError(
                "tensors must be a tensor, a tuple, a dict or a map-style Dataset, got "
                f"{type(tensors).__name__}: torch.stack a list of tensors (make them of pictures "
                "by a transform, of texts by a tokenizer); of a DataLoader give loader.dataset; "
                "use a tuple for positional arguments"
            )
        if self.limit < 1:
            raise InputError("there are no samples: TensorInputs needs at least one")

    def __len__(self) -> int:
        return self.limit

    def __repr__(self) -> str:
        return f"TensorInputs({self._describe()}, in_dim={self.in_dim}, length={self.limit})"

    def to_dict(self) -> dict[str, Any]:
        """Return shapes and dtypes, the sample axis and the number of samples, ready for JSON.

        The values are not in it.
        """
        return {
            "inputs": "TensorInputs",
            "tensors": self._describe(),
            "in_dim": self.in_dim,
            "length": self.limit,
        }

    def identity(self, used: int, seed: int) -> str:
        """Return a hash of all values that make these samples, as they are in float32.

        It is made once for the tensors and their versions. Data sets whose items may be anything
        have none, nor have tensors beside values that are not plain.
        """
        held = self._held()
        if type(self) is not TensorInputs or held is None:
            return ""
        leaves = dict(_leaves(held))
        if not all(isinstance(v, (Tensor, *_PLAIN)) for v in leaves.values()):
            return ""
        tensors = [v for v in leaves.values() if isinstance(v, Tensor)]
        versions = [(number(t), version(t), t.data_ptr()) for t in tensors]
        known = self._hashes.get(used)
        if known is not None and known[0] == versions:
            return known[1]
        self._hashes[used] = versions, f"tensors:{self._hash(leaves, used)}"
        return self._hashes[used][1]

    def _held(self) -> Any:
        """Return the tensors that the samples are rows of; None where a data set makes them."""
        if self.dataset is None:
            return self.tensors
        if type(self.dataset) is not TensorDataset:
            return None
        if self.item is None:
            return self.dataset.tensors
        return self.dataset.tensors[self.item] if type(self.item) is int else None

    def _hash(self, leaves: Mapping[str, Any], used: int) -> str:
        axis = self.in_dim if self.dataset is None else 0
        total = hashlib.sha256()
        for name, value in sorted(leaves.items()):
            total.update(name.encode())
            if not isinstance(value, Tensor):
                total.update(repr(value).encode())
                continue
            if value.shape[axis] == self.limit:
                value = value.narrow(axis, 0, used).movedim(axis, 0)
            kind = torch.float32 if value.is_floating_point() else value.dtype
            total.update(f"{tuple(value.shape)}{kind}".encode())
            rows = max(1, _HASHED // max(1, value[:1].numel()))
            for part in value.detach().split(rows):
                part = part.to("cpu", kind).resolve_conj().resolve_neg().contiguous()
                total.update(part.flatten().view(torch.uint8).numpy())
        return total.hexdigest()[:32]

    def _describe(self) -> str:
        if self.dataset is not None:
            return type(self.dataset).__name__
        parts = []
        for name, v in _leaves(self.tensors):
            if isinstance(v, Tensor):
                parts.append(f"{name}{str(v.dtype).removeprefix('torch.')}{list(v.shape)}")
            else:
                parts.append(f"{name}{v!r}")
        return ", ".join(parts)

    def _common_length(self, tensors: Any) -> int:
        lengths = {}
        for name, value in _leaves(tensors):
            if not isinstance(value, Tensor):
                continue
            require_pickable(value, f"tensor {name or 'x='}")
            if not -value.ndim <= self.in_dim < value.ndim:
                raise InputError(
                    f"tensor {name or 'x='}{list(value.shape)} has no axis {self.in_dim}: set "
                    "in_dim"
                )
            lengths[name.rstrip("=")] = value.shape[self.in_dim]
        if not lengths:
            raise InputError("no tensor among the inputs: TensorInputs needs at least one")
        batched = set(lengths.values()) - {1} or {1}
        if len(batched) > 1:
            held = [value for _, value in _leaves(tensors) if isinstance(value, Tensor)]
            are_flat = all(t.ndim == 1 and not t.is_floating_point() for t in held)
            raise InputError(
                f"the tensors have different numbers of samples along axis {self.in_dim}: "
                f"{lengths}{f'; {FLAT_IDS}' if are_flat else ''}"
            )
        return batched.pop()

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Batch:
        if self.dataset is not None:
            return _map(self._stack(start, stop), lambda t: _cast(t, device, dtype))

        def take(tensor: Tensor) -> Tensor:
            has_axis = -tensor.ndim <= self.in_dim < tensor.ndim  # not so of a number in a nest
            batched = has_axis and tensor.shape[self.in_dim] == self.limit
            return _cast(
                tensor.narrow(self.in_dim, start, stop - start) if batched else tensor,
                device,
                dtype,
            )

        return _map(self.tensors, take)

    def _stack(self, start: int, stop: int) -> Batch:
        def pick(item: Any) -> Any:
            if self.item is None:
                return item
            return self.item(item) if callable(self.item) else item[self.item]

        given = [self.dataset[i] for i in range(start, stop)]
        try:
            items = [pick(item) for item in given]
        except (TypeError, KeyError, IndexError) as error:
            raise InputError(
                f"item={self.item!r} picks nothing from an item of {type(self.dataset).__name__}, "
                f"a {type(given[0]).__name__} ({type(error).__name__}: {error}): give the index or "
                "key of the part that the model takes, or a function of the item"
            ) from error
        try:
            return _stack_items(items, self.in_dim)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise InputError(
                f"samples {start}..{stop - 1} of {type(self.dataset).__name__} do not stack into a "
                f"batch ({error}): items must be tensors, or tuples or dicts of them, of the same "
                "shapes; item= picks a part of an item"
            ) from error


def _leaves(tensors: Any) -> Iterator[tuple[str, Any]]:
    """(prefix, value) of a tensor, each element of a tuple or each entry of a dict."""
    if isinstance(tensors, Mapping):
        yield from ((f"{key}=", value) for key, value in tensors.items())
    elif isinstance(tensors, tuple):
        yield from ((f"{i}=", value) for i, value in enumerate(tensors))
    else:
        yield "", tensors


def _map(tensors: Any, function: Callable[[Tensor], Tensor]) -> Batch:
    """Apply ``function`` to the tensors; a mapping becomes a dict."""
    held = dict(tensors) if isinstance(tensors, Mapping) else tensors
    return tree_map_only(Tensor, function, held)


def _cast(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """A detached copy on ``device``, in ``dtype`` if it is floating-point."""
    return tensor.detach().to(device, dtype if tensor.is_floating_point() else None, copy=True)


def _stack_items(items: list, dim: int) -> Batch:
    if isinstance(items[0], Mapping):
        return {key: _stack_items([item[key] for item in items], dim) for key in items[0]}
    if isinstance(items[0], (tuple, list)):
        return tuple(_stack_items(list(part), dim) for part in zip(*items, strict=True))
    tensors = [torch.as_tensor(item) for item in items]
    return torch.stack(tensors, dim if tensors[0].ndim else 0)
