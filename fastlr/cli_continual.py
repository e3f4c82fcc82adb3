"""``fastlr continual``: the continual-learning driver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastlr.errors import InputError

if TYPE_CHECKING:
    from fastlr.drivers.continual import Progress


def continual(
    preset: Annotated[str | None, typer.Argument(help="paper, dohare32, tiny or demo; without it, paper.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run, new or empty (with --resume, the run's).")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder of an image store, or synthetic.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the run; may be repeated.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="How many, in all: --set tasks=.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the model, tasks and training: --set seed=.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    options: Annotated[
        bool, typer.Option("--options", help="Print every option with the preset's value; run nothing.")
    ] = False,
) -> None:
    """Train on a sequence of binary tasks and measure plasticity at every boundary; PRESET names a set of options."""
    from fastlr.drivers import continual as driver
    from fastlr.drivers.config import PRESETS, ContinualOptions, parse_settings, resolve

    given = parse_settings(ContinualOptions, settings or [])
    for key, value in (("data", data), ("tasks", tasks), ("seed", seed)):
        if value is not None:
            if key in given:
                raise InputError(f"--{key} and --set {key}= are both given: leave one out")
            given[key] = value
    if options:
        for key, value in vars(resolve(ContinualOptions, PRESETS, preset or "paper", given)).items():
            print(f"{key}={','.join(value) if isinstance(value, tuple) else value}")
        return
    if out is None:
        raise InputError("give --out, the folder of the run")
    with _progress() as report:
        if resume:
            path = driver.resume(out, given, preset, report)
        else:
            path = driver.begin(out, preset or "paper", given, report)
    print(f"run: {path}")


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows where the run is, on stderr; it does nothing if that is no terminal."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda progress: None
        return
    columns = (TextColumn("task {task.fields[at]}"), BarColumn(20), TextColumn("{task.fields[what]}"))
    with Bar(*columns, console=console) as bar:
        line = bar.add_task("", total=None, at="", what="measuring the untrained network")
        clock = _Clock()
        shown: dict[str, str] = {"accuracy": "", "LR": ""}

        def show(progress: Progress) -> None:
            done = progress.done + progress.epoch / progress.epochs
            if progress.record is not None:
                shown.update(_numbers(progress.record))
            left = clock.left(done, progress.total)
            parts = [f"{key} {value}" for key, value in shown.items() if value]
            what = ", ".join([*parts, f"{_duration(left)} left" if left is not None else ""]).strip(", ")
            bar.update(line, completed=done, total=progress.total, at=f"{progress.done}/{progress.total}", what=what)

        yield show


def _numbers(record: Any) -> dict[str, str]:
    """What to show of a record: accuracy, and local redundancy where it was measured."""
    found = {}
    if record.get("accuracy") is not None:
        found["accuracy"] = f"{100 * record['accuracy']:.1f} %"
    elif record.get("skipped"):
        found["accuracy"] = record["skipped"]
    value = record["measures"].get("local_redundancy", {}).get("value")
    if value is not None:
        found["LR"] = f"{value:.4g}"
    return found


class _Clock:
    """The time left, from the work done since the first look (a resumed run has much of it behind it)."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None

    def left(self, done: float, total: float) -> float | None:
        now = time.monotonic()
        if self.first is None:
            self.first = (now, done)
        began, before = self.first
        return None if done <= before else (now - began) / (done - before) * (total - done)


def _duration(seconds: float) -> str:
    """Write a time in its two largest units.

    Example:
        >>> _duration(59.2), _duration(3700), _duration(200_000)
        ('1 min 0 s', '1 h 1 min', '2 d 7 h')
    """
    whole = math.ceil(seconds)
    for size, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // below} {small}"
    return f"{whole} s"
