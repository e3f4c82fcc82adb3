"""The tables of transfer runs, from the analysis: text cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastlr.display.record import counted
from fastlr.display.sheets import DASH, Sheet, outside_zero, shown
from fastlr.errors import few
from fastlr.experiments.runs.records import as_dict, on_machines
from fastlr.experiments.runs.report import differences_from_the_paper
from fastlr.experiments.statistics.seeds import Mean
from fastlr.experiments.training.options import training_text
from fastlr.experiments.transfer.experiment import DRIVER
from fastlr.experiments.transfer.fields import FIELDS, REDUNDANCIES, strategy
from fastlr.experiments.transfer.options import OPEN, TransferOptions, substitutions
from fastlr.experiments.transfer.records import (
    Difference,
    TransferRun,
    difference,
    differences,
    losses,
    strategies,
)
from fastlr.models.patchtst import size_beside_the_papers

REFERENCE = "validation_loss"
PAPER_SEEDS = 120
_VALUE = "{:.6g}"


def setting(runs: Sequence[TransferRun]) -> tuple[str, ...]:
    """Return paragraphs on the runs.

    They say how the networks were trained, how that differs from the paper, and which runs are
    unfinished.
    """
    run, finished = runs[0], finished_of(runs)
    parameters = run.untrained.get("parameters", 0)
    seeds = counted(len(finished), "seed")
    pretrained = _trained(run, "source", "")
    tuned = _trained(run, "target", "finetune_")
    changes = [[*_changes(each), *_seeds_beside_the_papers(finished)] for each in runs]
    notes = [
        f"Pretrained on {pretrained}, fine-tuned on {tuned}; {parameters:,} parameters, {seeds}.",
        training_text(run),
        _ends(finished, run.options),
        differences_from_the_paper(runs, changes, TransferOptions(), OPEN),
    ]
    unfinished = [run.name for run in runs if not run.complete]
    if unfinished:
        notes.append(f"Left out, as they are not finished: {few(unfinished)}.")
    return tuple(notes)


def _changes(run: TransferRun) -> list[str]:
    """Return the options in which a run differs from the paper, each in words."""
    actual = {key: _series(run, key) for key in ("source", "target")}
    for key in ("steps_per_epoch", "finetune_steps_per_epoch"):
        if key in run.untrained:
            actual[key] = run.untrained[key]
    changes = substitutions(DRIVER.options_of(run.options), **actual)
    return changes + size_beside_the_papers(run.untrained.get("parameters", 0))


def _seeds_beside_the_papers(finished: Sequence[TransferRun]) -> list[str]:
    if len(finished) == PAPER_SEEDS:
        return []
    return [f"{counted(len(finished), 'seed')} for {PAPER_SEEDS}"]


def _series(run: TransferRun, key: str) -> Any:
    """Return the name of the "source" or the "target"."""
    return as_dict(as_dict(run.config, "data"), key).get("name", "?")


def _trained(run: TransferRun, key: str, prefix: str) -> str:
    """Say on what a network was trained and for how long; ``prefix`` is that of the options."""
    steps = run.untrained.get(f"{prefix}steps_per_epoch", "?")
    epochs = run.options.get(f"{prefix}epochs", "?")
    return f"{_series(run, key)} ({epochs} epochs of {steps} steps)"


def _ends(finished: Sequence[TransferRun], options: Mapping[str, Any]) -> str:
    """Say by which of the paper's two rules fine-tuning ended."""
    patience = options.get("finetune_patience", 0)
    if not patience:
        return (
            "Fine-tuning: all its epochs, as in the paper's appendix A.2; no stop when the "
            "validation loss saturates."
        )
    early = sum(run.saturated for run in finished)
    tunings = sum(len(run.tunings) for run in finished)
    return (
        "Fine-tuning: until the validation loss saturates, as in the paper's section 4.2 "
        f"({patience} validations without a fall by {100 * options.get('finetune_tolerance', 0):g} "
        f"%), or its epochs; {early} of {tunings} runs saturated."
    )


def last_epoch(runs: Sequence[TransferRun]) -> int:
    """The last epoch of pretraining that all runs have."""
    return min(run.epochs for run in runs)


