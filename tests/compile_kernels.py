"""Compile Triton kernels ahead of time, with no GPU: ``python compile_kernels.py [--table] [MODULE ...] [ARCH ...]``.

A kernel module offers ``compile_cases() -> [(name, kernel, signature, constexprs[, options]), ...]``. Each case is
compiled to a cubin for each architecture (80, 90 and 100 by default), and the assembler's resource usage is read back
with the cuobjdump that comes with Triton. Options, all of them optional:

- ``num_warps``, ``num_stages``, ``maxnreg``: as at the launch.
- ``divisible``: names of arguments that are multiples of 16 (strides, sizes) or aligned to 16 bytes (pointers). A launch
  with such arguments gets another variant (wider loads, other registers) than one without; ``"pointers"`` names all
  pointers. An argument that is 1 at the launch is a constant there: put it into ``constexprs``.

Records are ``{"case", "arch", "warps", "registers", "shared", "stack", "local", "spills"}`` (bytes, but for the first
four). Without a module every module of kernels/ is compiled, each in a process of its own, without TRITON_INTERPRET; the
result is printed as JSON, ``{module: records}``, or with ``--table`` as Markdown.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHITECTURES = (80, 90, 100)
KERNELS = Path(__file__).parent.parent / "kernels"
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that one program may take
REGISTERS = 1 << 16  # of a multiprocessor


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
    """Compile one case (see above) for ``arch``; ``options`` go before the case's own. Return its record."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, kernel, signature, constexprs, *rest = case
    options = {**(rest[0] if rest else {}), **options}
    divisible = options.pop("divisible", ())
    if divisible == "pointers":
        divisible = [key for key, kind in signature.items() if kind.startswith("*")]
    types = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    unknown = set(divisible) - set(types) or set(types) ^ set(kernel.arg_names)
    if unknown:
        raise ValueError(f"{name}: arguments {sorted(unknown)} do not match those of the kernel")
    attributes = {
        (number,): [["tt.divisibility", 16]]
        for number, key in enumerate(kernel.arg_names)
        if key in divisible and types[key] != "constexpr"
    }
    source = ASTSource(kernel, {key: types[key] for key in kernel.arg_names}, constexprs, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = resource_usage(compiled.asm["cubin"])
    # ptxas puts spilled registers on the stack (local memory); these kernels have no arrays of their own there.
    usage["spills"] = usage["stack"] + usage["local"]
    usage["shared"] = max(usage["shared"], compiled.metadata.shared)
    return {"case": name, "arch": arch, "warps": compiled.metadata.num_warps, **usage}


def compile_module(module: str, architectures: tuple[int, ...] = ARCHITECTURES) -> list[dict[str, object]]:
    """Compile every case of ``module`` for every architecture and return the records."""
    cases = getattr(importlib.import_module(module), "compile_cases", list)()
    return [compile_case(case, arch) for case in cases for arch in architectures]


def kernel_modules() -> list[str]:
    """Name the modules in kernels/, by listing the folder."""
    return [f"fastlr.kernels.{path.stem}" for path in sorted(KERNELS.glob("*.py")) if path.stem != "__init__"]


def run_module(module: str, architectures: tuple[int, ...] = ARCHITECTURES) -> list[dict[str, object]]:
    """`compile_module` in a process of its own, without TRITON_INTERPRET; what it prints comes with the error."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, module, *map(str, architectures)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stdout[-2000:]}\n{run.stderr[-6000:]}")
    return json.loads(run.stdout)[module]


def compile_all(architectures: tuple[int, ...] = ARCHITECTURES) -> dict[str, list[dict[str, object]]]:
    """Compile every module that offers compile_cases(), one process a module: {module: records}."""
    found = {module: run_module(module, architectures) for module in kernel_modules()}
    return {module: records for module, records in found.items() if records}


def problems(records: list[dict[str, object]]) -> list[str]:
    """Say which records spill or do not fit their architecture: such a kernel would be slow, or would not start."""
    found = []
    for record in records:
        where = f"{record['case']} on sm_{record['arch']}"
        if record["spills"]:
            found.append(f"{where} spills: {record['stack']} bytes of stack, {record['local']} of local memory")
        if record["shared"] > SHARED_LIMIT[record["arch"]]:
            found.append(f"{where} takes {record['shared']} bytes of shared memory of {SHARED_LIMIT[record['arch']]}")
        if record["registers"] * record["warps"] * 32 > REGISTERS:
            found.append(f"{where} takes {record['registers']} registers in {record['warps']} warps")
    return found


def table(found: dict[str, list[dict[str, object]]]) -> str:
    """Markdown: for each case and architecture the registers a thread, bytes of shared memory and bytes spilled."""
    archs = list(dict.fromkeys(record["arch"] for records in found.values() for record in records))
    lines = []
    for module, records in found.items():
        lines += [f"### {module.rsplit('.', 1)[-1]}", ""]
        lines.append("| case | warps | " + " | ".join(f"sm_{arch}" for arch in archs) + " |")
        lines.append("| --- | --- |" + " --- |" * len(archs))
        cases: dict[str, dict[int, dict[str, object]]] = {}
        for record in records:
            cases.setdefault(str(record["case"]), {})[record["arch"]] = record
        for name, by_arch in cases.items():
            row = (f"{r['registers']} / {r['shared']} / {r['spills']}" for r in (by_arch[arch] for arch in archs))
            lines.append(f"| {name} | {by_arch[archs[0]]['warps']} | " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join(["Registers a thread / bytes of shared memory / bytes spilled.", "", *lines])


def origin(modules: list[str]) -> str:
    """Say in one line what made a table of these modules: the command, the versions and the commit."""
    import torch
    import triton

    def said(*command: str) -> str:
        done = subprocess.run(command, cwd=KERNELS, capture_output=True, text=True)
        return done.stdout.strip()

    commit = said("git", "rev-parse", "--short=12", "HEAD") or "unknown"
    changed = said("git", "status", "--porcelain", "--", *(f"{module.rsplit('.', 1)[-1]}.py" for module in modules))
    if changed:
        commit += " with later changes"
    command = " ".join(["python tests/compile_kernels.py", *sys.argv[1:]])
    return f"Made by `{command}` with triton {triton.__version__} (its own ptxas), torch {torch.__version__}, commit {commit}."


def main() -> None:
    """Compile what the command line names and print it."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    parser = argparse.ArgumentParser(description="Compile Triton kernels with no GPU and print their resource usage.")
    parser.add_argument("--table", action="store_true", help="print Markdown, not JSON")
    parser.add_argument(
        "names", nargs="*", help="modules such as fastlr.kernels.shape_images, architectures such as 90"
    )
    chosen = parser.parse_args()
    architectures = tuple(int(name) for name in chosen.names if name.isdigit()) or ARCHITECTURES
    modules = [name for name in chosen.names if not name.isdigit()]
    if modules:
        found = {module: compile_module(module, architectures) for module in modules}
    else:
        found = compile_all(architectures)
    print(f"# Kernels as compiled\n\n{origin(list(found))}\n\n{table(found)}" if chosen.table else json.dumps(found))


if __name__ == "__main__":
    main()
