"""Run a driver many times in one folder: seeds, configurations or both, on this machine or on Ray.

=====================  ============================================================================
``many.json``          The driver, the preset, and the settings of every run by name, such as
                       "seed-3".
``NAME/``              The run folder of each (`fastlr.experiments.runs.folder`): the same files,
                       and on a CPU the same bits, as of a single run with these settings.
``logs/NAME.txt``      What its process printed.
``run.lock``           Held while the queue runs.
=====================  ============================================================================

Each run is a process of its own. One that fails is reported and the others go on; `resume` goes on
with those that are not finished and begins those that never began.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlr.errors import InputError
from fastlr.experiments.runs.experiment import Driver
from fastlr.experiments.runs.folder import before_lock, refuse_other_files
from fastlr.experiments.runs.options import RunOptions, from_json
from fastlr.experiments.runs.processes import Job, Listen, run_jobs
from fastlr.experiments.runs.sweep import Grids, product
from fastlr.experiments.runs.texts import CONFIG, read_lines
from fastlr.files import LOCK, locked, now, read_object, replace_file

if TYPE_CHECKING:
    from fastlr.experiments.runs.ray import Cluster

MANY, LOGS = "many.json", "logs"
Listening = Callable[[tuple[str, ...]], Listen]
PER_GPU = 4  # runs at a time on one


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the runs of a folder ended.

    Attributes:
        finished: Names, those that had finished before among them.
        failed: Name -> a line that says why.
    """

    finished: tuple[str, ...]
    failed: Mapping[str, str]


def _refuse_used(path: Path) -> None:
    """Raise InputError if a folder holds runs or other things."""
    if (path / MANY).exists() or (path / CONFIG).exists():
        raise InputError(f"{path} holds runs: --resume goes on with them; or choose another folder")
    refuse_other_files(path, {LOCK, MANY + ".part"})


def is_many(path: str | Path) -> bool:
    """Return True if a folder holds the runs of a queue."""
    return (Path(path) / MANY).is_file()