def strategy_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Return Table 3: the loss after fine-tuning by strategy, and its paired differences.

    They are differences from the strategy of the lowest validation loss.
    """
    title = "Table 3: validation loss after fine-tuning, by strategy of selection"
    finished = finished_of(runs)
    if not finished:
        return Sheet("strategies", title, notes=("No run has finished its fine-tuning yet.",))
    means, against = losses(finished), _against_reference(finished)
    rows = []
    for name in sorted(means, key=lambda name: means[name].value):
        minus = interval = DASH
        if name in against:
            minus, interval = _pm(against[name]), _interval(against[name])
        epochs = [run.picks[name]["epoch"] for run in finished]
        epoch = DASH if name == "no_pretraining" else f"{np.median(epochs):g}"
        rows.append((strategy(name).label, _pm(means[name]), minus, interval, epoch))
    columns = ("strategy", "loss ± s.e.", "minus lowest", "95 % interval", "epoch")
    return Sheet("strategies", title, columns, rows, _strategy_notes(finished))


def _against_reference(finished: Sequence[TransferRun]) -> dict[str, Mean]:
    """Return each other strategy's difference from that of the lowest validation loss."""
    names = [name for name in strategies(finished) if name != REFERENCE]
    if REFERENCE not in finished[0].picks:
        return {}
    return {name: difference(finished, name, REFERENCE).mean for name in names}


def _strategy_notes(finished: Sequence[TransferRun]) -> list[str]:
    """Say what the columns of Table 3 are and what its errors are worth."""
    first, seeds = finished[0], len(finished)
    tunings = len(first.of_pick(next(iter(first.picks))))
    notes = [
        "Loss: mean squared error on the target's validation windows at the end of fine-tuning, "
        f"in units of the training standard deviation; mean of {tunings} fine-tuning runs, then "
        f"over n = {seeds} seeds, ± standard error over seeds."
    ]
    if REFERENCE in first.picks:
        notes.append(
            "Minus lowest: the difference from lowest val. loss within each seed, mean over the "
            "seeds ± standard error, 95 % interval (Student, n - 1); negative is better. Epoch: "
            "median pick."
        )
    if "dormant_ratio" in first.picks:
        notes.append(f"Min dormant ratio: {_dormant(first.options)}.")
    if first.picks.get("linear_probe", {}).get("by"):
        judge = "training windows"
        if first.options.get("probe_by", "validation") == "validation":
            judge = "validation windows, on which this table is measured"
        notes.append(
            "† Sees the target before it selects: trains on its training windows, is judged by "
            f"its {judge}."
        )
    if seeds == 1:
        notes.append("One seed has no standard error: nothing can be said of differences.")
    elif seeds < 10:
        notes.append(f"With {seeds} seeds the standard errors themselves are rough.")
    return notes


def difference_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Paired differences of every two strategies."""
    title = "Paired differences between strategies"
    finished = finished_of(runs)
    if len(finished) < 2:
        return Sheet("differences", title, notes=("Differences need two finished seeds.",))
    pairs = differences(finished)
    columns = ("first - second", "mean ± s.e.", "95 % interval", "lower", "same")
    rows = []
    for pair in pairs:
        mean, n = pair.mean, pair.mean.n
        counts = (f"{pair.lower}/{n}", f"{pair.same}/{n}")
        rows.append((_pair_name(pair), _pm(mean), _interval(mean), *counts))
    outside = [_pair_name(pair) for pair in pairs if pair.mean.low > 0 or pair.mean.high < 0]
    notes = (
        f"First minus second within each seed, mean over n = {len(finished)} seeds ± standard "
        "error of that mean, 95 % interval by Student's distribution (– where it is 0 in every "
        "seed). Lower: seeds in which the first is better. Same: seeds in which both picked one "
        "checkpoint, whose fine-tuning runs they share (difference 0).",
        f"{outside_zero(outside, len(pairs))} (no correction for their number).",
    )
    return Sheet("differences", title, columns, rows, notes)


def _pair_name(pair: Difference) -> str:
    return f"{strategy(pair.first).short} - {strategy(pair.second).short}"


def _dormant(options: Mapping[str, Any]) -> str:
    """Define the dormant ratio of a run."""
    mean = "activation below" if options.get("dormant_by") == "mean" else "|activation| at most"
    return (
        f"share of feed-forward units with mean {mean} {options.get('dormant_threshold', '?')} on "
        "training windows of the source"
    )


def pretraining_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Losses and measures by epoch, averaged over seeds."""
    averaged = finished_of(runs) or list(runs)
    last = last_epoch(averaged)
    columns, cells = ["epoch"], [[str(epoch) for epoch in range(last + 1)]]
    for field in FIELDS.values():
        means = np.mean([run.measure(field.name)[: last + 1] for run in averaged], axis=0)
        if np.isfinite(means).any():
            columns.append(field.short)
            cells.append([field.text(mean) for mean in means])
    options = averaged[0].options
    seeds = "One seed" if len(averaged) == 1 else f"Means of {len(averaged)} seeds"
    unfinished = "" if averaged[0].complete else ": none has finished yet"
    notes = (
        f"LR: local redundancy on {options.get('redundancy_n', '?')} Gaussian inputs, mean of the "
        "measurements within the epoch; LR, file: at its end alone; epoch 0 is before training. "
        f"Dormant: {_dormant(options)}. Losses are "
        "mean squared errors; probe: that of a linear probe on the target.",
        f"{seeds}{unfinished}.",
    )
    title = "Pretraining: means over seeds after each epoch"
    return Sheet("pretraining", title, columns, list(zip(*cells)), notes)


