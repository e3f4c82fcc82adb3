"""What this machine offers fastlr, what is missing, what that costs and how to get it."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

OPTIONAL = {
    "timm": ("timm/... model names are unknown", "pip install 'fastlr[models]'"),
    "transformers": ("no Hugging Face models", "pip install 'fastlr[models]'"),
    "sklearn": ("fastlr demo network has no digits to train on", "pip install 'fastlr[demo]'"),
    "tensorboard": ("fastlr continual --tensorboard is refused", "pip install 'fastlr[logging]'"),
    "ray": ("fastlr sweep --ray is refused", "pip install 'fastlr[ray]'"),
    "opacus": ("bench/peers.py leaves Opacus out", "pip install 'fastlr[bench]'"),
    "backpack": ("bench/peers.py leaves BackPACK out", "pip install 'fastlr[bench]'"),
}
DISTRIBUTIONS = {"sklearn": "scikit-learn", "backpack": "backpack-for-pytorch"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: What it is.
        found: Whether it is there and works.
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
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", _python),
        ("torch", lambda: _package("torch", "nothing works without it", "pip install torch")),
        ("torchvision", lambda: _package("torchvision", "no torchvision model names", "pip install torchvision")),
        ("triton", lambda: _package("triton", "no GPU kernels: plain torch is used instead", "pip install triton")),
        ("GPU", _gpu),
        ("C++ compiler", _compiler),
        ("nvcc", _nvcc),
        ("fastlr._C", _extension),
        *[(name, lambda name=name: _package(name, *OPTIONAL[name])) for name in OPTIONAL],
    ]
    findings = []
    for name, check in checks:
        try:
            findings.append(check())
        except Exception as error:  # a broken installation must be reported, not raised
            findings.append(Finding(name, False, f"{type(error).__name__}: {_line(error)}", "the check itself failed"))
    return findings


def as_table(findings: list[Finding]) -> RenderableType:
    """Return what is there as a table, and below it each missing thing with its cost and remedy."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for each in findings:
        mark = Text("found", style="green") if each.found else Text("missing", style="yellow")
        table.add_row(mark, each.name, each.detail)
    missing = [each for each in findings if not each.found]
    parts: list[RenderableType] = [
        Text(f"fastlr {_version('fastlr') or '(not installed)'}", style="bold"),
        table,
        Text(),
    ]
    if not missing:
        parts.append(Text("Nothing is missing."))
    else:
        parts.append(Text("What the missing ones cost, and the remedy:"))
        notes = Table(box=None, pad_edge=False, show_header=False)
        notes.add_column(no_wrap=True, style="bold")
        notes.add_column(overflow="fold")
        for each in missing:
            notes.add_row(each.name, Text(each.cost + (f"\n-> {each.remedy}" if each.remedy else "")))
        parts.append(notes)
    return Group(*parts)


def _python() -> Finding:
    return Finding("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _package(name: str, cost: str, remedy: str) -> Finding:
    label = DISTRIBUTIONS.get(name, name)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return Finding(label, False, "not installed", cost, remedy)
        return Finding(label, False, f"does not import: {_line(error)}", cost, f"reinstall it: {remedy}")
    except Exception as error:
        return Finding(label, False, f"does not import: {_line(error)}", cost, f"reinstall it: {remedy}")
    return Finding(label, True, _version(label) or str(getattr(module, "__version__", "version unknown")))


def _gpu() -> Finding:
    import torch

    cost = "estimates run on the CPU"
    if torch.version.cuda is None:
        return Finding("GPU", False, "this torch was built without CUDA", cost, "install a CUDA build of torch")
    if not torch.cuda.is_available():
        detail = f"torch (CUDA {torch.version.cuda}) sees no device"
        return Finding("GPU", False, detail, cost, "needs an NVIDIA GPU and its driver")
    names = []
    for i in range(torch.cuda.device_count()):
        p: Any = torch.cuda.get_device_properties(i)
        names.append(f"{p.name} ({p.total_memory / 2**30:.0f} GiB, compute {p.major}.{p.minor})")
    return Finding("GPU", True, f"CUDA {torch.version.cuda}: {', '.join(names)}")


def _compiler() -> Finding:
    named = (sysconfig.get_config_var("CXX") or "c++").split()[0]
    for name in (named, "c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return Finding("C++ compiler", True, path)
    return Finding("C++ compiler", False, "none of c++, g++, clang++", "fastlr._C cannot be built", "install g++")


def _nvcc() -> Finding:
    cost = "CUDA code cannot be built here; running on a GPU does not need it"
    remedy = "install the CUDA toolkit of torch's version"
    path = shutil.which("nvcc")
    if path is None:
        return Finding("nvcc", False, "not on PATH", cost, remedy)
    run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    release = next((line for line in run.stdout.splitlines() if "release" in line), "").split(",")
    if run.returncode != 0:
        return Finding("nvcc", False, f"{path} fails: {_line(RuntimeError(run.stderr))}", cost, remedy)
    return Finding("nvcc", True, f"{path}{' (' + release[1].strip() + ')' if len(release) > 1 else ''}")


def _extension() -> Finding:
    cost = "sums across processes go through torch.distributed, with the same results; estimates do not need it"
    remedy = "in a checkout, with a C++ compiler (and nvcc, for GPUs): pip install --no-build-isolation -e ."
    try:
        import torch

        module = importlib.import_module("fastlr._C")
    except ModuleNotFoundError:
        return Finding("fastlr._C", False, "not built", cost, remedy)
    except ImportError as error:
        return Finding("fastlr._C", False, f"does not import: {_line(error)}", cost, remedy)
    if not module.cuda and torch.cuda.is_available():
        detail = f"{module.__file__}: for the CPU only"
        return Finding(
            "fastlr._C", False, detail, cost, "install nvcc, then in a checkout: pip install --no-build-isolation -e ."
        )
    parts = f"the CPU and compute {module.architectures}" if module.cuda else "the CPU"
    return Finding("fastlr._C", True, f"sums across processes, for {parts}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def main() -> int:
    """Print the findings; always 0, since fastlr runs without everything but torch."""
    from rich.console import Console

    Console(file=sys.stdout).print(as_table(examine()))
    return 0
