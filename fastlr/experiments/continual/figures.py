"""Figures of continual runs: curves over tasks, correlations, and a map of layers over tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlr.display.figures import (
    COLOURS,
    INK,
    MUTED,
    count_axis,
    dashed_line,
    error_band,
    legend,
    legend_below,
    log_axis,
    new_figure,
    style,
    style_rows,
    title_of_all,
)
from fastlr.display.record import counted
from fastlr.display.tables import group_to_fit
from fastlr.experiments.continual.association import TARGETS, Correlation
from fastlr.experiments.continual.fields import FIELDS, INPUTS, SHAPES
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.continual.tables import hundred, label, order
from fastlr.experiments.runs.records import Array, all_measures, finite, logarithm, number

_SMOOTH, _FROM = 31, 150  # tasks a running median, drawn in series of at least so many
_NAMES = 24  # on an axis, at most
_ROWS, _COLUMNS = 40, 400  # of the heat map: more tasks are averaged
_ABLATION = {
    "local_redundancy_next_task": INK,
    "local_redundancy_real": INK,
    "local_redundancy": COLOURS[0],
    "local_redundancy_noise": COLOURS[1],
    "local_redundancy_series": COLOURS[0],
}
_CORRELATIONS = {  # above or below the row's middle, colour, marker, name
    "pearson": (1, COLOURS[0], "o", "Pearson's r"),
    "spearman": (-1, COLOURS[1], "s", "Spearman's rho"),
}
# Of a number on a line.
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
_REDUNDANCY = "local redundancy, E||grad||²"
_BAND = " (band: ± 2 standard errors)"


def redundancy_and_accuracy(runs: Sequence[ContinualRun]) -> Any:
    """Draw local redundancy above accuracy over tasks, with bands of two standard errors.

    Returns None if neither was recorded.

    Thin: each task; thick, from 150 tasks on: running median over 31, which keeps a sudden fall
    where it is.
    """
    has_lr = _recorded(SHAPES, runs)
    if not has_lr and not any(np.isfinite(run.accuracy).any() for run in runs):
        return None
    figure, (top, bottom) = new_figure((9, 6.2), 2, sharex=True)
    for index, run in enumerate(runs):
        colour, line = _look(index)
        tasks, accuracy = np.arange(len(run)), 100 * run.accuracy
        _redundancy_curve(top, run, SHAPES, colour, run.name, line=line)
        error_band(bottom, tasks, accuracy, 100 * run.accuracy_stderr, colour)
        _curve(bottom, tasks, accuracy, colour, run.name, line=line)
    for chance in np.unique(finite([100 * run.chance for run in runs])):
        dashed_line(bottom, chance, f"chance, {chance:.3g} %")
    inputs = _count((run.measure(SHAPES, "n") for run in runs), "inputs")
    images = _count((run.test_images for run in runs), "images a task")
    has_errors = any(np.isfinite(run.accuracy_stderr).any() for run in runs)
    _style_both(
        figure,
        runs,
        f"Local redundancy over tasks{inputs}{_BAND}",
        f"Accuracy right after training on a task{images}{_BAND if has_errors else ''}",
    )
    if has_lr:
        log_axis(top)
    return figure


def _style_both(figure: Any, runs: Sequence[ContinualRun], above: str, below: str) -> None:
    """Give a panel of local redundancy and one of accuracy over tasks their titles and axes."""
    top, bottom = figure.axes
    style(top, _REDUNDANCY, above)
    style(bottom, f"accuracy on {runs[0].tested_on}, %", below)
    count_axis(bottom, f"task{_thick(runs)}")
    legend_below(figure, bottom)


def _recorded(name: str, runs: Sequence[ContinualRun]) -> bool:
    """Return True if any run has a value of a measure."""
    return any(np.isfinite(run.measure(name)).any() for run in runs)


def group_curves(groups: Mapping[str, Sequence[ContinualRun]]) -> Any:
    """Draw local redundancy above accuracy over tasks, as means over the runs of each group.

    The panels are those of `redundancy_and_accuracy`.
    """
    figure, (top, bottom) = new_figure((9, 6.8), 2, sharex=True)
    for index, (name, runs) in enumerate(groups.items()):
        colour, line = _look(index)
        tasks = np.arange(min(map(len, runs)))
        logs = np.array([logarithm(run.measure(SHAPES)[: len(tasks)]) for run in runs])
        _curve(top, tasks, np.exp(logs.mean(0)), colour, name, line=line)
        accuracy = np.array([run.accuracy[: len(tasks)] for run in runs])
        _curve(bottom, tasks, 100 * accuracy.mean(0), colour, name, line=line)
    every = [run for runs in groups.values() for run in runs]
    _style_both(
        figure,
        every,
        f"Local redundancy over tasks: geometric means over {_seeds(groups)}",
        "Accuracy right after training on a task: means over the same",
    )
    log_axis(top)
    return figure


def _seeds(groups: Mapping[str, Sequence[ContinualRun]]) -> str:
    sizes = sorted(map(len, groups.values()))
    return f"{sizes[0]} to {sizes[-1]} seeds" if sizes[0] < sizes[-1] else counted(sizes[0], "seed")


def _look(index: int) -> tuple[str, str]:
    """Colour and kind of line of a curve: eight colours, then the same ones with other lines."""
    return COLOURS[index % len(COLOURS)], ("-", "--", ":")[index // len(COLOURS) % 3]


def _count(numbers: Iterable[Array], things: str) -> str:
    """Return ", n = 500 inputs" or ", n = 5 to 500 inputs"; empty where no number is known."""
    known = finite(np.concatenate([*numbers, np.empty(0)]))
    if not len(known):
        return ""
    ends = sorted({int(known.min()), int(known.max())})
    return f", n = {' to '.join(map(str, ends))} {things}"


def _thick(runs: Sequence[ContinualRun]) -> str:
    """Return what stands behind the axis of tasks where there are two kinds of lines."""
    if max(map(len, runs)) < _FROM:
        return ""
    return f" (thin: each; thick: running median over {_SMOOTH})"


def ablation_curves(
    runs: Sequence[ContinualRun],
    at: str = "task",
    names_at: Sequence[str] = (),
) -> Any:
    """Draw local redundancy on synthetic and on real inputs over tasks.

    Returns None with fewer than two kinds of inputs.

    Args:
        runs: A panel each.
        at: What the axis is of.
        names_at: The names of what it is of, if they have any.
    """
    names = [name for name in _ABLATION if _recorded(name, runs)]
    if len(names) < 2:
        return None
    runs = [run for run in runs if not set(names).isdisjoint(run.measures)]
    figure, panels = new_figure((9, 0.9 + 3.0 * len(runs)), len(runs), sharex=True, squeeze=False)
    panels = panels.ravel()
    for axes, run in zip(panels, runs):
        for name in names:
            text = INPUTS[name] + _count([run.measure(name, "n")], "")
            colour, marked = _ABLATION[name], bool(names_at)
            _redundancy_curve(axes, run, name, colour, text.strip(), marked=marked)
        log_axis(axes)
        style(axes, _REDUNDANCY, f"Local redundancy by kind of input: {run.name}{_BAND}")
    last = panels[-1]
    count_axis(last, at + _thick(runs))
    legend_below(figure, *panels)
    if names_at:
        step = -(-len(names_at) // _NAMES)
        last.set_xticks(range(0, len(names_at), step), names_at[::step], rotation=30, ha="right")
        last.set_xlim(-0.5, len(names_at) - 0.5)
    return figure


def layer_map(run: ContinualRun) -> Any:
    """Draw local redundancy as a map of modules over tasks, with logarithmic colours.

    Modules are in network order, top to bottom. Returns None if no values by module were recorded.

    Modules are joined into blocks until there are at most 40 rows; beyond 400 columns tasks
    are averaged.
    """
    from matplotlib.colors import LogNorm

    means = run.per_parameter()
    if not means:
        return None
    rows, cells, start, width = _cells(means)
    if not cells.count():
        return None
    low, high = float(cells.min()), float(cells.max())
    norm = LogNorm(max(low, high * 1e-8), high if high > low else low * 1.01)
    figure, axes = new_figure((9, max(2.4, 1.4 + 0.19 * len(rows))), 1)
    axes.set_facecolor("#d7dbdf")
    edge = start + width * cells.shape[1]
    image = axes.imshow(
        cells,
        aspect="auto",
        interpolation="nearest",
        norm=norm,
        cmap="viridis",
        extent=(start - 0.5, edge - 0.5, len(rows) - 0.5, -0.5),
    )
    axes.set_yticks(range(len(rows)), rows, fontsize=7, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=MUTED)
    count_axis(axes, "task" + (f" (columns of {width})" if width > 1 else ""))
    inputs = _count([run.measure(SHAPES, "n")], "inputs")
    grey = " (grey: zero or none)" if cells.count() < cells.size else ""
    title = f"Local redundancy by module over tasks{inputs}: {run.name}{grey}"
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("E||grad||², log colours", fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=8, colors=MUTED)
    axes.spines[:].set_visible(False)
    return figure


def _cells(
    means: Mapping[int, Mapping[str, float]],
) -> tuple[list[str], np.ma.MaskedArray[Any, Any], int, int]:
    """Average local redundancy over columns of tasks, by module.

    Args:
        means: Task to the mean of each parameter.

    Returns:
        Names of the modules, positive values ``[modules, columns]`` (the rest masked), the first
        task, and the tasks a column.
    """
    names = next(iter(means.values())).keys()
    groups = {
        task: group_to_fit(values, _ROWS)
        for task, values in means.items()
        if values.keys() == names
    }
    rows = list(next(iter(groups.values())))
    start, last = min(groups), max(groups)
    step = int(np.min(np.diff(sorted(groups)))) if len(groups) > 1 else 1
    width = max(step, -(-(last + 1 - start) // _COLUMNS))
    sums, counts = np.zeros((2, len(rows), (last - start) // width + 1))
    for task, values in groups.items():
        column, by_row = (task - start) // width, np.array([values[name] for name in rows])
        known = np.isfinite(by_row)
        sums[known, column] += by_row[known]
        counts[known, column] += 1
    with np.errstate(invalid="ignore"):
        cells = np.ma.masked_invalid(sums / counts)
    return rows, np.ma.masked_less_equal(cells, 0), start, width


def correlation_chart(correlations: Sequence[Correlation]) -> Any:
    """Draw the semi-partial correlations of the raw measures with their 95 % intervals.

    Returns None if there are none.
    """
    chosen = [
        c for c in correlations if c.kind == "semi-partial" and c.transform == "raw" and not c.note
    ]
    names = order(c.measure for c in chosen)
    if not names:
        return None
    figure, axes = new_figure((7.5, 1.3 + 0.48 * len(names)), 1)
    axes.axvline(0, color=MUTED, linewidth=1)
    for c in chosen:
        side, colour, marker, name = _CORRELATIONS[c.method]
        y = names.index(c.measure) - 0.14 * side
        ends = [100 * c.low, 100 * c.high]
        axes.plot(ends, [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
        axes.plot([100 * c.value], [y], marker, color=colour, markersize=5, label=name)
        axes.annotate(
            hundred(c.value),
            (100 * c.value, y),
            (0, 4 * side),
            textcoords="offset points",
            fontsize=7,
            color=colour,
            ha="center",
            va="bottom" if side > 0 else "top",
            bbox=_BEHIND,
        )
    labels = [label(name) for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8, color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    legend(axes, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    target = TARGETS[chosen[0].target].label
    style_rows(axes, f"correlation x 100 with {target}, task number regressed out")
    tasks = _count([np.array([c.n for c in chosen], dtype=float)], "tasks")
    has_short = any(text.startswith("LR ") for text in labels)
    short = "; LR: local redundancy" if has_short else ""
    title = f"Semi-partial correlations{tasks}\n(lines: 95 % intervals{short})"
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    return figure


def measure_curves(runs: Sequence[ContinualRun]) -> Any:
    """Draw every measure but local redundancy over tasks, in a small panel each.

    Returns None if there are none.

    The axes begin at zero, so that small changes look small.
    """
    others = [name for name in order(all_measures(runs)) if not name.startswith(SHAPES)]
    names = [name for name in others if _recorded(name, runs)]
    if not names:
        return None
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, panels = new_figure((3.1 * columns + 0.4, 2.3 * lines + 0.6), lines, columns)
    flat = np.atleast_1d(panels).ravel()
    for axes, name in zip(flat, names):
        lowest = 0.0
        for index, run in enumerate(runs):
            colour, line = _look(index)
            values = run.measure(name)
            _curve(axes, np.arange(len(run)), values, colour, run.name, line=line)
            lowest = min(lowest, *finite(values))
        style(axes, FIELDS[name].unit if name in FIELDS else "value", label(name))
        count_axis(axes, "task")
        axes.set_ylim(min(0, axes.get_ylim()[0]) if lowest < 0 else 0)
    for axes in flat[len(names) :]:
        axes.set_visible(False)
    legend_below(figure, flat[0])
    images = [np.array([number(run.options.get("measure_images"))]) for run in runs]
    of = _count(images, "training images (units, gradients, ranks)").removeprefix(", ")
    lines_of_title = ["The other measures at each task boundary", of, _thick(runs).strip()]
    title = "\n".join(filter(None, lines_of_title))
    title_of_all(figure, title)
    return figure


def _redundancy_curve(
    axes: Any, run: ContinualRun, name: str, colour: str, text: str, **look: Any
) -> None:
    """Draw local redundancy over tasks with its band of two standard errors."""
    tasks, values = np.arange(len(run)), run.measure(name)
    positive = np.where(values > 0, values, np.nan)
    error_band(axes, tasks, positive, run.measure(name, "stderr"), colour)
    _curve(axes, tasks, positive, colour, text, **look)


def _curve(
    axes: Any,
    tasks: NDArray[Any],
    values: Array,
    colour: str,
    name: str,
    *,
    marked: bool = False,
    line: str = "-",
) -> None:
    """Draw one curve over tasks: values thin and, from 150 tasks on, their running median thick."""
    known = np.isfinite(values)
    if not known.any():
        return
    tasks, values = tasks[known], values[known]
    look = {"color": colour, "linestyle": line, "label": name or None}
    if len(values) < _FROM:
        marker = "o" if marked or len(values) == 1 else ""
        axes.plot(tasks, values, linewidth=1.4, marker=marker, markersize=4, **look)
        return
    axes.plot(tasks, values, linewidth=0.6, alpha=0.35, **{**look, "label": None})
    axes.plot(tasks, _running_median(values), linewidth=1.8, **look)


def _running_median(values: Array) -> Array:
    """Median over the 31 values around each; the series is reflected at its ends."""
    padded = np.pad(values, _SMOOTH // 2, mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, _SMOOTH), axis=1)
