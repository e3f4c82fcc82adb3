"""Block sizes of kernels by measurement, from a table that `python -m bench.tune` writes.

In: the arguments of a rule that gives a kernel's block sizes. Out: the table's for them, else the
rule's. The table is part of fastlr, so that the same call has the same block sizes, and gives the
same bits, in every process on such a GPU.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Tile = TypeVar("Tile")

# {"9.0": {"folded_pointwise.forward_tile(...)": {"positions": 64}}}.
TABLE = Path(__file__).with_name("tuned.json")
# Called in place of the table by `bench.tune`: with a key, the rule's answer, and its free fields.
observer: Callable[[str, Any, tuple[str, ...]], dict[str, int]] | None = None
_assumed = ""


def tuned(*free: str) -> Callable[[Callable[Arguments, Tile]], Callable[Arguments, Tile]]:
    """Let the table overrule a rule that gives a kernel's block sizes.

    The rule returns a NamedTuple of block sizes, or None where the kernel does not serve. It is
    asked where the current device is that of the tensors.

    Args:
        free: the fields with which the kernel is right whatever they are.
    """

    def declare(rule: Callable[Arguments, Tile]) -> Callable[Arguments, Tile]:
        signature = inspect.signature(rule)
        place = f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"

        @functools.wraps(rule)
        def chosen(*args: Arguments.args, **how: Arguments.kwargs) -> Tile:
            tile: Any = rule(*args, **how)
            entries = table().get(architecture(), {})
            if tile is None or not (entries or observer):
                return tile
            bound = signature.bind(*args, **how)
            bound.apply_defaults()
            shape = [tuple(a) if isinstance(a, torch.Size) else a for a in bound.arguments.values()]
            key = f"{place}({', '.join(map(str, shape))})"
            return tile._replace(
                **(observer(key, tile, free) if observer else entries.get(key, {}))
            )

        return chosen

    return declare


def on_device(t: torch.Tensor) -> AbstractContextManager:
    """Make the tensor's device the current one: rules are asked, and kernels launched, for it."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


@functools.cache
def table() -> dict[str, dict[str, dict[str, int]]]:
    """Return the measured block sizes: architecture -> rule and its arguments -> fields.

    The fields are those of the block sizes that are other than the rule's.
    """
    return json.loads(TABLE.read_text(encoding="utf-8"))


def architecture() -> str:
    """Return the compute capability that block sizes are for, such as "9.0".

    It is what is assumed, or the current device's, or "" without a GPU.
    """
    if _assumed or not torch.cuda.is_initialized():
        return _assumed
    return _capability(torch.cuda.current_device())


@functools.cache
def _capability(device: int) -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


@contextmanager
def assuming(arch: int) -> Iterator[None]:
    """Ask rules for another architecture than this machine's inside: 90 for 9.0."""
    global _assumed
    before, _assumed = _assumed, f"{arch // 10}.{arch % 10}"
    try:
        yield
    finally:
        _assumed = before
