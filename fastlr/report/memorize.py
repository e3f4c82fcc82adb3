"""The report of memorization runs: terminal tables, CSV, Markdown, PNG figures and one self-contained HTML page."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastlr.analysis.memorization import MemorizationRun, alike, read_memorization_runs
from fastlr.analysis.transfer import mean_over_seeds
from fastlr.report.figures import COLOURS, INK, MUTED, log_axis, new_figure, save_figure, style
from fastlr.report.folder import Figure, Figures, Report, make_folder, write_files
from fastlr.report.sheets import Sheet
from fastlr.report.tables import pm

_KINDS = {"series": "Gaussian series", "vision": "images with random labels"}
_PAPER = {"series": 1.7, "vision": 1.0}  # bits a parameter, section 4.3
_LINES, _SHOWN = 13, 4  # rows of a table over epochs; runs that have one in the terminal
_DASH = "–"
_DEFINITIONS = {
    "series": "Gaussian series: bits = (n m / 2) log2(1 / D), D the mean squared error an element over all n targets of m "
    "elements, whose variance is 1 (Proposition 3.5). There is no ceiling.",
    "vision": "Images with random labels: bits = n log2 C - n CE / ln 2, CE the mean cross-entropy in nats over all n "
    "images of C classes (Theorem 3.2); the ceiling is n log2 C.",
}


def write_memorization_report(
    paths: Sequence[str | Path], out: str | Path | None = None, *, figures: str = "png"
) -> Report:
    """Analyse run folders and write the report.

    Args:
        paths: Run folders, or folders of run folders.
        out: Folder for the files, made if missing; None: ``report`` in the one path given, ``fastlr-report`` for several.
        figures: "png", or "none".

    Returns:
        The report: ``index.html``, ``report.md``, a CSV file a table, ``report.json`` with all digits, and the figures.

    Raises:
        InputError: No runs there, or a file that cannot be written.
    """
    runs = read_memorization_runs(paths)
    folder = make_folder(paths, out, figures)
    drawn = _draw(runs, folder) if figures == "png" else []
    whole, over_time = bits_sheet(runs), [training_sheet(run, f"training-{i}") for i, run in enumerate(runs)]
    speed = speed_sheet(runs)
    screen = (whole, *(over_time if len(runs) <= _SHOWN else ()), speed)
    parts: list[Sheet | Figure] = [whole, *drawn, *over_time, speed]
    numbers: dict[str, Any] = {
        "runs": [
            {
                "path": str(run.path),
                "kind": run.kind,
                "parameters": run.parameters,
                "ceiling_bits_per_parameter": run.ceiling,
                "substitutions": run.substitutions,
                "late_gain": run.late_gain(),
                "records": list(run.records.values()),
            }
            for run in runs
        ]
    }
    lead = [
        "Bits that networks have taken up of random targets, over training. Numbers with all digits are in report.json."
    ]
    page = write_files(folder, "Memorization", lead, parts, runs, numbers)
    return Report(folder, page, (whole, *over_time, speed), screen, tuple(drawn))


def bits_sheet(runs: Sequence[MemorizationRun]) -> Sheet:
    """What each run has memorised at its last record, and means over seeds."""
    columns = ("run", "epochs", "parameters", "loss", "bits", "bits/param", "ceiling", "last 10 %")
    rows, notes = [], []
    for group in alike(runs):
        for run in group:
            last = run.last
            rows.append(
                (
                    run.name,
                    str(last["epoch"]),
                    f"{run.parameters:,}",
                    f"{last['loss']:.4g}",
                    f"{last['bits']:,.0f}",
                    f"{last['bits_per_parameter']:.3f}",
                    _percent(last.get("share_of_ceiling")),
                    _signed(run.late_gain()),
                )
            )
        if len(group) > 1:
            mean = mean_over_seeds([run.last["bits_per_parameter"] for run in group])
            seeds = f"Mean over {mean.n} seeds ({group[0].name}, ...)"
            notes.append(f"{seeds}: {pm(mean.value, mean.stderr)} bits a parameter, ± standard error.")
    notes += [_DEFINITIONS[kind] for kind in _KINDS if any(run.kind == kind for run in runs)]
    notes.append(
        "Losses are over all samples in eval mode. last 10 %: bits a parameter that came in the last tenth of the epochs; "
        "far from 0, the network has not taken up all that it could."
    )
    for group in alike(runs):
        run = group[0]
        said = ", ".join([f"epochs {run.last['epoch']} for 1000"] * (run.last["epoch"] != 1000) + run.substitutions)
        notes.append(
            f"The paper has {_PAPER[run.kind]} bits a parameter. Not as in the paper, {run.name}: {said or 'nothing'}."
        )
    return Sheet("bits", "Bits memorised", columns, tuple(rows), tuple(notes))


def training_sheet(run: MemorizationRun, slug: str) -> Sheet:
    """One run over its epochs: the first, the last and some in between, those with local redundancy if it was measured."""
    epochs, values, errors = run.redundancy()
    measured = {int(e): pm(v, s) if math.isfinite(s) else f"{v:.4g}" for e, v, s in zip(epochs, values, errors)}
    recorded = sorted({*measured, max(run.records)} if len(measured) > 1 else run.records)
    chosen = sorted({recorded[i] for i in np.linspace(0, len(recorded) - 1, _LINES).round().astype(int)})
    rows = []
    for epoch in chosen:
        record = run.records[epoch]
        loss = record.get("train_loss")
        rows.append(
            (
                str(epoch),
                _DASH if loss is None else f"{loss:.4g}",
                f"{record['loss']:.4g}",
                _percent(record.get("accuracy")),
                f"{record['bits']:,.0f}",
                f"{record['bits_per_parameter']:.4f}",
                _percent(record.get("share_of_ceiling")),
                measured.get(epoch, _DASH),
            )
        )
    columns = ("epoch", "train loss", "loss", "accuracy", "bits", "bits/param", "ceiling", "LR ± s.e.")
    notes = ["train loss: mean over the epoch's batches as they were met, in train mode."]
    if measured:
        first = next(each for each in run.records.values() if each.get("measures"))
        notes.append("LR: " + str(first["measures"]["local_redundancy"].get("definition", "")) + ".")
    title = f"Over training: {run.name}, {_KINDS.get(run.kind, run.kind)}"
    return Sheet(slug, title, columns, tuple(rows), tuple(notes))


def speed_sheet(runs: Sequence[MemorizationRun]) -> Sheet:
    """What the runs cost."""
    rows = []
    for run in runs:
        train, done = run.seconds("train"), max(run.records)
        samples = run.samples * done
        rows.append(
            (
                run.name,
                f"{train / done:.3g}" if done else _DASH,
                f"{samples / train:,.0f}" if train else _DASH,
                f"{run.seconds('evaluate') / len(run.records):.3g}",
                f"{run.seconds('local_redundancy') / len(found):.3g}" if len(found := run.redundancy()[0]) else _DASH,
                run.machine or _DASH,
            )
        )
    columns = ("run", "s/epoch", "samples/s", "s/evaluation", "s/LR", "machine")
    notes = (
        "Training alone; making the data is in it. The first evaluation and measurement have the start-up in them.",
    )
    return Sheet("speed", "Time", columns, tuple(rows), notes)


def _draw(runs: Sequence[MemorizationRun], folder: Path) -> list[Figure]:
    figures = Figures(folder)
    figures.keep(
        "bits.png",
        bits_curves(runs, folder / "bits.png"),
        "Bits a parameter over training, from the loss over all samples in eval mode. Dashed: the ceiling, all bits that "
        "there are.",
    )
    figures.keep(
        "losses.png",
        loss_curves(runs, folder / "losses.png"),
        "Loss over all samples in eval mode; thin: mean over each epoch's batches as they were met, in train mode.",
    )
    figures.keep(
        "redundancy.png",
        redundancy_curves(runs, folder / "redundancy.png"),
        "Local redundancy while the network memorises, on inputs that are not among the samples. Band: ± 2 standard errors.",
    )
    return figures.drawn


def bits_curves(runs: Sequence[MemorizationRun], path: str | os.PathLike[str]) -> bool:
    """Draw bits a parameter over epochs (the paper's figure), a panel a kind of data; False before the first epoch."""

    def draw(axes: Any, run: MemorizationRun, colour: str) -> None:
        axes.plot(run.epochs, run.series("bits_per_parameter"), color=colour, linewidth=1.6, label=run.name)
        if math.isfinite(run.ceiling):
            axes.axhline(run.ceiling, color=colour, linewidth=1, linestyle="--")
            text = f"all there are: {run.ceiling:.2f}"
            axes.annotate(text, (0, run.ceiling), (0, -9), textcoords="offset points", fontsize=7, color=MUTED)

    return _panels([run for run in runs if len(run.records) > 1], path, "bits per parameter", draw)


def loss_curves(runs: Sequence[MemorizationRun], path: str | os.PathLike[str]) -> bool:
    """Draw the losses over epochs; False before the first."""

    def draw(axes: Any, run: MemorizationRun, colour: str) -> None:
        axes.plot(*run.train_losses(), color=colour, linewidth=0.6, alpha=0.6)
        axes.plot(run.epochs, run.series("loss"), color=colour, linewidth=1.6, label=run.name)

    losses = {"series": "mean squared error", "vision": "cross-entropy, nats"}
    return _panels([run for run in runs if len(run.records) > 1], path, losses, draw)


def redundancy_curves(runs: Sequence[MemorizationRun], path: str | os.PathLike[str]) -> bool:
    """Draw local redundancy over epochs, a logarithmic axis; False where it was measured less than twice."""

    def draw(axes: Any, run: MemorizationRun, colour: str) -> None:
        epochs, values, errors = run.redundancy()
        low, high = np.maximum(values - 2 * errors, 0.05 * values), values + 2 * errors
        axes.fill_between(epochs, low, high, color=colour, alpha=0.22, linewidth=0)
        axes.plot(epochs, values, color=colour, linewidth=1.4, marker="o", markersize=3, label=run.name)
        log_axis(axes)

    return _panels([run for run in runs if len(run.redundancy()[0]) > 1], path, "local redundancy", draw)


def _panels(
    runs: Sequence[MemorizationRun], path: str | os.PathLike[str], ylabel: str | dict[str, str], draw: Any
) -> bool:
    """One panel for each kind of data, one colour for each run."""
    kinds = [kind for kind in _KINDS if any(run.kind == kind for run in runs)]
    if not kinds:
        return False
    figure, panels = new_figure((8, 0.5 + 3.0 * len(kinds)), len(kinds), squeeze=False)
    for axes, kind in zip(panels.ravel(), kinds):
        chosen = [run for run in runs if run.kind == kind]
        for index, run in enumerate(chosen):
            draw(axes, run, COLOURS[index % len(COLOURS)])
        title = _KINDS[kind][0].upper() + _KINDS[kind][1:] + (f": {chosen[0].name}" if len(chosen) == 1 else "")
        style(axes, ylabel if isinstance(ylabel, str) else ylabel[kind], title)
        axes.set_xlabel("epoch", color=INK, fontsize=9)
        if 1 < len(chosen) <= len(COLOURS):
            axes.legend(fontsize=8, frameon=False, ncols=4)
    return save_figure(figure, path)


def _percent(value: float | None) -> str:
    return _DASH if value is None else f"{round(100 * value, 1) + 0.0:.1f} %"  # no minus at 0.0


def _signed(value: float) -> str:
    return f"{value:+.3f}" if math.isfinite(value) else _DASH
