"""What the commands that carry out runs share: their options, the settings, the display of progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastlr.errors import InputError

if TYPE_CHECKING:
    from fastlr.drivers.launch import Driver, Progress

Out = Annotated[Path | None, typer.Option(help="Folder of the run, new or empty (with --resume, the run's).")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the run; may be repeated.")
]
Seed = Annotated[int | None, typer.Option(help="Of all that is random: --set seed=.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also write the records for TensorBoard, in the run's folder.")
]
ShowOptions = Annotated[
    bool, typer.Option("--options", help="Print every option with the preset's value; run nothing.")
]


def carry_out(
    driver: Driver,
    preset: str | None,
    out: Path | None,
    settings: list[str] | None,
    *,
    resume: bool,
    options: bool,
    tensorboard: bool = False,
    **named: Any,
) -> None:
    """Do what a command of a driver does.

    Args:
        driver: Which.
        preset: As given; None: the driver's first, or the resumed run's.
        out: As given; it must be.
        settings: The ``--set`` texts.
        resume: Go on with the run.
        options: Only print the options.
        tensorboard: Also log to TensorBoard.
        named: Settings that have options of their own (``--seed``); None: not given.

    Raises:
        InputError: Something given does not fit.
    """
    from fastlr.drivers.config import resolve
    from fastlr.drivers.scalars import TENSORBOARD, Mirror

    given = given_settings(driver.options, settings or [], named)
    if options:
        for key, value in vars(resolve(driver.options, driver.presets, preset or driver.preset, given)).items():
            print(f"{key}={','.join(value) if isinstance(value, tuple) else value}")
        return
    if out is None:
        raise InputError("give --out, the folder of the run")
    with Mirror.tensorboard(out) if tensorboard else nullcontext() as mirror, progress(driver) as show:

        def report(at: Progress) -> None:
            show(at)
            if mirror is not None and at.record is not None:
                mirror.update(at.record)

        if resume:
            path = driver.resume(out, given, preset, report)
        else:
            path = driver.begin(out, preset, given, report)
    print(f"run: {path}")
    if tensorboard:
        print(f"log: {path / TENSORBOARD} (tensorboard --logdir FOLDER shows it)")


def given_settings(kind: type, settings: list[str], named: dict[str, Any]) -> dict[str, Any]:
    """Return the values of ``--set`` and of options of the same meaning together.

    Raises:
        InputError: A setting does not fit, or is given in both ways.
    """
    from fastlr.drivers.config import parse_settings

    given = parse_settings(kind, settings)
    for key, value in named.items():
        if value is not None:
            if key in given:
                raise InputError(f"--{key} and --set {key}= are both given: leave one out")
            given[key] = value
    return given


@contextmanager
def progress(driver: Driver) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows where the run is, on stderr; it does nothing if that is no terminal."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda at: None
        return
    columns = (TextColumn(driver.step + " {task.fields[at]}"), BarColumn(20), TextColumn("{task.fields[what]}"))
    with Bar(*columns, console=console) as bar:
        line = bar.add_task("", total=None, at="", what=driver.opening)
        clock = Clock()
        shown: dict[str, str] = {}

        def show(at: Progress) -> None:
            done = at.done + at.epoch / at.epochs
            if at.record is not None:
                shown.update({key: text or shown.get(key, "") for key, text in driver.shown(at.record).items()})
            left = clock.left(done, at.total)
            parts = [f"{key} {value}" for key, value in shown.items() if value]
            what = ", ".join([*parts, f"{duration(left)} left" if left is not None else ""]).strip(", ")
            bar.update(line, completed=done, total=at.total, at=f"{at.done}/{at.total}", what=what)

        yield show


class Clock:
    """The time left, from the work done since the first look (a resumed run has much of it behind it)."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None

    def left(self, done: float, total: float) -> float | None:
        """Return seconds; None until something was done."""
        now = time.monotonic()
        if self.first is None:
            self.first = (now, done)
        began, before = self.first
        return None if done <= before else (now - began) / (done - before) * (total - done)


def duration(seconds: float) -> str:
    """Write a time in its two largest units.

    Example:
        >>> duration(59.2), duration(3700), duration(200_000)
        ('1 min 0 s', '1 h 1 min', '2 d 7 h')
    """
    whole = math.ceil(seconds)
    for size, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // below} {small}"
    return f"{whole} s"
