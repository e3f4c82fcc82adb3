"""One tensor from a file: ``.pt``, ``.npy`` or ``.safetensors``, read as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlr.errors import InputError, few, first_line
from fastlr.files import read_tensors

ENDINGS = (".pt", ".pth", ".npy", ".safetensors")


def read_tensor(path: str | Path) -> Tensor:
    """Read the one tensor that a file holds onto the CPU.

    Code that the file may contain is not run.

    Args:
        path: ``.pt`` or ``.pth`` (``torch.save``), ``.npy`` (``numpy.save``) or ``.safetensors``; a
            file of named tensors must hold only one.

    Raises:
        InputError: No such file, another ending, an unreadable file, several tensors or none, or
            values that are not finite.
    """
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise InputError(f"{path}: tensors are read from {', '.join(ENDINGS)}")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        content = _read(path)
    except InputError:
        raise
    except Exception as error:  # numpy, pickle, zip and safetensors each raise their own
        raise InputError(f"{path}: not readable as a plain tensor ({first_line(error)})") from error
    if isinstance(content, Mapping):
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if len(tensors) != 1:
            names = few(tensors) or "none"
            raise InputError(
                f"{path} holds {len(tensors)} tensors ({names}): save the inputs alone"
            )
        content = next(iter(tensors.values()))
    if not isinstance(content, Tensor):
        raise InputError(
            f"{path} holds {type(content).__name__}, not a tensor: save one by torch.save(tensor, "
            "path)"
        )
    if content.is_floating_point() and not content.isfinite().all():
        bad = int((~content.isfinite()).flatten().nonzero()[0]) // max(1, content[0].numel())
        raise InputError(f"{path}: sample {bad} has values that are infinite or not numbers")
    return content


def _read(path: Path) -> Any:
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path, allow_pickle=False))
    return read_tensors(path)
