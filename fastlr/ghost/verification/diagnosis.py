"""Why samples give another output in other company, and which parameters the graph does not show.

In: a model and a few samples. Out: errors that name the module or the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import HiddenParameterError, InteractionError, RandomForwardError, few
from fastlr.ghost.batch import Batch
from fastlr.ghost.graph import Graph
from fastlr.ghost.model_io import FAILURES, ModelView
from fastlr.ghost.recurrent import Unfused
from fastlr.ghost.verification.agreement import agree, gap, low_precision
from fastlr.ghost.verification.company import InBatch
from fastlr.ghost.verification.deep_copy import deep_copies

_LARGE_MOVE = 0.5  # of a parameter, in parts of its size
_SMALL_MOVES = {torch.float64: 1e-5, torch.float32: 1e-2}
_SMALL_MOVE_IN_FEW_DIGITS = 0.2
# Relative differences of outputs by rounding, where no company changes.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
_ROUNDING_IN_FEW_DIGITS = 1e-2


def require_independence(view: ModelView, samples: Batch) -> None:
    """Require that a few samples give the same again, and each the same among copies of itself.

    Raises:
        RandomForwardError: Two forward passes differ.
        InteractionError: A sample gives something else; the error names the first such module.
    """
    with torch.no_grad(), Unfused():
        every = list(range(samples.count))
        together = InBatch(view, samples, view.outputs(samples.pick(every)))
        if not together.holds(every, together.run(every)):
            raise RandomForwardError(_random_message(view.module))
        if together.first_difference([sample] * len(every) for sample in every) is not None:
            raise InteractionError(_interaction_message(together))


def _random_message(model: nn.Module) -> str:
    drops = [
        name
        for name, module in model.named_modules()
        if module.training and "dropout" in type(module).__name__.lower()
    ]
    where = f"; in train mode: {', '.join(drops[:5])}" if drops else ""
    message = f"two forward passes on the same inputs differ (dropout, sampling){where}"
    if any(module.training for module in model.modules()):
        return f"{message}: call model.eval()"
    return (
        f"{message}, although the model is in eval mode: its forward pass draws at random "
        "whatever the mode. Give F.dropout training=self.training, or draw only where "
        "self.training is true"
    )


def _interaction_message(together: InBatch) -> str:
    """Name the first module whose output for sample 0 changes when the other samples do."""
    message = "samples interact: the output of one depends on the others"
    if _gives_more_in_a_larger_batch(together):
        return (
            f"{message}, of whom it has an output each, as in f(x) @ g(x).T. Give what all samples "
            "are compared with as an input of its own, which they then share"
        )
    name = _first_changed_module(together)
    if name is None:
        return f"{message}. Make the forward pass work on each sample alone"
    module = together.view.module.get_submodule(name)
    message += f", first seen in module {name} ({type(module).__name__})"
    if module.training and "Norm" in type(module).__name__:
        return f"{message}, which is in train mode and uses batch statistics: call model.eval()"
    return f"{message}. Make it work on each sample alone"


def _gives_more_in_a_larger_batch(together: InBatch) -> bool:
    """Return True if a sample's output has more elements in a batch of twice the samples."""
    try:
        twice = together.run([*range(together.batch.count)] * 2)
    except FAILURES:  # the model may take no other batch
        return False
    return twice.numel() > 2 * together.output.numel()


def _first_changed_module(together: InBatch) -> str | None:
    count = together.batch.count
    with_others = _outputs_of_sample_0(together, range(count))
    by_itself = _outputs_of_sample_0(together, [0] * count)
    for (name, one), (_, other) in zip(with_others, by_itself, strict=False):
        relative = 1e-6 if one.dtype == torch.float64 else 1e-3
        if one.shape == other.shape and not agree(one, other, relative):
            return name
    return None


