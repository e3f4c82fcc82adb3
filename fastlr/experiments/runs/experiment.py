"""Begin and resume the run of a driver: options, device, data, ``config.json``, checks.

A run is carried out by the process that calls `Driver.begin` or `Driver.resume`, or by one of its
own, which `Driver.command` starts and whose `main` is here. Several ranks do a run together within
`fastlr.distributed.sharded`, as the commands do where torchrun has started them.

A driver is a `Driver`: its options and presets, how it opens its data, and the function that
carries a run on from its last checkpoint. By convention its checkpoints hold ``position``, the
number of steps done.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fastlr.display.record import counted, machine
from fastlr.distributed.connection import connect
from fastlr.distributed.sharding import local_device, team
from fastlr.errors import InputError, ModelError, one_line, warn
from fastlr.estimator.result import versions
from fastlr.experiments.runs.folder import Run, commit_of_source, opened
from fastlr.experiments.runs.options import RunOptions, from_json, from_record, resolve, unknown
from fastlr.experiments.runs.processes import Message, attach
from fastlr.experiments.runs.progress import Progress, Report, no_report
from fastlr.experiments.runs.tensorboard import mirrored
from fastlr.experiments.runs.texts import CONFIG
from fastlr.files import now
from fastlr.models.loading import usable_device

_START = (
    "import json, sys; sys.path = json.loads(sys.argv[1]); "
    "from fastlr.experiments.runs.experiment import main; main(sys.argv[2])"
)
_EVERY = 0.2  # seconds between two reports within a step


@dataclasses.dataclass(frozen=True)
class Driver:
    """A kind of run.

    Attributes:
        name: As in ``fastlr NAME``.
        module: Where it is to be found, as ``DRIVER``.
        options: Its options, a subclass of `RunOptions`.
        presets: Settings by name; the first is the one that is taken if none is named.
        changeable: Options that may change when a run is resumed.
        untold_by_old_runs: What options meant for runs that were begun before they existed, where
            that is not their default.
        step: What its steps are called in records and in the display, such as "task".
        opening: What it does until the first report, for the display.
        open_data: options -> (the data, what ``config.json`` says of them). The latter has a
            ``digest``, which must be the same when the run is resumed, and a ``path`` or None.
        carry_on: (run, options, data, device, report) does the steps that are left, from
            ``run.state``.
        finished: (options, records) -> True if nothing is left to do.
        shown: record -> short texts by name, for the display, such as ``{"accuracy": "83.1 %"}``;
            an empty one leaves what was shown before.
        report: What writes its report, as ``package.module:function`` of the paths of run folders,
            the report's folder and ``figures``.
        analysed: Options of ``fastlr report`` that this function takes besides.
    """

    name: str
    module: str
    options: type[RunOptions]
    presets: Mapping[str, Mapping[str, Any]]
    changeable: tuple[str, ...]
    step: str
    opening: str
    open_data: Callable[[Any], tuple[Any, dict[str, Any]]]
    carry_on: Callable[[Run, Any, Any, torch.device, Report], None]
    finished: Callable[[Any, Sequence[Mapping[str, Any]]], bool]
    shown: Callable[[Mapping[str, Any]], dict[str, str]]
    report: str
    analysed: tuple[str, ...] = ()
    untold_by_old_runs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def preset(self) -> str:
        """The preset that is taken if none is named."""
        return next(iter(self.presets))

    def begin(
        self,
        path: str | Path,
        preset: str | None,
        settings: Mapping[str, Any],
        report: Report = no_report,
    ) -> Path:
        """Begin a run in a new folder and carry it through.

        Args:
            path: The run folder, new or empty.
            preset: One of `presets`; None: the first.
            settings: Options that differ from the preset's.
            report: Called after each epoch and each step.

        Returns:
            The folder.

        Raises:
            InputError: Options, data, model or folder are not usable.
            ModelError: The model cannot be measured. NonFiniteError: a loss is not finite.
            FastlrError: The disk is full; the run can be resumed.
        """
        options = self.options_from(preset, settings)
        data, description = self.open_data(options)
        device = choose_device(options)
        _on_all_ranks(path, options, description, device)
        config = {
            "driver": self.name,
            "preset": preset or self.preset,
            "options": dataclasses.asdict(options),
            "data": description,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "machine": machine(device),
            "threads": torch.get_num_threads(),
            "processes": team().size,
            "versions": versions(),
            "commit": commit_of_source(),
            "command": sys.argv,
            "date": now(),
        }
        with opened(lambda: Run.create(path, config)) as run:
            try:
                self.carry_on(run, options, data, device, report)
            except (InputError, ModelError):
                run.abandon()
                raise
        return run.path

    def resume(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        preset: str | None = None,
        report: Report = no_report,
    ) -> Path:
        """Go on with a run after a crash, an interruption or its end (with more steps).

        Args:
            path: The run folder.
            settings: Options: those of the run, except that those of `changeable` may change.
            preset: None, or that of the run.
            report: As for `begin`.

        Returns:
            The folder.

        Raises:
            InputError: No run there, or it was begun with other options or data. Others as `begin`.
        """
        with opened(lambda: Run.resume(path)) as run:
            config = dict(run.config)
            before = self.recorded(run.path, config, settings, preset)
            options = dataclasses.replace(before, **settings)
            data, description = self.open_data(options)
            device = choose_device(options)
            _on_all_ranks(path, options, description, device)
            if description["digest"] != config["data"]["digest"]:
                raise InputError(
                    f"{description['path'] or 'this run'} has other data than {run.path} was begun "
                    "with: give the same"
                )
            if device.type == "cpu" and torch.get_num_threads() != config["threads"]:
                warn(
                    f"{run.path} was begun with {counted(config['threads'], 'thread')}, this "
                    f"process has {torch.get_num_threads()}: the last bits of its numbers may "
                    "differ; set OMP_NUM_THREADS to the same number"
                )
            fewer = [
                f"{key}={value}"
                for key, value in settings.items()
                if isinstance(value, int)
                and value < getattr(before, key)
                and self.finished(
                    dataclasses.replace(options, **{**settings, key: value + 1}), run.records
                )
            ]
            if fewer:
                text = (
                    f"{run.path} has done more than {fewer[0]} already: nothing is left to do, its "
                    f"{CONFIG} stays as it is"
                )
                warn(text)
            elif dataclasses.asdict(options) != from_json(config["options"]):
                run.set_config({**config, "options": dataclasses.asdict(options)})
            at = run.state["position"] if run.state else 0
            run.append({"kind": "resume", self.step: at, "date": now(), "processes": team().size})
            self.carry_on(run, options, data, device, report)
        return run.path

    def command(
        self,
        path: Path,
        preset: str,
        settings: dict[str, Any],
        changed: dict[str, Any],
        tensorboard: bool,
    ) -> list[str]:
        """Return the command of a process that carries out a run and reports on it (`main`).

        It begins a run with ``settings``, and goes on with one that there is with ``changed``.
        """
        work = {
            "driver": self.module,
            "path": str(path),
            "preset": preset,
            "settings": settings,
            "changed": changed,
            "tensorboard": tensorboard,
            "command": sys.argv,
        }
        return [sys.executable, "-c", _START, json.dumps(sys.path), json.dumps(work)]

    def options_from(self, preset: str | None, settings: Mapping[str, Any]) -> Any:
        """Return the options of a preset (None: the first) with some settings changed.

        Raises:
            InputError: As `resolve`.
        """
        return resolve(self.options, self.presets, preset or self.preset, settings)

    def write_report(self, paths: Sequence[Path], out: Path | None, **options: Any) -> Any:
        """Analyse run folders and return the `fastlr.experiments.runs.report.Report`.

        Args:
            paths: Run folders, or folders of them.
            out: Folder of the report; None: beside the runs.
            options: "figures", and those of `analysed`.
        """
        module, function = self.report.split(":")
        return getattr(importlib.import_module(module), function)(paths, out, **options)

    def options_of(self, record: Mapping[str, Any]) -> Any:
        """Return the options of a run as its ``config.json`` records them.

        Options that it lacks, because they came later, have the value that was implied at that
        time.

        Raises:
            InputError: An option that this version of fastlr does not have.
        """
        return from_record(self.options, {**self.untold_by_old_runs, **record})

    def recorded(
        self, path: Path, config: Mapping[str, Any], settings: Mapping[str, Any], preset: str | None
    ) -> RunOptions:
        """Return the options that a run was begun with, or last resumed with.

        Args:
            path: The run folder, for messages.
            config: The content of its ``config.json``.
            settings: Options with which it shall go on.
            preset: None, or that of the run.

        Raises:
            InputError: It is the run of another driver or preset, or settings change what must not
                change.
        """
        if config.get("driver") != self.name:
            raise InputError(
                f"{path} is a run of fastlr {config.get('driver')}, not of fastlr {self.name}"
            )
        if preset is not None and preset != config["preset"]:
            raise InputError(
                f"{path} was begun with the preset {config['preset']}, not {preset}: leave it out"
            )
        options: RunOptions = self.options_of(config["options"])
        for key, value in settings.items():
            if value != getattr(options, key) and key not in self.changeable:
                raise InputError(
                    f"{path} was begun with {key}={getattr(options, key)}, not {value}: leave it "
                    "out, or begin another run"
                )
        return options


def main(text: str) -> None:
    """Carry out the run that `Driver.command` describes, in a process of `run_jobs`.

    After an error the exit code is 1 and the error's line is reported.
    """
    send = attach()
    error = carry_out(json.loads(text), send)
    if error is not None:
        send({"error": error})
        sys.exit(1)


def carry_out(work: Mapping[str, Any], send: Callable[[Message], None]) -> str | None:
    """Carry out a run in this process.

    Args:
        work: What `Driver.command` describes.
        send: Called with the progress.

    Returns:
        The line of the error, whose traceback is printed; None if there is none.
    """
    sys.argv = work["command"]  # what made this run, for its config.json
    driver: Driver = importlib.import_module(work["driver"]).DRIVER
    last = 0.0

    def show(at: Progress) -> None:
        nonlocal last
        if at.record is None and time.monotonic() - last < _EVERY:
            return
        last = time.monotonic()
        shown = None if at.record is None else driver.shown(at.record)
        send({"done": at.done, "total": at.total, "part": at.epoch / at.epochs, "shown": shown})

    try:
        path = Path(work["path"])
        with mirrored(path, work["tensorboard"], show) as report:
            if (path / CONFIG).exists():
                driver.resume(path, from_json(work["changed"]), None, report)
            else:
                driver.begin(path, work["preset"], from_json(work["settings"]), report)
    except Exception as error:
        traceback.print_exc()
        return one_line(error)
    return None


DRIVERS = {  # the modules of the drivers, by their commands' names
    "continual": "fastlr.experiments.continual.experiment",
    "memorize": "fastlr.experiments.memorization.experiment",
    "transfer": "fastlr.experiments.transfer.experiment",
}


def find_driver(name: str) -> Driver:
    """Return a driver by its name.

    Raises:
        InputError: There is none of this name (with the nearest one).
    """
    if name not in DRIVERS:
        raise InputError(f"driver {unknown(name, DRIVERS)}")
    driver: Driver = importlib.import_module(DRIVERS[name]).DRIVER
    return driver


def _on_all_ranks(
    path: str | Path, options: RunOptions, description: Mapping[str, Any], device: torch.device
) -> None:
    """Compare what the ranks are to do, and choose how they reduce."""
    members = team()
    if members.board is None:
        return
    if options.device.startswith("cuda:"):
        raise InputError(
            f"device={options.device}: {members.size} processes take a GPU each: leave it out, or "
            "device=cuda"
        )
    given, data = {"out": str(path), **dataclasses.asdict(options)}, {"data": description["digest"]}
    remedy = "start every process with the same command, on the same data"
    members.agree("the run", given, remedy, data)
    connect(device, members.group, timeout=members.board.timeout)


def choose_device(options: RunOptions) -> torch.device:
    """Return the device of a run, and set the number of threads.

    Of several ranks that shall have GPUs, each gets one.

    Raises:
        InputError: There is no such device, or it cannot be used.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if team().size > 1:
        name = local_device(name) or name
    return usable_device(name, "device=")
