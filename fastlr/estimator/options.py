"""The arguments of an estimate, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastlr.errors import InputError
from fastlr.estimator.predictive import PROBES, Predictive
from fastlr.estimator.progress import OnProgress
from fastlr.estimator.statistics import count
from fastlr.ghost.model.view import OutputSelector
from fastlr.inputs.base import SupportsBatch
from fastlr.ops.philox import check_seed

AUTOCAST = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
DEFAULT_N = 5000


@dataclass(frozen=True, eq=False, repr=False)
class EstimateOptions:
    """The arguments of `fastlr.estimate`, which describes them, once they are checked.

    Attributes:
        n: The default where None was given.
        dtype: A torch.dtype, or None for the model's own precision.
        total: Largest number of inputs that are used; ``min_n`` is at most that.

    Raises:
        InputError: one is wrong, or two do not go together.
    """

    model: nn.Module
    inputs: SupportsBatch
    n: int
    predictive: Predictive | None
    probe: str
    batch_size: int | None
    seed: int
    dtype: torch.dtype | None
    device: torch.device | str | None
    output: OutputSelector
    in_dim: int
    out_dim: int
    target_rel_stderr: float | None
    min_n: int
    max_n: int | None
    progress: bool | OnProgress | None
    total: int = field(init=False)

    def __post_init__(self) -> None:
        """Check the arguments."""
        _refuse_classes(model=self.model, inputs=self.inputs, predictive=self.predictive)
        require_inputs(self.inputs)
        require_predictive(self.predictive)
        if self.inputs_in_dim not in (0, self.in_dim):
            raise InputError(
                f"the inputs' samples are on axis {self.inputs_in_dim}, but in_dim={self.in_dim}: "
                "pass the same"
            )
        if self.probe not in (*PROBES, "batch"):
            raise InputError(
                f"unknown probe {self.probe!r}: choose 'rademacher', 'sampled', 'exact' or 'batch'"
            )
        try:
            torch.device("cpu" if self.device is None else self.device)
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"device={self.device!r} is no device of torch's: 'cpu', 'cuda', 'cuda:1' ..., or "
                "leave device out"
            ) from error
        if not (
            self.progress is None or isinstance(self.progress, bool) or callable(self.progress)
        ):
            raise InputError(
                "progress must be True, False, None or a function of (done, total, value, stderr)"
            )
        seed = check_seed(self.seed)
        n = all_or(DEFAULT_N, self.inputs) if self.n is None else count("n", self.n)
        min_n = count("min_n", self.min_n)
        total = total_inputs(n, self.inputs, self.target_rel_stderr, min_n, self.max_n)
        batch_size = None if self.batch_size is None else count("batch_size", self.batch_size)
        checked = {
            "dtype": autocast_dtype(self.dtype),
            "seed": seed,
            "n": n,
            "min_n": min(min_n, total),
            "total": total,
            "batch_size": batch_size,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def inputs_in_dim(self) -> int:
        """Sample axis of the inputs as they are made."""
        return getattr(self.inputs, "in_dim", 0)


def require_inputs(inputs: Any) -> None:
    """Raise InputError for what makes no batches, such as a tensor."""
    if not callable(getattr(inputs, "batch", None)):
        raise InputError(
            f"inputs of type {type(inputs).__name__} have no batch(start, stop, *, seed, device, "
            "dtype): pass fastlr.ShapeImages() or another of fastlr's inputs; wrap a tensor or a "
            "data set in fastlr.TensorInputs, of a DataLoader its loader.dataset"
        )


def require_predictive(predictive: Any) -> None:
    """Raise InputError for what has no cotangents; None is for the default."""
    _refuse_classes(predictive=predictive)
    if predictive is not None and not callable(getattr(predictive, "cotangent", None)):
        raise InputError(
            "predictive must be fastlr.Categorical(), Bernoulli(), Gaussian() or "
            "DiagonalGaussian(), or have a cotangent()"
        )


def _refuse_classes(**given: Any) -> None:
    for name, value in given.items():
        if issubclass(type(value), type):
            raise InputError(
                f"{name}={value.__name__} is a class: pass an instance, {value.__name__}(...)"
            )


def autocast_dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """Return the autocast dtype; None stands for the model's own precision."""
    name = "float32" if given is None else str(given).removeprefix("torch.")
    if name not in AUTOCAST:
        raise InputError(
            f"dtype={given!r} is no autocast dtype: give 'bfloat16' or 'float16', or None for the "
            "model's own precision"
        )
    return AUTOCAST[name]


def all_or(default: int, inputs: Any) -> int:
    """Return the default number of inputs, or all of them if there are fewer."""
    return min(default, len(inputs)) if hasattr(inputs, "__len__") else default


def total_inputs(n: int, inputs: Any, target: float | None, min_n: int, max_n: int | None) -> int:
    """Return the most inputs that an estimate may use.

    This follows from n, the length of the inputs and the options of early stopping.
    """
    length = len(inputs) if hasattr(inputs, "__len__") else None
    if target is None:
        if max_n is not None:
            raise InputError(
                "max_n goes with target_rel_stderr: pass n for a fixed number of inputs"
            )
        total = n
    else:
        if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 < target < 1:
            raise InputError(
                "target_rel_stderr must be a fraction in (0, 1), such as 0.05 for 5 %, not "
                f"{target!r}"
            )
        if max_n is None:
            total = n if length is None else min(n, length)
        elif count("max_n", max_n) < min_n:
            raise InputError(
                f"max_n = {max_n} is less than min_n = {min_n}: raise max_n or lower min_n"
            )
        else:
            total = count("max_n", max_n)
    if length is not None and total > length:
        raise InputError(f"{total} inputs are asked for but there are {length}: lower n (or max_n)")
    return count("the number of inputs", total)
