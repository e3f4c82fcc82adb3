"""The tables of transfer runs, from the analysis: text cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastlr.display.record import counted
from fastlr.display.sheets import DASH, Columns, Sheet, shown
from fastlr.experiments.runs.options import not_as_in_the_paper
from fastlr.experiments.runs.records import as_dict
from fastlr.experiments.statistics.seeds import Mean
from fastlr.experiments.training.options import training_text
from fastlr.experiments.transfer.experiment import DRIVER
from fastlr.experiments.transfer.options import substitutions
from fastlr.experiments.transfer.records import Difference, TransferRun, differences, losses
from fastlr.models.patchtst import size_beside_the_papers

LABELS = {
    "linear_probe": "linear probe †",
    "local_redundancy": "max local redundancy",
    "local_redundancy_at_end": "max LR of the file",
    "validation_loss": "lowest val. loss",
    "dormant_ratio": "min dormant ratio",
    "weight_norm": "min weight norm",
    "no_pretraining": "no pretraining",
}
_SHORT = {"linear_probe": "probe †", "local_redundancy": "max LR", "validation_loss": "val. loss"}
_SHORT |= {"local_redundancy_at_end": "file's LR"}
_SHORT |= {"dormant_ratio": "dormant", "weight_norm": "weight norm"}
_REDUNDANCIES = ("local_redundancy", "local_redundancy_at_end")
REFERENCE = "validation_loss"
PAPER_SEEDS = 120
_COLUMNS = {
    "train_loss": "train loss",
    "validation_loss": "val. loss",
    "local_redundancy": "LR",
    "local_redundancy_at_end": "LR, file",
    "weight_norm": "weight norm",
    "dormant_ratio": "dormant",
    "linear_probe": "probe",
}


def label(strategy: str) -> str:
    """A strategy in words."""
    return LABELS.get(strategy, strategy.replace("_", " "))


def short(strategy: str) -> str:
    """A strategy in a word or two, for columns."""
    return _SHORT.get(strategy) or label(strategy)


def setting(runs: Sequence[TransferRun]) -> tuple[str, ...]:
    """Return sentences on the training of the runs.

    They say how it was done, in what it differs from the paper, and which runs are not finished.
    """
    run, finished = runs[0], _finished(runs)
    data, options = as_dict(run.config, "data"), run.options
    actual = {key: as_dict(data, key).get("name", "?") for key in ("source", "target")}
    steps = ("steps_per_epoch", "finetune_steps_per_epoch")
    actual |= {key: run.start[key] for key in steps if key in run.start}
    changed = substitutions(DRIVER.options_of(options), **actual)
    changed += size_beside_the_papers(run.start.get("parameters", 0))
    seeds = counted(len(finished), "seed")
    if len(finished) != PAPER_SEEDS:
        changed.append(f"{seeds} for {PAPER_SEEDS}")

    def trained(key: str, before: str) -> str:
        name, steps = (
            as_dict(data, key).get("name", "?"),
            run.start.get(f"{before}steps_per_epoch", "?"),
        )
        return f"{name} ({options.get(f'{before}epochs', '?')} epochs of {steps} steps)"

    notes = [
        f"Pretrained on {trained('source', '')}, fine-tuned on {trained('target', 'finetune_')}; "
        f"{run.start.get('parameters', 0):,} parameters, {seeds}.",
        training_text(run),
    ]
    notes += [_ends(finished, options), not_as_in_the_paper(changed)]
    unfinished = [run.name for run in runs if not run.complete]
    if unfinished:
        names = ", ".join(unfinished[:5]) + (" ..." if len(unfinished) > 5 else "")
        notes.append(f"Left out, as they are not finished: {names}.")
    return tuple(notes)


def _ends(finished: Sequence[TransferRun], options: Mapping[str, Any]) -> str:
    """Say by which of the paper's two rules fine-tuning ended."""
    patience = options.get("finetune_patience", 0)
    if not patience:
        return (
            "Fine-tuning: all its epochs, as in the paper's appendix A.2; no stop when the "
            "validation loss saturates."
        )
    early, tunings = (
        sum(run.saturated for run in finished),
        sum(len(run.tunings) for run in finished),
    )
    return (
        "Fine-tuning: until the validation loss saturates, as in the paper's section 4.2 "
        f"({patience} validations without a fall by {100 * options.get('finetune_tolerance', 0):g} "
        f"%), or its epochs; {early} of {tunings} runs saturated."
    )


def last_epoch(runs: Sequence[TransferRun]) -> int:
    """The last epoch of pretraining that all runs have."""
    return min(max(run.epochs, default=0) for run in runs)


