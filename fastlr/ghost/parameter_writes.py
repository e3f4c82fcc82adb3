"""Parameters that a forward pass writes: an average of others, a norm that is held by hand.

They are put back after a measurement like buffers (`fastlr.ghost.state`). But parameters are many,
and hardly ever written: copies of all of them at every call would cost too much. So the first
forward pass of a model in a mode is watched beside copies; what it has written is known from then
on, and kept at every call. Later passes are watched by how often parameters were written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fastlr.distributed import on_demand
from fastlr.errors import few, warn
from fastlr.ghost.state import Copied, HeldTensor, KeptTensors, kept_now, seen_written, writes_of
from fastlr.ops.model_lock import all_modules
from fastlr.ops.torch_private import no_torch_function


@contextmanager
def parameters_watched(model: Callable) -> Iterator[None]:
    """Run a forward pass of a model within this context, and see which parameters it writes.

    Whoever keeps the model's buffers (`fastlr.ghost.state.put_back`) puts these back, too. Those
    whose values are in memory on demand only are not watched.
    """
    keepers = kept_now(model)
    if not keepers or on_demand.active():
        yield
        return
    mode = tuple([module.training for module in keepers[0].modules])
    is_new = any([mode not in kept.writes.watched for kept in keepers])
    with no_torch_function():  # modes see a call in each of these reads
        parameters = keepers[0].parameters
        compared = parameters if is_new else ()
        copies = {id(one.tensor): Copied.of(one.tensor, unseen=True) for one in compared}
        before = [one.tensor._version for one in parameters]
    try:
        yield
    finally:
        with no_torch_function():
            now = [one.tensor._version for one in parameters]
            if is_new or now != before:
                versions = zip(parameters, before, now, strict=True)
                written = [
                    one
                    for one, old, new in versions
                    if new != old or (is_new and _differs(one.tensor, copies))
                ]
                _enter(written, copies, keepers)
    if is_new:
        for kept in keepers:
            kept.writes.watched.add(mode)


def written_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters of a model that forward passes were seen to write."""
    return [one.tensor for one in seen_written(all_modules(model), writes_of(model))]


def _differs(parameter: Tensor, copies: dict[int, Copied]) -> bool:
    """Return True if a parameter no longer has the values of its copy, or its dtype.

    So it is after a write by ``.data``, and after ``self.router.to(torch.float32)``.
    """
    values = copies[id(parameter)].values
    return parameter.dtype != values.dtype or not torch.equal(parameter.detach(), values)


def _enter(
    written: Sequence[HeldTensor], copies: dict[int, Copied], keepers: Sequence[KeptTensors]
) -> None:
    """Enter parameters that were written into what is known and kept; warn where it is too late."""
    too_late = []
    for one in written:
        for kept in keepers:
            kept.writes.places.add((id(one.module), one.name))
            if id(one.tensor) in copies:
                kept.add(one, copies[id(one.tensor)])
            elif not kept.holds(one.tensor):
                too_late.append(one)
    if too_late:
        _warn(keepers[0].modules[0], too_late)


def _warn(model: nn.Module, changed: Iterable[HeldTensor]) -> None:
    ids = {id(one.tensor) for one in changed}
    names = [name for name, p in model.named_parameters() if id(p) in ids]
    warn(
        f"a forward pass has written to {few(names)}, as none had before when it was first watched "
        "in this mode: this call leaves that changed. Later ones put it back"
    )
