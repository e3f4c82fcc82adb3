"""Forward passes on a few samples.

Do they interact, is a pass random, does a parameter move the output outside the graph?

In: a copy of the model on three or four samples (fastlr.ghost.verification.trial). Out: errors that
name the module, or what the checks have found. Samples are run in other company and must give what
they gave; parameters that are not in the graph are moved, and the output must stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import (
    HiddenParameterError,
    InteractionError,
    RandomForwardError,
    few,
)
from fastlr.ghost.fusion.conv_bn import FoldRefuted
from fastlr.ghost.graph import Graph
from fastlr.ghost.model_io import FAILURES
from fastlr.ghost.verification.agreement import agree
from fastlr.ghost.verification.company import InBatch
from fastlr.ghost.verification.trial import Trial

SAMPLES = 3
EVEN_SAMPLES = 4  # for a model that does not take three
_LARGE_MOVE = 0.5  # of a parameter, in parts of its size
_TINY_MOVE, _TINY_MOVE_IN_DOUBLE = 1e-3, 1e-6


def require_same(trial: Trial, in_batch: InBatch, samples: Sequence[int], output: Tensor) -> None:
    """Require that samples that gave ``output`` give the same together."""
    if not in_batch.holds(samples, output):
        raise what_differs(trial, in_batch)


# -- why outputs differ
# --------------------------------------------------------------------------------------------------


def what_differs(trial: Trial, in_batch: InBatch) -> Exception:
    """Find out why samples give something else than together, and return the error that says it.

    It is that they interact, that the folding is wrong, that the forward pass is random, or that
    each pass changes what the next one reads.
    """
    with torch.no_grad():
        unfolded = trial.in_batch(trial.run(trial.all))
        is_random = not unfolded.holds(trial.all, trial.run(trial.all))
        if not is_random and in_batch.holds(trial.all, unfolded.output):
            return InteractionError(_interaction_message(trial, unfolded.relative))
    folding_is_wrong = trial.is_folded and not is_random
    if folding_is_wrong:
        return FoldRefuted("the folded model gives another output")
    changed = _what_passes_change(trial)
    return RandomForwardError(
        _changes_message(changed) if changed else _random_message(trial.view.module)
    )


def _what_passes_change(trial: Trial) -> list[str]:
    """Return the parameters and buffers that a pass writes, if only by that two of them differ."""
    state = trial.subject.state
    before = {name: t.detach().clone() for name, t in state.items()}
    outputs: list[Tensor] = []
    changed: set[str] = set()
    with torch.no_grad():
        for _ in range(2):
            outputs.append(trial.run(trial.all).detach())
            written = [name for name, t in state.items() if not torch.equal(t, before[name])]
            changed.update(written)
            for name in written:
                state[name].copy_(before[name])
    same = trial.in_batch(outputs[0]).holds(trial.all, outputs[1])
    return sorted(changed) if same else []


def _changes_message(changed: Sequence[str]) -> str:
    return (
        "two forward passes on the same inputs differ, as each writes what the next one reads "
        f"({few(changed)}): write it in the training loop, or only where self.training is true, "
        "and call model.eval()"
    )


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


def _interaction_message(trial: Trial, relative: float) -> str:
    """Name the first module whose output for sample 0 changes when the other samples do."""
    message = "samples of the batch interact: what one gives depends on the others"
    if _gives_more_in_a_larger_batch(trial):
        return (
            f"{message}, of whom it has an output each, as in f(x) @ g(x).T. Give what all samples "
            "are compared with as an input of its own, which they then share"
        )
    name = _first_changed_module(trial, relative)
    if name is None:
        return f"{message}. Make the forward pass work on each sample alone"
    module = dict(trial.subject.running.named_modules())[name]
    message += f", first seen in module {name} ({type(module).__name__})"
    if module.training and "Norm" in type(module).__name__:
        return f"{message}, which is in train mode and uses batch statistics: call model.eval()"
    return f"{message}. Make it work on each sample alone"


def _gives_more_in_a_larger_batch(trial: Trial) -> bool:
    """Return True if a sample's output has more elements in a batch of twice the samples."""
    try:
        with torch.no_grad():
            once, twice = (trial.run([*trial.all] * times).numel() for times in (1, 2))
    except FAILURES:  # the model may take no other batch
        return False
    return twice > 2 * once


