"""What a reader needs to repeat a run: command, commit, machine, versions, date."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent


def git(*arguments: str) -> str | None:
    """Output of a git command in the checkout that this package lies in; None if it lies in none or git fails."""
    try:
        for command in (["ls-files", "--error-unmatch", "fastlr/__init__.py"], arguments):
            run = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, timeout=20)
            if run.returncode != 0:
                return None
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def source_digest() -> str:
    """Hash of the package's own source files, kernels included: tells two states apart where there is no commit."""
    total = hashlib.sha256()
    folders = {PACKAGE: "fastlr"}
    spec = importlib.util.find_spec("fastlr.kernels")
    if spec is not None and spec.submodule_search_locations:
        folders[Path(next(iter(spec.submodule_search_locations)))] = "fastlr/kernels"
    for folder, name in folders.items():
        for path in sorted(folder.rglob("*.py")):
            total.update(f"{name}/{path.relative_to(folder)}".encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def cpu_name() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version of a package, None if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def command_line() -> list[str]:
    """The command's own words: ``-m bench.gpu --quick``."""
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.parent.name == "bench":
        return ["-m", f"bench.{script.stem}", *sys.argv[1:]]
    return [script.name, *sys.argv[1:]]


def environment(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Command, commit, machine, versions and date, ready for JSON."""
    names = ("torch", "torchvision", "triton", "numpy", *packages)
    status = git("status", "--porcelain")
    return {
        "command": shlex.join([Path(sys.executable).name, *command_line()]),
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_gib": _memory_gib(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def gpu_details(device: torch.device) -> dict[str, Any]:
    """Name, memory, multiprocessors, cache and compute capability of a GPU; the versions it works with."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return {
        "gpu": found.name,
        "gpu_memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "cache_mib": round(getattr(found, "L2_cache_size", 0) / 2**20, 1),
        "compute_capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "allow_tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
    }
