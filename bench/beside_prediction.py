"""What launches took on a GPU beside what is predicted of them; needs no GPU.

    python -m bench.beside_prediction RECORD.json [...] [--gpu h200]

A record is one of `bench.launch_times`. The chunk that it measured is planned and counted anew, as
`bench.traffic` does, by the code as it is now: give it the commit of the record. Both have the same
kernels in the same order. Prints Markdown: the launches of a kernel whose programs have as many
warps, and as many of them resident on a multiprocessor, share a row.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench import predicted, traffic
from bench.gpu_model import GPUS
from bench.launch_times import Launch, launches_of
from fastlr.ops import tuning

NEAR = 3  # launches that may be missing between two that are found


def pairs(
    measured: list[Launch], rows: list[predicted.Row]
) -> Iterator[tuple[float, predicted.Row]]:
    """Yield the milliseconds that a launch took, and its row.

    Raises:
        ValueError: more than NEAR launches are no row's.
    """
    at = 0
    for row in rows:
        names = [launch.name for launch in measured[at : at + NEAR + 1]]
        if row.name not in names:
            raise ValueError(f"no launch of {row.name} after number {at}, but {names}")
        at += names.index(row.name)
        yield (measured[at].ended - measured[at].begun) / 1e3, row
        at += 1


def table(path: Path, gpu: str) -> str:
    """Return the Markdown table of a record."""
    record = json.loads(path.read_text())
    chosen = GPUS[gpu]
    with tuning.assuming(chosen.architecture):
        made = traffic.of_network(record["network"], record["size"], "bf16", record["chunk"])
        rows = [row for row in predicted.predicted(made.made, chosen) if row.programs]
    ours = {row.name for row in rows}
    measured = [launch for launch in launches_of(record) if launch.name in ours]
    found: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for milliseconds, row in pairs(measured, rows):
        kind = row.name, row.warps, row.resident // row.warps
        found[kind].append((milliseconds, 1e3 * row.terms.seconds))
    lines = [
        f"{record['network']}, a chunk of {record['chunk']}:",
        "",
        "| kernel | warps | programs resident | launches | ms measured | ms predicted | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (name, warps, resident), times in sorted(
        found.items(), key=lambda item: -sum(ms for ms, _ in item[1])
    ):
        took, expected = (sum(each) for each in zip(*times, strict=True))
        lines.append(
            f"| {name} | {warps} | {resident} | {len(times)} | {took:.2f} | {expected:.2f} | "
            f"{took / expected:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    args = parser.parse_args()
    for path in args.records:
        print(table(path, args.gpu))


if __name__ == "__main__":
    main()
