"""The report of transfer runs: tables for the terminal, CSV, Markdown, PNG figures, a web page.

The page is one self-contained HTML file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastlr.display.figures import (
    COLOURS,
    MUTED,
    count_axis,
    dashed_line,
    legend_below,
    new_figure,
    style,
)
from fastlr.experiments.runs.records import Array
from fastlr.experiments.runs.report import Drawing, Report, make_folder, write_files
from fastlr.experiments.transfer import tables
from fastlr.experiments.transfer.fields import FIELDS, strategy
from fastlr.experiments.transfer.records import (
    TransferRun,
    differences,
    losses,
    read_transfer_runs,
    strategies,
)

_TRAIN, _VALIDATION, _REDUNDANCY = COLOURS[:3]
# As in Figure 5, of fine-tuning.
_CURVES = {
    "validation_loss": _TRAIN,
    "local_redundancy": _VALIDATION,
}


def write_transfer_report(
    paths: Sequence[str | Path], out: str | Path | None = None, *, figures: str = "png"
) -> Report:
    """Analyse run folders that differ by their seeds and write the report.

    Args:
        paths: Run folders, or folders of run folders; all of them are pooled.
        out: Folder for the files, made if missing; None: ``report`` in the one path given,
            ``fastlr-report`` for several.
        figures: "png", or "none".

    Returns:
        The report: ``index.html``, ``report.md``, a CSV file a table, ``report.json`` with all
            digits, and the figures.

    Raises:
        InputError: No runs there, runs that cannot be pooled, or a file that cannot be written.
    """
    runs = read_transfer_runs(paths)
    folder = make_folder(paths, out, figures)
    finished = tables.finished_of(runs)
    setting = tables.setting(runs)
    sheets = [
        tables.strategy_sheet(runs),
        tables.difference_sheet(runs),
        tables.pretraining_sheet(runs),
        tables.picks_sheet(runs),
        tables.runs_sheet(runs),
    ]
    by_seed = {}
    for run in finished:
        by_seed[str(run.seed)] = {name: run.loss(name) for name in run.picks}
    compared = []
    for pair in differences(finished):
        compared.append({**vars(pair), "mean": vars(pair.mean)})
    means = {name: vars(mean) for name, mean in losses(finished).items()}
    picks = {str(run.seed): run.picks for run in runs}
    numbers: dict[str, Any] = {
        "runs": [str(run.path) for run in runs],
        "setting": list(setting),
        "losses": means,
        "losses_by_seed": by_seed,
        "differences": compared,
        "picks": picks,
    }
    drawings = _drawings(finished or runs) if figures == "png" else []
    return write_files(
        folder,
        "Selecting checkpoints for transfer",
        (),
        [*setting, "Numbers with all digits are in report.json."],
        sheets,
        drawings,
        runs,
        numbers,
        screen=sheets[:3],
    )


def _drawings(runs: Sequence[TransferRun]) -> list[Drawing]:
    band = "One seed."
    if len(runs) > 1:
        band = f"Bands: ± one standard deviation over {len(runs)} seeds."
    return [
        Drawing(
            "finetuning.png",
            partial(finetuning_curves, tables.finished_of(runs)),
            "Validation loss on the target while fine-tuning the checkpoints that each strategy "
            "picked, mean of the fine-tuning runs, then over seeds; those with the same picks lie "
            f"on one another. Dashed: the end of training without pretraining. {band}",
        ),
        Drawing(
            "pretraining.png",
            partial(pretraining_curves, runs),
            "Training loss, validation loss and local redundancy (right axis, every measurement) "
            f"in pretraining. {band}",
        ),
    ]


def pretraining_curves(runs: Sequence[TransferRun]) -> Any:
    """Draw losses and local redundancy over the epochs of pretraining (the paper's Figure 4).

    Returns None before epoch 1.
    """
    last = tables.last_epoch(runs)
    if not last:
        return None
    figure, axes = new_figure((8, 4.2), 1)
    epochs = np.arange(last + 1.0)
    for name, colour in (("train_loss", _TRAIN), ("validation_loss", _VALIDATION)):
        rows = np.stack([run.measure(name)[: last + 1] for run in runs])
        _band(axes, epochs, rows, colour, FIELDS[name].label)
    style(axes, "mean squared error, normalised", f"Pretraining{_seeds(runs)}")
    count_axis(axes, "epoch")
    right = axes.twinx()
    points = [run.redundancy_points() for run in runs]
    known = min(len(x) for x, _ in points)
    _band(
        right,
        points[0][0][:known],
        np.stack([y[:known] for _, y in points]),
        _REDUNDANCY,
        "local redundancy",
    )
    inputs = ""
    if "redundancy_n" in runs[0].options:
        inputs = f", n = {runs[0].options['redundancy_n']} inputs"
    style(right, f"local redundancy, E||grad||²{inputs} (right axis)")
    right.grid(False)
    right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
    right.yaxis.get_offset_text().set(size=8, color=MUTED)
    legend_below(figure, axes, right)
    return figure


def finetuning_curves(runs: Sequence[TransferRun]) -> Any:
    """Draw the validation loss over the steps of fine-tuning (the paper's Figure 5).

    Returns None without strategies to draw.

    The two strategies of the paper's figure have bands, the others thin lines.
    """
    names = [name for name in strategies(runs) if name != "no_pretraining"]
    if not names:
        return None
    figure, axes = new_figure((8, 4.2), 1)
    colours = iter(COLOURS[2:])
    for name in names:
        curves = [run.curve(name) for run in runs]
        text = strategy(name).label.replace("†", "(sees the target)")
        steps = max((x for x, _ in curves), key=len)
        rows = np.stack([np.append(y, np.full(len(steps) - len(y), y[-1])) for _, y in curves])
        if name in _CURVES:
            _band(axes, steps, rows, _CURVES[name], text)
        else:
            axes.plot(steps, rows.mean(0), color=next(colours), linewidth=0.9, label=text)
    if "no_pretraining" in runs[0].picks:
        end = float(np.mean([run.loss("no_pretraining") for run in runs]))
        dashed_line(axes, end, "no pretraining, at its end")
    style(
        axes,
        "mean squared error on the target, normalised",
        f"Fine-tuning, validation loss{_seeds(runs)}",
    )
    count_axis(axes, "optimiser step")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _seeds(runs: Sequence[TransferRun]) -> str:
    if len(runs) == 1:
        return ", one seed"
    return f", mean of n = {len(runs)} seeds (bands: ± 1 standard deviation)"


def _band(axes: Any, x: Array, rows: Array, colour: str, text: str) -> None:
    """Draw the mean of rows, with a band of their standard deviation where there are several."""
    mean = rows.mean(0)
    known = np.isfinite(mean)
    axes.plot(x[known], mean[known], color=colour, linewidth=1.6, label=text)
    if len(rows) > 1:
        deviation = rows.std(0, ddof=1)[known]
        axes.fill_between(
            x[known],
            mean[known] - deviation,
            mean[known] + deviation,
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