def strategy_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Return Table 3: the loss after fine-tuning by strategy, and its paired differences.

    They are differences from the strategy of the lowest validation loss.
    """
    title = "Table 3: validation loss after fine-tuning, by strategy of selection"
    finished = _finished(runs)
    if not finished:
        return Sheet("strategies", title, notes=("No run has finished its fine-tuning yet.",))
    means, picks = losses(finished), finished[0].picks
    pairs = differences(finished)
    against = {pair.first: pair.mean for pair in pairs if pair.second == REFERENCE}
    against |= {pair.second: _negative(pair.mean) for pair in pairs if pair.first == REFERENCE}
    columns: Columns[str] = {
        "strategy": label,
        "loss ± s.e.": lambda name: _pm(means[name]),
        "minus lowest": lambda name: _pm(against[name]) if name in against else DASH,
        "95 % interval": lambda name: _interval(against[name]) if name in against else DASH,
        "epoch": lambda name: (
            DASH
            if name == "no_pretraining"
            else f"{np.median([run.picks[name]['epoch'] for run in finished]):g}"
        ),
    }
    tunings = len(finished[0].of_pick(next(iter(picks))))
    notes = [
        "Loss: mean squared error on the target's validation windows at the end of fine-tuning, "
        f"in units of the training standard deviation; mean of {tunings} fine-tuning runs, then "
        f"over n = {len(finished)} seeds, ± standard error over seeds."
    ]
    if REFERENCE in picks:
        notes.append(
            "Minus lowest: the difference from lowest val. loss within each seed, mean over the "
            "seeds ± standard error, 95 % interval (Student, n - 1); negative is better. Epoch: "
            "median pick."
        )
    if picks.get("linear_probe", {}).get("by"):
        by_validation = finished[0].options.get("probe_by", "validation") == "validation"
        judge = (
            "validation windows, on which this table is measured"
            if by_validation
            else "training windows"
        )
        notes.append(
            "† Sees the target before it selects: trains on its training windows, is judged by "
            f"its {judge}."
        )
    if len(finished) == 1:
        notes.append("One seed has no standard error: nothing can be said of differences.")
    elif len(finished) < 10:
        notes.append(f"With {len(finished)} seeds the standard errors themselves are rough.")
    return Sheet.of(
        "strategies", title, sorted(means, key=lambda name: means[name].value), columns, notes
    )


def difference_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Paired differences of every two strategies."""
    title = "Paired differences between strategies"
    finished = _finished(runs)
    if len(finished) < 2:
        return Sheet("differences", title, notes=("Differences need two finished seeds.",))
    pairs = differences(finished)

    def pair_name(pair: Difference) -> str:
        return " - ".join(short(name) for name in (pair.first, pair.second))

    columns: Columns[Difference] = {
        "first - second": pair_name,
        "mean ± s.e.": lambda pair: _pm(pair.mean),
        "95 % interval": lambda pair: _interval(pair.mean),
        "lower": lambda pair: f"{pair.lower}/{pair.mean.n}",
        "same": lambda pair: f"{pair.same}/{pair.mean.n}",
    }
    outside = [pair_name(pair) for pair in pairs if pair.mean.low > 0 or pair.mean.high < 0]
    notes = (
        f"First minus second within each seed, mean over n = {len(finished)} seeds ± standard "
        "error of that mean, 95 % interval by Student's distribution (– where it is 0 in every "
        "seed). Lower: seeds in which the first is better. Same: seeds in which both picked one "
        "checkpoint, whose fine-tuning runs they share (difference 0).",
        f"Intervals without zero: {', '.join(outside) or 'none'}; of {len(pairs)} such intervals "
        f"about {len(pairs) / 20:.1f} would leave out zero by chance (no correction for their "
        "number).",
    )
    return Sheet.of("differences", title, pairs, columns, notes)


