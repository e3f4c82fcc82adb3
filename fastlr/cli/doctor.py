"""``fastlr doctor``: the parts that fastlr can use and those that this machine lacks.

It says what the lack costs and how to get them.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastlr.errors import first_line, install

# Packages: what their absence costs, and how to get them.
WANTED = {
    "torch": ("nothing works without it", "pip install torch"),
    "torchvision": ("no torchvision model names", "pip install torchvision"),
    "triton": ("no GPU kernels: plain torch is used instead", "pip install triton"),
}
OPTIONAL = {
    "timm": ("timm/... model names are unknown", install("models")),
    "transformers": ("no Hugging Face models", install("models")),
    "tensorboard": ("fastlr continual --tensorboard is refused", install("logging")),
    "ray": ("fastlr sweep --ray is refused", install("ray")),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: What it is.
        found: True if it is there and works.
        detail: Its version or place, or why it does not count as found.
        cost: What its absence costs; empty if found.
        remedy: How to get it; empty if found or if there is nothing to do.
    """

    name: str
    found: bool
    detail: str
    cost: str = ""
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything that fastlr can use; never raises: a check that fails is a finding."""
    checks: dict[str, Callable[[], Finding]] = {"python": _python}
    checks |= {
        name: partial(_package, name, *cost_and_remedy) for name, cost_and_remedy in WANTED.items()
    }
    checks |= {"GPU": _gpu, "fastlr._C": _extension}
    checks |= {
        name: partial(_package, name, *cost_and_remedy)
        for name, cost_and_remedy in OPTIONAL.items()
    }
    findings = []
    for name, check in checks.items():
        try:
            findings.append(check())
        except Exception as error:  # a broken installation must be reported, not raised
            findings.append(Finding(name, False, _described(error), "the check itself failed"))
    return findings


def as_table(findings: list[Finding]) -> RenderableType:
    """Return the findings as a table, and below it each missing thing with its cost and remedy."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    notes = Table(box=None, pad_edge=False, show_header=False)
    notes.add_column(no_wrap=True, style="bold")
    notes.add_column(overflow="fold")
    for finding in findings:
        mark = Text("found", style="green") if finding.found else Text("missing", style="yellow")
        table.add_row(mark, finding.name, finding.detail)
        if not finding.found:
            remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
            notes.add_row(finding.name, Text(finding.cost + remedy))
    title = Text(f"fastlr {_version('fastlr') or '(not installed)'}", style="bold")
    if not notes.row_count:
        return Group(title, table, Text(), Text("Nothing is missing."))
    return Group(title, table, Text(), Text("What the missing ones cost, and the remedy:"), notes)


def _python() -> Finding:
    return Finding(
        "python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )


def _package(name: str, cost: str, remedy: str) -> Finding:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return Finding(name, False, "not installed", cost, remedy)
        return Finding(
            name, False, f"does not import: {first_line(error)}", cost, f"reinstall it: {remedy}"
        )
    return Finding(
        name, True, _version(name) or str(getattr(module, "__version__", "version unknown"))
    )


def _gpu() -> Finding:
    import torch

    cost = "estimates run on the CPU"
    if torch.version.cuda is None:
        return Finding(
            "GPU", False, "this torch was built without CUDA", cost, "install a CUDA build of torch"
        )
    if not torch.cuda.is_available():
        detail = f"torch (CUDA {torch.version.cuda}) sees no device"
        return Finding("GPU", False, detail, cost, "needs an NVIDIA GPU and its driver")
    names = []
    for i in range(torch.cuda.device_count()):
        p: Any = torch.cuda.get_device_properties(i)
        names.append(f"{p.name} ({p.total_memory / 2**30:.0f} GiB, compute {p.major}.{p.minor})")
    return Finding("GPU", True, f"CUDA {torch.version.cuda}: {', '.join(names)}")


def _extension() -> Finding:
    from fastlr.distributed.connection import BUILD

    cost = (
        "sums across processes go through torch.distributed, with the same results; estimates do "
        "not need it"
    )
    remedy = f"with a C++ compiler (and nvcc, for GPUs): {BUILD}"
    try:
        import torch

        module = importlib.import_module("fastlr._C")
    except ModuleNotFoundError:
        return Finding("fastlr._C", False, "not built", cost, remedy)
    except ImportError as error:
        return Finding("fastlr._C", False, f"does not import: {first_line(error)}", cost, remedy)
    if not module.cuda and torch.cuda.is_available():
        remedy = f"with nvcc: {BUILD}"
        return Finding("fastlr._C", False, f"{module.__file__}: for the CPU only", cost, remedy)
    parts = f"the CPU and compute {module.architectures}" if module.cuda else "the CPU"
    return Finding("fastlr._C", True, f"sums across processes, for {parts}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def kernels() -> list[Finding]:
    """Compare every kernel with plain torch, and return a finding for each op and dtype.

    On a GPU; without one in Triton's interpreter where TRITON_INTERPRET is set. Otherwise the one
    finding says how.
    """
    import torch

    from fastlr import ops
    from fastlr.cli.kernels import DTYPES, outcomes
    from fastlr.kernels.interpreter import repair_interpreter

    gpu = torch.cuda.is_available()
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    why = None
    if not ops.has_triton():
        why = "Triton is not installed, or torch is built for AMD GPUs"
    elif not gpu and not interpreted:
        why = "no GPU: the kernels run in Triton's interpreter only"
    if why is not None:
        remedy = "TRITON_INTERPRET=1 fastlr doctor --kernels (some minutes)"
        return [Finding("kernels", False, why, "they are not compared with plain torch", remedy)]
    if not gpu:
        repair_interpreter()
    device = torch.device("cuda" if gpu else "cpu")
    return [
        _of_kernel(f"{name}, {str(dtype).removeprefix('torch.')}", shares, reason)
        for dtype in DTYPES
        for name, shares, reason in outcomes(device, dtype)
    ]


def _of_kernel(title: str, shares: list[float], reason: str) -> Finding:
    if reason:
        cost = "plain torch serves, slower"
        return Finding(title, False, f"wrong: {reason}", cost, "please report this table")
    most = max(shares, default=0.0)
    detail = f"{len(shares)} calls as plain torch, at most {most:.2g} of the deviation allowed"
    return Finding(title, True, detail)


def print_findings(with_kernels: bool = False) -> None:
    """Print the findings, on request those of the kernels too."""
    Console().print(as_table(examine() + (kernels() if with_kernels else [])))
