"""The report of memorization runs: tables for the terminal, CSV, Markdown, PNG figures, a web page.

The page is one self-contained HTML file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastlr.display.figures import (
    COLOURS,
    count_axis,
    dashed_line,
    error_band,
    labels_once,
    legend,
    log_axis,
    new_figure,
    style,
)
from fastlr.display.sheets import DASH, Sheet, shown
from fastlr.display.tables import pm
from fastlr.experiments.memorization.fields import FIELDS
from fastlr.experiments.memorization.options import OPEN, MemorizeOptions
from fastlr.experiments.memorization.records import MemorizationRun, alike, read_memorization_runs
from fastlr.experiments.runs.records import number
from fastlr.experiments.runs.report import (
    Drawing,
    Report,
    differences_from_the_paper,
    make_folder,
    write_files,
)
from fastlr.experiments.statistics.seeds import mean_over_seeds
from fastlr.experiments.training.options import training_text
from fastlr.models.patchtst import size_beside_the_papers

_LINES, _SHOWN = 13, 4  # rows of a table over epochs; runs that have one in the terminal


class Kind(NamedTuple):
    """A kind of random data to memorise.

    Attributes:
        label: In words.
        paper: Bits a parameter in the paper's section 4.3.
        loss: What the loss is, with its unit.
        definition: Definition of the bits.
    """

    label: str
    paper: float
    loss: str
    definition: str


WEIGHT_BITS = 16  # of a weight in bfloat16, as the paper trains
KINDS = {
    "series": Kind(
        "Gaussian series",
        1.7,
        "mean squared error, variance 1",
        "Gaussian series: bits = (n m / 2) log2(1 / D), D the mean squared error an element over "
        "all n targets of m elements, whose variance is 1 (Proposition 3.5). There is no ceiling.",
    ),
    "vision": Kind(
        "images with random labels",
        1.0,
        "cross-entropy, nats",
        "Images with random labels: bits = n log2 C - n CE / ln 2, CE the mean cross-entropy in "
        "nats over all n images of C classes (Theorem 3.2); the ceiling is n log2 C.",
    ),
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
    screen = [bits, *training, speed] if len(runs) <= _SHOWN else [bits, speed]
    numbers = {"runs": [_numbers_of(run) for run in runs]}
    lead = (
        "Bits that networks have taken up of random targets, over training. Numbers with all "
        "digits are in report.json."
    )
    drawings = _drawings(runs) if figures == "png" else []
    return write_files(
        folder,
        "Memorization",
        (),
        [lead, differences_from_the_paper(runs, map(_changes, runs), MemorizeOptions(), OPEN)],
        [bits, *training, speed],
        drawings,
        runs,
        numbers,
        screen=screen,
    )


def _numbers_of(run: MemorizationRun) -> dict[str, Any]:
    """Return what ``report.json`` has of a run."""
    return {
        "path": str(run.path),
        "kind": run.kind,
        "parameters": run.parameters,
        "ceiling_bits_per_parameter": run.ceiling,
        "substitutions": run.substitutions,
        "late_gain": run.late_gain(),
        "records": run.records,
    }


def _late(run: MemorizationRun) -> str:
    """Name the epochs of a run that count as its last."""
    if run.late_is_a_tenth:
        return "last tenth of the epochs"
    return f"last {run.late_epochs} of {run.epochs[-1]} epochs"


def bits_sheet(runs: Sequence[MemorizationRun]) -> Sheet:
    """The bits that each run has memorised at its last record, and means over seeds."""
    columns = [
        "run",
        "epochs",
        "parameters",
        "loss",
        "bits",
        "bits/param",
        "ceiling",
        "of 16",
        "last 10 %",
    ]
    groups = alike(runs)
    rows = []
    for group in groups:
        rows += [_bits_row(run) for run in group]
        if len(group) > 1:
            mean = mean_over_seeds([run.last["bits_per_parameter"] for run in group])
            name = f"{group[0].name}: mean of {mean.n} seeds"
            rows.append((name, *[""] * 4, pm(mean.value, mean.stderr), *[""] * 3))
    kinds = {run.kind for run in runs}
    notes = [kind.definition for name, kind in KINDS.items() if name in kinds]
    notes.append(
        f"of 16: share of the {WEIGHT_BITS} bits of a bfloat16 weight, which the paper calls the "
        "theoretical ceiling; the ceiling before it is how many bits the labels have."
    )
    notes.append(
        "Losses are over all samples in eval mode. last 10 %: bits a parameter that came in the "
        "last tenth of the epochs; far from 0, the network has not taken up all that it could."
    )
    others = [run for run in runs if math.isfinite(run.late_gain()) and not run.late_is_a_tenth]
    if others:
        text = ", ".join(f"{run.name}: {_late(run)}" for run in others)
        notes.append(f"last 10 % is of more epochs where no record is at their start ({text}).")
    for run in [group[0] for group in groups]:
        paper = KINDS[run.kind].paper
        notes.append(f"{run.name}: the paper has {paper} bits a parameter. {training_text(run)}")
    return Sheet("bits", "Bits memorised", columns, rows, notes)


def _bits_row(run: MemorizationRun) -> tuple[str, ...]:
    """Return the row of one run in the table of bits."""
    return (
        run.name,
        str(run.last["epoch"]),
        f"{run.parameters:,}",
        f"{run.last['loss']:.4g}",
        f"{run.last['bits']:,.0f}",
        f"{run.last['bits_per_parameter']:.3f}",
        FIELDS["share_of_ceiling"].text(number(run.last.get("share_of_ceiling"))),
        f"{100 * run.last['bits_per_parameter'] / WEIGHT_BITS:.1f} %",
        shown(run.late_gain(), "{:+.3f}"),
    )


def _changes(run: MemorizationRun) -> list[str]:
    """Return the options in which a run differs from the paper, each in words."""
    changes = list(run.substitutions)
    if run.last["epoch"] != 1000:
        changes.insert(0, f"epochs {run.last['epoch']} for 1000")
    if run.kind == "series":
        changes += size_beside_the_papers(run.parameters)
    return changes


def training_sheet(run: MemorizationRun, slug: str) -> Sheet:
    """Return the table of one run over its epochs: the first, the last and some in between.

    The epochs are those with local redundancy if it was measured.
    """
    measured, values, errors = run.redundancy()
    redundancy = {}
    for epoch, value, error in zip(measured, values, errors):
        redundancy[epoch] = pm(value, error) if math.isfinite(error) else f"{value:.4g}"
    recorded = sorted({*redundancy, run.epochs[-1]}) if len(redundancy) > 1 else run.epochs
    places = np.linspace(0, len(recorded) - 1, _LINES).round().astype(int)
    columns = [*(field.short for field in FIELDS.values()), "LR ± s.e."]
    rows = []
    for epoch in dict.fromkeys(recorded[place] for place in places):
        record = run.rows[epoch]
        cells = [field.text(number(record.get(field.name))) for field in FIELDS.values()]
        rows.append((*cells, redundancy.get(epoch, DASH)))
    notes = ["train loss: mean over the epoch's batches as they were met, in train mode."]
    if redundancy:
        notes.append(f"LR: {run.definition('local_redundancy')}.")
    title = f"Over training: {run.name}, {KINDS[run.kind].label}"
    return Sheet(slug, title, columns, rows, notes)


def speed_sheet(runs: Sequence[MemorizationRun]) -> Sheet:
    """Seconds of training and measuring, and the machine."""
    columns = ("run", "s/epoch", "samples/s", "s/evaluation", "s/LR", "machine")
    rows = []
    for run in runs:
        epochs, training = run.epochs[-1], run.spent("train")
        row = (
            run.name,
            _rate(training, epochs, "{:.3g}"),
            _rate(run.samples * epochs, training, "{:,.0f}"),
            _rate(run.spent("evaluate"), len(run.epochs), "{:.3g}"),
            _rate(run.spent("local_redundancy"), len(run.redundancy()[0]), "{:.3g}"),
            run.machine or DASH,
        )
        rows.append(row)
    note = (
        "Training alone; making the data is in it. The first evaluation and measurement have the "
        "start-up in them."
    )
    return Sheet("speed", "Time", columns, rows, (note,))


def _rate(amount: float, divisor: float, form: str) -> str:
    return form.format(amount / divisor) if divisor else DASH


def _drawings(runs: Sequence[MemorizationRun]) -> list[Drawing]:
    ceiling = ""
    if any(map(_has_ceiling, runs)):
        ceiling = " Dashed: the ceiling of images, all bits that there are."
    return [
        Drawing(
            "bits.png",
            partial(bits_curves, runs),
            "Bits a parameter over training, from the loss over all samples in eval mode."
            f"{ceiling}",
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


def bits_curves(runs: Sequence[MemorizationRun]) -> Any:
    """Draw bits per parameter over epochs (the paper's figure), a panel for each kind of data.

    Returns None before the first epoch.
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
            dashed_line(axes, run.ceiling, text)

    labels = dict.fromkeys(KINDS, FIELDS["bits_per_parameter"].label)
    return _panels([run for run in runs if len(run) > 1], labels, draw)


def loss_curves(runs: Sequence[MemorizationRun]) -> Any:
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

    labels = {name: kind.loss for name, kind in KINDS.items()}
    return _panels([run for run in runs if len(run) > 1], labels, draw)


def redundancy_curves(runs: Sequence[MemorizationRun]) -> Any:
    """Draw local redundancy over epochs, on a logarithmic axis.

    Returns None where it was measured less than twice.
    """

    def draw(axes: Any, run: MemorizationRun, colour: str) -> None:
        epochs, values, errors = run.redundancy()
        error_band(axes, epochs, values, errors, colour)
        inputs = ""
        if "redundancy_n" in run.options:
            inputs = f", n = {run.options['redundancy_n']} inputs"
        text = f"{run.name}{inputs} (band: ± 2 standard errors)"
        axes.plot(epochs, values, color=colour, linewidth=1.4, marker="o", markersize=3, label=text)
        log_axis(axes)

    labels = dict.fromkeys(KINDS, "local redundancy, E||grad||²")
    return _panels([run for run in runs if len(run.redundancy()[0]) > 1], labels, draw)


def _panels(
    runs: Sequence[MemorizationRun],
    ylabel: dict[str, str],  # by kind of data
    draw: Callable[[Any, MemorizationRun, str], None],  # axes, run, colour
) -> Any:
    """One panel for each kind of data, one colour for each run."""
    given = {run.kind for run in runs}
    kinds = [kind for kind in KINDS if kind in given]
    if not kinds:
        return None
    figure, panels = new_figure((10, 0.5 + 3.0 * len(kinds)), len(kinds), squeeze=False)
    for axes, kind in zip(panels.ravel(), kinds):
        chosen = [run for run in runs if run.kind == kind]
        for run, colour in zip(chosen, cycle(COLOURS)):
            draw(axes, run, colour)
        title = KINDS[kind].label
        counts = {run.samples for run in chosen} - {0}
        samples = ", ".join(f"{n:,}" for n in sorted(counts))
        if samples:
            title += f", n = {samples} samples"
        style(axes, ylabel[kind], title[0].upper() + title[1:])
        count_axis(axes, "epoch")
        if len(labels_once(axes)) <= 2 * len(COLOURS):
            legend(axes, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _has_ceiling(run: MemorizationRun) -> bool:
    return math.isfinite(run.ceiling)
