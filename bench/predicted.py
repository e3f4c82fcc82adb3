"""The predicted time of noted launches: each variant compiled, its instructions counted, no GPU.

In: launches as `traffic.py` notes them. A variant is compiled once for the GPU's architecture and
disassembled; with the trips of its loops (`trips.py`) it gives what a program does
(`execution.py`), and with that and the bytes that it touches and reads again (`read_again.py`) the
three times of a launch (`gpu_model.py`). Out: a row a launch, a summary by kernel, and the files of
a record. Operations of ATen have the time of their bytes alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from bench import compile_kernels, execution, sass
from bench.gpu_model import Gpu, Terms, dram_seconds, load_latency, terms
from bench.read_again import read_again
from bench.trips import loop_names, trips

THREADS = 32  # of a warp
OF_ATEN = "operations of ATen and cuDNN"


class Row(NamedTuple):
    """One launch.

    Attributes:
        name: of the kernel, or `OF_ATEN`.
        variant: of the kernel, by types, constants and what is known of sizes.
        programs: of the launch.
        warps: of a program.
        resident: warps on a multiprocessor.
        instructions: of all warps of a program.
        computing: the share of them that computes.
        barriers: that a program waits at.
        in_flight: bytes that a multiprocessor's resident threads have asked of memory at most when
            they wait for some of them.
        touched: bytes, each tensor once.
        again: bytes read again, from the second cache.
        terms: the three times, in seconds.
    """

    name: str
    variant: str
    programs: int
    warps: int
    resident: int
    instructions: float
    computing: float
    barriers: float
    in_flight: int
    touched: int
    again: float
    terms: Terms


class Variant(NamedTuple):
    """A compiled variant: its code, the names of its loops, its resource usage."""

    code: sass.Code
    names: list[str]
    usage: dict[str, Any]


def compiled_variant(case: tuple, arch: int) -> Variant:
    """Compile and read one variant."""
    return variant_of(case, arch, compile_kernels.compiled(case, arch))


def variant_of(case: tuple, arch: int, binary: Any) -> Variant:
    """Read a variant that was compiled."""
    code = sass.parsed(sass.disassembly(binary.asm["cubin"]))
    return Variant(code, loop_names(code), compile_kernels.record_of(case, arch, binary))


def predicted(made: Iterable[Any], gpu: Gpu) -> list[Row]:
    """Return a row for each of some launches."""
    variants: dict[str, Variant] = {}
    rows = []
    for launch in made:
        if launch.case is None:
            only = Terms(0.0, 0.0, dram_seconds(launch.touched, gpu))
            rows.append(Row(OF_ATEN, launch.name, 0, 0, 0, 0, 0, 0, 0, launch.touched, 0, only))
            continue
        label = launch.case[0]
        if label not in variants:
            variants[label] = compiled_variant(launch.case, gpu.architecture)
        rows.append(row_of(launch, variants[label], gpu))
    return rows


def loop_trips(launch: Any, variant: Variant) -> list[float]:
    """Return how often a program of a launch goes through each loop of its code."""
    of_source = trips(launch.name, variant.names, launch.arguments)
    return execution.unrolled(variant.code, variant.names, of_source)


def counted(launch: Any, variant: Variant) -> execution.Counts:
    """Return what a warp of a launch does."""
    return execution.counts(variant.code, loop_trips(launch, variant))


def row_of(launch: Any, variant: Variant, gpu: Gpu) -> Row:
    """Return the row of a kernel's launch."""
    usage, programs = variant.usage, launch.arguments["programs"]
    warps = usage["warps"]
    resident = compile_kernels.resident_warps(
        gpu.architecture, warps, usage["registers"], usage["shared"]
    )
    counts = counted(launch, variant)
    threads = programs * warps * THREADS
    again = read_again(launch.name, launch.arguments)
    read = max(0.0, launch.touched - counts.stored * threads)
    latency = load_latency(counts.loaded * threads, read, again)
    alone = execution.alone(variant.code, loop_trips(launch, variant), latency)
    instructions = counts.instructions * warps
    return Row(
        launch.name,
        launch.case[0],
        programs,
        warps,
        resident,
        instructions,
        counts.computing / counts.instructions,
        counts.barriers,
        alone.in_flight * THREADS * resident,
        launch.touched,
        again,
        terms(instructions, alone.cycles, programs, max(1, resident // warps), launch.touched, gpu),
    )


def summary(rows: list[Row], images: int, chunk: int, gpu: str) -> dict[str, Any]:
    """Return times in ms for so many images, and counts an image, in all and by kernel.

    The kernel of most time is first.
    """
    total = _kernel(rows, images, chunk)
    total |= {"name": "all", "kernels": _by(lambda row: row.name, rows, images, chunk)}
    return {"gpu": gpu, "images": images, "chunk": chunk, **total}


def _by(
    key: Callable[[Row], str], rows: list[Row], images: int, chunk: int
) -> list[dict[str, Any]]:
    """The numbers of the launches of each key, most time first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    found = [_kernel(group, images, chunk) | {"name": name} for name, group in groups.items()]
    return sorted(found, key=lambda kernel: -kernel["ms"])


def _kernel(rows: list[Row], images: int, chunk: int) -> dict[str, Any]:
    """The numbers of some launches in one chunk."""
    sums: dict[str, float] = defaultdict(float)
    resident, in_flight = set(), set()
    for row in rows:
        sums["programs"] += row.programs
        sums["instructions"] += row.instructions * row.programs
        sums["computing"] += row.computing * row.instructions * row.programs
        sums["barriers"] += row.barriers * row.programs
        sums["touched"] += row.touched
        sums["again"] += row.again
        sums["seconds"] += row.terms.seconds
        for name, seconds in row.terms._asdict().items():
            sums[name] += seconds
        if row.warps:
            resident.add(row.resident)
            in_flight.add(row.in_flight)
    in_ms = 1e3 * images / chunk
    return {
        "name": rows[0].name,
        "launches": len(rows),
        "ms": in_ms * sums["seconds"],
        "issue_ms": in_ms * sums["issue"],
        "latency_ms": in_ms * sums["latency"],
        "dram_ms": in_ms * sums["dram"],
        "instructions": sums["instructions"] / chunk,
        "computing": sums["computing"] / max(1, sums["instructions"]),
        "barriers": sums["barriers"] / max(1, sums["programs"]),
        "resident_warps": sorted(resident),
        "in_flight": sorted(in_flight),
        "touched": sums["touched"] / chunk,
        "again": sums["again"] / chunk,
    }


COLUMNS = (
    "launches",
    "M instr.",
    "computes",
    "barriers",
    "warps",
    "KB in flight",
    "MB",
    "MB again",
    "issue",
    "latency",
    "DRAM",
    "ms",
)


ON_SCREEN = ("launches", "M instr.", "issue", "latency", "DRAM", "ms")


def cells(kernel: dict[str, Any], columns: Iterable[str] = COLUMNS) -> list[str]:
    """What the tables say of some launches: the chosen ones of `COLUMNS`."""
    in_flight = [size / 1e3 for size in kernel["in_flight"]]
    values = [
        f"{kernel['launches']}",
        f"{kernel['instructions'] / 1e6:.2f}",
        f"{kernel['computing']:.0%}",
        f"{kernel['barriers']:.0f}",
        _span(kernel["resident_warps"]),
        _span(in_flight),
        f"{kernel['touched'] / 1e6:.2f}",
        f"{kernel['again'] / 1e6:.2f}",
        f"{kernel['issue_ms']:.1f}",
        f"{kernel['latency_ms']:.1f}",
        f"{kernel['dram_ms']:.1f}",
        f"{kernel['ms']:.1f}",
    ]
    by_column = dict(zip(COLUMNS, values, strict=True))
    return [by_column[column] for column in columns]


def _span(values: list[float]) -> str:
    """The least and the most of some numbers."""
    if not values:
        return ""
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return least if least == most else f"{least}-{most}"


def table(found: dict[str, Any]) -> Table:
    """Return a summary as a table for the terminal."""
    result = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), title=title(found))
    for column in ("kernel", *ON_SCREEN):
        result.add_column(column, justify="left" if column == "kernel" else "right")
    for kernel in (*found["kernels"], found):
        result.add_row(kernel["name"], *cells(kernel, ON_SCREEN))
    return result


def title(found: dict[str, Any]) -> str:
    """Say what the times are of."""
    return (
        f"predicted, not measured: {found['ms']:.0f} ms for {found['images']} images in chunks of "
        f"{found['chunk']} on one {found['gpu'].upper()}"
    )


def write(path: Path, found: dict[str, Any], rows: list[Row]) -> None:
    """Write a summary as JSON, and with a row for each variant as Markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    modules = sorted(file.stem for file in compile_kernels.KERNELS.glob("*.py"))
    origin = compile_kernels.origin(modules, "bench.traffic")
    record = json.dumps({"origin": origin, **found}, indent=1)
    path.with_name(path.name + ".json").write_text(record + "\n")
    lines = [f"# {path.name}", "", f"{title(found)}. {origin}", "", *_markdown(found["kernels"])]
    lines += ["", "## By variant", ""]
    of_kernels = [row for row in rows if row.warps]
    lines += _markdown(
        _by(lambda row: f"`{row.variant}`", of_kernels, found["images"], found["chunk"])
    )
    path.with_name(path.name + ".md").write_text("\n".join(lines) + "\n")


def _markdown(kernels: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| kernel | " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * len(COLUMNS)]
    lines += [f"| {kernel['name']} | " + " | ".join(cells(kernel)) + " |" for kernel in kernels]
    return lines
