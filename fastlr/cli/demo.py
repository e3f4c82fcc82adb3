"""The demo: a network loses its plasticity, and keeps it by shrink-and-perturb.

It is trained on a sequence of tasks of random labels.

``make demo`` and ``fastlr demo`` carry it out: two runs of the preset ``demo`` of ``fastlr
continual`` side by side, their curves growing in the terminal, then what they show in three
sentences, one chart and one page.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fastlr.display.record import MinuteLog, output_folder
from fastlr.display.sheets import DASH, Sheet
from fastlr.display.verdict import PARTS, brief
from fastlr.errors import FastlrError, FastlrWarning, InputError
from fastlr.experiments.continual import ContinualRun, read_run
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.continual.figures import redundancy_and_accuracy
from fastlr.experiments.continual.findings import describe, ends, percent, rank_correlation
from fastlr.experiments.continual.tables import definitions_sheet, hundred, label, setting
from fastlr.experiments.runs import queue
from fastlr.experiments.runs.processes import Message
from fastlr.experiments.runs.records import Array, finite, mean_of_known
from fastlr.experiments.runs.report import Drawing, Report, write_files

HELPED = {"shrink": 0.8, "perturb": 0.03}
RUNS: dict[str, dict[str, Any]] = {"as-it-is": {}, "shrink-and-perturb": HELPED}
_LEVELS, _WIDTH = "▁▂▃▄▅▆▇█", 16  # of a curve in the terminal, and its characters
_COLUMNS = ("", "accuracy", "", "redundancy, log", "", "")
_IN_TABLE = (
    "local_redundancy",
    "dormant_ratio",
    "effective_rank",
    "weight_norm",
    "train_grad_norm",
)


def run(
    output: str | os.PathLike[str] = "demo-output",
    *,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> Report:
    """Carry out both runs of the demo and report on them.

    A demo that is there, or was interrupted, is gone on with.

    Args:
        output: Folder of the runs (in ``runs``) and of the report (in ``report``); made if needed.
        seed: Of the network, the labels, the training and the synthetic images.
        settings: Options of both runs that differ from the preset's.
        console: Where to print; stdout if None.

    Returns:
        The report; its ``findings`` are the sentences that are printed.

    Raises:
        InputError: ``output`` is not writable, or holds a demo with other options.
        FastlrError: A run has failed.
    """
    say = console or Console(highlight=False)
    folder = output_folder(output)
    began = time.perf_counter()
    options = {"seed": seed, **(settings or {})}
    _introduce(say, folder / "runs", options)
    _carry_out(say, folder / "runs", options)
    runs = [read_run(folder / "runs" / name) for name in RUNS]
    sentences = findings(*runs)
    drawing = Drawing(
        "redundancy-accuracy.png",
        partial(redundancy_and_accuracy, runs),
        "Local redundancy after each task, and how much of each task's random labels was learned. "
        "Thin: each task; thick, in long runs: running mean over 30.",
    )
    lead = (
        "Two runs of fastlr continual demo that differ in shrink and perturb; all their numbers: "
        "runs/*/records.jsonl."
    )
    sheets = [_course_sheet(runs), definitions_sheet(runs)]
    numbers = {"findings": sentences, "runs": [str(run.path) for run in runs]}
    title = "A network loses its plasticity, and keeps it"
    report = write_files(
        output_folder(folder / "report"),
        title,
        sentences,
        [lead, *setting(runs)],
        sheets,
        [drawing],
        runs,
        numbers,
        screen=[],
    )
    # Without a terminal the curves end without a line's end.
    say.print("" if say.is_terminal else "\n")
    for sentence in sentences:
        say.print(sentence + "\n", highlight=False)
    say.print(
        f"[bold]{time.perf_counter() - began:.0f} s in all.[/] The chart, and the page to open in "
        "a browser:"
    )
    say.print(f"   {report.figures[0][0]}", soft_wrap=True)
    say.print(f"   {report.page}", soft_wrap=True)
    return report


def findings(plain: ContinualRun, helped: ContinualRun) -> list[str]:
    """Say in three sentences what the runs show.

    Args:
        plain: The network as it is.
        helped: With shrink-and-perturb.
    """
    (first, last), (_, kept) = (map(finite, ends(run.accuracy)) for run in (plain, helped))
    (begin, end), (_, kept_end) = (
        map(np.nanmedian, ends(run.measure("local_redundancy"))) for run in (plain, helped)
    )
    lost = last.mean() < first.mean() - 0.05
    return [
        f"As it is, the network learns {percent(first)} of the random labels in the first fifth of "
        f"{len(plain)} tasks and {percent(last)} in the last (guessing: "
        f"{percent(np.array([1 / plain.options.get('random_classes', 10)]))}): "
        + (
            "it has lost its plasticity."
            if lost
            else "that it loses its plasticity cannot be told from so few tasks."
        ),
        "Local redundancy, measured on synthetic images without any label of the tasks, goes from "
        f"{brief(begin)} to {brief(end)} (medians); against the accuracy of the task that comes "
        f"next it has {describe(rank_correlation([plain], 1))}.",
        f"With shrink-and-perturb (before each task every parameter times {HELPED['shrink']}, plus "
        f"noise of {HELPED['perturb']}) the last fifth still has {percent(kept)}, and a local "
        f"redundancy of {brief(kept_end)}.",
    ]


def _introduce(say: Console, path: Path, options: Mapping[str, Any]) -> None:
    say.print(
        "[bold]Can a network still learn? Task after task it gets the same images with new random "
        "labels."
    )
    say.print("Accuracy says how many it learned; local redundancy is measured without them.")
    if queue.is_many(path):
        say.print(f"{path} is there: going on with it (remove it to begin anew)", soft_wrap=True)
    say.print()


def _carry_out(say: Console, path: Path, options: dict[str, Any]) -> None:
    """Carry out what is left of both runs, with their curves on the terminal.

    Each run is a process of its own.
    """
    minutes = MinuteLog(Console(stderr=True))

    def listen(name: str, message: Message) -> None:
        if "done" in message:
            minutes.log(f"{name}: task {message['done']}")

    runs = queue.Queue(DRIVER, path, "demo")
    with Live(get_renderable=lambda: _curves(path, options), console=say, refresh_per_second=2):
        if queue.is_many(path):
            outcome = runs.resume(options, lambda names: listen)
        else:
            settings = {name: {**options, **change} for name, change in RUNS.items()}
            outcome = runs.begin(settings, lambda names: listen)
    if outcome.failed:
        failed = "; ".join(
            f"{name}: {why} (log: {path / queue.LOGS / name}.txt)"
            for name, why in outcome.failed.items()
        )
        raise FastlrError(f"not all runs of the demo have ended well: {failed}")


def _curves(path: Path, options: Mapping[str, Any]) -> Table:
    """Return a table of the runs so far: curves over tasks and the values of the last task.

    The curves are of accuracy and of local redundancy (logarithmic).
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, no_wrap=True, justify="left" if column or not index else "right")
    runs = {name: _so_far(path / name) for name in RUNS}
    total = options.get("tasks", DRIVER.presets["demo"]["tasks"])
    logarithms = {
        name: np.log10(run.measure("local_redundancy"))
        for name, run in runs.items()
        if run is not None
    }
    known = finite(np.concatenate([*logarithms.values(), np.zeros(1)]))
    for name, run in runs.items():
        if run is None or not len(run):
            table.add_row(name, "", "", "", "", "beginning")
            continue
        redundancy = run.measure("local_redundancy")[-1]
        table.add_row(
            name,
            _curve(run.accuracy, total, 0.0, 1.0),
            f"{hundred(run.accuracy[-1])} %",
            _curve(logarithms[name], total, known.min(), known.max()),
            brief(redundancy),
            f"{len(run)}/{total}",
        )
    return table