def picks_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Every pick of every run, with the number that it was made by and the next best."""
    columns = ["seed", "strategy", "epoch", "by", "value", "next best epoch (value)"]
    columns += [FIELDS[name].short for name in REDUNDANCIES]
    rows = []
    for run in runs:
        redundancies = [run.measure(name) for name in REDUNDANCIES]
        for name, pick in run.picks.items():
            if pick.get("by") is None:
                continue
            row = (
                str(run.seed),
                strategy(name).label,
                str(pick["epoch"]),
                f"{pick['rule']} {pick['by']}",
                shown(pick["value"], _VALUE),
                _next_best(pick),
                *[shown(values[pick["epoch"]], _VALUE) for values in redundancies],
            )
            rows.append(row)
    note = (
        "Of equal values the earliest epoch is picked. All candidates are in the runs' records, "
        "kind selection."
    )
    return Sheet("picks", "What each strategy picked", columns, rows, (note, _two_values(runs)))


def _two_values(runs: Sequence[TransferRun]) -> str:
    """Say what the two columns are, and in how many runs they are greatest at different epochs."""
    compared = other = 0
    for run in runs:
        values = np.stack([run.measure(name)[1:] for name in REDUNDANCIES])
        if values.size and np.isfinite(values).all():
            of_epoch, of_file = values.argmax(1)
            compared += 1
            other += int(of_epoch != of_file)
    return (
        "LR: mean of the measurements within the epoch, by which max local redundancy picks, as "
        "in the paper; LR, file: of the checkpoint alone, by which max LR of the file picks "
        f"(--set strategies=...,local_redundancy_at_end). In {other} of "
        f"{counted(compared, 'run')} they are greatest at different epochs."
    )


def _next_best(pick: dict[str, Any]) -> str:
    """Return the epoch that is the best but for the pick, with its value; a dash if none is."""
    values = pick["candidates"]
    ranked = sorted(values, key=values.__getitem__, reverse=pick["rule"] == "greatest")
    if len(ranked) < 2:
        return DASH
    return f"{int(ranked[1])} ({values[ranked[1]]:.6g})"


def runs_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """How far each run is."""
    columns = ["run", "epochs", "tunings", "finished", "pretraining s", "LR s", "fine-tuning s"]
    columns.append("all min")
    rows = []
    for run in runs:
        done = f"{run.epochs}/{run.options.get('epochs', '?')}"
        finished = "yes" if run.complete else "no"
        seconds = [f"{run.spent(name):.1f}" for name in ("train", "local_redundancy", "finetune")]
        minutes = f"{run.spent() / 60:.1f}"
        rows.append((run.name, done, str(len(run.tunings)), finished, *seconds, minutes))
    note = (
        "Pretraining: its optimiser steps; LR: measuring local redundancy; all: every step of the "
        "run."
    )
    return Sheet("runs", "Runs", columns, rows, (" ".join([note, *on_machines(runs)]),))


def finished_of(runs: Sequence[TransferRun]) -> list[TransferRun]:
    """Return the runs whose fine-tuning is complete."""
    return [run for run in runs if run.complete]


def _pm(mean: Mean) -> str:
    """Return a mean with its standard error."""
    if mean.value == mean.stderr == 0:
        return "0"
    if not math.isfinite(mean.stderr):
        return f"{mean.value:.4f}"
    error = f"{mean.stderr:.4f}" if mean.stderr >= 5e-5 else "<0.0001"
    return f"{mean.value:.4f} ± {error}"


def _interval(mean: Mean) -> str:
    if not math.isfinite(mean.low) or mean.stderr == 0:
        return DASH
    return f"[{mean.low:.4f}, {mean.high:.4f}]"
