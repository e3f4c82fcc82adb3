"""Draw the roofline of a record: ``python -m bench.gpu_run.roofline OPS.json PICTURE.png``."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import table
from fastlr.display.figures import COLOURS, GRID, INK, MUTED, new_figure, save_figure, style

LEAST_INTENSITY = 0.05  # where kernels without floating-point arithmetic are drawn


def draw(record: Path, picture: Path) -> None:
    """Draw each op's bytes per second over its arithmetic intensity, and a copy's bandwidth."""
    content = table.read(record)
    infos = [row["extra_info"] for row in content["benchmarks"]]
    rows = [info for info in infos if "bytes_per_second" in info]
    bandwidth = max(row["copy_bandwidth"] for row in rows) / 1e9
    figure, axes = new_figure((9.0, 6.0), 1, 1)
    style(axes, "GB/s", f"Memory traffic of every op: {content['machine_info'].get('gpu', 'CPU')}")
    axes.axhline(bandwidth, color=INK)
    axes.axhline(0.7 * bandwidth, color=MUTED, linestyle="--")  # the goal for large layers
    for place, name in enumerate(dict.fromkeys(row["op"] for row in rows)):
        of_op = [row for row in rows if row["op"] == name]
        x = [max(LEAST_INTENSITY, row["operations"] / row["bytes"]) for row in of_op]
        y = [row["bytes_per_second"] / 1e9 for row in of_op]
        marker = "os^D"[place // len(COLOURS) % 4]
        colour = COLOURS[place % len(COLOURS)]
        axes.scatter(x, y, s=26, color=colour, marker=marker, label=name)
    axes.set(xscale="log", yscale="log", xlabel="floating-point operations per byte")
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    figure.legend(loc="outside right center", fontsize=7.5, frameon=False)
    save_figure(figure, picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
