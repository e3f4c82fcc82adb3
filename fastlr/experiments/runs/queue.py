"""Many runs of a driver in one folder: seeds, configurations or both, as a local queue or on a Ray cluster.

=====================  ================================================================================================
``many.json``          The driver, the preset, and the settings of every run by name, such as "seed-3".
``NAME/``              The run folder of each (`fastlr.experiments.runs.folder`): the same files, and on a CPU the same bits, as
                       of a single run with these settings.
``logs/NAME.txt``      What its process printed.
``run.lock``           Held while the queue runs.
=====================  ================================================================================================

Each run is a process of its own. One that fails is reported and the others go on; `resume` goes on with those that are not
finished and begins those that never began.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlr.errors import InputError
from fastlr.experiments.runs import worker
from fastlr.experiments.runs.experiment import Driver
from fastlr.experiments.runs.folder import CONFIG, RECORDS, read_config, read_lines, refuse_other_files
from fastlr.experiments.runs.options import RunOptions, from_json, resolve
from fastlr.experiments.runs.processes import Job, Listen, run_jobs
from fastlr.experiments.runs.sweep import Grids, product
from fastlr.files import LOCK, lock_folder, now, replace_file

if TYPE_CHECKING:
    from fastlr.experiments.runs.ray import Cluster

MANY, LOGS = "many.json", "logs"
PER_GPU = 4  # runs at a time on one


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the runs of a folder ended.

    Attributes:
        path: The folder.
        finished: Names, those that had finished before among them.
        failed: Name -> a line that says why.
    """

    path: Path
    finished: tuple[str, ...]
    failed: Mapping[str, str]


def begin(
    driver: Driver,
    out: str | Path,
    preset: str | None,
    runs: Mapping[str, Mapping[str, Any]],
    at_once: int | None,
    listen: Callable[[tuple[str, ...]], Listen],
    tensorboard: bool = False,
    cluster: Cluster | None = None,
) -> Outcome:
    """Begin runs in a new folder and carry them through.

    On the CPU each has one thread, unless ``threads`` or OMP_NUM_THREADS say otherwise; the number becomes a setting of the
    run, since the last bits depend on it.

    Args:
        driver: Of all of them.
        out: The folder, new or empty.
        preset: None: the driver's first.
        runs: Settings by name; a name becomes a folder.
        at_once: How many at a time; None: on the CPU one for each core over threads, else 4 a GPU.
        listen: Called with the names of the runs that are to be done; returns what hears them (`run_jobs`).
        tensorboard: Also log each for TensorBoard, in its folder.
        cluster: Where to run them (`fastlr.experiments.runs.ray`); None: as processes of this machine.

    Raises:
        InputError: Folder, preset, settings or data are not usable.
    """
    queue = _Queue(driver, Path(os.path.abspath(out)), preset or driver.preset, at_once, listen, tensorboard, cluster)
    settings_by_run = {}
    for name, settings in runs.items():
        options = queue.options(settings)
        on_gpu = _on_gpu(options) if cluster is None else cluster.on_gpu(options)
        settings_by_run[name] = {**settings, "threads": options.threads or _threads(on_gpu)}
        if cluster is not None and options.device == "auto":  # what this machine has does not matter
            settings_by_run[name]["device"] = "cuda" if on_gpu else "cpu"
    queue.check(settings_by_run)
    with _folder(queue.path, make=True):
        if (queue.path / MANY).exists() or (queue.path / CONFIG).exists():
            raise InputError(f"{queue.path} holds runs: --resume goes on with them; or choose another folder")
        refuse_other_files(queue.path, {LOCK, MANY + ".part"})
        return queue.run(settings_by_run, {})


def resume(
    driver: Driver,
    out: str | Path,
    changed: Mapping[str, Any],
    at_once: int | None,
    listen: Callable[[tuple[str, ...]], Listen],
    preset: str | None = None,
    count: int | None = None,
    tensorboard: bool = False,
    cluster: Cluster | None = None,
    grids: Grids | None = None,
) -> Outcome:
    """Go on with the runs of a folder that are not finished, and begin those that never began.

    Args:
        driver: Of all of them.
        out: The folder.
        changed: Settings for all; only those of ``driver.changeable``, or as they are.
        at_once: As for `begin`.
        listen: As for `begin`.
        preset: None, or that of the runs.
        count: So many seeds from now on; None: as many as there are.
        tensorboard: As for `begin`.
        cluster: As for `begin`.
        grids: The values from now on, those that there are among them; None: as they are.

    Raises:
        InputError: No such folder, it belongs to other runs, or settings that do not fit.
    """
    path = Path(os.path.abspath(out))
    if not is_many(path):
        raise InputError(f"{path} holds no runs to go on with (no {MANY}): leave --resume out to begin them")
    with _folder(path, make=False):
        record = _read(path)
        if record.get("driver") != driver.name:
            raise InputError(f"{path} holds runs of fastlr {record.get('driver')}, not of fastlr {driver.name}")
        if preset is not None and preset != record["preset"]:
            raise InputError(f"{path} was begun with the preset {record['preset']}, not {preset}: leave it out")
        queue = _Queue(driver, path, record["preset"], at_once, listen, tensorboard, cluster)
        begun = {name: from_json(settings) for name, settings in record["runs"].items()}
        changed = queue.changes(begun, changed)
        runs = {name: {**settings, **changed} for name, settings in begun.items()}
        if count is not None or grids is not None:
            runs = queue.with_more(
                runs, {**next(iter(begun.values())), **changed}, grids or {}, 1 if count is None else count
            )
        queue.check(runs)
        return queue.run(runs, changed)


