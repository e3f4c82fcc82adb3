"""How far runs are, on stderr: a bar for one run, a board for several at once; without a terminal a line a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from fastlr.report.record import Minutes

if TYPE_CHECKING:
    from fastlr.drivers.launch import Driver, Progress


@contextmanager
def progress(driver: Driver) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows where the run is: in a bar, or a line a minute if stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(driver.step + " {task.fields[at]}"), BarColumn(20), TextColumn("{task.fields[what]}"))
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        line = bar.add_task("", total=None, at="", what=driver.opening)
        clock, minutes = Clock(), Minutes(console)
        shown: dict[str, str] = {}

        def show(at: Progress) -> None:
            done = at.done + at.epoch / at.epochs
            if at.record is not None:
                _merge(shown, driver.shown(at.record))
            where, what = f"{at.done}/{at.total}", _line(shown, clock.left(done, at.total))
            bar.update(line, completed=done, total=at.total, at=where, what=what)
            minutes.say(lambda: f"{driver.step} {where}  {what}")

        yield show


class Board:
    """A line for all runs of a queue and one for each under way; without a terminal, what is done in a line a minute.

    Failures are said at once either way.

    Use it in a ``with`` block; `begin` returns what `fastlr.drivers.jobs.run_jobs` calls.

    Args:
        driver: Of the runs.
        out: Their folder, for messages.
    """

    def __init__(self, driver: Driver, out: Path) -> None:
        self.driver, self.out = driver, out
        self.console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            TextColumn("{task.fields[at]}"),
            BarColumn(10),
            TextColumn("{task.fields[what]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        )
        self.bar = Bar(*columns, console=self.console, disable=not self.console.is_terminal, expand=True)
        self.minutes = Minutes(self.console)
        self.rows: dict[str, _Row] = {}
        self.parts: dict[str, tuple[float, float]] = {}  # of each run: share done at first sight, and now
        self.ended = self.failed = 0

    def __enter__(self) -> Board:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, names: tuple[str, ...]) -> Callable[[str, dict[str, Any]], None]:
        """Tell which runs are to be done; return what hears their messages."""
        self.parts = dict.fromkeys(names, (0.0, 0.0))
        self.whole = self.bar.add_task("all", total=len(names), at=f"0/{len(names)}", what="")
        self.clock = Clock()
        self.clock.left(0, 1)
        return self.hear

    def hear(self, name: str, message: dict[str, Any]) -> None:
        """Take in a message of a run."""
        if message.get("event") == "started":
            line = self.bar.add_task(name, total=None, at="", what=self.driver.opening)
            self.rows[name] = _Row(line, Clock(), {})
        elif message.get("event") == "lost":
            self._remove(name)
            self._say(f"{name}: {message['why']}; {message['next']}")
        elif message.get("event") == "ended":
            self._remove(name)
            self.parts[name] = (self.parts[name][0], 1.0)
            self.ended += 1
            if message["error"] is not None:
                self.failed += 1
                self._say(f"{name} failed: {message['error']} (log: {self.out / 'logs' / name}.txt)")
        elif "done" in message:
            row, done, total = self.rows[name], message["done"] + message["part"], message["total"]
            _merge(row.shown, message["shown"] or {})
            at, what = f"{message['done']}/{total}", _line(row.shown, row.clock.left(done, total))
            self.bar.update(row.line, completed=done, total=total, at=at, what=what)
            first = self.parts[name][0] if row.seen else done / total
            self.parts[name], row.seen = (first, done / total), True
        before = sum(first for first, _ in self.parts.values())
        now = sum(share for _, share in self.parts.values())
        left = self.clock.left(now - before, len(self.parts) - before)
        what = ", ".join([f"{self.failed} failed"] * bool(self.failed) + _left(left if now < len(self.parts) else None))
        at = f"{self.ended}/{len(self.parts)}"
        self.bar.update(self.whole, completed=now, at=at, what=what)
        said = [f"{at} runs ended", f"{now / len(self.parts):.0%} done", *[what] * bool(what)]
        self.minutes.say(lambda: ", ".join(said))

    def _remove(self, name: str) -> None:
        if name in self.rows:  # a run on Ray may end before it has begun
            self.bar.remove_task(self.rows.pop(name).line)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@dataclass
class _Row:
    line: Any
    clock: Clock
    shown: dict[str, str]
    seen: bool = False


def _merge(shown: dict[str, str], new: dict[str, str]) -> None:
    shown.update({key: text or shown.get(key, "") for key, text in new.items()})


def _line(shown: dict[str, str], left: float | None) -> str:
    parts = [f"{key} {value}" for key, value in shown.items() if value]
    return ", ".join(parts + _left(left))


def _left(seconds: float | None) -> list[str]:
    return [] if seconds is None else [f"{duration(seconds)} left"]


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
