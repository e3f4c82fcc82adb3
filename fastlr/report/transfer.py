"""The report of transfer runs: terminal tables, CSV, Markdown, PNG figures and one self-contained HTML page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlr.analysis.transfer import TransferRun, differences, losses, read_transfer_runs
from fastlr.report import transfer_tables as tables
from fastlr.report.figures import COLOURS, INK, MUTED, new_figure, save_figure, style
from fastlr.report.folder import Figure, Figures, Report, make_folder, write_files
from fastlr.report.sheets import Sheet

Array = NDArray[np.float64]
_TRAIN, _VALIDATION, _REDUNDANCY = COLOURS[:3]
_CURVES = {"validation_loss": _TRAIN, "local_redundancy": _VALIDATION}  # the paper's Figure 4


def write_transfer_report(
    paths: Sequence[str | Path], out: str | Path | None = None, *, figures: str = "png"
) -> Report:
    """Analyse run folders that differ by their seeds and write the report.

    Args:
        paths: Run folders, or folders of run folders; all of them are pooled.
        out: Folder for the files, made if missing; None: ``report`` in the one path given, ``fastlr-report`` for several.
        figures: "png", or "none".

    Returns:
        The report: ``index.html``, ``report.md``, a CSV file a table, ``report.json`` with all digits, and the figures.

    Raises:
        InputError: No runs there, runs that cannot be pooled, or a file that cannot be written.
    """
    runs = read_transfer_runs(paths)
    folder = make_folder(paths, out, figures)
    done = [run for run in runs if run.complete]
    screen = (tables.strategy_sheet(runs), tables.difference_sheet(runs), tables.pretraining_sheet(runs))
    rest = (tables.picks_sheet(runs), tables.runs_sheet(runs))
    drawn = _draw(runs, done, folder) if figures == "png" else []
    places = {"finetuning.png": "strategies", "pretraining.png": "pretraining"}
    parts: list[Sheet | Figure] = []
    for sheet in (*screen, *rest):
        parts.append(sheet)
        parts += [figure for figure in drawn if places[figure[0].name] == sheet.slug]
    numbers: dict[str, Any] = {
        "runs": [str(run.path) for run in runs],
        "setting": list(tables.setting(runs)),
        "losses": {name: vars(mean) for name, mean in losses(done).items()},
        "losses_by_seed": {str(run.seed): {name: run.loss(name) for name in run.picks} for run in done},
        "differences": [{**vars(each), "mean": vars(each.mean)} for each in differences(done)] if done else [],
        "picks": {str(run.seed): run.picks for run in runs},
    }
    lead = [*tables.setting(runs), "Numbers with all digits are in report.json."]
    page = write_files(folder, "Selecting checkpoints for transfer", lead, parts, runs, numbers)
    return Report(folder, page, (*screen, *rest), screen, tuple(drawn))


def _draw(runs: Sequence[TransferRun], done: Sequence[TransferRun], folder: Path) -> list[Figure]:
    figures, shown = Figures(folder), done or runs
    band = f"Bands: ± one standard deviation over {len(shown)} seeds." if len(shown) > 1 else "One seed."
    figures.keep(
        "pretraining.png",
        pretraining_curves(shown, folder / "pretraining.png"),
        f"Training loss, validation loss and local redundancy (right axis, every measurement) in pretraining. {band}",
    )
    figures.keep(
        "finetuning.png",
        bool(done) and finetuning_curves(done, folder / "finetuning.png"),
        "Validation loss on the target while fine-tuning the checkpoints that each strategy picked, mean of the "
        "fine-tuning runs, then over seeds; those with the same picks lie on one another. Dashed: the end of training "
        f"without pretraining. {band}",
    )
    return figures.drawn


def pretraining_curves(runs: Sequence[TransferRun], path: str | os.PathLike[str]) -> bool:
    """Draw the losses and local redundancy over the epochs of pretraining (the paper's Figure 3); False before epoch 1."""
    last = min(max(run.epochs, default=0) for run in runs)
    if not last:
        return False
    figure, axes = new_figure((8, 4.2), 1)
    epochs = np.arange(last + 1.0)
    for name, colour, text in (
        ("train_loss", _TRAIN, "training loss"),
        ("validation_loss", _VALIDATION, "validation loss"),
    ):
        _band(axes, epochs, np.stack([run.numbers(name)[: last + 1] for run in runs]), colour, text)
    style(axes, "mean squared error", "Pretraining")
    axes.set_xlabel("epoch", color=INK, fontsize=9)
    right = axes.twinx()
    points = [run.redundancy_points() for run in runs]
    known = min(len(x) for x, _ in points)
    _band(right, points[0][0][:known], np.stack([y[:known] for _, y in points]), _REDUNDANCY, "local redundancy")
    style(right, "local redundancy (right axis)")
    right.grid(False)
    right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
    right.yaxis.get_offset_text().set(size=8, color=MUTED)
    handles = [line for each in (axes, right) for line in each.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.55, 1))
    return save_figure(figure, path)


def finetuning_curves(runs: Sequence[TransferRun], path: str | os.PathLike[str]) -> bool:
    """Draw the validation loss over the steps of fine-tuning (the paper's Figure 4); False without strategies to draw.

    The two strategies of the paper's figure have bands, the others thin lines.
    """
    names = [name for name in runs[0].picks if name != "no_pretraining"]
    if not names:
        return False
    figure, axes = new_figure((8, 4.2), 1)
    colours = iter(COLOURS[2:])
    for name in names:
        curves = [run.curve(name) for run in runs]
        steps = max((x for x, _ in curves), key=len)
        rows = np.stack([np.append(y, np.full(len(steps) - len(y), y[-1])) for _, y in curves])
        if name in _CURVES:
            _band(axes, steps, rows, _CURVES[name], tables.label(name))
        else:
            axes.plot(steps, rows.mean(0), color=next(colours), linewidth=0.9, label=tables.label(name))
    if "no_pretraining" in runs[0].picks:
        end = float(np.mean([run.loss("no_pretraining") for run in runs]))
        axes.axhline(end, color=MUTED, linewidth=1, linestyle="--", label="no pretraining, at its end")
    style(axes, "validation loss on the target", "Fine-tuning")
    axes.set_xlabel("optimiser step", color=INK, fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return save_figure(figure, path)


def _band(axes: Any, x: Array, rows: Array, colour: str, text: str) -> None:
    """Draw the mean of rows, with a band of their standard deviation where there are several."""
    mean = rows.mean(0)
    known = np.isfinite(mean)
    axes.plot(x[known], mean[known], color=colour, linewidth=1.6, label=text)
    if len(rows) > 1:
        deviation = rows.std(0, ddof=1)[known]
        axes.fill_between(
            x[known], mean[known] - deviation, mean[known] + deviation, color=colour, alpha=0.18, linewidth=0
        )
