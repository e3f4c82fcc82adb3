"""The report of memorization runs: tables for the terminal, CSV, Markdown, PNG figures, a web page.

The page is one self-contained HTML file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastlr.display.figures import (
    COLOURS,
    MUTED,
    count_axis,
    error_band,
    log_axis,
    new_figure,
    save_figure,
    style,
)
from fastlr.display.sheets import DASH, Columns, Sheet, shown
from fastlr.display.tables import pm
from fastlr.experiments.memorization.records import MemorizationRun, alike, read_memorization_runs
from fastlr.experiments.runs.options import not_as_in_the_paper
from fastlr.experiments.runs.records import number
from fastlr.experiments.runs.report import Drawing, Report, make_folder, write_files
from fastlr.experiments.statistics.seeds import mean_over_seeds
from fastlr.experiments.training.options import training_text
from fastlr.models.patchtst import size_beside_the_papers

_KINDS = {"series": "Gaussian series", "vision": "images with random labels"}
_PAPER = {"series": 1.7, "vision": 1.0}  # bits a parameter, section 4.3
_LINES, _SHOWN = 13, 4  # rows of a table over epochs; runs that have one in the terminal
_DEFINITIONS = {
    "series": "Gaussian series: bits = (n m / 2) log2(1 / D), D the mean squared error an "
    "element over all n targets of m "
    "elements, whose variance is 1 (Proposition 3.5). There is no ceiling.",
    "vision": "Images with random labels: bits = n log2 C - n CE / ln 2, CE the mean "
    "cross-entropy in nats over all n "
    "images of C classes (Theorem 3.2); the ceiling is n log2 C.",
}


def write_memorization_report(
    paths: Sequence[str | Path], out: str | Path | None = None, *, figures: str = "png"
) -> Report:
    """Analyse run folders and write the report.

    Args:
        paths: Run folders, or folders of run folders.
        out: Folder for the files, made if missing; None: ``report`` in the one path given,
            ``fastlr-report`` for several.
        figures: "png", or "none".

    Returns:
        The report: ``index.html``, ``report.md``, a CSV file a table, ``report.json`` with all
            digits, and the figures.

    Raises:
        InputError: No runs there, or a file that cannot be written.
    """
    runs = read_memorization_runs(paths)
    folder = make_folder(paths, out, figures)
    bits, speed = bits_sheet(runs), speed_sheet(runs)
    training = [training_sheet(run, f"training-{i}") for i, run in enumerate(runs)]
    screen = [bits, *(training if len(runs) <= _SHOWN else []), speed]
    sentences = findings(runs)
    numbers: dict[str, Any] = {
        "findings": sentences,
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
        ],
    }
    lead = (
        "Bits that networks have taken up of random targets, over training. Numbers with all "
        "digits are in report.json."
    )
    drawings = _drawings(runs) if figures == "png" else []
    return write_files(
        folder,
        "Memorization",
        sentences,
        [lead],
        [bits, *training, speed],
        drawings,
        runs,
        numbers,
        screen=screen,
    )


def findings(runs: Sequence[MemorizationRun]) -> list[str]:
    """Say how many bits per parameter the runs have memorised, beside the paper's figure.

    Say also how much they gained in the last tenth of the epochs: whether they could take up more.
    """
    sentences = []
    for group in alike(runs):
        mean = mean_over_seeds([run.last["bits_per_parameter"] for run in group])
        of_seeds = (
            f" ± {mean.stderr:.3f} over {mean.n} seeds"
            if mean.n > 1
            else " (one seed, so without an error)"
        )
        gains = [gain for run in group if math.isfinite(gain := run.late_gain())]
        late = (
            f", {max(gains, key=abs):+.3f} of them in the last tenth of the epochs" if gains else ""
        )
        sentences.append(
            f"{group[0].name}: {mean.value:.3f}{of_seeds} bits a parameter of "
            f"{_KINDS.get(group[0].kind, group[0].kind)}{late}; the paper has "
            f"{_PAPER[group[0].kind]}."
        )
    return sentences


def bits_sheet(runs: Sequence[MemorizationRun]) -> Sheet:
    """The bits that each run has memorised at its last record, and means over seeds."""
    groups = alike(runs)
    columns: Columns[MemorizationRun] = {
        "run": lambda run: run.name,
        "epochs": lambda run: str(run.last["epoch"]),
        "parameters": lambda run: f"{run.parameters:,}",
        "loss": lambda run: f"{run.last['loss']:.4g}",
        "bits": lambda run: f"{run.last['bits']:,.0f}",
        "bits/param": lambda run: f"{run.last['bits_per_parameter']:.3f}",
        "ceiling": lambda run: _percent(run.last.get("share_of_ceiling")),
        "last 10 %": lambda run: shown(run.late_gain(), "{:+.3f}"),
    }
    notes = [_DEFINITIONS[kind] for kind in _KINDS if any(run.kind == kind for run in runs)]
    notes.append(
        "Losses are over all samples in eval mode. last 10 %: bits a parameter that came in the "
        "last tenth of the epochs; far from 0, the network has not taken up all that it could."
    )
    for run, *_ in groups:
        epochs = run.last["epoch"]
        changes = [*([f"epochs {epochs} for 1000"] if epochs != 1000 else []), *run.substitutions]
        changes += size_beside_the_papers(run.parameters) if run.kind == "series" else []
        unlike = not_as_in_the_paper(changes, run.name)
        notes.append(
            f"The paper has {_PAPER[run.kind]} bits a parameter. {unlike} {training_text(run)}"
        )
    return Sheet.of(
        "bits", "Bits memorised", [run for group in groups for run in group], columns, notes
    )


def training_sheet(run: MemorizationRun, slug: str) -> Sheet:
    """Return the table of one run over its epochs: the first, the last and some in between.

    The epochs are those with local redundancy if it was measured.
    """
    epochs, values, errors = run.redundancy()
    measured = {
        int(e): pm(v, s) if math.isfinite(s) else f"{v:.4g}"
        for e, v, s in zip(epochs, values, errors)
    }
    recorded = sorted({*measured, max(run.records)} if len(measured) > 1 else run.records)
    chosen = sorted(
        {recorded[i] for i in np.linspace(0, len(recorded) - 1, _LINES).round().astype(int)}
    )
    columns: Columns[dict[str, Any]] = {
        "epoch": lambda record: str(record["epoch"]),
        "train loss": lambda record: shown(record.get("train_loss"), "{:.4g}"),
        "loss": lambda record: f"{record['loss']:.4g}",
        "accuracy": lambda record: _percent(record.get("accuracy")),
        "bits": lambda record: f"{record['bits']:,.0f}",
        "bits/param": lambda record: f"{record['bits_per_parameter']:.4f}",
        "ceiling": lambda record: _percent(record.get("share_of_ceiling")),
        "LR ± s.e.": lambda record: measured.get(record["epoch"], DASH),
    }
    notes = ["train loss: mean over the epoch's batches as they were met, in train mode."]
    if measured:
        record = next(record for record in run.records.values() if record.get("measures"))
        notes.append(
            "LR: " + str(record["measures"]["local_redundancy"].get("definition", "")) + "."
        )
    title = f"Over training: {run.name}, {_KINDS.get(run.kind, run.kind)}"
    return Sheet.of(slug, title, [run.records[epoch] for epoch in chosen], columns, notes)


def speed_sheet(runs: Sequence[MemorizationRun]) -> Sheet:
    """Seconds of training and measuring, and the machine."""

    def rate(amount: float, divisor: float, form: str) -> str:
        return form.format(amount / divisor) if divisor else DASH

    columns: Columns[MemorizationRun] = {
        "run": lambda run: run.name,
        "s/epoch": lambda run: rate(run.seconds("train"), max(run.records), "{:.3g}"),
        "samples/s": lambda run: rate(
            run.samples * max(run.records), run.seconds("train"), "{:,.0f}"
        ),
        "s/evaluation": lambda run: rate(run.seconds("evaluate"), len(run.records), "{:.3g}"),
        "s/LR": lambda run: rate(
            run.seconds("local_redundancy"), len(run.redundancy()[0]), "{:.3g}"
        ),
        "machine": lambda run: run.machine or DASH,
    }
    note = (
        "Training alone; making the data is in it. The first evaluation and measurement have the "
        "start-up in them."
    )
    return Sheet.of("speed", "Time", runs, columns, [note])


def _drawings(runs: Sequence[MemorizationRun]) -> list[Drawing]:
    return [
        Drawing(
            "bits.png",
            partial(bits_curves, runs),
            "Bits a parameter over training, from the loss over all samples in eval mode."
            + (
                " Dashed: the ceiling of images, all bits that there are."
                if any(map(_has_ceiling, runs))
                else ""
            ),
        ),
        Drawing(
            "losses.png",
            partial(loss_curves, runs),
            "Loss over all samples in eval mode; thin: mean over each epoch's batches as they "
            "were met, in train mode.",
        ),
        Drawing(
            "redundancy.png",
            partial(redundancy_curves, runs),
            "Local redundancy while the network memorises, on inputs that are not among the "
            "samples. Band: ± 2 standard errors.",
        ),
    ]


def bits_curves(runs: Sequence[MemorizationRun], path: str | os.PathLike[str]) -> bool:
    """Draw bits per parameter over epochs (the paper's figure), a panel for each kind of data.

    Returns False before the first epoch.
    """

    def draw(axes: Any, run: MemorizationRun, colour: str) -> None:
        axes.plot(
            run.epochs,
            run.series("bits_per_parameter"),
            color=colour,
            linewidth=1.6,
            label=run.name,
        )
        if _has_ceiling(run):
            text = f"ceiling, all bits that there are: {run.ceiling:.2f}"
            axes.axhline(run.ceiling, color=MUTED, linewidth=1, linestyle="--", label=text)

    return _panels(
        [run for run in runs if len(run.records) > 1],
        path,
        dict.fromkeys(_KINDS, "bits per parameter"),
        draw,
    )


def loss_curves(runs: Sequence[MemorizationRun], path: str | os.PathLike[str]) -> bool:
    """Draw the losses over epochs; False before the first."""

    def draw(axes: Any, run: MemorizationRun, colour: str) -> None:
        axes.plot(
            *run.train_losses(),
            color=colour,
            linewidth=0.6,
            alpha=0.6,
            label="thin: in training, by epoch",
        )
        axes.plot(
            run.epochs,
            run.series("loss"),
            color=colour,
            linewidth=1.6,
            label=f"{run.name}, all samples, eval mode",
        )

    losses = {"series": "mean squared error, variance 1", "vision": "cross-entropy, nats"}
    return _panels([run for run in runs if len(run.records) > 1], path, losses, draw)


def redundancy_curves(runs: Sequence[MemorizationRun], path: str | os.PathLike[str]) -> bool:
    """Draw local redundancy over epochs, on a logarithmic axis.

    Returns False where it was measured less than twice.
    """

    def draw(axes: Any, run: MemorizationRun, colour: str) -> None:
        epochs, values, errors = run.redundancy()
        error_band(axes, epochs, values, errors, colour)
        inputs = (
            f", n = {run.options['redundancy_n']} inputs" if "redundancy_n" in run.options else ""
        )
        told = f"{run.name}{inputs} (band: ± 2 standard errors)"
        axes.plot(epochs, values, color=colour, linewidth=1.4, marker="o", markersize=3, label=told)
        log_axis(axes)

    return _panels(
        [run for run in runs if len(run.redundancy()[0]) > 1],
        path,
        dict.fromkeys(_KINDS, "local redundancy, E||grad||²"),
        draw,
    )


def _panels(
    runs: Sequence[MemorizationRun],
    path: str | os.PathLike[str],
    ylabel: dict[str, str],  # by kind of data
    draw: Callable[[Any, MemorizationRun, str], None],  # axes, run, colour
) -> bool:
    """One panel for each kind of data, one colour for each run."""
    kinds = [kind for kind in _KINDS if any(run.kind == kind for run in runs)]
    if not kinds:
        return False
    figure, panels = new_figure((10, 0.5 + 3.0 * len(kinds)), len(kinds), squeeze=False)
    for axes, kind in zip(panels.ravel(), kinds):
        chosen = [run for run in runs if run.kind == kind]
        for index, run in enumerate(chosen):
            draw(axes, run, COLOURS[index % len(COLOURS)])
        samples = ", ".join(f"{n:,}" for n in sorted({run.samples for run in chosen}) if n)
        style(
            axes,
            ylabel[kind],
            _KINDS[kind][0].upper()
            + _KINDS[kind][1:]
            + (f", n = {samples} samples" if samples else ""),
        )
        count_axis(axes, "epoch")
        handles, texts = axes.get_legend_handles_labels()
        unique = dict(zip(texts, handles))
        if len(unique) <= 2 * len(COLOURS):
            place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
            axes.legend(unique.values(), unique.keys(), fontsize=8, frameon=False, **place)
    return save_figure(figure, path)


def _has_ceiling(run: MemorizationRun) -> bool:
    return math.isfinite(run.ceiling)


def _percent(value: float | None) -> str:
    return shown(round(100 * number(value), 1) + 0.0, "{:.1f} %")  # no minus at 0.0
