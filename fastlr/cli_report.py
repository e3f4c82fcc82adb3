"""``fastlr report``, ``fastlr ablate`` and ``fastlr cost``: the tables and figures of continual runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFolders = Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold several.")]
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Also write the table here.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (report, ablate, cost):
        app.command()(command)


def report(
    runs: RunFolders,
    out: Annotated[Path | None, typer.Option(help="Folder of the report; without it, report in RUNS.")] = None,
    figures: Annotated[str, typer.Option(help="png or none.")] = "png",
    bootstrap: Annotated[int, typer.Option(help="Resamples behind each standard error.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0,
) -> None:
    """Analyse continual RUNS, pooled: tables, figures and one HTML page."""
    from fastlr.report.continual import write_report

    write_report(runs, out, figures=figures, resamples=bootstrap, seed=seed).show()


def ablate(
    runs: RunFolders,
    bootstrap: Annotated[int, typer.Option(help="Resamples behind the standard error of r.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0,
    csv_file: CsvFile = None,
) -> None:
    """Compare local redundancy on shapes and noise with that on real images of the next task, from the records of RUNS."""
    from fastlr.analysis import agreement, read_runs
    from fastlr.report.continual_tables import ablation_sheet

    _print(ablation_sheet(agreement(read_runs(runs), resamples=bootstrap, seed=seed)), csv_file)


def cost(runs: RunFolders, csv_file: CsvFile = None) -> None:
    """Say what each measure cost in seconds and as a share of training, from the records of RUNS."""
    from fastlr.analysis import costs, read_runs
    from fastlr.report.continual_tables import cost_sheet

    found = read_runs(runs)
    _print(cost_sheet(costs(found), found), csv_file)


def _print(sheet: object, csv_file: Path | None) -> None:
    from fastlr.errors import InputError
    from fastlr.report.continual import show
    from fastlr.report.sheets import Sheet

    assert isinstance(sheet, Sheet)
    show([sheet])
    if csv_file is not None:
        try:
            csv_file.write_text(sheet.csv(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--csv {csv_file}: {error.strerror or error}") from error
        print(f"csv: {csv_file}")