def _outputs_of_sample_0(together: InBatch, samples: Sequence[int]) -> list[tuple[str, Tensor]]:
    """Run some samples, and return what each module gave for the first of them, in order."""
    seen: list[tuple[str, Tensor]] = []
    count = together.batch.count

    def hook_for(name: str) -> Callable:
        def hook(_module: nn.Module, _inputs: Any, result: Any) -> None:
            is_plain = isinstance(result, Tensor) and not result.is_nested and result.ndim > 0
            if is_plain and len(result) % count == 0:
                seen.append((name, result.detach()[: len(result) // count].clone()))

        return hook

    handles = [
        module.register_forward_hook(hook_for(name))
        for name, module in together.view.module.named_modules()
        if name
    ]
    try:
        together.run(samples)
    finally:
        for handle in handles:
            handle.remove()
    return seen


# -- parameters that are not in the graph
# --------------------------------------------------------------------------------------------------


def unused_parameters(
    view: ModelView, samples: Batch, graph: Graph, tested: Collection[frozenset[str]]
) -> frozenset[str]:
    """Return the parameters that are not in the graph, which must not move the output.

    They are moved in the model for a forward pass, and put back.

    Args:
        view: Model.
        samples: A few samples.
        graph: Graph of the output.
        tested: Sets of parameters that were found not to move the output before. The result is
            empty if all parameters that are not in the graph are in one of these.

    Raises:
        HiddenParameterError: Some move the output.
    """
    absent = frozenset(view.parameters) - frozenset(graph.parameters.values())
    if not absent or any(absent <= names for names in tested):
        return frozenset()
    in_order = [name for name in view.parameters if name in absent]
    z = view.outputs(samples.pick(range(samples.count)))
    if _move_output(view, samples, z, in_order):
        moved = [name for name in in_order if _move_output(view, samples, z, [name])]
        culprits = moved or in_order
        module = _module_to_blame(view.module, culprits)
        kind = type(view.module.get_submodule(module)).__name__
        raise HiddenParameterError(
            f"parameter {few(culprits, 1)} of module {module or '(root)'} ({kind}) "
            "change the output but are not in its autograd graph: reentrant activation "
            "checkpointing (use use_reentrant=False or switch it off), no_grad, detach or "
            ".data in the forward pass; or freeze them with requires_grad_(False) if they "
            "should not count"
        )
    return absent


def _module_to_blame(model: nn.Module, culprits: Sequence[str]) -> str:
    """Return the innermost module that has the first culprit, and is checkpointed or has all.

    Where there is none it is the child of the model that has the first.
    """
    module = culprits[0].rpartition(".")[0]
    while "." in module:
        checkpointed = "checkpoint" in repr(type(model.get_submodule(module))).lower()
        if checkpointed or all(name.startswith(module + ".") for name in culprits):
            break
        module = module.rpartition(".")[0]
    return module


def _move_output(view: ModelView, samples: Batch, z: Tensor, names: Sequence[str]) -> bool:
    """Return True if parameters move the output, and not by a choice alone.

    A deep copy in more digits says so, if it moves like the model.
    """
    if not _gaps_with(view, samples, z, names, _LARGE_MOVE).any():
        return False
    for clone in deep_copies(view.module):
        of_copy = ModelView.of(clone, view.output, view.in_dim, view.out_dim)
        dtype = next(clone.parameters()).dtype
        x = samples.pick(range(samples.count), dtype)
        cast = Batch(x, samples.count, samples.in_dim, samples.batched)
        try:
            z_of_copy = of_copy.outputs(cast.pick(range(samples.count)))
            if _gaps_with(of_copy, cast, z_of_copy, names, _LARGE_MOVE).any():
                return _moves_smoothly(of_copy, cast, z_of_copy, names)
        except Exception:  # whatever a copy raises
            continue
    return _moves_smoothly(view, samples, z, names)


def _moves_smoothly(view: ModelView, samples: Batch, z: Tensor, names: Sequence[str]) -> bool:
    """Return True if a tenth of a small change moves an output about a tenth as far.

    Scores of hard routing move it by a choice alone, which has no gradient: a tenth of a change
    moves it not at all, or as far.
    """
    low = low_precision(z.device, {p.dtype for p in view.parameters.values()})
    small = _SMALL_MOVE_IN_FEW_DIGITS if low else _SMALL_MOVES[z.dtype]
    gaps = _gaps_with(view, samples, z, names, small)
    of_a_tenth = _gaps_with(view, samples, z, names, small / 10)
    for largest, part in ((gaps.max(), of_a_tenth.max()), (gaps.median(), of_a_tenth.median())):
        if 4 * part < largest < 25 * part:
            return True
    return False


def _gaps_with(
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
            noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
            t.add_(noise * size * (t.abs().mean() + 0.2))
        moved = view.outputs(samples.pick(range(samples.count)))
    finally:
        for t, before in zip(data, saved, strict=True):
            t.copy_(before)
    relative = _ROUNDING.get(z.dtype, _ROUNDING_IN_FEW_DIGITS)
    if z.shape != moved.shape:
        return torch.full((1,), math.inf)
    same = agree(z, moved, relative, view.out_dim)
    return torch.zeros(1) if same else gap(z, moved).flatten()