def _first_changed_module(trial: Trial, relative: float) -> str | None:
    together = _outputs_of_sample_0(trial, trial.all)
    by_itself = _outputs_of_sample_0(trial, [0] * trial.count)
    for (name, one), (_, other) in zip(together, by_itself, strict=False):
        if one.shape == other.shape and not agree(one, other, relative):
            return name
    return None


def _outputs_of_sample_0(trial: Trial, samples: Sequence[int]) -> list[tuple[str, Tensor]]:
    """Run some samples, and return what each module gave for the first of them, in order."""
    seen: list[tuple[str, Tensor]] = []

    def hook_for(name: str) -> Callable:
        def hook(_module: nn.Module, _inputs: Any, result: Any) -> None:
            is_plain = isinstance(result, Tensor) and not result.is_nested and result.ndim > 0
            if is_plain and len(result) % trial.count == 0:
                seen.append((name, result.detach()[: len(result) // trial.count].clone()))

        return hook

    handles = [
        module.register_forward_hook(hook_for(name))
        for name, module in trial.subject.running.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            trial.run(samples)
    finally:
        for handle in handles:
            handle.remove()
    return seen


# -- parameters that are not in the graph
# --------------------------------------------------------------------------------------------------


def unused_parameters(
    trial: Trial, z: Tensor, graph: Graph, tested: Collection[frozenset[str]]
) -> frozenset[str]:
    """Return the parameters that are not in the graph, which must not move the output.

    Args:
        trial: of a copy of the model.
        z: its output for all samples.
        graph: below ``z``.
        tested: sets of parameters that were found not to move the output before. None of the
            parameters are returned where all are in one of these.

    Raises:
        HiddenParameterError: some move it.
    """
    absent = frozenset(trial.view.parameters) - frozenset(graph.parameters.values())
    if not absent or any(absent <= names for names in tested):
        return frozenset()
    in_order = [name for name in trial.view.parameters if name in absent]
    if _move_output(trial, z, in_order):
        culprits = [name for name in in_order if _move_output(trial, z, [name])] or in_order
        module = _module_to_blame(trial.view.module, culprits)
        kind = type(trial.view.module.get_submodule(module)).__name__
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


def _move_output(trial: Trial, z: Tensor, names: Sequence[str]) -> bool:
    """Return True if parameters move the output, and not by a choice alone.

    Scores of hard routing move it by such a choice alone.

    Such a choice has no gradient: it does not move with the least of changes.
    """
    if not _moves_with(trial, z, names, _LARGE_MOVE):
        return False
    tiny = _TINY_MOVE_IN_DOUBLE if z.dtype == torch.float64 else _TINY_MOVE
    by_a_choice_alone = not _moves_with(trial, z, names, tiny)
    return not by_a_choice_alone


def _moves_with(trial: Trial, z: Tensor, names: Sequence[str], size: float) -> bool:
    """Return True if the output moves with parameters that are moved at random by ``size``."""
    parameters = trial.subject.parameters
    generator = torch.Generator().manual_seed(2)
    saved = {name: parameters[name].detach().clone() for name in names}
    with torch.no_grad():
        try:
            for name in names:
                p = parameters[name]
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
                p.add_(noise * size * (p.abs().mean() + 0.2))
            moved = trial.run_folded(trial.all)
        finally:
            for name in names:
                parameters[name].copy_(saved[name])
    relative = 1e-12 if z.dtype == torch.float64 else 1e-6
    return not agree(z, moved, relative, None, trial.view.out_dim)
