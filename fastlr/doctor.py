"""What this machine offers fastlr, what is missing, what that costs and how to get it."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import torch

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


def repair_interpreter() -> None:
    """Repair Triton 3.6's interpreter for NumPy 2.4, before kernels run in it.

    ``range()`` over a run-time value makes a Python integer of an array of one element, which NumPy no longer allows.
    Kernels need such loops: Triton pipelines the loads of ``range``, not of ``while``.
    """
    from triton.runtime import interpreter

    plain: Any = interpreter._patch_lang_tensor
    if getattr(plain, "repaired", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.repaired = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched


def kernels(only: Collection[str] | None = None) -> list[Finding]:
    """Hold every kernel to plain torch on the small calls of `fastlr.kernel_cases`: a finding for each op and dtype.

    On a GPU; without one in Triton's interpreter where TRITON_INTERPRET is set, in float32 and on one call in ten, as it
    takes seconds for each. Otherwise the one finding says how.

    Args:
        only: these ops; default: all.
    """
    import torch

    from fastlr import ops

    gpu = torch.cuda.is_available()
    if not ops.has_triton() or not (gpu or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")):
        why = "no GPU: the kernels run in Triton's interpreter only" if ops.has_triton() else "Triton is not installed"
        remedy = "TRITON_INTERPRET=1 fastlr doctor --kernels (float32 only, about a minute)"
        return [Finding("kernels", False, why, "they are not compared with plain torch", remedy)]
    if not gpu:
        repair_interpreter()
    device = torch.device("cuda" if gpu else "cpu")
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if gpu else (torch.float32,)
    names = [name for name in ops.TABLE if "triton" in ops.backends(name) and (only is None or name in only)]
    return [_kernel(name, device, dtype) for name in names for dtype in dtypes]


def _kernel(name: str, device: torch.device, dtype: torch.dtype) -> Finding:
    """One op in one dtype."""
    from fastlr import kernel_cases, kernel_checks, ops

    title = f"{name}, {str(dtype).removeprefix('torch.')}"
    if name.startswith("shape_images"):
        images = [{**options, "dtype": dtype} for options in kernel_cases.IMAGES]
        wrong = [str(options["size"]) for options in images if not ops.images_agree(device, options)]
        return _compared(title, len(images), wrong, 0.0)
    calls = list(kernel_cases.CASES[name]().items())[:: 1 if device.type == "cuda" else 10]
    wrong, worst, count = [], 0.0, 0
    for case, args in calls:
        given = kernel_cases.moved(name, args, device, dtype)
        try:
            result = ops.get(name, "triton")(*given)
            if result is NotImplemented:
                continue
            found = kernel_checks.compared(ops.get(name, "triton"), ops.twin(name), given, ops.SAMPLES[name], result)
        except Exception as error:  # a kernel that does not compile or run is a finding
            wrong.append(f"{case} ({type(error).__name__}: {_line(error)})")
            continue
        count, worst = count + 1, max(worst, found.share)
        if found.share > 1:
            wrong.append(f"{case} (off by {found.relative:.2g})")
    return _compared(title, count, wrong, worst)


def _compared(title: str, count: int, wrong: list[str], worst: float) -> Finding:
    if not wrong:
        return Finding(title, True, f"{count} calls as plain torch, at most {worst:.2g} of the deviation allowed")
    cost = "plain torch serves where a first call shows it, slower"
    return Finding(title, False, f"wrong: {', '.join(wrong)}", cost, "please report this table")


def main(with_kernels: bool = False) -> int:
    """Print the findings, on request those of the kernels too; always 0, since fastlr runs without all but torch."""
    from rich.console import Console

    Console(file=sys.stdout).print(as_table(examine() + (kernels() if with_kernels else [])))
    return 0