@dataclasses.dataclass(frozen=True)
class Queue:
    """The runs of a folder, and how they are to be carried out.

    Attributes:
        driver: Driver of all of them.
        path: The folder.
        preset: None: the driver's first, or that of the runs that are resumed.
        at_once: How many at a time; None: on the CPU one for each core over threads, else 4 a GPU.
        tensorboard: Also log each for TensorBoard, in its folder.
        cluster: Where to run them (`fastlr.experiments.runs.ray`); None: as processes of this
            machine.
    """

    driver: Driver
    path: Path
    preset: str | None
    at_once: int | None = None
    tensorboard: bool = False
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        """Name the folder by its whole path: runs are begun from other folders."""
        object.__setattr__(self, "path", Path(os.path.abspath(self.path)))

    def begin(
        self, settings_by_name: Mapping[str, Mapping[str, Any]], listening: Listening
    ) -> Ended:
        """Begin runs in a new or empty folder and carry them through; a name becomes a folder.

        On the CPU each has one thread, unless ``threads`` or OMP_NUM_THREADS say otherwise; the
        number becomes a setting of the run, since the last bits depend on it.

        Args:
            settings_by_name: Settings of each run, where they differ from the preset's.
            listening: Called with the names of the runs that are to be done; returns what hears
                them (`run_jobs`).

        Raises:
            InputError: Folder, preset, settings or data are not usable.
        """
        runs = {}
        for name, settings in settings_by_name.items():
            options = self._options(settings)
            on_gpu = _on_gpu(options) if self.cluster is None else self.cluster.on_gpu(options)
            runs[name] = {**settings, "threads": options.threads or _threads(on_gpu)}
            if self.cluster is not None and options.device == "auto":
                # What this machine has does not matter.
                runs[name]["device"] = "cuda" if on_gpu else "cpu"
        self._check(runs)
        before_lock(self.path, _refuse_used)
        with locked(self.path, make=True):
            _refuse_used(self.path)
            return self._run(runs, {}, listening)

    def resume(
        self,
        changed: Mapping[str, Any],
        listening: Listening,
        count: int | None = None,
        grids: Grids | None = None,
    ) -> Ended:
        """Resume the runs of the folder that are not finished, and begin those that never began.

        Args:
            changed: Settings for all; only those of ``driver.changeable``, or as they are.
            listening: As for `begin`.
            count: So many seeds from now on; None: as many as there are.
            grids: The values from now on, those that there are among them; None: as they are.

        Raises:
            InputError: No such folder, it belongs to other runs, or settings that do not fit.
        """
        path = self.path
        if not is_many(path):
            raise InputError(
                f"{path} holds no runs to go on with (no {MANY}): leave --resume out to begin them"
            )
        with locked(path):
            record = _read(path)
            if record.get("driver") != self.driver.name:
                raise InputError(
                    f"{path} holds runs of fastlr {record.get('driver')}, not of fastlr "
                    f"{self.driver.name}"
                )
            if self.preset not in (None, record["preset"]):
                raise InputError(
                    f"{path} was begun with the preset {record['preset']}, not {self.preset}: "
                    "leave it out"
                )
            queue = dataclasses.replace(self, preset=record["preset"])
            begun = {name: from_json(settings) for name, settings in record["runs"].items()}
            changed = queue._changes(begun, changed)
            runs = {name: {**settings, **changed} for name, settings in begun.items()}
            if count is not None or grids is not None:
                first = {**next(iter(begun.values())), **changed}
                runs = queue._with_more(runs, first, grids or {}, 1 if count is None else count)
            queue._check(runs)
            return queue._run(runs, changed, listening)

    def _options(self, settings: Mapping[str, Any]) -> RunOptions:
        options: RunOptions = self.driver.options_from(self.preset, settings)
        return options

    def _check(self, runs: Mapping[str, Mapping[str, Any]]) -> None:
        """Meet errors in the settings and the data now, rather than in every run."""
        opened = set()
        for settings in runs.values():
            options = self._options(settings)
            # The data's among them.
            texts = tuple(value for value in vars(options).values() if isinstance(value, str))
            if texts not in opened:
                self.driver.open_data(options)
                opened.add(texts)

    def _changes(
        self, begun: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the settings among ``settings`` that change; only those that may change can.

        The others must be as they were; a seed is that of the first run.
        """
        options = [self._options(settings) for settings in begun.values()]
        changed = {}
        for key, value in settings.items():
            before = [getattr(of_run, key) for of_run in options]
            if key != "seed" and any(other != before[0] for other in before):
                raise InputError(f"{self.path}: the runs differ in {key}: leave it out")
            if key in self.driver.changeable:
                changed[key] = value
            elif before[0] != value:
                raise InputError(
                    f"{self.path}: {key} cannot change when runs are resumed; begin others in "
                    "another folder"
                )
        return changed

    def _with_more(
        self, runs: dict[str, dict[str, Any]], settings: Mapping[str, Any], grids: Grids, count: int
    ) -> dict[str, dict[str, Any]]:
        """Return the runs that there are and those that grids and seeds add.

        The added ones have the settings of the first.
        """
        if not grids and count < len(runs):
            raise InputError(
                f"--seeds {count}: {self.path} has {len(runs)} runs already; leave it out"
            )
        wanted = product(self.driver, self.preset, settings, grids, count)
        missing = [name for name in runs if name not in wanted]
        if missing and not grids:
            raise InputError(
                f"--seeds: the runs of {self.path} do not differ by their seeds alone; leave it out"
            )
        if missing:
            raise InputError(
                f"--grid, --seeds: {self.path} has {missing[0]}, which is not among these: give "
                "all their values and seeds, and more, or leave both out"
            )
        return {**wanted, **runs}

    def _run(
        self, runs: dict[str, dict[str, Any]], changed: dict[str, Any], listening: Listening
    ) -> Ended:
        """Write down what the runs are, and do those that are not finished."""
        if self.at_once is not None and self.at_once < 1:
            raise InputError(f"--at-once {self.at_once}: give at least 1")
        options = self._options(next(iter(runs.values())))
        share = None if self.cluster is None else self.cluster.share(options)
        record = {
            "driver": self.driver.name,
            "preset": self.preset or self.driver.preset,
            "runs": runs,
            "command": sys.argv,
            "date": now(),
        }
        replace_file(self.path / MANY, json.dumps(record, indent=2) + "\n")
        (self.path / LOGS).mkdir(exist_ok=True)
        left = tuple(name for name in runs if not self._finished(name, changed))
        jobs, listen = [self._job(name, runs[name], changed) for name in left], listening(left)
        if self.cluster is None or share is None:
            failed = run_jobs(jobs, _slots(options, self.at_once), listen)
        else:
            failed = self.cluster.run(jobs, share, self.at_once, listen)
        return Ended(tuple(name for name in runs if name not in failed), failed)

    def _job(self, name: str, settings: dict[str, Any], changed: dict[str, Any]) -> Job:
        """Return the process of a run."""
        preset = self.preset or self.driver.preset
        command = self.driver.command(self.path / name, preset, settings, changed, self.tensorboard)
        return Job(name, command, self.path / LOGS / f"{name}.txt")

    def _finished(self, name: str, changed: Mapping[str, Any]) -> bool:
        path = self.path / name
        if not (path / CONFIG).exists():
            return False
        options = self.driver.recorded(path, read_object(path / CONFIG), changed, None)
        records = read_lines(path).records
        return self.driver.finished(dataclasses.replace(options, **changed), records)


def _read(path: Path) -> dict[str, Any]:
    record = read_object(path / MANY)
    if not isinstance(record.get("runs"), dict) or not record["runs"]:
        raise InputError(f"{path / MANY} is no list of runs")
    return record


def _on_gpu(options: RunOptions) -> bool:
    return options.device.startswith("cuda") or (
        options.device == "auto" and torch.cuda.is_available()
    )


def _threads(on_gpu: bool) -> int:
    """Return the number of threads of a run whose options leave it open.

    It is 0, torch's own choice, on a GPU.
    """
    if on_gpu:
        return 0
    number = os.environ.get("OMP_NUM_THREADS", "")
    return int(number) if number.isdecimal() and int(number) else 1


def _slots(options: RunOptions, at_once: int | None) -> list[dict[str, str]]:
    """Return the environment of each place where a run can be.

    GPUs are taken in turn, unless the options name one.
    """
    if not _on_gpu(options):
        cores = len(os.sched_getaffinity(0))
        return [{}] * (at_once or max(1, cores // max(1, options.threads)))
    if options.device not in ("auto", "cuda"):
        return [{}] * (at_once or PER_GPU)
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = visible.split(",")[: max(1, count)]
    places = itertools.islice(itertools.cycle(names), at_once or PER_GPU * len(names))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in places]
