"""The tables of transfer runs, from the analysis: text cells, with what is not as in the paper below every table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastlr.analysis.folders import as_dict
from fastlr.analysis.transfer import Mean, TransferRun, differences, losses, strategies
from fastlr.drivers.config import from_record
from fastlr.drivers.transfer_config import TransferOptions, substitutions
from fastlr.report.sheets import Sheet

LABELS = {
    "linear_probe": "linear probe †",
    "local_redundancy": "max local redundancy",
    "validation_loss": "lowest val. loss",
    "dormant_ratio": "min dormant ratio",
    "weight_norm": "min weight norm",
    "no_pretraining": "no pretraining",
}
_SHORT = {"linear_probe": "probe †", "local_redundancy": "max LR", "validation_loss": "val. loss"}
_SHORT |= {"dormant_ratio": "dormant", "weight_norm": "weight norm"}
REFERENCE = "validation_loss"
PAPER_SEEDS = 120
_COLUMNS = {
    "train_loss": "train loss",
    "validation_loss": "val. loss",
    "local_redundancy": "LR",
    "weight_norm": "weight norm",
    "dormant_ratio": "dormant",
    "linear_probe": "probe",
}
_DASH = "–"


def label(strategy: str) -> str:
    """A strategy in words."""
    return LABELS.get(strategy, strategy.replace("_", " "))


def setting(runs: Sequence[TransferRun]) -> tuple[str, ...]:
    """What was done, in a sentence, and what of it is not as in the paper."""
    run, done = runs[0], [run for run in runs if run.complete]
    data, options = as_dict(run.config, "data"), run.options
    actual = {key: as_dict(data, key).get("name", "?") for key in ("source", "target")}
    steps = ("steps_per_epoch", "finetune_steps_per_epoch")
    actual |= {key: run.start[key] for key in steps if key in run.start}
    changed = substitutions(from_record(TransferOptions, options), **actual)
    seeds = f"{len(done)} {'seed' if len(done) == 1 else 'seeds'}"
    if len(done) != PAPER_SEEDS:
        changed.append(f"{seeds} for {PAPER_SEEDS}")

    def trained(key: str, before: str) -> str:
        name, steps = as_dict(data, key).get("name", "?"), run.start.get(f"{before}steps_per_epoch", "?")
        return f"{name} ({options.get(f'{before}epochs', '?')} epochs of {steps} steps)"

    text = (
        f"Pretrained on {trained('source', '')}, fine-tuned on {trained('target', 'finetune_')}; "
        f"{run.start.get('parameters', 0):,} parameters, {seeds}."
    )
    notes = [text]
    if changed:
        notes.append("Not as in the paper: " + "; ".join(changed) + ".")
    left = [run.name for run in runs if not run.complete]
    if left:
        notes.append(f"Left out, as they are not finished: {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}.")
    return tuple(notes)


def strategy_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Table 3: the loss after fine-tuning by strategy, and its paired difference from the lowest validation loss's."""
    title = "Table 3: validation loss after fine-tuning, by strategy of selection"
    done = [run for run in runs if run.complete]
    if not done:
        return Sheet("strategies", title, (), (), ("No run has finished its fine-tuning yet.", *setting(runs)))
    found, names = losses(done), strategies(done)
    reference = REFERENCE if REFERENCE in names else ""
    against = {d.first: d.mean for d in differences(done) if d.second == reference}
    against |= {d.second: _negative(d.mean) for d in differences(done) if d.first == reference}
    rows = []
    for name in sorted(names, key=lambda name: found[name].value):
        epochs = sorted(run.picks[name]["epoch"] for run in done)
        rows.append(
            (
                label(name),
                _pm(found[name]),
                _pm(against[name]) if name in against else _DASH,
                _interval(against[name]) if name in against else _DASH,
                f"{np.median(epochs):g}" if name != "no_pretraining" else _DASH,
            )
        )
    notes = [
        "Loss: mean squared error on the target's validation windows at the end of fine-tuning, in units of the training "
        f"standard deviation; mean of {len(done[0].of_pick(names[0]))} fine-tuning runs, then over n = {len(done)} seeds, "
        "± standard error over seeds.",
    ]
    if reference:
        notes.append(
            "Minus lowest: the difference from lowest val. loss within each seed, mean over the seeds ± standard error, 95 % "
            "interval (Student, n - 1); negative is better. Epoch: median pick."
        )
    if done[0].picks.get("linear_probe", {}).get("by"):
        judged = (
            "validation windows, on which this table is measured" if _by_validation(done[0]) else "training windows"
        )
        notes.append(f"† Sees the target before it selects: trains on its training windows, is judged by its {judged}.")
    notes.append(_spread(done))
    columns = ("strategy", "loss ± s.e.", "minus lowest", "95 % interval", "epoch")
    return Sheet("strategies", title, columns, tuple(rows), (*(n for n in notes if n), *setting(runs)))


def _by_validation(run: TransferRun) -> bool:
    return run.options.get("probe_by", "validation") == "validation"


def _spread(done: Sequence[TransferRun]) -> str:
    if len(done) == 1:
        return "One seed has no standard error: nothing can be said of differences."
    if len(done) < 10:
        return f"With {len(done)} seeds the standard errors themselves are rough."
    return ""


