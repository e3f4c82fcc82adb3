"""Versions of fastlr and of what it runs on."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str]:
    """Return the versions of fastlr, torch and Python."""
    return {
        "fastlr": _version_of_fastlr(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@cache  # it is read from a file
def _version_of_fastlr() -> str:
    try:
        return version("fastlr")
    except PackageNotFoundError:
        return "not installed"
