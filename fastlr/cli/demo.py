"""The demo: a network loses its plasticity, and keeps it by shrink-and-perturb.

It is trained on a sequence of tasks of random labels.

``make demo`` and ``fastlr demo`` carry it out: two runs of the preset ``demo`` of ``fastlr
continual`` side by side, then what they show in three
sentences, one chart and one page.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fastlr.cli.progress import RunBoard
from fastlr.display.record import output_folder
from fastlr.display.sheets import DASH, Sheet
from fastlr.display.tables import brief
from fastlr.errors import FastlrError
from fastlr.experiments.continual import ContinualRun, read_run
from fastlr.experiments.continual.course import PARTS, ends
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.continual.figures import redundancy_and_accuracy
from fastlr.experiments.continual.rank_correlation import describe, rank_correlation
from fastlr.experiments.continual.tables import definitions_sheet, hundred, label, setting
from fastlr.experiments.runs import queue
from fastlr.experiments.runs.records import Array, finite, mean_of_known
from fastlr.experiments.runs.report import Drawing, Report, write_files
from fastlr.experiments.statistics.bootstrap import mean_error

HELPED = {"shrink": 0.8, "perturb": 0.03}
RUNS: dict[str, dict[str, Any]] = {"as-it-is": {}, "shrink-and-perturb": HELPED}
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
        seed: Seed of the network, the labels, the training and the synthetic images.
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
    _carry_out(folder / "runs", options)
    runs = [read_run(folder / "runs" / name) for name in RUNS]
    sentences = findings(*runs)
    drawing = Drawing(
        "redundancy-accuracy.png",
        partial(redundancy_and_accuracy, runs),
        "Local redundancy after each task, and how much of each task's random labels was learned. "
        "Thin: each task; thick, in long runs: running median over 31.",
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
        [lead, setting(runs)],
        sheets,
        [drawing],
        runs,
        numbers,
        screen=[],
    )
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
        plain: Run of the plain network.
        helped: Run with shrink-and-perturb.
    """
    (first, last), (_, kept) = (map(finite, ends(run.accuracy)) for run in (plain, helped))
    (begin, end), (_, kept_end) = (
        map(np.nanmedian, ends(run.measure("local_redundancy"))) for run in (plain, helped)
    )
    lost = last.mean() < first.mean() - 0.05
    return [
        f"The plain network learns {_percent(first)} of the random labels in the first fifth of "
        f"{len(plain)} tasks and {_percent(last)} in the last (guessing: "
        f"{_percent(np.array([1 / plain.options.get('random_classes', 10)]))}): "
        + (
            "it has lost its plasticity."
            if lost
            else "so few tasks do not show a loss of plasticity."
        ),
        "Local redundancy, measured on synthetic images without any label of the tasks, changes "
        f"from {brief(begin)} to {brief(end)} (medians). Its correlation with the accuracy on the "
        f"next task: {describe(rank_correlation([plain], 1))}.",
        f"Shrink-and-perturb multiplies every parameter by {HELPED['shrink']} before each task and "
        f"adds noise of {HELPED['perturb']}. With it, the network still learns {_percent(kept)} in "
        f"the last fifth, and its local redundancy is {brief(kept_end)}.",
    ]


def _percent(shares: Array) -> str:
    """Return the mean of shares with its standard error, in per cent."""
    error = mean_error(shares)
    return f"{hundred(float(shares.mean()))}{f' ± {hundred(error)}' if error > 0 else ''} %"


def _introduce(say: Console, path: Path, options: Mapping[str, Any]) -> None:
    say.print(
        "[bold]Can a network still learn? Task after task it gets the same images with new random "
        "labels."
    )
    say.print("Accuracy is the share of labels that it learned. Local redundancy needs no labels.")
    if queue.is_many(path):
        say.print(f"Resuming {path}. Delete the folder to start again.", soft_wrap=True)
    say.print()


def _carry_out(path: Path, options: dict[str, Any]) -> None:
    """Carry out what is left of both runs, with their progress on stderr.

    Each run is a process of its own.
    """
    runs = queue.Queue(DRIVER, path, "demo")
    with RunBoard(DRIVER, path) as board:
        if queue.is_many(path):
            outcome = runs.resume(options, board.begin)
        else:
            settings = {name: {**options, **change} for name, change in RUNS.items()}
            outcome = runs.begin(settings, board.begin)
    if outcome.failed:
        failed = "; ".join(
            f"{name}: {why} (log: {path / queue.LOGS / name}.txt)"
            for name, why in outcome.failed.items()
        )
        raise FastlrError(f"not all runs of the demo have ended well: {failed}")


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
