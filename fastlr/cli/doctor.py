"""``fastlr doctor``: the parts that fastlr can use and those that this machine lacks.

It says what the lack costs and how to get them.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastlr.errors import first_line, install

if TYPE_CHECKING:
    import torch

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
    "opacus": ("pytest bench/test_peers.py does without Opacus", install("bench")),
    "backpack": ("pytest bench/test_peers.py does without BackPACK", install("bench")),
}
DISTRIBUTIONS = {"backpack": "backpack-for-pytorch"}


_ONE = Lock()  # held by the thread that asks for the calls of models, which are made once


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
    checks |= {name: partial(_package, name, *told) for name, told in WANTED.items()}
    checks |= {"GPU": _gpu, "C++ compiler": _compiler, "nvcc": _nvcc, "fastlr._C": _extension}
    checks |= {"comparisons": _comparisons}
    checks |= {name: partial(_package, name, *told) for name, told in OPTIONAL.items()}
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
    label = DISTRIBUTIONS.get(name, name)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return Finding(label, False, "not installed", cost, remedy)
        return Finding(
            label, False, f"does not import: {first_line(error)}", cost, f"reinstall it: {remedy}"
        )
    return Finding(
        label, True, _version(label) or str(getattr(module, "__version__", "version unknown"))
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


def _compiler() -> Finding:
    named = (sysconfig.get_config_var("CXX") or "c++").split()[0]
    for name in (named, "c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return Finding("C++ compiler", True, path)
    return Finding(
        "C++ compiler",
        False,
        "none of c++, g++, clang++",
        "fastlr._C cannot be built",
        "install g++",
    )


def _nvcc() -> Finding:
    cost = "CUDA code cannot be built here; running on a GPU does not need it"
    remedy = "install the CUDA toolkit of torch's version"
    path = shutil.which("nvcc")
    if path is None:
        return Finding("nvcc", False, "not on PATH", cost, remedy)
    run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    if run.returncode != 0:
        return Finding(
            "nvcc", False, f"{path} fails: {first_line(RuntimeError(run.stderr))}", cost, remedy
        )
    release = re.search(r"release [^,\n]+", run.stdout)
    return Finding("nvcc", True, f"{path} ({release[0].strip()})" if release else path)


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


def _comparisons() -> Finding:
    from fastlr.ops import kept_comparisons

    return Finding("comparisons", True, f"of kernels, kept: {kept_comparisons.summary()}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def kernels(only: Collection[str] | None = None) -> list[Finding]:
    """Compare every kernel with plain torch, and return a finding for each op and dtype.

    On a GPU; without one in Triton's interpreter where TRITON_INTERPRET is set. Otherwise the one
    finding says how.

    Args:
        only: these ops; default: all.
    """
    import torch

    from fastlr import ops
    from fastlr.ops.interpreter import repair_interpreter

    gpu = torch.cuda.is_available()
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    why = None
    if not ops.has_triton():
        why = "Triton is not installed, or torch is built for AMD GPUs"
    elif not gpu and not interpreted:
        why = "no GPU: the kernels run in Triton's interpreter only"
    if why is not None:
        remedy = "TRITON_INTERPRET=1 fastlr doctor --kernels (two minutes)"
        return [Finding("kernels", False, why, "they are not compared with plain torch", remedy)]
    if not gpu:
        repair_interpreter()
    device = torch.device("cuda" if gpu else "cpu")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    names = [
        name
        for name in ops.TABLE
        if "triton" in ops.backends(name) and (only is None or name in only)
    ]
    compared = [(name, device, dtype) for name in names for dtype in dtypes]
    # Triton compiles outside of Python's lock: most of a first call. The interpreter works in one
    # thread alone.
    workers = min(16, os.cpu_count() or 1) if gpu else 1
    with ops.compared_anew(), ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda each: small_calls(*each), compared))


@cache
def model_calls() -> dict[str, dict[str, tuple]]:
    """Return the calls of ops, in float32, that measuring two small models makes.

    Their sizes are odd, so that tiles are broken.

    Returns:
        Op -> what is alike in calls that are compared once -> arguments.
    """
    import torch
    from torch import nn

    import fastlr
    from fastlr import ops
    from fastlr.ops import block, kernel_calls, kernel_checks

    found: dict[str, dict[str, tuple]] = defaultdict(dict)
    run = ops.run

    def noted(name: str, *args: Any) -> Any:
        tensors = [a for a in block.leaves(args) if isinstance(a, torch.Tensor)]
        if torch.float64 not in {t.dtype for t in tensors}:
            kind = kernel_checks.signature(args, ops.SAMPLES[name])
            found[name][kind] = tuple(block.changed(kernel_calls.copied, args))
        return run(name, *args)

    def cotangent(z: torch.Tensor) -> Any:
        return fastlr.Categorical().cotangent(z, "rademacher", range(len(z)), 0)

    images = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish()),
        *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24), nn.Conv2d(24, 7, 3), nn.GroupNorm(1, 7)),
        *(nn.Flatten(), nn.Linear(7 * 7 * 9, 10)),
    )
    embedding = (nn.Embedding(9, 33), nn.LayerNorm(33), nn.RMSNorm(33))
    tokens = nn.Sequential(*embedding, nn.Linear(33, 131), nn.ReLU(), nn.Linear(131, 130))
    pixels, words = kernel_calls.draw(3, 3, 9, 11), torch.arange(3 * 67).view(3, 67) % 9
    generator = torch.Generator().manual_seed(0)
    given = (images, pixels), (images, kernel_calls.channels_last(pixels, 1)), (tokens, words)
    with patch.object(ops, "run", noted):
        for model, x in (*given, (tokens, words[:, :9])):
            for t in model.eval().state_dict().values():
                if t.is_floating_point():
                    t.uniform_(0.1, 0.9, generator=generator)
            fastlr.per_sample_grad_sq_norms(model, x, cotangent)
    norms = found["layer_norm_sums"]  # torch takes an RMS norm apart, but on a GPU
    found["rms_norm_sums"] = {kind: (x, g, rstd) for kind, (x, g, _, rstd) in norms.items()}
    return dict(found)


def small_calls(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "triton",
    calls: Mapping[str, Callable[[], dict[str, tuple]]] | None = None,
) -> Finding:
    """Compare an op in one dtype with plain torch, or plain torch with the definition.

    All tensors lie in the middle of buffers of NaN, whose borders are looked at afterwards.

    Args:
        name: of the op.
        device: where.
        dtype: of the data.
        backend: that is held: "triton" or "torch".
        calls: of each op, which is called to have them; default: those of `model_calls`.
    """
    from fastlr import ops
    from fastlr.ops import kernel_calls, kernel_checks
    from fastlr.ops.borders import Borders

    twin = ops.twin(name) if backend == "triton" else ops.get(name, "reference")
    title = f"{name}, {str(dtype).removeprefix('torch.')}"
    if name.startswith("shape_images"):
        images = [{**options, "dtype": dtype} for options in kernel_calls.IMAGES]
        borders = Borders()
        try:
            with borders:
                wrong = [
                    str(options["size"])
                    for options in images
                    if not ops.images_agree(device, options)
                ]
        except Exception as error:
            wrong = [_described(error)]
        if borders.broken():
            wrong.append("writes beyond a tensor")
        return _compared(title, len(images), wrong, 0.0)
    wrong, worst, count = [], 0.0, 0
    if calls is None:
        with _ONE:
            cases = model_calls()[name]
    else:
        cases = calls[name]()
    for case, args in cases.items():
        borders = Borders()
        given = borders.around_all(kernel_calls.moved(name, args, device, dtype))
        try:
            with borders:
                result = ops.get(name, backend)(*given)
            if result is NotImplemented:
                continue
            deviation = kernel_checks.compared(
                ops.get(name, backend), twin, given, ops.SAMPLES[name], result
            )
        except Exception as error:  # a kernel that does not compile or run is a finding
            wrong.append(f"{case} ({_described(error)})")
            continue
        if borders.broken():
            wrong.append(f"{case} (writes beyond a tensor)")
        count, worst = count + 1, max(worst, deviation.share)
        if deviation.share > 1:
            wrong.append(f"{case} (off by {deviation.relative:.2g})")
    return _compared(
        title, count, wrong, worst, "plain torch" if backend == "triton" else "the definition"
    )


def _compared(
    title: str, count: int, wrong: list[str], worst: float, truth: str = "plain torch"
) -> Finding:
    if not wrong:
        return Finding(
            title, True, f"{count} calls as {truth}, at most {worst:.2g} of the deviation allowed"
        )
    cost = "plain torch serves where a first call shows it, slower"
    return Finding(title, False, f"wrong: {', '.join(wrong)}", cost, "please report this table")


def print_findings(with_kernels: bool = False) -> None:
    """Print the findings, on request those of the kernels too."""
    Console().print(as_table(examine() + (kernels() if with_kernels else [])))
