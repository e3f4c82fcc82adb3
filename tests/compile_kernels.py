"""Compile Triton kernels ahead of time, with no GPU: ``python compile_kernels.py MODULE [ARCH ...]`` prints JSON
records.

A kernel module offers ``compile_cases() -> [(name, kernel, signature, constexprs), ...]``. Each case is compiled to a
cubin for each architecture (80, 90 and 100 by default), and the assembler's resource usage is read back with the
cuobjdump that comes with Triton: ``{"case", "arch", "registers", "shared", "stack", "local", "spills"}`` (bytes, but
for registers). It runs in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHITECTURES = (80, 90, 100)


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
    """Compile one case (see above) for ``arch``, with options of Triton such as num_warps or maxnreg; measure it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, kernel, signature, constexprs = case
    types = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    source = ASTSource(kernel, {key: types[key] for key in kernel.arg_names}, constexprs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage = resource_usage(compiled.asm["cubin"])
    # ptxas puts spilled registers on the stack (local memory); these kernels have no arrays of their own there.
    usage["spills"] = usage["stack"] + usage["local"]
    usage["shared"] = max(usage["shared"], compiled.metadata.shared)
    return {"case": name, "arch": arch, **usage}


def compile_module(module: str, architectures: tuple[int, ...] = ARCHITECTURES) -> list[dict[str, object]]:
    """Compile every case of ``module`` for every architecture and return the records."""
    cases = importlib.import_module(module).compile_cases()
    return [compile_case(case, arch) for case in cases for arch in architectures]


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    chosen = tuple(map(int, sys.argv[2:])) or ARCHITECTURES
    print(json.dumps(compile_module(sys.argv[1], chosen)))
