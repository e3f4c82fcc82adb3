"""Figures of continual runs: curves over tasks, the correlations, local redundancy by layer and task."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlr.analysis import INPUTS, Correlation, Run
from fastlr.report.continual_tables import hundred, label, order
from fastlr.report.figures import COLOURS, GRID, INK, MUTED, log_axis, new_figure, save_figure, style
from fastlr.report.tables import group_to_fit

_SMOOTH, _FROM = 30, 150  # tasks a running mean, drawn in series of at least so many
_COLUMNS = 400  # of the heat map: more tasks are averaged
_ABLATION = {
    "local_redundancy_next_task": INK,
    "local_redundancy_real": INK,
    "local_redundancy": COLOURS[0],
    "local_redundancy_noise": COLOURS[1],
    "local_redundancy_series": COLOURS[0],
}
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}  # of a number on a line
Array = NDArray[np.float64]


def redundancy_and_accuracy(runs: Sequence[Run], path: str | os.PathLike[str]) -> bool:
    """Draw local redundancy (band: two standard errors) above accuracy over tasks; False if neither was recorded.

    Thin: each task; thick, from 150 tasks on: running mean over 30 (of the logarithm, for local redundancy).
    """
    lr = [run for run in runs if np.isfinite(run.measure("local_redundancy")).any()]
    accurate = [run for run in runs if np.isfinite(run.accuracy).any()]
    if not lr and not accurate:
        return False
    figure, (top, bottom) = new_figure((9, 6.2), 2, sharex=True)
    for index, run in enumerate(runs):
        colour = COLOURS[index % len(COLOURS)]
        name = run.name if len(runs) > 1 else ""
        tasks, values, error = (
            np.arange(len(run)),
            run.measure("local_redundancy"),
            run.measure("local_redundancy", "stderr"),
        )
        values = np.where(values > 0, values, np.nan)
        if np.isfinite(error).any():
            low, high = np.maximum(values - 2 * error, 0.05 * values), values + 2 * error
            shown = np.isfinite(low) & np.isfinite(high)
            top.fill_between(tasks[shown], low[shown], high[shown], color=colour, alpha=0.22, linewidth=0)
        _curve(top, tasks, np.log(values), colour, name, exponential=True)
        _curve(bottom, tasks, 100 * run.accuracy, colour, name)
    style(top, "local redundancy", "Local redundancy (band: ± 2 standard errors) and accuracy over tasks")
    style(bottom, "held-out accuracy, %")
    if lr:
        log_axis(top)
    bottom.set_xlabel("task", color=INK, fontsize=9)
    if len(runs) > 1:
        bottom.legend(fontsize=8, frameon=False, ncols=4)
    return save_figure(figure, path)


def ablation_curves(runs: Sequence[Run], path: str | os.PathLike[str], at: str = "task") -> bool:
    """Draw local redundancy on synthetic and on real inputs over tasks; False with fewer than two kinds of inputs."""
    names = [name for name in _ABLATION if any(np.isfinite(run.measure(name)).any() for run in runs)]
    if len(names) < 2:
        return False
    runs = [run for run in runs if any(name in run.measures for name in names)]
    figure, panels = new_figure((9, 0.6 + 3.0 * len(runs)), len(runs), sharex=True)
    for axes, run in zip(np.atleast_1d(panels), runs):
        for name in names:
            values = run.measure(name)
            values = np.log(np.where(values > 0, values, np.nan))
            _curve(axes, np.arange(len(run)), values, _ABLATION[name], INPUTS[name], exponential=True)
        log_axis(axes)
        style(
            axes, "local redundancy", "Local redundancy by kind of input" + (f": {run.name}" if len(runs) > 1 else "")
        )
        axes.legend(
            fontsize=8, frameon=False, ncols=len(names), loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3
        )
    np.atleast_1d(panels)[-1].set_xlabel(at, color=INK, fontsize=9)
    return save_figure(figure, path)


def layer_map(run: Run, path: str | os.PathLike[str], most: int = 40) -> bool:
    """Draw local redundancy by module (network order, top to bottom) and task, colours logarithmic; False without it.

    Modules are joined into blocks until there are at most ``most`` rows; beyond 400 columns tasks are averaged.
    """
    from matplotlib.colors import LogNorm

    found = run.per_parameter()
    if not found:
        return False
    names = next(iter(found.values()))
    found = {task: values for task, values in found.items() if values.keys() == names.keys()}
    groups = {task: group_to_fit(values, most) for task, values in found.items()}
    rows = list(next(iter(groups.values())))
    first, last = min(groups), max(groups)
    step = int(np.min(np.diff(sorted(groups)))) if len(groups) > 1 else 1
    width = max(step, -(-(last + 1 - first) // _COLUMNS))
    sums, counts = np.zeros((2, len(rows), (last - first) // width + 1))
    for task, values in groups.items():
        each = np.array([values[name] for name in rows])
        known = np.isfinite(each)
        sums[known, (task - first) // width] += each[known]
        counts[known, (task - first) // width] += 1
    with np.errstate(invalid="ignore"):
        cells = np.ma.masked_invalid(np.where(counts > 0, sums / counts, np.nan))
    cells = np.ma.masked_less_equal(cells, 0)
    if not cells.count():
        return False
    low, high = float(cells.min()), float(cells.max())
    norm = LogNorm(max(low, high * 1e-8), high if high > low else low * 1.01)
    figure, axes = new_figure((9, max(2.4, 1.4 + 0.19 * len(rows))), 1)
    axes.set_facecolor("#d7dbdf")
    edge = first + width * cells.shape[1]
    image = axes.imshow(
        cells,
        aspect="auto",
        interpolation="nearest",
        norm=norm,
        cmap="viridis",
        extent=(first - 0.5, edge - 0.5, len(rows) - 0.5, -0.5),
    )
    axes.set_yticks(range(len(rows)), rows, fontsize=7, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=MUTED)
    axes.set_xlabel("task" + (f" (columns of {width})" if width > 1 else ""), color=INK, fontsize=9)
    axes.set_title(f"Local redundancy by module over tasks: {run.name}", loc="left", fontsize=10, color=INK)
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("E||grad||^2, log colours", fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=8, colors=MUTED)
    for side in axes.spines.values():
        side.set_visible(False)
    return save_figure(figure, path)


def correlation_chart(found: Sequence[Correlation], path: str | os.PathLike[str]) -> bool:
    """Draw the semi-partial correlations of the raw measures with their 95 % intervals; False if there are none."""
    chosen = [c for c in found if c.kind == "semi-partial" and c.transform == "raw" and not c.note]
    names = order(list(dict.fromkeys(c.measure for c in chosen)))
    if not names:
        return False
    figure, axes = new_figure((7.5, 1.3 + 0.48 * len(names)), 1)
    axes.axvline(0, color=MUTED, linewidth=1)
    for c in chosen:
        pearson = c.method == "pearson"
        y = names.index(c.measure) + (-0.14 if pearson else 0.14)
        colour = COLOURS[0 if pearson else 1]
        axes.plot([100 * c.low, 100 * c.high], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
        kind = "Pearson's r" if pearson else "Spearman's rho"
        axes.plot([100 * c.value], [y], "o" if pearson else "s", color=colour, markersize=5, label=kind)
        away = {
            "xytext": (0, 4 if pearson else -4),
            "textcoords": "offset points",
            "va": "bottom" if pearson else "top",
        }
        axes.annotate(hundred(c.value), (100 * c.value, y), fontsize=7, color=colour, ha="center", bbox=_BEHIND, **away)
    axes.set_yticks(range(len(names)), [label(name) for name in names], fontsize=8, color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    handles, texts = axes.get_legend_handles_labels()
    unique = dict(zip(texts, handles))
    axes.legend(
        list(unique.values()),
        list(unique),
        fontsize=8,
        frameon=False,
        ncols=2,
        loc="lower right",
        bbox_to_anchor=(1, 1),
    )
    what = "accuracy of the next 10 tasks" if chosen[0].target == "future accuracy" else "forgetting"
    style(axes, "")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"correlation x 100 with {what}, task number regressed out", fontsize=9, color=INK)
    return save_figure(figure, path)


def measure_curves(runs: Sequence[Run], path: str | os.PathLike[str]) -> bool:
    """Draw every measure but local redundancy over tasks, a small panel each; False if there are none."""
    names = order(list(dict.fromkeys(m for run in runs for m in run.measures if not m.startswith("local_redundancy"))))
    names = [name for name in names if any(np.isfinite(run.measure(name)).any() for run in runs)]
    if not names:
        return False
    columns = 3 if len(names) > 2 else len(names)
    lines = -(-len(names) // columns)
    figure, panels = new_figure((3.1 * columns + 0.4, 2.1 * lines + 0.3), lines, columns)
    flat = np.atleast_1d(panels).ravel()
    for axes, name in zip(flat, names):
        for index, run in enumerate(runs):
            _curve(axes, np.arange(len(run)), run.measure(name), COLOURS[index % len(COLOURS)], "")
        style(axes, "", label(name))
    for axes in flat[len(names) :]:
        axes.set_visible(False)
    return save_figure(figure, path)


def _curve(axes: Any, tasks: NDArray[Any], values: Array, colour: str, name: str, *, exponential: bool = False) -> None:
    """Each task thin and, from 150 tasks on, the running mean thick; of logarithms that are shown as numbers, if asked."""
    known = np.isfinite(values)
    if not known.any():
        return
    tasks, values = tasks[known], values[known]
    shown = np.exp if exponential else np.asarray
    long = len(values) >= _FROM
    axes.plot(
        tasks, shown(values), color=colour, linewidth=0.6 if long else 1.4, alpha=0.35 if long else 1.0,
        marker="" if len(values) > 1 else "o", label=None if long else name or None,
    )  # fmt: skip
    if long:
        axes.plot(tasks, shown(_running_mean(values)), color=colour, linewidth=1.8, label=name or None)


def _running_mean(values: Array) -> Array:
    """Mean over the 30 values around each, fewer at the ends."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    middle = np.arange(len(values))
    low, high = np.maximum(middle - _SMOOTH // 2, 0), np.minimum(middle + _SMOOTH // 2, len(values))
    return (sums[high] - sums[low]) / (high - low)
