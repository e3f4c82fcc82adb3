"""Compile Triton kernels ahead of time, with no GPU.

Usage: ``python -m bench.compile_kernels [--table] [MODULE ...] [ARCH ...]``.

`kernel_variants.py` has the cases of every module of kernels/: (name, kernel, signature,
constexprs, options). Each is compiled to a cubin for each architecture (80, 90 and 100 by default),
and the assembler's resource usage is read back with the cuobjdump that comes with Triton. Options,
all of them optional:

- ``num_warps``, ``num_stages``, ``maxnreg``: as at the launch.
- ``divisible``: names of arguments that are multiples of 16 (strides, sizes) or aligned to 16 bytes
  (pointers). A launch with such arguments gets another variant (wider loads, other registers) than
  one without. An argument that is 1 at the launch is a constant there: put it into ``constexprs``.

Records are ``{"case", "arch", "warps", "registers", "shared", "stack", "local", "spills"}`` (bytes,
but for the first four). Without a module every module of kernels/ is compiled, each in a process of
its own, without TRITON_INTERPRET; the result is printed as JSON, ``{module: records}``, or with
``--table`` as Markdown (``--before COMMIT``: beside the record there).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median_low
from typing import Any

ARCHITECTURES = (80, 90, 100)
ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "kernels"
RECORD = ROOT / "bench/results/compile/kernels.md"
# What a multiprocessor has: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability".
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}  # bytes
REGISTERS, WARPS, PROGRAMS = 1 << 16, 64, 32
# How it is given out: cuda_occupancy.h of CUDA 13.0, the occupancy calculator.
PARTS = 4  # of a multiprocessor, each with a part of its registers and warps
# Those of a warp, and the bytes of a program, are rounded up to multiples.
REGISTERS_AT_ONCE, SHARED_AT_ONCE = (
    256,
    128,
)
RESERVED = 1 << 10  # bytes of shared memory that a program takes beside its own


def resident_warps(arch: int, warps: int, registers: int, shared: int) -> int:
    """Return the warps, of WARPS, that a multiprocessor holds of one kernel; 0 if none fits.

    This is the kernel's theoretical occupancy.

    Args:
        arch: One of ARCHITECTURES.
        warps: Of a program.
        registers: Of a thread.
        shared: Bytes of a program.
    """
    of_warp = math.ceil(32 * registers / REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    of_program = math.ceil((shared + RESERVED) / SHARED_AT_ONCE) * SHARED_AT_ONCE
    by_registers = REGISTERS // PARTS // of_warp * PARTS // warps
    return warps * min(by_registers, SHARED[arch] // of_program, WARPS // warps, PROGRAMS)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack, shared and local memory of the single kernel in ``cubin``."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if len(found) != 1:
        raise RuntimeError(f"expected one kernel in the cubin, cuobjdump said:\n{text}")
    return dict(zip(("registers", "stack", "shared", "local"), map(int, found[0]), strict=True))


def compile_case(case: tuple, arch: int, **options: int) -> dict[str, object]:
    """Compile one case (see above) for ``arch``, and return its record.

    ``options`` go before the case's own.
    """
    return record_of(case, arch, compiled(case, arch, **options))


def compiled(case: tuple, arch: int, **options: int) -> Any:
    """Compile one case (see above) for ``arch``: what `triton.compile` returns."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fastlr.kernels.launching import FUSED

    name, kernel, signature, constexprs, given = case
    options = FUSED | given | options
    divisible = options.pop("divisible")
    types = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    unknown = set(divisible) - set(types) or set(types) ^ set(kernel.arg_names)
    if unknown:
        raise ValueError(f"{name}: arguments {sorted(unknown)} do not match those of the kernel")
    attributes = {
        (number,): [["tt.divisibility", 16]]
        for number, key in enumerate(kernel.arg_names)
        if key in divisible and types[key] != "constexpr"
    }
    source = ASTSource(
        kernel, {key: types[key] for key in kernel.arg_names}, constexprs, attributes
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def record_of(case: tuple, arch: int, binary: Any) -> dict[str, object]:
    """The record of a case from what was compiled of it."""
    usage = resource_usage(binary.asm["cubin"])
    # ptxas puts spilled registers on the stack (local memory); these kernels have no arrays of
    # their own there.
    usage["spills"] = usage["stack"] + usage["local"]
    # Cuobjdump knows nothing of it, but for what is reserved from 9.0 on.
    usage["shared"] = binary.metadata.shared
    return {"case": case[0], "arch": arch, "warps": binary.metadata.num_warps, **usage}


def compile_module(
    module: str, architectures: tuple[int, ...] = ARCHITECTURES
) -> list[dict[str, object]]:
    """Compile every case of ``module`` for every architecture and return the records."""
    from bench.kernel_variants import VARIANTS
    from fastlr.ops import tuning

    of_arch = []
    for arch in architectures:
        with tuning.assuming(arch):
            cases = VARIANTS[module]() if module in VARIANTS else ()
            of_arch.append([compile_case(case, arch) for case in cases])
    return [record for of_case in zip(*of_arch, strict=True) for record in of_case]


def rows(text: str) -> Iterator[tuple[str, str, int, list[list[int]]]]:
    """The rows of a `table`: module, case, warps, and for each architecture its numbers."""
    for part in text.split("\n### ")[1:]:
        for name, warps, cells in re.findall(r"^\| (.*?) \| (\d+) \| (.*) \|$", part, re.MULTILINE):
            found = [[int(number) for number in cell.split(" / ")] for cell in cells.split(" | ")]
            yield part.partition("\n")[0], name, int(warps), found


def largest_case(module: str, record: Path = RECORD) -> list[tuple]:
    """Return, in a list, the case that took most registers; none of a module without kernels.

    They are read in ``record``, of compute capability 9.0. Convolutions of 7x7, which take the
    compiler longest, are left out.
    """
    from bench.kernel_variants import VARIANTS

    text = record.read_text() if record.exists() else ""  # it is left out of source distributions
    taken = {name: cells[1][0] * warps for _, name, warps, cells in rows(text)}
    cases = VARIANTS[module]() if module in VARIANTS else []
    cases = [case for case in cases if "7x7/" not in case[0]]
    return sorted(cases, key=lambda case: taken.get(case[0], 0))[-1:]


def kernel_modules() -> list[str]:
    """Name the modules in kernels/, by listing the folder."""
    return [path.stem for path in sorted(KERNELS.glob("*.py")) if path.stem != "__init__"]


def run_module(
    module: str, architectures: tuple[int, ...] = ARCHITECTURES
) -> list[dict[str, object]]:
    """Run `compile_module` in its own process without TRITON_INTERPRET; an error has its output."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.compile_kernels", module, *map(str, architectures)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed:\n{run.stdout[-2000:]}\n{run.stderr[-6000:]}"
        )
    return json.loads(run.stdout)[module]


def compile_all(
    architectures: tuple[int, ...] = ARCHITECTURES,
) -> dict[str, list[dict[str, object]]]:
    """Compile every module that has variants, one process a module: {module: records}."""
    found = {module: run_module(module, architectures) for module in kernel_modules()}
    return {module: records for module, records in found.items() if records}


def problems(records: list[dict[str, object]]) -> list[str]:
    """Say which records spill or do not fit their architecture.

    Such a kernel would be slow, or would not start.
    """
    found = []
    for record in records:
        where = f"{record['case']} on sm_{record['arch']}"
        if record["spills"]:
            found.append(
                f"{where} spills: {record['stack']} bytes of stack, {record['local']} of local "
                "memory"
            )
        if record["shared"] > SHARED[record["arch"]] - RESERVED:
            found.append(
                f"{where} takes {record['shared']} bytes of shared memory, more than a program may"
            )
        if record["registers"] * record["warps"] * 32 > REGISTERS:
            found.append(
                f"{where} takes {record['registers']} registers in {record['warps']} warps"
            )
    return found


def table(found: dict[str, list[dict[str, object]]]) -> str:
    """Return a Markdown table of what each case takes on each architecture.

    The columns are registers a thread, bytes of shared memory and bytes spilled, and resident
    warps.
    """
    archs = list(dict.fromkeys(record["arch"] for records in found.values() for record in records))
    lines = []
    for module, records in found.items():
        lines += [f"### {module}", ""]
        lines.append("| case | warps | " + " | ".join(f"sm_{arch}" for arch in archs) + " |")
        lines.append("| --- | --- |" + " --- |" * len(archs))
        cases: dict[str, dict[int, dict[str, object]]] = {}
        for record in records:
            cases.setdefault(str(record["case"]), {})[record["arch"]] = record
        for name, by_arch in cases.items():
            row = (" / ".join(map(str, numbers(by_arch[arch]))) for arch in archs)
            lines.append(f"| {name} | {by_arch[archs[0]]['warps']} | " + " | ".join(row) + " |")
        lines.append("")
    what = (
        "Registers a thread / bytes of shared memory / bytes spilled / resident warps of a "
        "multiprocessor"
    )
    return "\n".join([f"{what} (of {WARPS}: the theoretical occupancy).", "", *lines])


def numbers(record: dict[str, object]) -> tuple[int, int, int, int]:
    """What `table` says of a record."""
    arch, warps, registers, shared, spills = (
        record[key] for key in ("arch", "warps", "registers", "shared", "spills")
    )
    return registers, shared, spills, resident_warps(arch, warps, registers, shared)


def comparison(before: str, after: str) -> str:
    """Return a Markdown table that compares the modules of two tables.

    It has the most registers and bytes spilled, on any architecture, and the resident warps.
    """
    lines = ["| module | before | after |", "| --- | --- | --- |"]
    modules = [summary(text) for text in (before, after)]
    for module in sorted({**modules[0], **modules[1]}):
        lines.append(
            f"| {module} | " + " | ".join(found.get(module, "") for found in modules) + " |"
        )
    what = (
        "Most registers a thread / most bytes spilled / fewest resident warps / their median, "
        "over cases and architectures."
    )
    return "\n".join([what, "", *lines])


def summary(text: str) -> dict[str, str]:
    """A cell of `comparison` for each module of a table."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for module, _, warps, cells in rows(text):
        for arch, (registers, shared, spills, *_) in zip(ARCHITECTURES, cells, strict=True):
            found.setdefault(module, []).append(
                (registers, spills, resident_warps(arch, warps, registers, shared))
            )
    columns = {module: list(zip(*of_module, strict=True)) for module, of_module in found.items()}
    return {
        m: f"{max(r)} / {max(s)} / {min(w)} / {median_low(w)}" for m, (r, s, w) in columns.items()
    }


def said(*command: str) -> str:
    """What a command prints in the clone."""
    return subprocess.run(command, cwd=KERNELS, capture_output=True, text=True).stdout.strip()


def origin(modules: list[str]) -> str:
    """Say in one line what made a table of modules: the command, the versions and the commit."""
    import torch
    import triton

    commit = said("git", "rev-parse", "--short=12", "HEAD") or "unknown"
    changed = said("git", "status", "--porcelain", "--", *(f"{module}.py" for module in modules))
    if changed:
        commit += " with later changes"
    command = " ".join(["python -m bench.compile_kernels", *sys.argv[1:]])
    return (
        f"Made by `{command}` with triton {triton.__version__} (its own ptxas), torch "
        f"{torch.__version__}, commit {commit}."
    )


def main() -> None:
    """Compile what the command line names and print it."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    parser = argparse.ArgumentParser(
        description="Compile Triton kernels with no GPU and print their resource usage."
    )
    parser.add_argument("--table", action="store_true", help="print Markdown, not JSON")
    parser.add_argument(
        "--before", metavar="COMMIT", help="with --table: compare with the record in that commit"
    )
    parser.add_argument(
        "names",
        nargs="*",
        help="modules of kernels/ such as shape_images, architectures such as 90",
    )
    chosen = parser.parse_args()
    earlier = (
        said("git", "show", f"{chosen.before}:bench/results/compile/kernels.md")
        if chosen.before
        else ""
    )
    if chosen.before and not earlier:
        parser.error(f"commit {chosen.before} has no record")
    architectures = tuple(int(name) for name in chosen.names if name.isdigit()) or ARCHITECTURES
    modules = [name for name in chosen.names if not name.isdigit()]
    if modules:
        found = {module: compile_module(module, architectures) for module in modules}
    else:
        found = compile_all(architectures)
    if not chosen.table:
        print(json.dumps(found))
        return
    parts = ["# Kernels as compiled", origin(list(found)), table(found)]
    if earlier:
        parts.insert(
            2,
            f"## Beside commit {chosen.before}\n\n{comparison(earlier, parts[-1])}\n\n## All cases",
        )
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
