"""Carrying out runs for the command line: one, or several at a time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import typer

from fastlr.cli.progress import RunBoard, progress
from fastlr.errors import InputError, Interrupted

if TYPE_CHECKING:
    from fastlr.experiments.runs.experiment import Driver, Progress, Report
    from fastlr.experiments.runs.ray import Cluster
    from fastlr.experiments.runs.sweep import Grids


@dataclass(frozen=True)
class RunRequest:
    """A run, or several, as a command is to carry them out.

    Attributes:
        driver: Of the runs.
        preset: None: the driver's first, or that of the runs that are resumed.
        out: The folder of the run, or of the runs' folders.
        given: Settings that differ from the preset's.
        resume: Go on with what is in the folder.
        tensorboard: Also log to TensorBoard.
        seeds: How many runs that differ by their seed; None: not given.
        at_once: How many of them at a time; None: as many as there is room for.
        grids: Values of settings, of which every combination is run.
        cluster: Where several runs are carried out; None: on this machine.
    """

    driver: Driver
    preset: str | None
    out: Path
    given: dict[str, Any]
    resume: bool
    tensorboard: bool
    seeds: int | None
    at_once: int | None
    grids: Grids = field(default_factory=dict)
    cluster: Cluster | None = None

    def carry_out(self, is_first_rank: bool) -> None:
        """Carry out one run, or those of several seeds.

        Raises:
            InputError: Something given does not fit. Interrupted: By Ctrl-C.
        """
        from fastlr.experiments.runs.queue import is_many

        if is_many(self.out) if self.resume else self.seeds is not None:
            self.carry_out_many()
        elif self.seeds is not None:
            raise InputError(f"{self.out} does not hold runs of several seeds")
        elif self.at_once is not None:
            raise InputError("--at-once goes with --seeds")
        else:
            self._carry_out_one(is_first_rank)

    def _carry_out_one(self, is_first_rank: bool) -> None:
        """Carry out one run, which the first rank shows on the terminal and in TensorBoard."""
        from fastlr.experiments.runs.experiment import no_report
        from fastlr.experiments.runs.tensorboard import TENSORBOARD, mirrored

        last: Progress | None = None
        with ExitStack() as displays:
            report: Report = no_report
            if is_first_rank:
                show = displays.enter_context(progress(self.driver))
                report = displays.enter_context(mirrored(self.out, self.tensorboard, show))

            def note(at: Progress) -> None:
                nonlocal last
                last = at
                report(at)

            try:
                if self.resume:
                    path = self.driver.resume(self.out, self.given, self.preset, note)
                else:
                    path = self.driver.begin(self.out, self.preset, self.given, note)
            except KeyboardInterrupt:
                interrupted = Interrupted(self._interruption(last))
                interrupted.told_by = 0
                raise interrupted from None
        if is_first_rank:
            print(f"run: {path}")
            self._print_log(path / TENSORBOARD)

    def _interruption(self, last: Progress | None) -> str:
        """Say how far an interrupted run is, by its last report; without one, by its folder."""
        from fastlr.experiments.runs.folder import CONFIG, RECORDS

        if not (self.out / CONFIG).exists():
            return "interrupted before the run began: begin it anew"
        if last is not None and last.done:
            return (
                f"interrupted after {self.driver.step} {last.done} of {last.total}: --resume goes "
                "on with it"
            )
        if last is None and (self.out / RECORDS).exists():
            return "interrupted: --resume goes on with the run"
        return f"interrupted before the first {self.driver.step} was done: --resume goes on with it"

    def carry_out_many(self) -> None:
        """Carry out every combination of the grids' values with every seed.

        The exit code is 1 if a run fails.

        Raises:
            InputError: Something given does not fit. Interrupted: By Ctrl-C.
        """
        from fastlr.distributed.sharding import by_torchrun
        from fastlr.experiments.runs import queue
        from fastlr.experiments.runs.sweep import product
        from fastlr.integrations.loggers import require_tensorboard

        if by_torchrun():
            raise InputError(
                "several runs are spread over the GPUs without torchrun, which is for one run on "
                "several GPUs: leave it out"
            )
        if self.tensorboard:
            require_tensorboard()
        try:
            with RunBoard(self.driver, self.out) as board:
                how = self.at_once, self.tensorboard, self.cluster
                runs = queue.Queue(self.driver, self.out, self.preset, board.begin, *how)
                if self.resume:
                    outcome = runs.resume(self.given, self.seeds, self.grids or None)
                else:
                    count = 1 if self.seeds is None else self.seeds
                    outcome = runs.begin(
                        product(self.driver, self.preset, self.given, self.grids, count)
                    )
        except KeyboardInterrupt:
            begun = queue.is_many(self.out)
            when = (
                ": --resume goes on with the runs"
                if begun
                else " before the runs began: begin them anew"
            )
            raise Interrupted(f"interrupted{when}") from None
        failed = f", {len(outcome.failed)} failed: --resume tries again" if outcome.failed else ""
        print(f"runs: {outcome.path} ({len(outcome.finished)} finished{failed})")
        self._print_log(outcome.path)
        if failed:
            raise typer.Exit(1)

    def _print_log(self, folder: Path) -> None:
        if self.tensorboard:
            print(f"log: {folder} (tensorboard --logdir FOLDER shows it)")


def print_options(driver: Driver, preset: str | None, given: Mapping[str, Any]) -> None:
    """Print every option of a driver with its value, and its choices where it has some."""
    from fastlr.experiments.runs.options import resolve

    options = resolve(driver.options, driver.presets, preset or driver.preset, given)
    hints = get_type_hints(driver.options)
    for key, value in vars(options).items():
        words = (
            f"  # {', '.join(get_args(hints[key]))}" if get_origin(hints[key]) is Literal else ""
        )
        print(f"{key}={','.join(value) if isinstance(value, tuple) else value}{words}")


def given_settings(kind: type, settings: list[str] | None, **named: Any) -> dict[str, Any]:
    """Return the values of ``--set`` and of options of the same meaning together.

    Raises:
        InputError: A setting does not fit, or is given in both ways.
    """
    from fastlr.experiments.runs.options import parse_settings

    given = parse_settings(kind, settings or [])
    for key, value in named.items():
        if value is not None:
            if key in given:
                raise InputError(f"--{key} and --set {key}= are both given: leave one out")
            given[key] = value
    return given
