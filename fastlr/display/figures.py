"""Drawing shared by all figures: an empty figure, the style of axes, saving.

Among the axes is a logarithmic one.
"""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastlr.errors import InputError
from fastlr.files import written_whole

INK, MUTED, GRID = "#1f2933", "#66717d", "#e3e7eb"
COLOURS = ("#2f6f9f", "#b8621b", "#4b8b3b", "#8e4a9e", "#b03a48", "#5b6770", "#97801a", "#2a8c8c")


def new_figure(
    size: tuple[float, float], rows: int, columns: int = 1, **options: Any
) -> tuple[Any, Any]:
    """Return a figure of a size in inches and its axes.

    ``options`` are as for matplotlib's ``Figure.subplots``.

    Notebooks show it, without pyplot; its ``save(path)`` writes it, as that of a picture of Pillow.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.__dict__["_repr_png_"] = partial(_png, figure)
    figure.__dict__["save"] = partial(figure.savefig, dpi=130)
    return figure, figure.subplots(rows, columns, **options)


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100)
    return out.getvalue()


def style(axes: Any, ylabel: str, title: str = "", grid: str = "y") -> None:
    """Give axes the common look: lines at the ticks of one axis, no frame, title on the left."""
    axes.set_ylabel(ylabel, color=INK, fontsize=9)
    if title:
        axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.tick_params(labelsize=8, colors=MUTED)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)


def title_of_all(figure: Any, title: str, fontsize: int = 10) -> None:
    """Put a title above all axes of a figure, on the left."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=fontsize, color=INK)


def dashed_line(axes: Any, height: float, text: str) -> None:
    """Draw a level that values are set against."""
    axes.axhline(height, color=MUTED, linewidth=1, linestyle="--", label=text)


def count_axis(axes: Any, xlabel: str) -> None:
    """Name a horizontal axis that counts something, with ticks at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(xlabel, color=INK, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=(1, 2, 5, 10)))


def labels_once(*axes: Any) -> dict[str, Any]:
    """Return what is drawn for each label of axes; of several with one label the last."""
    found: dict[str, Any] = {}
    for one in axes:
        handles, texts = one.get_legend_handles_labels()
        found.update(zip(texts, handles))
    return found


def legend(axes: Any, **place: Any) -> None:
    """Put the labels of axes beside them, each once; ``place`` is as for matplotlib's legends."""
    labels = labels_once(axes)
    axes.legend(labels.values(), labels.keys(), fontsize=8, frameon=False, **place)


def legend_below(figure: Any, *axes: Any) -> None:
    """Put the labels of axes below a figure, each once."""
    labels = labels_once(*axes)
    if labels:
        place = {"ncols": 4, "loc": "outside lower center"}
        figure.legend(labels.values(), labels.keys(), fontsize=8, frameon=False, **place)


def style_rows(axes: Any, xlabel: str, *, fontsize: int = 9) -> None:
    """Give axes whose rows are named on the left the common look, with vertical lines."""
    style(axes, "", grid="x")
    axes.set_xlabel(xlabel, fontsize=fontsize, color=INK)


def error_band(axes: Any, x: Any, values: Any, stderr: Any, colour: str) -> None:
    """Draw a band of two standard errors around values, where both are known.

    The axes may be logarithmic.
    """
    low, high = np.maximum(values - 2 * stderr, 0.05 * values), values + 2 * stderr
    known = np.isfinite(low) & np.isfinite(high)
    if known.any():
        axes.fill_between(x[known], low[known], high[known], color=colour, alpha=0.22, linewidth=0)


def log_axis(axes: Any) -> None:
    """Make the y axis logarithmic, with plain numbers at 1, 2 and 5 of each decade.

    Where there are many decades, the numbers are at the decades alone.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 2000 else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def save_figure(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure, or a picture of Pillow, whole or not at all; without a suffix as PNG.

    Returns:
        The path of the file, with its suffix.

    Raises:
        InputError: The path is a folder, or the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(
            f"cannot write the figure {path}: it is a folder; name a file in it, such as "
            f"{path / 'figure.png'}"
        )
    path = path if path.suffix else path.with_suffix(".png")
    try:
        with written_whole(path) as unfinished:
            figure.save(unfinished)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write the figure {path}: {error}") from error
    return path
