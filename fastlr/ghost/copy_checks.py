"""Checks on a deep copy of a model in more digits.

In: a model and a few samples. A new engine measures them on the copy, with the audits of a new
plan. Out: the routes that the model's own engine takes over, or an error that says why the model
cannot be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fastlr.errors import (
    HiddenParameterError,
    InteractionError,
    NonlinearBackwardError,
    RandomForwardError,
)
from fastlr.ghost.batch import Batch
from fastlr.ghost.known import Plan
from fastlr.ghost.model_io import ModelView
from fastlr.ghost.planner import Chunk, batch_of, spread
from fastlr.ghost.verification.agreement import has_few_digits
from fastlr.ghost.verification.deep_copy import all_zero, deep_copies, move
from fastlr.ghost.verification.measured_rounding import outputs_of_copy
from fastlr.ghost.verification.record import Ledger
from fastlr.ops.cudnn import never_cudnn
from fastlr.ops.process_state import warnings_ignored

Measure = Callable[[ModelView, Any], Ledger]  # of a copy and inputs: measures them by a new engine
MOST_DEEP_COPIES = 8  # structures that deep copies test, of a model whose data choose its graph
_MEANINGLESS = (
    InteractionError,
    RandomForwardError,
    HiddenParameterError,
    NonlinearBackwardError,
)


def check_on_copy(chunk: Chunk, plan: Plan, measure: Measure) -> None:
    """Check a deep copy where few digits or parameters of zeros hide errors of the rules.

    Args:
        chunk: A batch that has passed its audits.
        plan: Its new plan.
        measure: Function that measures the copy.

    Raises:
        InteractionError, RandomForwardError, HiddenParameterError, NonlinearBackwardError: The copy
            cannot be measured.
    """
    ledger, tested = chunk.ledger, plan.structure.tested_on_copy
    parameters = chunk.view.parameters.values()
    of_rules = [name for name, p in ledger.parameters.items() if p.route in ("rule", "node")]
    untested = [name for name in of_rules if not ledger.parameters[name].was_tested]
    if has_few_digits(parameters, chunk.view.device):
        names = of_rules
    else:
        names = untested if untested and all_zero(parameters) else []
    if tested.issuperset(names) or chunk.flags.deep_copies >= MOST_DEEP_COPIES:
        return
    few = batch_of(chunk).part(spread(chunk.count))
    of_copy, _ = _measured_on_copy(chunk.view, few, ledger, measure)
    tested.update(names)
    chunk.flags.deep_copies += 1
    if of_copy is None:
        ledger.note("no deep copy of it runs like the model: it was checked as it is alone")
        return
    ledger.give_up(of_copy.rules_given_up)
    by_loop = of_copy.loop - ledger.loop
    if by_loop:
        ledger.to_loop(by_loop, of_copy.parameters[min(by_loop)].reason)


def with_deviations_of_copy(
    view: ModelView, batch: Batch, ledger: Ledger, measure: Measure
) -> tuple[Ledger, str]:
    """Return routes with the deviations of a deep copy on a few samples, and what copy it is.

    The routes are those of ``ledger``, and "" says that no copy runs like the model.
    """
    of_copy, dtype = _measured_on_copy(view, batch.part(spread(batch.count)), ledger, measure)
    if of_copy is None:
        return ledger, ""
    entries = dict(of_copy.parameters)
    for name, entry in ledger.parameters.items():
        other = entries.get(name, entry)
        tested = entry.was_tested or other.was_tested
        entries[name] = replace(entry, was_tested=tested, deviation=other.deviation)
    return replace(ledger, parameters=entries), f"{str(dtype).removeprefix('torch.')} copy"


def _measured_on_copy(
    view: ModelView, batch: Batch, ledger: Ledger, measure: Measure
) -> tuple[Ledger | None, torch.dtype | None]:
    """Measure a few samples on a deep copy, its zeros moved.

    Returns:
        Routes of the copy and its dtype; None where no copy runs like the model.
    """
    for clone in deep_copies(view.module):
        dtype = next(clone.parameters()).dtype
        if outputs_of_copy(view, clone, batch, range(batch.count)) is None:
            continue
        try:
            move(all_zero(p for p in clone.parameters() if p.requires_grad))
            copied = ModelView.of(clone, view.output, view.in_dim, view.out_dim)
            autocast = torch.autocast(view.device.type, enabled=False)
            with warnings_ignored(), never_cudnn(), autocast:
                of_copy = measure(copied, batch.pick(range(batch.count), dtype))
        except _MEANINGLESS:
            raise
        except Exception:  # whatever a copy raises
            continue
        if of_copy.parameters_in_graph.issuperset(ledger.parameters_in_graph):
            return of_copy, dtype
    return None, None
