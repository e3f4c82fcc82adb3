"""What ``fastlr bench`` does with its options."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console

from fastlr.errors import InputError
from fastlr.speed import figures, record, tables
from fastlr.speed.run import Bench, check_files, device_named, exit_code, settings_for


def run(
    *,
    device: str | None = None,
    quick: bool = False,
    budget: float | None = None,
    json_file: Path | None = None,
    figure: Path | None = None,
    compare: tuple[Path, Path] | None = None,
) -> int:
    """Run the benchmark and print it, or print the comparison of two records.

    Args:
        device: to measure; default a GPU if there is one.
        quick: only the main cases.
        budget: seconds; the last sections are dropped first.
        json_file: where the record goes (``-``: stdout, and the tables to stderr), saved after every section.
        figure: where the roofline goes; the stages beside it.
        compare: two records to compare instead.

    Returns:
        0, or 1 if anything is wrong or failed.

    Raises:
        InputError: an option or a file is wrong.
    """
    out = Console(stderr=str(json_file) == "-")
    if compare is not None:
        if json_file or figure:
            raise InputError("--compare only compares: leave --json and --figure out")
        a, b = (record.load(path) for path in compare)
        out.print(tables.comparison(a, b, (str(compare[0]), str(compare[1]))), highlight=False)
        return 0
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise InputError(f"--budget {budget}: give a positive number of seconds")
    place = device_named(device)
    check_files(json=json_file, figure=figure)
    progress = Console(stderr=True)
    bench = Bench(settings_for(place, quick=quick, budget=budget), say_on(progress))
    if place.type == "cpu":
        progress.print(
            "CPU run: the small cases, about a minute; figures for a GPU need one", style="yellow", highlight=False
        )
    save = (lambda: bench.record.save(json_file)) if json_file is not None and str(json_file) != "-" else lambda: None
    found = bench.run(after=save)
    out.print(tables.report(found), highlight=False)
    if json_file is not None:
        found.save(json_file)
        if str(json_file) != "-":
            out.print(f"json: {json_file}", highlight=False, soft_wrap=True)
    if figure is not None:
        for path in figures.draw(found, figure):
            out.print(f"figure: {path}", highlight=False, soft_wrap=True)
    return exit_code(found)


def say_on(console: Console) -> record.Say:
    """A function that prints what is being done, dimly."""
    return lambda text: console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