def is_many(path: str | Path) -> bool:
    """Return True if a folder holds the runs of a queue."""
    return (Path(path) / MANY).is_file()


@dataclasses.dataclass(frozen=True)
class _Queue:
    """The runs of a folder, as they are to be carried out; see `begin` for the fields."""

    driver: Driver
    path: Path
    preset: str
    at_once: int | None
    listen: Callable[[tuple[str, ...]], Listen]
    tensorboard: bool
    cluster: Cluster | None

    def options(self, settings: Mapping[str, Any]) -> RunOptions:
        return resolve(self.driver.options, self.driver.presets, self.preset, settings)

    def check(self, runs: Mapping[str, Mapping[str, Any]]) -> None:
        """Meet errors in the settings and the data now, rather than in every run."""
        opened = set()
        for settings in runs.values():
            options = self.options(settings)
            texts = tuple(value for value in vars(options).values() if isinstance(value, str))  # the data's among them
            if texts not in opened:
                self.driver.open_data(options)
                opened.add(texts)

    def changes(self, begun: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of options that may change, the others being as they were; a seed is that of the first."""
        options = [self.options(settings) for settings in begun.values()]
        changed = {}
        for key, value in settings.items():
            before = [getattr(of_run, key) for of_run in (options[:1] if key == "seed" else options)]
            if any(other != before[0] for other in before):
                raise InputError(f"{self.path}: the runs differ in {key}: leave it out")
            if key in self.driver.changeable:
                changed[key] = value
            elif before[0] != value:
                raise InputError(
                    f"{self.path}: {key} cannot change when runs are resumed; begin others in another folder"
                )
        return changed

    def with_more(
        self, runs: dict[str, dict[str, Any]], settings: Mapping[str, Any], grids: Grids, count: int
    ) -> dict[str, dict[str, Any]]:
        """Return the runs that there are and those that grids and seeds add, made of the settings of the first."""
        if not grids and count < len(runs):
            raise InputError(f"--seeds {count}: {self.path} has {len(runs)} runs already; leave it out")
        wanted = product(self.driver, self.preset, settings, grids, count)
        missing = [name for name in runs if name not in wanted]
        if missing and not grids:
            raise InputError(f"--seeds: the runs of {self.path} do not differ by their seeds alone; leave it out")
        if missing:
            raise InputError(
                f"--grid, --seeds: {self.path} has {missing[0]}, which is not among these: give all their values and "
                "seeds, and more, or leave both out"
            )
        return {**wanted, **runs}

    def run(self, runs: dict[str, dict[str, Any]], changed: dict[str, Any]) -> Outcome:
        """Write down what the runs are, and do those that are not finished."""
        if self.at_once is not None and self.at_once < 1:
            raise InputError(f"--at-once {self.at_once}: give at least 1")
        options = self.options(next(iter(runs.values())))
        share = None if self.cluster is None else self.cluster.share(options)
        record = {"driver": self.driver.name, "preset": self.preset, "runs": runs, "command": sys.argv, "date": now()}
        replace_file(self.path / MANY, json.dumps(record, indent=2) + "\n")
        (self.path / LOGS).mkdir(exist_ok=True)
        left = tuple(name for name in runs if not self._finished(name, changed))
        jobs = []
        for name in left:
            command = worker.command(self.driver, self.path / name, self.preset, runs[name], changed, self.tensorboard)
            jobs.append(Job(name, command, self.path / LOGS / f"{name}.txt"))
        if self.cluster is None or share is None:
            failed = run_jobs(jobs, _slots(options, self.at_once), self.listen(left))
        else:
            failed = self.cluster.run(jobs, self.path / MANY, share, self.at_once, self.listen(left))
        return Outcome(self.path, tuple(name for name in runs if name not in failed), failed)

    def _finished(self, name: str, changed: Mapping[str, Any]) -> bool:
        path = self.path / name
        if not (path / CONFIG).exists():
            return False
        options = self.driver.recorded(path, read_config(path), changed, None)
        return self.driver.finished(dataclasses.replace(options, **changed), read_lines(path / RECORDS)[0])


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / MANY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path / MANY}: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("runs"), dict) or not record["runs"]:
        raise InputError(f"{path / MANY} is no list of runs")
    return record


@contextmanager
def _folder(path: Path, make: bool) -> Iterator[None]:
    lock = lock_folder(path, make)
    try:
        yield
    finally:
        os.close(lock)


def _on_gpu(options: RunOptions) -> bool:
    return options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available())


def _threads(on_gpu: bool) -> int:
    """Return the threads of a run whose options leave them open: 0, which leaves them open, on a GPU."""
    if on_gpu:
        return 0
    number = os.environ.get("OMP_NUM_THREADS", "")
    return int(number) if number.isdecimal() and int(number) else 1


def _slots(options: RunOptions, at_once: int | None) -> list[dict[str, str]]:
    """Return the environment of each place where a run can be: GPUs in turn, unless the options name one."""
    if not _on_gpu(options):
        cores = len(os.sched_getaffinity(0))
        return [{}] * (at_once or max(1, cores // max(1, options.threads)))
    if options.device not in ("auto", "cuda"):
        return [{}] * (at_once or PER_GPU)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    names = names[: max(1, torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": names[i % len(names)]} for i in range(at_once or PER_GPU * len(names))]
