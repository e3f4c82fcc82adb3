"""Show the progress of runs on stderr: a bar for one run, a board for several at once.

Without a terminal it is a line a minute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from fastlr.display.record import MinuteLog

if TYPE_CHECKING:
    from fastlr.experiments.runs.experiment import Driver, Progress


@contextmanager
def progress(driver: Driver) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows the progress of a run: a bar, or a line a minute.

    The latter is for a stderr that is no terminal.
    """
    console = Console(stderr=True)
    minutes = MinuteLog(console)
    with Bar(*_columns(20), console=console, disable=not console.is_terminal) as bar:
        row = _Row(bar, driver.step, driver.opening)

        def show(at: Progress) -> None:
            measures = {} if at.record is None else driver.shown(at.record)
            text = row.update(at.done, at.epoch / at.epochs, at.total, measures)
            minutes.log(f"{driver.step} {at.done}/{at.total}  {text}")

        yield show


class RunBoard:
    """Shows the progress of a queue: a line for all its runs and one for each under way.

    Without a terminal, it prints what is done in a line a minute.

    Failures are said at once either way.

    Use it in a ``with`` block; `begin` returns what `fastlr.experiments.runs.processes.run_jobs`
    calls.

    Args:
        driver: Driver of the runs.
        out: Their folder, for messages.
    """

    def __init__(self, driver: Driver, out: Path) -> None:
        self.driver, self.out = driver, out
        self.console = Console(stderr=True)
        columns = _columns(10, Column(no_wrap=True, overflow="ellipsis", ratio=1))
        self.bar = Bar(
            *columns, console=self.console, disable=not self.console.is_terminal, expand=True
        )
        self.minutes = MinuteLog(self.console)
        self.rows: dict[str, _Row] = {}  # of the runs under way
        # Of each run: the share done at its first report, and now.
        self.shares: dict[str, tuple[float, float]] = {}
        self.ended = self.failed = 0

    def __enter__(self) -> RunBoard:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, names: tuple[str, ...]) -> Callable[[str, dict[str, Any]], None]:
        """Show that the runs ``names`` are to be done; return the receiver of their messages."""
        self.shares = dict.fromkeys(names, (0.0, 0.0))
        self.whole = self.bar.add_task("all", total=len(names), at=f"0/{len(names)}", text="")
        self.clock = Clock()
        self.clock.left(0, 1)
        return self.receive

    def receive(self, name: str, message: dict[str, Any]) -> None:
        """Show a message of a run."""
        event = message.get("event")
        if event == "started":
            self.rows[name] = _Row(self.bar, name, self.driver.opening)
        elif event == "ended":
            if name in self.rows:  # Ray does not say when a run starts
                self.bar.remove_task(self.rows.pop(name).task)
            self.shares[name] = (self.shares[name][0], 1.0)
            self.ended += 1
            if message["error"] is not None:
                self.failed += 1
                self._print(
                    f"{name} failed: {message['error']} (log: {self.out / 'logs' / name}.txt)"
                )
        elif "done" in message:
            row = self.rows[name]
            share = (message["done"] + message["part"]) / message["total"]
            self.shares[name] = (share if row.clock.start is None else self.shares[name][0], share)
            row.update(message["done"], message["part"], message["total"], message["shown"] or {})
        self._show_whole()

    def _show_whole(self) -> None:
        """Update the line of all runs."""
        runs = len(self.shares)
        before = sum(start for start, _ in self.shares.values())
        now = sum(share for _, share in self.shares.values())
        left = self.clock.left(now - before, runs - before)
        if now >= runs:
            left = None
        text = _joined(f"{self.failed} failed" if self.failed else "", _time_left(left))
        self.bar.update(self.whole, completed=now, at=f"{self.ended}/{runs}", text=text)
        self.minutes.log(_joined(f"{self.ended}/{runs} runs ended", f"{now / runs:.0%} done", text))

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _columns(width: int, text: Column | None = None) -> tuple[ProgressColumn, ...]:
    """Return the columns of a run's line on the terminal.

    These are its name, the steps done, a bar of a width, the measures and the time left.
    """
    return (
        TextColumn("{task.description}"),
        TextColumn("{task.fields[at]}"),
        BarColumn(width),
        TextColumn("{task.fields[text]}", table_column=text),
    )


class _Row:
    """The line of a run, ``task`` in the bar."""

    def __init__(self, bar: Bar, name: str, opening: str) -> None:
        self.bar, self.clock = bar, Clock()
        self.task = bar.add_task(name, total=None, at="", text=opening)
        self.measures: dict[str, str] = {}

    def update(self, done: int, part: float, total: int, measures: dict[str, str]) -> str:
        """Show the steps done, the part of the next one, and the measures; return the text.

        A measure that is empty stays as it was.
        """
        self.measures.update(
            {name: value or self.measures.get(name, "") for name, value in measures.items()}
        )
        values = [f"{name} {value}" for name, value in self.measures.items() if value]
        text = _joined(*values, _time_left(self.clock.left(done + part, total)))
        self.bar.update(
            self.task, completed=done + part, total=total, at=f"{done}/{total}", text=text
        )
        return text


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _time_left(seconds: float | None) -> str:
    return "" if seconds is None else f"{timedelta(seconds=math.ceil(seconds))} left"


class Clock:
    """Estimates the time left from the work done since the first call.

    (A resumed run has much of its work behind it.)
    """

    def __init__(self) -> None:
        self.start: tuple[float, float] | None = None  # time and work done at the first look

    def left(self, done: float, total: float) -> float | None:
        """Return seconds; None until something was done."""
        now = time.monotonic()
        if self.start is None:
            self.start = (now, done)
        began, before = self.start
        return None if done <= before else (now - began) / (done - before) * (total - done)
