"""What cuxray says of kernels, beside what is counted here.

``pip install cuxray``, then ``python -m bench.second_opinion mobilenet_v3_large``. For every
variant that a chunk launches both say how many warps a multiprocessor holds, and of each loop how
many instructions a trip has and how many cycles its stalls take. Printed is a table of both, ours
first, and why they differ where they do by more than 1.5. Only cuxray knows conflicts of banks of
shared memory: the last column but one has the most cycles that one access in a loop takes for one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from rich.console import Console
from rich.table import Table

from bench import compile_kernels, predicted, sass, traffic
from bench.gpu_model import GPUS

APART = 1.5


class Opinion(NamedTuple):
    """What is said of a variant.

    Attributes:
        resident: warps on a multiprocessor.
        loops: of each, by the label that it begins with.
    """

    resident: int
    loops: dict[str, Trip]


class Trip(NamedTuple):
    """A trip through a loop: its instructions, and the cycles of their stalls."""

    instructions: int
    stalls: int


class Row(NamedTuple):
    """What both say of one thing, ours first, and why where they are apart."""

    variant: str
    what: str
    here: int
    there: int
    why: str = ""


def own(variant: predicted.Variant, arch: int) -> Opinion:
    """What is counted here."""
    usage = variant.usage
    resident = compile_kernels.resident_warps(
        arch, usage["warps"], usage["registers"], usage["shared"]
    )
    return Opinion(resident, trips(variant.code))


def trips(code: sass.Code) -> dict[str, Trip]:
    """Return a trip through each loop: of the blocks that are in it."""
    return {code.blocks[head].label: _trip(code, members) for head, members in code.loops}


def trips_to_the_next_label(code: sass.Code) -> dict[str, Trip]:
    """Return trips as cuxray counts them: what follows a label up to the next is one block to it.

    So what comes behind the branch that ends a loop, to which nothing jumps, is in the loop, too.
    """
    found = {}
    for head, members in code.loops:
        all_of_it = set(members)
        for number, block in enumerate(code.blocks):
            if number - 1 in all_of_it and not block.label:
                all_of_it.add(number)
        found[code.blocks[head].label] = _trip(code, all_of_it)
    return found


def _trip(code: sass.Code, members: Collection[int]) -> Trip:
    inside = [i for n in sorted(members) for i in code.blocks[n].instructions]
    return Trip(len(inside), sum(max(1, i.stall) for i in inside))


def cuxrays(cubin: bytes, usage: dict[str, Any], arch: int) -> tuple[Opinion, list[int]]:
    """What cuxray says, and the cycles that each access of shared memory in a loop takes."""
    from cuxray import occupancy, toolchain
    from cuxray.analyze.access import analyze_accesses
    from cuxray.analyze.schedule import loop_schedule
    from cuxray.archspec import lookup
    from cuxray.parse import cfgdot, ctrl
    from cuxray.parse import sass as cuxray_sass

    tools = toolchain.resolve(allow_fetch=False, quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = tools.run("nvdisasm", ["-c", "-gi", str(path)])
        graph = tools.run("nvdisasm", ["-cfg", str(path)])
        schedule = tools.run("cuobjdump", ["-sass", str(path)])
    ((name, function),) = cuxray_sass.parse_gi(text).functions.items()
    threads = 32 * usage["warps"]
    blocks = cfgdot.parse(graph)[name]
    loops = {}
    for row in loop_schedule(function, blocks, ctrl.parse_sass_controls(schedule)[name]):
        loops[row["header"]] = Trip(row["instructions"], row["est_issue_stall_cycles_per_iter"])
    fits = occupancy.compute(
        lookup(f"sm_{arch}"), usage["registers"], threads, smem_dynamic=usage["shared"]
    )
    ways = []
    for access in analyze_accesses(function, (threads, 1, 1), blocks.loop_depth)["accesses"]:
        if access["space"] == "shared" and access["loop_depth"]:
            ways.append(access["conflict_ways"])
    return Opinion(fits.active_warps, loops), ways


def rows_of(name: str, ours: Opinion, theirs: Opinion, code: sass.Code) -> Iterator[Row]:
    """What both say of a variant."""
    why = "" if close(ours.resident, theirs.resident) else "not known"
    yield Row(name, "resident warps", ours.resident, theirs.resident, why)
    to_next_label = trips_to_the_next_label(code)
    for label in sorted(ours.loops.keys() | theirs.loops.keys()):
        here, there = (opinion.loops.get(label, Trip(0, 0)) for opinion in (ours, theirs))
        for field in Trip._fields:
            pair = getattr(here, field), getattr(there, field)
            explained = getattr(to_next_label.get(label, Trip(0, 0)), field)
            yield Row(name, f"{field} of {label}", *pair, why_apart(*pair, explained))


def close(one: float, other: float, factor: float = APART) -> bool:
    """Return True if two counts differ by a factor of at most ``factor``."""
    return max(one, other) <= factor * min(one, other)


def why_apart(here: int, there: int, to_next_label: int) -> str:
    """Say why two counts of a loop differ by more than `APART`; "" where they do not."""
    if close(here, there):
        return ""
    if 0 in (here, there):
        return f"a loop to {'cuxray' if here == 0 else 'us'} alone"
    if close(to_next_label, there, 1.02):
        return "cuxray counts on behind the loop's last branch, to the next label"
    return "not known"


def table_of(rows: list[Row], ways: dict[str, int]) -> Table:
    """Return the table of all rows.

    Args:
        rows: of all variants.
        ways: by variant, the most cycles that one access of shared memory in a loop takes.
    """
    table = Table(box=None, pad_edge=False)
    for column in ("variant", "of", "here", "cuxray", "cycles an access", "why they differ"):
        table.add_column(column, overflow="fold")
    for row in rows:
        of_banks = str(ways.get(row.variant, "")) if row.what == "resident warps" else ""
        table.add_row(row.variant, row.what, str(row.here), str(row.there), of_banks, row.why)
    return table


def main() -> None:
    """Compare what a network launches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="a torchvision or timm name")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    given = parser.parse_args()
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    os.environ["CUXRAY_TOOLCHAIN"] = str(tools)
    arch = GPUS[given.gpu].architecture
    made = traffic.of_network(given.network).made
    cases = {launch.case[0]: launch.case for launch in made if launch.case}
    rows: list[Row] = []
    most: dict[str, int] = {}
    for number, case in enumerate(cases.values(), 1):
        binary = compile_kernels.compiled(case, arch)
        variant = predicted.variant_of(case, arch, binary)
        theirs, ways = cuxrays(binary.asm["cubin"], variant.usage, arch)
        name = f"{number} {case[1].__name__}"
        rows += rows_of(name, own(variant, arch), theirs, variant.code)
        if ways:
            most[name] = max(ways)
    Console(width=160).print(table_of(rows, most))
    apart = [row for row in rows if row.why]
    print(f"\n{len(rows)} counts of {len(cases)} variants, {len(apart)} apart by more than {APART}")
    for why in dict.fromkeys(row.why for row in apart):
        print(f"{sum(row.why == why for row in apart)}: {why}")


if __name__ == "__main__":
    main()