def _so_far(path: Path) -> ContinualRun | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastlrWarning)  # a line that is being written
        try:
            return read_run(path)
        except InputError:
            return None


def _curve(values: Array, total: int, low: float, high: float) -> str:
    """Draw a curve of block characters: means over equal parts of ``total`` tasks.

    The heights of the blocks lie between the values ``low`` and ``high``.
    """
    place = np.arange(len(values)) * _WIDTH // total
    means = [
        finite(values[place == k]).mean() for k in range(_WIDTH) if len(finite(values[place == k]))
    ]
    share = (np.array(means) - low) / ((high - low) or 1.0)
    return "".join(_LEVELS[int(np.clip(x, 0, 0.999) * len(_LEVELS))] for x in share)


def _course_sheet(runs: Sequence[ContinualRun]) -> Sheet:
    """Accuracy and measures by fifths of the runs."""
    columns = ("run", "tasks", "accuracy, %", *map(label, _IN_TABLE))
    rows = []
    for run in runs:
        edges = [len(run) * k // PARTS for k in range(PARTS + 1)]
        for start, stop in zip(edges, edges[1:]):
            if start == stop:
                continue
            accuracy = hundred(mean_of_known(run.accuracy[start:stop]))
            medians = []
            for name in _IN_TABLE:
                values = finite(run.measure(name)[start:stop])
                medians.append(f"{np.median(values):.3g}" if len(values) else DASH)
            rows.append((run.name, f"{start} to {stop - 1}", accuracy, *medians))
    notes = ("Accuracy: mean; the measures: medians.",)
    return Sheet("course", "By fifths of the runs", columns, rows, notes)
