"""What the commands that carry out runs share: their options, the settings, one run or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastlr.cli_display import Board, progress
from fastlr.errors import InputError, Interrupted

if TYPE_CHECKING:
    from fastlr.drivers.launch import Driver, Progress, Report
    from fastlr.drivers.on_ray import Cluster
    from fastlr.drivers.sweep import Grids

Out = Annotated[Path | None, typer.Option(help="Folder of the run, new or empty (with --resume, the run's).")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the run; may be repeated.")
]
Seed = Annotated[int | None, typer.Option(help="Of all that is random: --set seed=.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run, or runs, in the folder.")]
Seeds = Annotated[
    int | None, typer.Option(help="Run so many seeds, from --seed on, each in a folder of its own in --out.")
]
AtOnce = Annotated[
    int | None, typer.Option(help="With --seeds: how many at a time; else 4 a GPU, or one a core with one thread.")
]
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
    seeds: int | None = None,
    at_once: int | None = None,
    **named: Any,
) -> None:
    """Do what a command of a driver does, together with the other processes that torchrun has started, if it has.

    Args:
        driver: Which.
        preset: As given; None: the driver's first, or the resumed run's.
        out: As given; it must be.
        settings: The ``--set`` texts.
        resume: Go on with the run.
        options: Only print the options.
        tensorboard: Also log to TensorBoard.
        seeds: As given: how many runs that differ by their seed.
        at_once: As given: how many of them at a time.
        named: Settings that have options of their own (``--seed``); None: not given.

    Raises:
        InputError: Something given does not fit. Interrupted: By Ctrl-C, in a run.
    """
    from fastlr.distributed.process_group import joined
    from fastlr.drivers import many
    from fastlr.drivers.config import resolve
    from fastlr.drivers.scalars import TENSORBOARD

    with joined() as members:
        given = given_settings(driver.options, settings or [], named)
        if options:
            resolved = vars(resolve(driver.options, driver.presets, preset or driver.preset, given))
            for key, value in resolved.items() if members.rank == 0 else ():
                print(f"{key}={','.join(value) if isinstance(value, tuple) else value}")
            return
        if out is None:
            raise InputError("give --out, the folder of the run")
        if many.is_many(out) if resume else seeds is not None:
            carry_out_many(driver, preset, out, given, seeds, at_once, resume, tensorboard)
            return
        if seeds is not None or at_once is not None:
            raise InputError(
                "--at-once goes with --seeds" if seeds is None else f"{out} does not hold runs of several seeds"
            )
        with _reported(driver, out, tensorboard, members.rank == 0) as report:
            at: list[Progress] = []

            def note(progress: Progress) -> None:
                at[:] = [progress]
                report(progress)

            try:
                if resume:
                    path = driver.resume(out, given, preset, note)
                else:
                    path = driver.begin(out, preset, given, note)
            except KeyboardInterrupt:
                ended = Interrupted(_where(driver, out, at[0] if at else None))
                ended.told_by = 0
                raise ended from None
        if members.rank == 0:
            print(f"run: {path}")
            if tensorboard:
                _say_log(path / TENSORBOARD)


@contextmanager
def _reported(driver: Driver, out: Path, tensorboard: bool, first: bool) -> Iterator[Report]:
    """How a run reports: on the terminal and to TensorBoard; not at all from a process that is not the first."""
    from fastlr.drivers.launch import no_report
    from fastlr.drivers.scalars import mirrored

    if not first:
        yield no_report
        return
    with progress(driver) as show, mirrored(out, tensorboard, show) as report:
        yield report


def _where(driver: Driver, out: Path, at: Progress | None) -> str:
    """Say how far an interrupted run is, by its last report; without one, by its folder."""
    from fastlr.drivers.runs import CONFIG, RECORDS

    if not (out / CONFIG).exists():
        return "interrupted before the run began: begin it anew"
    if at is not None and at.done:
        return f"interrupted after {driver.step} {at.done} of {at.total}: --resume goes on with it"
    if at is None and (out / RECORDS).exists():
        return "interrupted: --resume goes on with the run"
    return f"interrupted before the first {driver.step} was done: --resume goes on with it"


def carry_out_many(
    driver: Driver,
    preset: str | None,
    out: Path,
    given: dict[str, Any],
    seeds: int | None,
    at_once: int | None,
    resume: bool,
    tensorboard: bool,
    grids: Grids | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Do what ``--seeds`` and ``--grid`` say; the exit code is 1 if a run fails.

    Raises:
        InputError: Something given does not fit.
    """
    from fastlr.distributed.sharding import by_torchrun
    from fastlr.drivers import many
    from fastlr.drivers.sweep import product
    from fastlr.loggers import require_tensorboard

    if by_torchrun():
        raise InputError(
            "several runs are spread over the GPUs without torchrun, which is for one run on several GPUs: leave it out"
        )
    if tensorboard:
        require_tensorboard()
    with _interruptible(out), Board(driver, out) as board:
        if resume:
            outcome = many.resume(
                driver, out, given, at_once, board.begin, preset, seeds, tensorboard, cluster, grids or None
            )
        else:
            runs = product(driver, preset, given, grids or {}, 1 if seeds is None else seeds)
            outcome = many.begin(driver, out, preset, runs, at_once, board.begin, tensorboard, cluster)
    failed = f", {len(outcome.failed)} failed: --resume tries again" if outcome.failed else ""
    print(f"runs: {outcome.path} ({len(outcome.finished)} finished{failed})")
    if tensorboard:
        _say_log(outcome.path)
    if failed:
        raise typer.Exit(1)


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    from fastlr.drivers import many

    try:
        yield
    except KeyboardInterrupt:
        begun = many.is_many(out)
        what = ": --resume goes on with the runs" if begun else " before the runs began: begin them anew"
        raise Interrupted(f"interrupted{what}") from None


def _say_log(folder: Path) -> None:
    print(f"log: {folder} (tensorboard --logdir FOLDER shows it)")


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
