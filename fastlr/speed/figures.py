"""A record as pictures: each kernel on the roofline of its machine, and the estimate by stage and mode."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastlr.errors import InputError
from fastlr.report.figures import GRID, INK, MUTED
from fastlr.speed.kernels import SECTION
from fastlr.speed.record import Record
from fastlr.speed.tables import seconds

COLOURS = (
    "#2f6f9f", "#b8621b", "#3f8f5b", "#8a4f9e", "#b03a48", "#4b5a67", "#a58a1f", "#1f8f92", "#d07aa0", "#6b6fd0",
    "#7a5230", "#5f7f2a", "#c2497f", "#315b8a", "#93702c",
)  # fmt: skip
KINDS = {"estimate": "#2f6f9f", "stage": "#9db7cc", "plain": "#b8621b", "folded plain": "#dfb48c", "tool": "#8a98a5"}
KIND_NAMES = {
    "estimate": "whole estimate",
    "stage": "its first stages",
    "plain": "plain forward+backward",
    "folded plain": "plain, folded",
    "tool": "per-sample norms, by tool",
}
LEAST_INTENSITY = 0.05  # where kernels without floating-point arithmetic are drawn


def pictures(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The two files that one name stands for: ``x.png`` and ``x-stages.png``."""
    path = Path(path)
    return path, path.with_name(f"{path.stem}-stages{path.suffix}")


def draw(record: Record, path: str | os.PathLike[str]) -> list[Path]:
    """Draw what there is to draw: the roofline into ``path``, the stages into the file beside it; return the files.

    Raises:
        InputError: the record holds nothing that can be drawn, or a file cannot be written.
    """
    first, second = pictures(path)
    made = []
    if any("bytes_per_second" in r for r in record.rows if r["section"] == SECTION):
        made.append(roofline(record, first))
    if any("kind" in r and "seconds" in r for r in record.rows):
        made.append(stage_chart(record, second))
    if not made:
        raise InputError(f"{path}: the record holds no times, so there is nothing to draw")
    return made


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> Path:
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write the figure {path}: {error}") from error
    return path


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8)


def _place(record: Record) -> str:
    e = record.environment
    commit = (e.get("commit") or e.get("sources") or "?")[:10]
    return f"{e.get('gpu') or e['cpu']}, torch {e['versions'].get('torch')}, {commit}, {e['date'][:10]}"


