"""``fastlr report`` and ``fastlr cost``: the tables and figures of runs; printing tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastlr.errors import InputError

if TYPE_CHECKING:
    from fastlr.report.sheets import Sheet

RunFolders = Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold several.")]
Pool = Annotated[bool, typer.Option("--pool", help="Also pool runs that differ in more than their seed.")]
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Also write the table here.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (report, cost):
        app.command()(command)


def report(
    runs: RunFolders,
    out: Annotated[Path | None, typer.Option(help="Folder of the report; without it, report in RUNS.")] = None,
    figures: Annotated[str, typer.Option(help="png or none.")] = "png",
    bootstrap: Annotated[int, typer.Option(help="Resamples behind each standard error of continual runs.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0,
    pool: Pool = False,
) -> None:
    """Analyse RUNS of fastlr continual, transfer or memorize, pooled: tables, figures and one HTML page."""
    from fastlr.analysis.folders import driver_of

    driver = driver_of(runs)
    if pool and driver != "continual":
        raise InputError(f"--pool goes with continual runs, not with those of fastlr {driver}")
    if driver == "transfer":
        from fastlr.report.transfer import write_transfer_report

        write_transfer_report(runs, out, figures=figures).show()
        return
    if driver == "memorize":
        from fastlr.report.memorize import write_memorization_report

        write_memorization_report(runs, out, figures=figures).show()
        return
    if driver != "continual":
        raise InputError(f"there is no report for runs of fastlr {driver}")
    from fastlr.report.continual import write_report

    write_report(runs, out, figures=figures, resamples=bootstrap, seed=seed, pool=pool).show()


def cost(runs: RunFolders, csv_file: CsvFile = None, pool: Pool = False) -> None:
    """Say what each measure cost in seconds and as a share of training, from the records of RUNS."""
    from fastlr.analysis import costs, read_runs
    from fastlr.report.continual_tables import cost_sheet

    found = read_runs(runs, pool=pool)
    print_sheets([cost_sheet(costs(found), found)], csv_file)


def print_sheets(sheets: Sequence[Sheet], csv_file: Path | None) -> None:
    """Print tables, and write the last one as CSV if a file is given.

    Raises:
        InputError: The file cannot be written.
    """
    from fastlr.report.folder import show

    show(sheets)
    if csv_file is not None:
        try:
            csv_file.write_text(sheets[-1].csv(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--csv {csv_file}: {error.strerror or error}") from error
        print(f"csv: {csv_file}")
