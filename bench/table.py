"""README's table and figure from a record of ``pytest bench/``, or two records side by side.

The record is written by ``--benchmark-json FILE``.

    python -m bench.table FILE [OTHER] [--figure PICTURE.png]

With one file: the table of the peers in Markdown, and those of the benchmarks that have rows of
their own (such as sums). With two: every benchmark of both by its ratio to plain (ops and plain
passes without one: by seconds), and whether it moved by more than the spread of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastlr.display.figures import COLOURS, INK, MUTED, new_figure, save_figure, style
from fastlr.errors import InputError

NAMES = {
    "mobilenet_v3_large": "MobileNetV3-Large, 224x224",
    "resnet18": "ResNet-18, 224x224",
    "vit_b_16": "ViT-B/16, 224x224",
    "patchtst": "PatchTST, 512 to 96 steps",
    "gpt2": "GPT-2, 64 tokens",
    "lstm": "LSTM, 2 x 128, 30 steps",
}
TITLES = {
    "fastlr": "fastlr",
    "loop": "loop over samples",
    "vmap": "torch.func vmap",
    "opacus": "Opacus",
    "opacus-ghost": "Opacus, ghost norms",
    "backpack": "BackPACK",
}
Row = Mapping[str, Any]
_BEHIND = {
    "facecolor": "white",
    "edgecolor": "none",
    "pad": 1.0,
}  # of a number where the dashed line may pass


def read(path: str | Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        InputError: it is not there, or no record of pytest-benchmark.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no JSON that can be read ({error})") from error
    if not isinstance(record, dict) or "benchmarks" not in record:
        raise InputError(
            f"{path} is no record of pytest bench/ --benchmark-json: it holds no benchmarks"
        )
    return record


def peers(record: Mapping[str, Any]) -> dict[str, dict[str, Row]]:
    """Return network -> contender -> its ``extra_info``, or why it has no time.

    The latter has a "kind" and a "reason".
    """
    rows: dict[str, dict[str, Row]] = {name: {} for name in NAMES}
    found = [
        (each["group"], each["extra_info"])
        for each in record["benchmarks"]
        if "ratio" in each["extra_info"]
    ]
    for group, row in [
        *found,
        *((refusal["group"], refusal) for refusal in record.get("refused", ())),
    ]:
        if group in rows:
            rows[group][row["contender"]] = row
    return {network: contenders for network, contenders in rows.items() if contenders}


def why(row: Row) -> str:
    """Return why a contender has no time, in few words.

    Examples:
        >>> why({"kind": "wrong", "reason": "3.5 times the truth (conv1.weight 15 times)"})
        'wrong, 3.5 times the truth'
    """
    return f"wrong, {row['reason'].split(' (')[0]}" if row["kind"] == "wrong" else row["kind"]


def markdown_table(*rows: Iterable[Any]) -> str:
    """Return a table, its heads in the first row; numbers to three digits."""
    heads, *body = ([_cell(cell) for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *body))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def markdown(record: Mapping[str, Any]) -> str:
    """Return the table of the README."""
    lines = [
        [
            "model",
            "fastlr, time",
            "fastlr, memory",
            "fastest correct alternative, time",
            "loop over samples",
            "excluded",
        ]
    ]
    for network, rows in peers(record).items():
        ratios = {
            name: row["ratio"] for name, row in rows.items() if "ratio" in row and name != "fastlr"
        }
        best = min(ratios, key=lambda name: ratios[name], default=None)
        refused = [
            f"{TITLES[name]}: {why(row)}" for name, row in rows.items() if "ratio" not in row
        ]
        own = rows.get("fastlr", {})
        cells = [NAMES[network], "not timed", "not timed"]
        if "ratio" in own:
            cells[1:] = f"**{own['ratio']:.2f}**", f"{own['memory_ratio']:.2f}"
        cells.append("not timed" if best is None else f"{ratios[best]:.2f} ({TITLES[best]})")
        cells += [
            f"{ratios['loop']:.2f}" if "loop" in ratios else "not timed",
            "; ".join(refused) or "none",
        ]
        lines.append(cells)
    return markdown_table(*lines)


def further(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of each group of benchmarks whose ``extra_info`` has rows of their own."""
    groups: dict[str, list[Row]] = {}
    for each in record["benchmarks"]:
        groups.setdefault(each["group"], []).extend(each["extra_info"].get("rows", ()))
    for group, rows in groups.items():
        if rows:
            yield f"{group}:\n\n" + markdown_table(rows[0], *(row.values() for row in rows))


