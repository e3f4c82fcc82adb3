"""Parameters that move the output although the graph does not show them.

In: a model, a few samples and the graph of their output. Out: an error that names the hidden
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastlr.errors import HiddenParameterError, few
from fastlr.ghost.graph.walk import Graph
from fastlr.ghost.model.batch import Batch
from fastlr.ghost.model.view import ModelView
from fastlr.ghost.trust.agreement import agree, computes_in_few_digits, gap
from fastlr.ghost.trust.copies import deep_copies
from fastlr.ghost.trust.independence import evenly_spaced

_LARGE_MOVE = 0.5  # of a parameter, in parts of its size
_SMALL_MOVES = {torch.float64: 1e-5, torch.float32: 1e-2}
_SMALL_MOVE_IN_FEW_DIGITS = 0.2
# Relative differences of outputs by rounding, where no company changes.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
_ROUNDING_IN_FEW_DIGITS = 1e-2


def require_no_hidden_parameters(view: ModelView, batch: Batch, graph: Graph) -> None:
    """Require that parameters that are not in the graph do not move the output.

    They are moved in the model for a forward pass over a few samples, and put back.

    Args:
        view: Model.
        batch: Inputs of the batch.
        graph: Graph of the output.

    Raises:
        HiddenParameterError: Some move the output.
    """
    in_graph = set(graph.parameters.values())
    absent = [name for name in view.parameters if name not in in_graph]
    if not absent:
        return
    samples = batch.part(evenly_spaced(batch.count))
    z = view.outputs(samples.pick(range(samples.count)))
    if _do_move_output(view, samples, z, absent):
        moved = [name for name in absent if _do_move_output(view, samples, z, [name])]
        raise HiddenParameterError(
            f"parameter {few(moved or absent)} of {type(view.module).__name__} changes the output, "
            "but is not in its autograd graph: reentrant activation checkpointing (use "
            "use_reentrant=False or switch it off), no_grad, detach or .data in the forward pass; "
            "or freeze it with requires_grad_(False) if it should not count"
        )


def _do_move_output(view: ModelView, samples: Batch, z: Tensor, names: Sequence[str]) -> bool:
    """Return True if parameters move the output, and not by a choice alone.

    A deep copy in more digits decides, if it moves like the model.
    """
    if not _gaps_when_moved(view, samples, z, names, _LARGE_MOVE).any():
        return False
    for of_copy, dtype in deep_copies(view):
        cast = samples.part(range(samples.count), dtype)
        try:
            z_of_copy = of_copy.outputs(cast.pick(range(samples.count)))
            if _gaps_when_moved(of_copy, cast, z_of_copy, names, _LARGE_MOVE).any():
                return _moves_smoothly(of_copy, cast, z_of_copy, names)
        except Exception:  # whatever a copy raises
            continue
    return _moves_smoothly(view, samples, z, names)


def _moves_smoothly(view: ModelView, samples: Batch, z: Tensor, names: Sequence[str]) -> bool:
    """Return True if a tenth of a small change moves an output about a tenth as far.

    Scores of hard routing move it by a choice alone, which has no gradient: a tenth of a change
    moves it not at all, or as far.
    """
    low = computes_in_few_digits(z.device, {p.dtype for p in view.parameters.values()})
    small = _SMALL_MOVE_IN_FEW_DIGITS if low else _SMALL_MOVES[z.dtype]
    gaps = _gaps_when_moved(view, samples, z, names, small)
    of_a_tenth = _gaps_when_moved(view, samples, z, names, small / 10)
    for largest, part in ((gaps.max(), of_a_tenth.max()), (gaps.median(), of_a_tenth.median())):
        if 4 * part < largest < 25 * part:
            return True
    return False


def _gaps_when_moved(
    view: ModelView, samples: Batch, z: Tensor, names: Sequence[str], size: float
) -> Tensor:
    """Return how far elements of an output move with parameters moved at random by ``size``.

    They are 0 where rounding moves them as far.
    """
    generator = torch.Generator().manual_seed(2)
    data = [view.parameters[name].data for name in names]  # the versions stay
    saved = [t.clone() for t in data]
    try:
        for t in data:
            noise = torch.randn(t.shape, generator=generator, dtype=torch.float64, device="cpu")
            t.add_(noise.to(t) * size * (t.abs().mean() + 0.2))
        moved = view.outputs(samples.pick(range(samples.count)))
    finally:
        for t, before in zip(data, saved, strict=True):
            t.copy_(before)
    relative = _ROUNDING.get(z.dtype, _ROUNDING_IN_FEW_DIGITS)
    if z.shape != moved.shape:
        return torch.full((1,), math.inf, device="cpu")
    same = agree(z, moved, relative, view.out_dim)
    return torch.zeros(1, device="cpu") if same else gap(z, moved).flatten()
