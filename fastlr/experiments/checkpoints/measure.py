"""Measuring a user's checkpoints one after the other, in one model, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

import fastlr
from fastlr.errors import FastlrError, InputError, NonFiniteError, warn
from fastlr.estimator.result import Estimate
from fastlr.experiments.continual.fields import INPUTS
from fastlr.models.loading import load_state_dict, read_checkpoint, weights_file

ProgressContext = Callable[[str, int], AbstractContextManager[Any]]


def no_progress(label: str, total: int) -> AbstractContextManager[Any]:
    """Show nothing."""
    return nullcontext(False)


def weight_files(checkpoints: Sequence[Path]) -> list[Path]:
    """Return the checkpoints, with the weights in place of folders that a Trainer has saved.

    A folder of ``checkpoint-STEP`` folders stands for them in their order, and for its own weights.
    Those without weights are left out with a warning.
    """
    files: list[Path] = []
    for path in checkpoints:
        steps = [p for p in path.glob("checkpoint-*") if p.is_dir() and not p.is_symlink()]
        for step in sorted(steps, key=lambda folder: (len(folder.name), folder)):
            if weights_file(step) == step:
                warn(f"{step} holds no weights: it is left out")
            else:
                files.append(weights_file(step))
        if not steps or weights_file(path) != path:
            files.append(weights_file(path))
    return files


def existing(checkpoints: Sequence[str | Path], fewest: int, why: str) -> list[Path]:
    """Return the checkpoints' paths: each file exists, is given once; there are ``fewest`` or more.

    ``why`` tells the user what so many are needed for.

    Raises:
        InputError: Fewer, one named twice, or missing.
    """
    paths = [Path(path) for path in checkpoints]
    resolved = [path.resolve() for path in paths]
    for path in paths:
        if not path.is_file():
            raise InputError(f"checkpoint {path}: no such file, nor a folder with weights")
        if resolved.count(path.resolve()) > 1:
            raise InputError(f"checkpoint {path} is given twice: each counts once")
    if len(paths) < fewest:
        raise InputError(f"{len(paths)} checkpoints: {why}; fastlr estimate measures a single one")
    return paths


def measure_each(
    model: nn.Module,
    paths: Sequence[Path],
    sources: Mapping[str, tuple[Any, int]],
    *,
    progress: ProgressContext = no_progress,
    left_out: dict[Path, str] | None = None,
    **options: Any,
) -> dict[Path, dict[str, Estimate]]:
    """Measure local redundancy at each checkpoint, on the same inputs each time.

    The estimators are kept from one checkpoint to the next, so that plans are made and proven once.

    Args:
        model: The checkpoints are loaded into it, strictly; it is left with the last.
        paths: State dicts.
        sources: Name of a measure to its inputs and how many of them.
        progress: (label, total) -> context manager around a measurement, whose value is the
            estimator's ``progress``.
        left_out: Filled with the reason for each checkpoint that is unreadable, of another model
            or gives no numbers. None: such a checkpoint is an error.
        options: Options of `fastlr.estimate`: ``predictive``, ``probe``, ``batch_size``, ``seed``,
            ``dtype``.

    Returns:
        For each checkpoint the estimates by name.

    Raises:
        InputError: A checkpoint is unreadable or of another model.
        ModelError: The model cannot be measured, as for `fastlr.estimate`.
        NonFiniteError: A checkpoint gives no numbers.
    """
    estimators: dict[str, fastlr.LocalRedundancy] = {}

    def measure(number: int, path: Path) -> dict[str, Estimate]:
        estimates = {}
        for name, (inputs, total) in sources.items():
            label = INPUTS.get(name, name)
            if name not in estimators:
                estimators[name] = fastlr.LocalRedundancy(model, inputs, total, **options)
            with progress(f"{number}/{len(paths)} {label}", total) as report:
                estimators[name].progress = report
                try:
                    estimates[name] = estimators[name].measure()
                except NonFiniteError as error:
                    where = f"checkpoint {path}, {label}" if label else f"checkpoint {path}"
                    raise NonFiniteError(f"{where}: {error}") from error
        return estimates

    measured = {}
    for number, path in enumerate(paths, 1):
        try:
            load_state_dict(model, read_checkpoint(path), source=str(path))
        except InputError as error:
            _leave_out(path, error, left_out)
            continue
        try:
            measured[path] = measure(number, path)
        except NonFiniteError as error:
            _leave_out(path, error, left_out)
    return measured


def _leave_out(path: Path, error: FastlrError, left_out: dict[Path, str] | None) -> None:
    """Note why a checkpoint is not measured, or raise the error."""
    if left_out is None:
        raise error
    left_out[path] = str(error)
