"""The record beside a figure (machine, JSON, folder, picture of the inputs) and progress bars."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fastlr.display.tables import pm
from fastlr.errors import InputError
from fastlr.files import write_errors, write_text

if TYPE_CHECKING:
    import torch


def machine(device: torch.device | None = None) -> str:
    """Return the GPU's name, or the processor's with the number of threads.

    It is part of the record beside any figure.

    Args:
        device: Where the work was done; None: a GPU if there is one.
    """
    import torch

    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    return f"{name}, {counted(torch.get_num_threads(), 'thread')}"


def counted(count: int, thing: str) -> str:
    """Return "1 thread" or "2 threads", for any thing whose plural ends in s."""
    return f"{count} {thing}{'s' * (count != 1)}"


def output_folder(path: str | os.PathLike[str]) -> Path:
    """Make a folder for results, and those above it, if they are not there; return it.

    Raises:
        InputError: It cannot be made.
    """
    folder = Path(path)
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_images(path: str | Path, inputs: Any, *, seed: int = 0, count: int = 32) -> Path:
    """Save the first synthetic images as one PNG.

    They are shown as they were drawn, or else rescaled to their own range.

    Args:
        path: The file.
        inputs: An object whose ``batch(start, stop, *, seed, device, dtype)`` returns [n, C, H, W],
            C = 1 or 3; :class:`fastlr.ShapeImages` are shown before normalisation, others from
            their least to largest value.
        seed: As for the estimate.
        count: How many.

    Returns:
        The path of the file, with its suffix.

    Raises:
        InputError: The inputs are no images, or the file cannot be written.
    """
    import torch

    from fastlr.display.figures import save_figure
    from fastlr.display.images import tiled

    if hasattr(inputs, "raw"):
        images = inputs.raw(0, count, seed=seed)
    else:
        images = inputs.batch(0, count, seed=seed, device="cpu", dtype=torch.float32)
        if not isinstance(images, torch.Tensor) or images.dim() != 4:
            raise InputError(
                f"{path}: the inputs are no images [n, C, H, W], so there is no picture to save"
            )
        low, high = images.aminmax()
        images = (images - low) / (high - low).clamp_min(1e-12)
    return save_figure(tiled(images), path)


def write_json(path: str | Path, record: dict[str, Any]) -> None:
    """Write ``record`` as JSON to a file, or to stdout for ``-``.

    Infinite numbers and NaN become null.

    Raises:
        InputError: The file cannot be written.
    """
    text = json.dumps(finite(record), indent=2, allow_nan=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        write_text(path, text)


def finite(value: Any) -> Any:
    """Return what JSON can hold: None in place of each number that is not finite."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


EVERY = 60.0  # seconds between lines where stderr is no terminal


class MinuteLog:
    """Prints a line every EVERY seconds where ``console`` is neither a terminal nor a notebook.

    Work that is shorter prints nothing.
    """

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, time.monotonic()
        self.shows_bars = console.is_terminal or console.is_jupyter

    def log(self, text: str) -> None:
        """Print ``text`` if a line is due."""
        if not self.shows_bars and time.monotonic() - self.last >= EVERY:
            self.last = time.monotonic()
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def count_bars() -> Iterator[Callable[..., None]]:
    """Yield ``show(label, done, total, text="")``, which draws a bar for each label on stderr.

    If stderr is neither a terminal nor a notebook, it prints a line a minute.
    """
    console = Console(stderr=True)
    minutes, tasks = MinuteLog(console), dict[str, TaskID]()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        TextColumn("{task.fields[text]}"),
        console=console,
        transient=True,
        disable=not minutes.shows_bars,
    ) as bar:

        def show(label: str, done: int, total: int | None, text: str = "") -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total, text="")
            bar.update(tasks[label], completed=done, total=total, text=text)
            minutes.log(f"{label} {done}/{total}  {text}".rstrip())

        yield show


@contextmanager
def progress_bar(
    label: str, total: int | None = None
) -> Iterator[Callable[[int, int, float, float], None]]:
    """Yield a function ``progress(done, total, value, stderr)`` that shows an estimate's progress.

    It shows it by `count_bars`.
    """
    with count_bars() as show:
        show(label, 0, total)
        yield lambda done, total, value, stderr: show(label, done, total, pm(value, stderr))