def pretraining_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Losses and measures by epoch, averaged over seeds."""
    averaged = _finished(runs) or list(runs)
    last = last_epoch(averaged)
    means = {
        name: np.mean([run.numbers(name)[: last + 1] for run in averaged], axis=0)
        for name in _COLUMNS
    }
    means = {name: values for name, values in means.items() if np.isfinite(values).any()}
    columns = ("epoch", *(_COLUMNS[name] for name in means))
    rows = tuple(
        (str(epoch), *(shown(values[epoch], "{:.4g}") for values in means.values()))
        for epoch in range(last + 1)
    )
    options = averaged[0].options
    dormant = "activation below" if options.get("dormant_by") == "mean" else "|activation| at most"
    notes = (
        f"LR: local redundancy on {options.get('redundancy_n', '?')} Gaussian inputs, mean of the "
        "measurements within the epoch; LR, file: at its end alone; epoch 0 is before training. "
        f"Dormant: share of feed-forward units with mean {dormant} "
        f"{options.get('dormant_threshold', '?')} on training windows of the source. Losses are "
        "mean squared errors; probe: that of a linear probe on the target.",
        ("One seed" if len(averaged) == 1 else f"Means of {counted(len(averaged), 'seed')}")
        + (": none has finished yet." if not averaged[0].complete else "."),
    )
    title = "Pretraining: means over seeds after each epoch"
    return Sheet("pretraining", title, columns, rows, notes)


def picks_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Every pick of every run, with the number that it was made by and the next best."""
    columns = (
        "seed",
        "strategy",
        "epoch",
        "by",
        "value",
        "next best epoch (value)",
        "LR",
        "LR, file",
    )
    rows = []
    for run in runs:
        for name, pick in run.picks.items():
            if pick.get("by") is not None:
                cells = (
                    str(pick["epoch"]),
                    f"{pick['rule']} {pick['by']}",
                    f"{pick['value']:.6g}",
                    _next_best(pick),
                )
                both = (shown(run.numbers(by)[pick["epoch"]], "{:.6g}") for by in _REDUNDANCIES)
                rows.append((str(run.seed), label(name), *cells, *both))
    note = (
        "Of equal values the earliest epoch is picked. All candidates are in the runs' records, "
        "kind selection."
    )
    return Sheet(
        "picks", "What each strategy picked", columns, tuple(rows), (note, _two_values(runs))
    )


def _two_values(runs: Sequence[TransferRun]) -> str:
    """Say what the two columns are, and in how many runs they are greatest at different epochs."""
    both = [np.stack([run.numbers(by)[1:] for by in _REDUNDANCIES]) for run in runs if run.epochs]
    greatest = [values.argmax(1) for values in both if np.isfinite(values).all()]
    other = sum(int(of_epoch != of_file) for of_epoch, of_file in greatest)
    return (
        "LR: mean of the measurements within the epoch, by which max local redundancy picks, as "
        "in the paper; LR, file: of the checkpoint alone, by which max LR of the file picks "
        f"(--set strategies=...,local_redundancy_at_end). In {other} of "
        f"{counted(len(greatest), 'run')} they are greatest at different epochs."
    )


def _next_best(pick: dict[str, Any]) -> str:
    values = {int(epoch): value for epoch, value in pick["candidates"].items()}
    sign = 1 if pick["rule"] == "least" else -1
    ranked = sorted(values, key=lambda epoch: sign * values[epoch])
    return f"{ranked[1]} ({values[ranked[1]]:.6g})" if len(ranked) > 1 else DASH


def runs_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """How far each run is."""
    columns: Columns[TransferRun] = {
        "run": lambda run: run.name,
        "epochs": lambda run: f"{max(run.epochs, default=0)}/{run.options.get('epochs', '?')}",
        "tunings": lambda run: str(len(run.tunings)),
        "finished": lambda run: "yes" if run.complete else "no",
        "pretraining s": lambda run: f"{run.seconds('train'):.1f}",
        "LR s": lambda run: f"{run.seconds('local_redundancy'):.1f}",
        "fine-tuning s": lambda run: f"{run.seconds('finetune'):.1f}",
        "all min": lambda run: f"{run.seconds() / 60:.1f}",
    }
    machines = "; ".join(dict.fromkeys(run.machine for run in runs if run.machine))
    note = (
        "Pretraining: its optimiser steps; LR: measuring local redundancy; all: every step of the "
        f"run. On {machines}."
    )
    return Sheet.of("runs", "Runs", runs, columns, [note])


def _finished(runs: Sequence[TransferRun]) -> list[TransferRun]:
    return [run for run in runs if run.complete]


def _pm(mean: Mean) -> str:
    if mean.value == mean.stderr == 0:
        return "0"
    if not math.isfinite(mean.stderr):
        return f"{mean.value:.4f}"
    return f"{mean.value:.4f} ± " + (f"{mean.stderr:.4f}" if mean.stderr >= 5e-5 else "<0.0001")


def _interval(mean: Mean) -> str:
    return (
        f"[{mean.low:.4f}, {mean.high:.4f}]"
        if math.isfinite(mean.low) and mean.stderr > 0
        else DASH
    )


def _negative(mean: Mean) -> Mean:
    return Mean(-mean.value, mean.stderr, -mean.high, -mean.low, mean.n)
