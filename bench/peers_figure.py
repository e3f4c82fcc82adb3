"""The record of bench.peers as one picture, and as the table of the README.

    python -m bench.peers_figure RECORD.json [PICTURE.png]

Prints the table in Markdown; draws the picture if it is named (`python -m bench.peers --figure` does it too).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastlr.report.figures import COLOURS, INK, MUTED, new_figure, save_figure, style

NAMES = {
    "mobilenet_v3_large": "MobileNetV3-Large, 224x224",
    "resnet18": "ResNet-18, 224x224",
    "vit_b_16": "ViT-B/16, 224x224",
    "patchtst": "PatchTST, 512 to 96 steps",
}
SHORT = {
    "plain": "plain forward+backward",
    "fastlr": "fastlr",
    "loop": "loop over samples",
    "vmap": "torch.func vmap",
    "opacus": "Opacus",
    "opacus-ghost": "Opacus, ghost norms",
    "backpack": "BackPACK",
}
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # of a number where the dashed line may pass
Row = Mapping[str, Any]


def why(row: Row) -> str:
    """Why a contender has no time, in a word or two."""
    if "error" in row:
        return "cannot run"
    if "total_ratio" in row:
        return f"wrong: {row['total_ratio']:.3g} times the truth"
    return "wrong"


def draw(document: Mapping[str, Any], path: str | Path) -> None:
    """Draw the times of all contenders on all models, as ratios to plain; those that are wrong have a word in their place.

    Raises:
        InputError: The file cannot be written.
    """
    results: Mapping[str, Mapping[str, Row]] = document["results"]
    names = [name for name in SHORT if any(name in rows for rows in results.values()) and name != "plain"][::-1]
    rows_of_panels = -(-len(results) // 2)
    size = (9.0, rows_of_panels * (0.3 * len(names) + 0.7) + 0.5)
    figure, axes = new_figure(size, rows_of_panels, min(2, len(results)), sharey=True, squeeze=False)
    for panel in axes.flat[len(results) :]:
        panel.set_visible(False)
    for model, panel in zip(results, axes.flat):
        style(panel, "", NAMES.get(model, model))
        panel.grid(axis="y", visible=False)
        rows = results[model]
        widest = max(row["ratio"] for row in rows.values() if "ratio" in row)
        for y, name in enumerate(names):
            row = rows.get(name, {"error": ""})
            if "ratio" in row:
                panel.barh(y, row["ratio"], color=COLOURS[0] if name == "fastlr" else "#b9c3cc", height=0.66)
                weight = "bold" if name == "fastlr" else "normal"
                text, x, colour = f"{row['ratio']:.2f}", row["ratio"] + 0.02 * widest, INK
            else:
                text, x, colour, weight = why(row), 0.02 * widest, COLOURS[4], "normal"
            panel.text(x, y, text, va="center", fontsize=8, color=colour, fontweight=weight, bbox=_BEHIND)
        panel.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (3, 2)), zorder=0.5)
        panel.set_xlim(0, 1.2 * widest)
        panel.set_yticks(range(len(names)), [SHORT[name] for name in names], color=INK, fontsize=9)
    text = "Time of the squared gradient norms of every sample, all parameters: ratio to one plain forward and backward pass"
    batch, cpu = document["batch"], document["environment"]["cpu"]
    figure.supxlabel(f"{text} (dashed)\nbatch of {batch}, float32, eval mode, {cpu}", fontsize=8, color=MUTED)
    save_figure(figure, path)


def table(document: Mapping[str, Any]) -> str:
    """Return the table of the README."""
    lines = ["| model | fastlr, time | fastlr, memory | best correct peer, time | loop over samples | wrong |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for model, rows in document["results"].items():
        right = {n: row["ratio"] for n, row in rows.items() if "ratio" in row and n not in ("plain", "fastlr")}
        best = min(right, key=lambda name: right[name])
        bad = [f"{SHORT[name]}: {why(row)}" for name, row in rows.items() if "ratio" not in row]
        ours = rows["fastlr"]
        cells = [NAMES.get(model, model), f"**{ours['ratio']:.2f}**", f"{ours['memory_ratio']:.2f}"]
        cells += [f"{right[best]:.2f} ({SHORT[best]})", f"{right['loop']:.2f}", "; ".join(bad) or "none"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table of a record, and draw its picture."""
    document = json.loads(Path(arguments[0]).read_text())
    print(table(document))
    if len(arguments) > 1:
        draw(document, arguments[1])


if __name__ == "__main__":
    main(sys.argv[1:])