def draw(record: Mapping[str, Any], path: str | Path) -> None:
    """Draw the times of all contenders as ratios to plain, with a word in place of wrong ones.

    Raises:
        InputError: the file cannot be written.
    """
    results = {network: rows for network, rows in peers(record).items() if len(rows) > 1}
    present = set().union(*results.values())
    contenders = [name for name in TITLES if name in present][::-1]
    rows_of_panels = -(-len(results) // 2)
    size = (9.0, rows_of_panels * (0.3 * len(contenders) + 0.7) + 0.5)
    figure, axes = new_figure(
        size, rows_of_panels, min(2, len(results)), sharey=True, squeeze=False
    )
    for panel in axes.flat[len(results) :]:
        panel.set_visible(False)
    for (network, rows), panel in zip(results.items(), axes.flat):
        style(panel, "", NAMES[network], grid="x")
        widest = max(row["ratio"] for row in rows.values() if "ratio" in row)
        for y, row in ((y, rows[name]) for y, name in enumerate(contenders) if name in rows):
            own, ratio = row["contender"] == "fastlr", row.get("ratio", 0.0)
            panel.barh(y, ratio, color=COLOURS[0] if own else "#b9c3cc", height=0.66)
            text, colour = (f"{ratio:.2f}", INK) if ratio else (why(row), COLOURS[4])
            look = {
                "fontsize": 8,
                "color": colour,
                "fontweight": "bold" if own else "normal",
                "bbox": _BEHIND,
            }
            panel.text(ratio + 0.02 * widest, y, text, va="center", **look)
        panel.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (3, 2)), zorder=0.5)
        panel.set_xlim(0, 1.2 * widest)
        panel.set_yticks(
            range(len(contenders)), [TITLES[name] for name in contenders], color=INK, fontsize=9
        )
    text = (
        "Time of the squared gradient norms of every sample, all parameters: ratio to one plain "
        "forward and backward pass"
    )
    about = (
        "batch of 16, float32, eval mode, "
        f"{record['machine_info'].get('gpu') or record['machine_info']['cpu']}"
    )
    figure.supxlabel(f"{text} (dashed)\n{about}", fontsize=8, color=MUTED)
    save_figure(figure, path)


def compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each benchmark of either record: old and new ratio, and the verdict.

    Ratios are to plain; without one, seconds stand in their place.
    """
    for key in ("cpu", "gpu", "threads", "versions"):
        before, now = old["machine_info"].get(key), new["machine_info"].get(key)
        if before != now:
            yield f"{key}: {before} and {now}"
    by_name = [_rows_by_name(record) for record in (old, new)]
    for name in dict.fromkeys([*by_name[0], *by_name[1]]):
        if name not in by_name[0] or name not in by_name[1]:
            yield f"{name}: only in the {'first' if name in by_name[0] else 'second'} record"
            continue
        (low, middle, high), (new_low, new_middle, new_high) = (
            _spread(rows[name]) for rows in by_name
        )
        verdict = "slower" if new_low > high else "same"
        if new_high < low:
            verdict = "faster"
        unit = "of plain" if "ratio" in by_name[0][name]["extra_info"] else "s"
        yield (
            f"{name}: {middle:.3g} -> {new_middle:.3g} {unit} ({new_middle / middle:.2f}): "
            f"{verdict}"
        )


def _rows_by_name(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a record's rows by group and contender."""
    return {
        f"{row['group']}, {row['extra_info']['contender']}": row for row in record["benchmarks"]
    }


def _spread(row: Row) -> tuple[float, float, float]:
    """Return 20 % quantile, median and 80 % quantile of the ratio to plain.

    Without a ratio they are quartiles and median of the seconds.
    """
    info, stats = row["extra_info"], row["stats"]
    if "ratio" in info:
        return info["ratio_p20"], info["ratio"], info["ratio_p80"]
    return stats["q1"], stats["median"], stats["q3"]


def main(arguments: list[str] | None = None) -> int:
    """Print; draw where a picture is named."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.table", description=__doc__.split("\n")[0]
    )
    parser.add_argument("file", type=Path, help="a record")
    parser.add_argument("other", type=Path, nargs="?", help="another, to compare it with")
    parser.add_argument("--figure", type=Path, help="where to draw the times (.png, .pdf, .svg)")
    args = parser.parse_args(arguments)
    try:
        record = read(args.file)
        tables = [markdown(record)] if peers(record) else []
        print(
            "\n".join(compared(record, read(args.other)))
            if args.other
            else "\n\n".join([*tables, *further(record)])
        )
        if args.figure:
            draw(record, args.figure)
    except InputError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