def difference_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Paired differences of every two strategies."""
    title = "Paired differences between strategies"
    done = [run for run in runs if run.complete]
    if len(done) < 2:
        return Sheet("differences", title, (), (), ("Differences need two finished seeds.", *setting(runs)))
    found = differences(done)
    named = [(" - ".join(_SHORT.get(name) or label(name) for name in (d.first, d.second)), d) for d in found]
    rows = [
        (name, _pm(d.mean), _interval(d.mean), f"{d.lower}/{d.mean.n}", f"{d.same}/{d.mean.n}") for name, d in named
    ]
    outside = [name for name, d in named if d.mean.low > 0 or d.mean.high < 0]
    notes = (
        f"First minus second within each seed, mean over n = {len(done)} seeds ± standard error of that mean, 95 % "
        "interval by Student's distribution (– where it is 0 in every seed). Lower: seeds in which the first is better. "
        "Same: seeds in which both picked one checkpoint, whose fine-tuning runs they share (difference 0).",
        f"Intervals without zero: {', '.join(outside) or 'none'}; of {len(found)} such intervals about "
        f"{len(found) / 20:.1f} would leave out zero by chance (no correction for their number).",
    )
    columns = ("first - second", "mean ± s.e.", "95 % interval", "lower", "same")
    return Sheet("differences", title, columns, tuple(rows), (*notes, *setting(runs)))


def pretraining_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Losses and measures by epoch, averaged over seeds."""
    title = "Pretraining: means over seeds after each epoch"
    everyone, runs = runs, [run for run in runs if run.complete] or list(runs)
    last = min(max(run.epochs, default=0) for run in runs)
    table = {name: np.stack([run.numbers(name)[: last + 1] for run in runs]) for name in _COLUMNS}
    kept = [name for name in _COLUMNS if np.isfinite(table[name]).any()]
    rows = []
    for epoch in range(last + 1):
        cells = []
        for name in kept:
            values = table[name][:, epoch]
            cells.append(f"{values.mean():.4g}" if np.isfinite(values).all() else _DASH)
        rows.append((str(epoch), *cells))
    n = runs[0].options.get("redundancy_n", "?")
    notes = (
        f"LR: local redundancy on {n} Gaussian inputs, mean of the measurements within the epoch; epoch 0 is before "
        "training. Dormant: share of feed-forward units with mean |activation| at most "
        f"{runs[0].options.get('dormant_threshold', '?')} on training windows of the source. Losses are mean squared "
        "errors; probe: that of a linear probe on the target.",
        f"Means of {len(runs)} seeds" + (": none has finished yet." if not runs[0].complete else "."),
    )
    columns = ("epoch", *(_COLUMNS[name] for name in kept))
    return Sheet("pretraining", title, columns, tuple(rows), (*notes, *setting(everyone)))


def picks_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """Every pick of every run, with the number that it was made by and the next best."""
    rows = []
    for run in runs:
        for name, found in run.picks.items():
            if found.get("by") is None:
                continue
            values = {int(epoch): value for epoch, value in found["candidates"].items()}
            ranked = sorted(values, key=lambda e: values[e] if found["rule"] == "least" else -values[e])  # noqa: B023
            following = f"{ranked[1]} ({values[ranked[1]]:.6g})" if len(ranked) > 1 else _DASH
            cells = (str(found["epoch"]), f"{found['rule']} {found['by']}", f"{found['value']:.6g}", following)
            rows.append((str(run.seed), label(name), *cells))
    columns = ("seed", "strategy", "epoch", "by", "value", "next best epoch (value)")
    note = "Of equal values the earliest epoch is picked. All candidates are in the runs' records, kind selection."
    return Sheet("picks", "What each strategy picked", columns, tuple(rows), (note, *setting(runs)))


def runs_sheet(runs: Sequence[TransferRun]) -> Sheet:
    """How far each run is."""
    rows = []
    for run in runs:
        epochs, state = (
            f"{max(run.epochs, default=0)}/{run.options.get('epochs', '?')}",
            "yes" if run.complete else "no",
        )
        seconds = (f"{run.seconds(key):.1f}" for key in ("train", "local_redundancy", "finetune"))
        rows.append((run.name, epochs, str(len(run.tunings)), state, *seconds, f"{run.seconds() / 60:.1f}"))
    columns = ("run", "epochs", "tunings", "finished", "pretraining s", "LR s", "fine-tuning s", "all min")
    machines = "; ".join(dict.fromkeys(run.machine for run in runs if run.machine))
    note = (
        f"Pretraining: its optimiser steps; LR: measuring local redundancy; all: every step of the run. On {machines}."
    )
    return Sheet("runs", "Runs", columns, tuple(rows), (note, *setting(runs)))


def _pm(mean: Mean) -> str:
    if mean.value == mean.stderr == 0:
        return "0"
    if not math.isfinite(mean.stderr):
        return f"{mean.value:.4f}"
    return f"{mean.value:.4f} ± " + (f"{mean.stderr:.4f}" if mean.stderr >= 5e-5 else "<0.0001")


def _interval(mean: Mean) -> str:
    return f"[{mean.low:.4f}, {mean.high:.4f}]" if math.isfinite(mean.low) and mean.stderr > 0 else _DASH


def _negative(mean: Mean) -> Mean:
    return Mean(-mean.value, mean.stderr, -mean.high, -mean.low, mean.n)
