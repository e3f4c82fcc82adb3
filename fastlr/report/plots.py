"""Charts of an estimate."""

from __future__ import annotations

import os
from typing import Any

from fastlr.errors import InputError
from fastlr.report.tables import group_to_fit, pm

INK, MUTED, BAR, PAIR = "#1f2933", "#66717d", "#2f6f9f", "#d9822b"


def per_layer_chart(
    estimate: Any,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    label: str = "",
    other: Any = None,
    other_label: str = "",
    most: int = 48,
) -> None:
    """Draw each module's share of the mean squared gradient norm, top to bottom in network order, into ``path``.

    The shares of the parameters of a module are added up; where that gives more than ``most`` bars, modules are joined
    into the blocks that hold them.

    Args:
        estimate: A :class:`fastlr.Estimate`; the shares are ``per_parameter`` over their sum.
        path: The picture: ``.png``, ``.pdf`` or ``.svg``.
        title: First line above the chart.
        label: Name of the estimate, in the legend if there are two.
        other: A second estimate of the same parameters, drawn beside the first.
        other_label: Its name.
        most: The largest number of bars.

    Raises:
        InputError: Nothing to show (no parameters or all values zero), other parameters, or an unwritable path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    series = [(estimate, label, BAR)] + ([(other, other_label, PAIR)] if other is not None else [])
    if len({tuple(each.per_parameter) for each, _, _ in series}) > 1:
        raise InputError("the two estimates are of different parameters, so their bars cannot stand side by side")
    shares = []
    for each, _, _ in series:
        groups = group_to_fit(each.per_parameter, most)
        total = sum(groups.values())
        if not total > 0:
            raise InputError("the estimate is zero or has no parameters: there are no shares to draw")
        shares.append({name: value / total for name, value in groups.items()})
    names = list(shares[0])

    height = 0.8 / len(series)
    figure = Figure(figsize=(8, 1.7 + 0.2 * len(names) * (1 if len(series) == 1 else 1.25)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, (each, name, colour) in enumerate(series):
        at = [row + (i - (len(series) - 1) / 2) * height for row in range(len(names))]
        text = f"{name}: {pm(each.value, each.stderr)}" if name else pm(each.value, each.stderr)
        bars = axes.barh(at, [shares[i][n] for n in names], height=height, color=colour, label=text)
        if len(series) == 1:
            texts = [f"{100 * shares[i][n]:.1f}" if shares[i][n] >= 0.0005 else "" for n in names]
            axes.bar_label(bars, texts, padding=3, fontsize=7, color=MUTED)
    axes.set_yticks(range(len(names)), names, fontsize=8, color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.1 * max(max(s.values()) for s in shares))
    axes.xaxis.set_major_formatter(
        PercentFormatter(1.0, decimals=0 if max(max(s.values()) for s in shares) > 0.1 else 1)
    )
    axes.set_xlabel("share of the local redundancy (mean squared per-sample gradient norm)", fontsize=9, color=INK)
    axes.tick_params(axis="x", labelsize=8, colors=MUTED)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    heading = title or "Local redundancy by layer, in network order"
    if len(series) == 1:
        heading += f"\nlocal redundancy {pm(estimate.value, estimate.stderr)}, n = {estimate.n}"
    else:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    axes.set_title(heading, loc="left", fontsize=10, color=INK)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write the chart {path}: {error}") from error
