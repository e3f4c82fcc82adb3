"""An estimate carries what identifies its inputs and its predictive, so that only like ones pair.

An identity is for comparison alone, within a process and across stored records. What nothing can
identify, such as inputs of a class of the user's own, is known as one object of one process.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from fastlr.estimator.predictive import Bernoulli, Categorical, DiagonalGaussian, Gaussian
from fastlr.inputs.base import Inputs
from fastlr.ops.objects import number
from fastlr.ops.torch_private import tree_leaves

_PROCESS = uuid4().hex[:12]
_OBJECT, _PREDICTIVE = "object", "predictive"  # kinds of identities


def of_inputs(inputs: Any, used: int, seed: int) -> str:
    """Return what identifies inputs 0 .. used - 1; "" where nothing does."""
    text = inputs.identity(used, seed) if isinstance(inputs, Inputs) else ""
    return text or _of_object(inputs)


def tells_all(identity: str) -> bool:
    """Return True if an identity is of the values of inputs, not of an object that makes them."""
    return bool(identity) and identity.partition(":")[0] != _OBJECT


def same(left: str, right: str) -> bool | None:
    """Return whether two identities are of the same thing; None if that is unknown.

    Records of earlier versions have none for predictives, or one that is not a text.
    """
    if not all(isinstance(identity, str) and identity for identity in (left, right)):
        return None
    kinds = {left.partition(":")[0], right.partition(":")[0]}
    if len(kinds) > 1 and _PREDICTIVE not in kinds:
        return None
    if left == right:
        return True
    return None if kinds == {_OBJECT} else False


def of_predictive(predictive: Any, axes: int | None) -> str:
    """Return what identifies a predictive distribution; "" where nothing does.

    Args:
        predictive: the distribution.
        axes: Number of axes of the output. A class axis is then counted from the end.
    """
    kind = type(predictive)
    if kind not in (Bernoulli, Categorical, DiagonalGaussian, Gaussian):
        return _of_object(predictive)
    values: dict[str, Any] = {}
    if kind in (Categorical, DiagonalGaussian):
        values["dim"] = predictive.dim if axes is None else predictive.dim % axes - axes
    if kind is Categorical:
        values["mask"] = _of_mask(predictive.mask)
    if kind is Gaussian:
        values["sigma"] = float(predictive.sigma)
    return f"{_PREDICTIVE}:{kind.__name__} {values}"


def _of_object(thing: Any) -> str:
    """Return what identifies an object in this process; "" where nothing tells of its end."""
    known = number(thing)
    return f"{_OBJECT}:{_PROCESS}-{os.getpid()}-{known}" if known > 0 else ""


def _of_mask(mask: Tensor | None) -> str | None:
    """Return a hash of a mask as it is broadcast; None where all positions count."""
    if mask is None or bool(mask.all()):
        return None
    while mask.ndim > 1 and mask.shape[0] == 1:
        mask = mask[0]
    values = mask.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(f"{tuple(mask.shape)}".encode() + values.tobytes()).hexdigest()[:32]


def describe(thing: Any) -> str:
    """Return the repr of an object, or its type's name where the repr is an address."""
    return type(thing).__name__ if type(thing).__repr__ is object.__repr__ else repr(thing)


def inputs_hash(inputs: Any, used: int, seed: int) -> str:
    """Return a hash of the first two inputs and the last.

    They are made on the CPU in float32 whatever the model.
    """
    total = hashlib.sha256()
    for start, stop in ((0, min(2, used)), (used - 1, used)):
        x = inputs.batch(start, stop, seed=seed, device=torch.device("cpu"), dtype=torch.float32)
        for leaf in tree_leaves(x):
            if isinstance(leaf, Tensor):
                total.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
                total.update(
                    leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                )
            else:
                total.update(repr(leaf).encode())
    return total.hexdigest()[:16]