def roofline(record: Record, path: Path) -> Path:
    """Achieved bytes a second of every kernel over its arithmetic intensity, under the two measured ceilings."""
    rows = [r for r in record.rows if r["section"] == SECTION and "bytes_per_second" in r]
    order = list(dict.fromkeys(r["op"] for r in rows))
    rows.sort(key=lambda r: order.index(r["op"]))
    lines = len(rows) + len(order)
    columns = 1 if lines <= 40 else 2
    figure = _figure(9.2 + 3.1 * columns, max(6.2, 1.2 + 0.17 * lines / columns))
    axes, side = figure.subplots(1, 2, width_ratios=(8.6 / (3.1 * columns), 1))
    bandwidth = record.ceilings["copy"]["bytes_per_second"] / 1e9
    rate = record.ceilings["matmul"]["operations_per_second"] / 1e9
    points = [(max(LEAST_INTENSITY, r["operations"] / r["bytes"]), r["bytes_per_second"] / 1e9) for r in rows]
    right = max([3 * rate / bandwidth, *(2 * x for x, _ in points)])
    low = max(min([y for _, y in points] + [bandwidth / 4]) / 1.5, bandwidth * 1e-3)
    axes.plot(
        [LEAST_INTENSITY / 2, rate / bandwidth, right], [bandwidth, bandwidth, rate / right], color=INK, linewidth=1.6
    )
    axes.axhline(0.7 * bandwidth, color=MUTED, linewidth=0.8, linestyle=(0, (4, 4)))
    left = LEAST_INTENSITY * 0.55
    axes.text(left, bandwidth * 1.04, f"copy {bandwidth:,.0f} GB/s", fontsize=8, color=INK, va="bottom")
    axes.text(left, 0.7 * bandwidth * 0.97, "70 %", fontsize=8, color=MUTED, va="top")
    peak = f"{record.ceilings['matmul']['dtype']} product {rate / 1e3:,.3g} TFLOP/s"
    axes.text(rate / bandwidth * 0.95, bandwidth * 1.04, peak, fontsize=8, color=INK, ha="left", va="bottom")
    for number, (row, (x, y)) in enumerate(zip(rows, points, strict=True), 1):
        colour = COLOURS[order.index(row["op"]) % len(COLOURS)]
        y = max(y, low * 1.15)
        axes.scatter([x], [y], s=150, color=colour, alpha=0.88, linewidths=0.6, edgecolors="white", zorder=3)
        axes.text(x, y, str(number), fontsize=6, color="white", ha="center", va="center_baseline", zorder=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(LEAST_INTENSITY / 2, right)
    axes.set_ylim(low, bandwidth * 1.7)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.set_xlabel("floating-point operations per byte that must be moved (left edge: none)", fontsize=9, color=INK)
    axes.set_ylabel("achieved GB/s", fontsize=9, color=INK)
    _bare(axes)
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _legend(side, rows, order, columns)
    what = "kernels" if str(record.settings["device"]).startswith("cuda") else "ops in plain torch"
    title = f"Every kernel against its machine: {what} on {record.settings['dtype']}, batch {record.settings['batch']}"
    figure.suptitle(f"{title}\n{_place(record)}", x=0.01, ha="left", fontsize=10, color=INK)
    return _save(figure, path)


def _legend(axes: Any, rows: list[dict[str, Any]], order: list[str], columns: int) -> None:
    """The numbers' meaning: op, case, share of the copy bandwidth."""
    axes.axis("off")
    lines = -(-(len(rows) + len(order) + 1) // columns)
    axes.set_xlim(0, columns)
    axes.set_ylim(lines + 0.5, -0.5)
    entries: list[tuple[int, dict[str, Any] | None, str]] = []
    for op in order:
        entries.append((0, None, op))
        entries += [(number, row, op) for number, row in enumerate(rows, 1) if row["op"] == op]
    at = 0
    for number, row, op in entries:
        if row is None and at % lines == lines - 1:  # a title alone at the foot of a column
            at += 1
        left, place = at // lines, at % lines
        at += 1
        colour = COLOURS[order.index(op) % len(COLOURS)]
        if row is None:
            axes.text(left, place, op, fontsize=7.5, color=colour, weight="bold", va="center")
            continue
        star = " *" if row["status"] == "not covered" else ""
        axes.text(left + 0.07, place, str(number), fontsize=7, color=colour, va="center", ha="right")
        axes.text(left + 0.1, place, f"{row['case']}{star}", fontsize=7, color=INK, va="center")
        axes.text(left + 0.94, place, f"{100 * row['share']:.0f} %", fontsize=7, color=MUTED, va="center", ha="right")


def stage_chart(record: Record, path: Path) -> Path:
    """Bars of the estimate by mode, its stages and the plain passes; a tick at the least time that memory allows."""
    sections = list(dict.fromkeys(r["section"] for r in record.rows if "kind" in r and "seconds" in r))
    groups = {
        name: [r for r in record.rows if r["section"] == name and "kind" in r and "seconds" in r] for name in sections
    }
    heights = [0.75 + 0.27 * len(rows) for rows in groups.values()]
    figure = _figure(9.6, 0.9 + sum(heights))
    panels = figure.subplots(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (name, rows) in zip(panels, groups.items(), strict=True):
        values = [r["seconds"] for r in rows]
        colours = [KINDS[r["kind"]] for r in rows]
        error = [
            [max(0.0, r["seconds"] - r["seconds_p20"]) for r in rows],
            [max(0.0, r["seconds_p80"] - r["seconds"]) for r in rows],
        ]
        places = list(range(len(rows)))
        axes.barh(places, values, 0.72, color=colours, xerr=error, error_kw={"ecolor": INK, "elinewidth": 0.8})
        largest = max(r["seconds_p80"] for r in rows)
        for place, row in zip(places, rows, strict=True):
            ratio = f"   {row['ratio']:.2f} of plain" if "ratio" in row and row["kind"] == "estimate" else ""
            text = f"{seconds(row['seconds'])}{ratio}"
            end = max(row["seconds"], row["seconds_p80"]) + 0.012 * largest
            axes.text(end, place, text, va="center", fontsize=8, color=INK)
            if row.get("floor_seconds"):
                axes.plot([row["floor_seconds"]] * 2, [place - 0.36, place + 0.36], color="#b03a48", linewidth=2)
        axes.set_yticks(places, [r["name"] for r in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1.28 * largest)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        n, side, precision = (rows[0][key] for key in ("n", "size", "precision"))
        axes.set_title(f"{name}: {n} images of {side}x{side}, {precision}", loc="left", fontsize=9, color=INK)
        _bare(axes)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.spines["left"].set_visible(False)
    _keys(figure, panels[0], groups)
    panels[-1].set_xlabel("seconds (median; lines: 20 % to 80 % quantile)", fontsize=9, color=INK)
    title = f"The estimate by mode and stage, beside plain passes\n{_place(record)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=INK)
    return _save(figure, path)


def _keys(figure: Any, axes: Any, groups: dict[str, list[dict[str, Any]]]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {r["kind"] for rows in groups.values() for r in rows}
    keys: list[Any] = [Patch(color=colour, label=KIND_NAMES[kind]) for kind, colour in KINDS.items() if kind in used]
    keys.append(Line2D([], [], color="#b03a48", linewidth=2, label="floor: bytes over copy bandwidth"))
    figure.legend(handles=keys, loc="outside upper right", ncols=1, fontsize=7.5, frameon=False)
