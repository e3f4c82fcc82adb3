"""One tensor from a file: ``.pt``, ``.npy`` or ``.safetensors``, read as plain data."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlr.errors import InputError

ENDINGS = (".pt", ".pth", ".npy", ".safetensors")


def read_tensor(path: str | Path) -> Tensor:
    """Read the tensor that a file holds, on the CPU, without running code that the file may contain.

    Args:
        path: ``.pt`` or ``.pth`` (``torch.save``), ``.npy`` (``numpy.save``) or ``.safetensors``; a file of named tensors
            must hold only one.

    Raises:
        InputError: No such file, another ending, an unreadable file, several tensors or none, or values that are not finite.
    """
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise InputError(f"{path}: tensors are read from {', '.join(ENDINGS)}")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        found = _read(path)
    except Exception as error:  # numpy, pickle, zip and safetensors each raise their own
        advice = isinstance(error, pickle.UnpicklingError)  # torch's, to run code that the file holds
        reason = "" if advice else f" ({(str(error).splitlines() or [type(error).__name__])[0]})"
        raise InputError(f"{path}: not readable as a plain tensor{reason}") from error
    if isinstance(found, Mapping):
        tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
        if len(tensors) != 1:
            names = ", ".join(list(tensors)[:4]) or "none"
            raise InputError(f"{path} holds {len(tensors)} tensors ({names}): save the inputs alone")
        found = next(iter(tensors.values()))
    if not isinstance(found, Tensor):
        raise InputError(f"{path} holds {type(found).__name__}, not a tensor: save one by torch.save(tensor, path)")
    if found.is_floating_point() and not found.isfinite().all():
        bad = int((~found.isfinite()).flatten().nonzero()[0]) // max(1, found[0].numel())
        raise InputError(f"{path}: sample {bad} has values that are infinite or not numbers")
    return found


def _read(path: Path) -> Any:
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path, allow_pickle=False))
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)
