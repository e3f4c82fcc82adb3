"""The ablation from checkpoints: local redundancy on synthetic and on real inputs at each of them.

Source: paper, appendix A.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fastlr
from fastlr.errors import InputError
from fastlr.estimator.result import Estimate, count
from fastlr.experiments.checkpoints.measure import (
    ProgressContext,
    existing,
    measure_each,
    no_progress,
)
from fastlr.experiments.continual.fields import REAL
from fastlr.experiments.continual.measures import CurrentImages
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.data import ImageStore, split_series
from fastlr.experiments.data.series import read_series
from fastlr.experiments.data.tensors import read_tensor
from fastlr.experiments.runs.folder import stream_seed
from fastlr.inputs import Inputs, TensorInputs

FEWEST = 3  # checkpoints with which a correlation exists
CONTEXT = 512


@dataclass(frozen=True)
class RealInputs:
    """Real inputs to hold synthetic ones to.

    Attributes:
        inputs: As an estimator takes them.
        shape: Shape of one sample: [C, H, W] of an image, [length, features] of a series.
        count: How many.
        what: What they are, in words.
        notes: What must be known of their standard error.
    """

    inputs: Inputs
    shape: tuple[int, ...]
    count: int
    what: str
    notes: tuple[str, ...] = ()

    @property
    def series(self) -> bool:
        """True for time series."""
        return len(self.shape) == 2


def real_inputs(path: str | Path, n: int, *, context: int = CONTEXT, seed: int = 0) -> RealInputs:
    """Open real inputs, at most ``n`` of them.

    Args:
        path: The folder of an image store (its test images, normalised as the drivers do); a file
            that `fastlr.experiments.data.tensors.read_tensor` reads, ``[N, C, H, W]`` (uint8: RGB,
            normalised alike; floating-point: as it is) or ``[N, length, features]`` (as it is); or
            a CSV file of a series (windows of its last fifth, normalised by the first four:
            `fastlr.experiments.data.split_series`).
        n: How many are wanted; of more, as many are drawn (windows: evenly spaced).
        context: Rows of a window, for a CSV file.
        seed: Seed of the draw.

    Raises:
        InputError: Nothing that can be read, or of another shape.
    """
    path, n = Path(path), count("n", n)
    if path.suffix == ".csv":
        return _windows(path, n, context)
    if path.is_dir():
        store = ImageStore.open(path)
        rows, _ = store.rows("test")
        chosen = np.sort(rows[_draw(len(rows), n, seed).numpy()])
        images = torch.from_numpy(store.images[chosen]).permute(0, 3, 1, 2)
        return _images(images, f"test images of {path.name}")
    if not path.exists():
        raise InputError(
            f"{path} does not exist: give an image store, a file of a tensor or a .csv series"
        )
    tensor = read_tensor(path)
    is_bytes = tensor.dtype == torch.uint8
    if tensor.dim() not in (3, 4) or not (tensor.is_floating_point() or is_bytes):
        raise InputError(
            f"{path} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}: inputs "
            "are images [N, C, H, W], uint8 or floating-point, or series [N, length, features], "
            "floating-point"
        )
    if is_bytes and (tensor.dim() != 4 or tensor.shape[1] != 3):
        raise InputError(
            f"{path} is uint8 {list(tensor.shape)}: images as bytes must be [N, 3, H, W]"
        )
    if not len(tensor):
        raise InputError(f"{path} holds no samples")
    tensor = tensor[_draw(len(tensor), n, seed)]
    if is_bytes:
        return _images(tensor, f"images of {path.name}")
    return RealInputs(
        TensorInputs(tensor), tuple(tensor.shape[1:]), len(tensor), f"samples of {path.name}"
    )


def synthetic_inputs(real: RealInputs) -> dict[str, Inputs]:
    """Return synthetic inputs of the same shape, by the name of the measure on them.

    Shapes (for three channels, normalised as ImageNet) and Gaussian noise for images, Gaussian
    series for series.
    """
    if real.series:
        length, features = real.shape
        return {"local_redundancy_series": fastlr.GaussianSeries(length, features)}
    channels, height, width = real.shape
    size = (channels, height, width)
    shapes = {"local_redundancy": fastlr.ShapeImages(size)} if channels == 3 else {}
    return {**shapes, "local_redundancy_noise": fastlr.NoiseImages(size)}


def measure_checkpoints(
    model: nn.Module,
    checkpoints: Sequence[str | Path],
    real: RealInputs,
    n: int,
    *,
    progress: ProgressContext = no_progress,
    **options: Any,
) -> list[dict[str, Estimate]]:
    """Measure local redundancy on synthetic and on real inputs at each of a list of checkpoints.

    The inputs are the same at every checkpoint.

    Args:
        model: The checkpoints are loaded into it, strictly; it is left with the last.
        checkpoints: State dicts, in the order of the training that made them.
        real: The real inputs.
        n: Synthetic inputs of each kind.
        progress: As for `fastlr.experiments.checkpoints.measure.measure_each`.
        options: As there; ``predictive`` is Gaussian with sigma 1 for series, unless given.

    Returns:
        For each checkpoint the estimates by name; the one on real inputs is called
        local_redundancy_real.

    Raises:
        InputError: Fewer than 3 checkpoints, one named twice, missing, or of another model.
        ModelError: The model cannot be measured, as for `fastlr.estimate`. NonFiniteError: a
            checkpoint gives no numbers.
    """
    why = f"a correlation needs at least {FEWEST}, one with a standard error 91"
    paths = existing(checkpoints, FEWEST, why)
    if real.series:
        options["predictive"] = options.get("predictive") or fastlr.Gaussian()
    sources: dict[str, tuple[Inputs, int]] = {
        name: (inputs, n) for name, inputs in synthetic_inputs(real).items()
    }
    sources[REAL] = real.inputs, real.count
    measured = measure_each(model, paths, sources, progress=progress, **options)
    return list(measured.values())


def as_run(measured: Sequence[Mapping[str, Estimate]]) -> ContinualRun:
    """Return the measurements as a run's records, one "task" for each checkpoint.

    This is the form that `agreement` takes.
    """
    run = ContinualRun(Path("checkpoints"))
    for place, estimates in enumerate(measured):
        measures = {
            name: {"value": e.value, "stderr": e.stderr, "n": e.n} for name, e in estimates.items()
        }
        run.add({"kind": "task", "task": place, "measures": measures})
    return run


def _draw(total: int, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(stream_seed(seed, "real inputs"))
    return torch.randperm(total, generator=generator)[:n].sort().values


def _windows(path: Path, n: int, context: int) -> RealInputs:
    """Evenly spaced windows of the last fifth of a CSV series."""
    windows = split_series(read_series(path), context, horizon=1).validation
    places = torch.linspace(0, len(windows) - 1, min(n, len(windows)), dtype=torch.float64)
    index = places.round().long()
    inputs, _ = windows.batch(index)
    distance = (len(windows) - 1) / max(1, len(inputs) - 1)
    notes: tuple[str, ...] = ()
    if distance < context:
        notes = ("The windows overlap, so the standard errors on them are too small.",)
    what = f"windows of the last fifth of {path.name}"
    return RealInputs(TensorInputs(inputs), tuple(inputs.shape[1:]), len(inputs), what, notes)


def _images(images: torch.Tensor, what: str) -> RealInputs:
    inputs = CurrentImages()
    inputs.images = images
    return RealInputs(inputs, tuple(images.shape[1:]), len(images), what)
