"""Many runs of a driver in one folder: seeds, configurations or both, as a local queue or on a Ray cluster.

=====================  ================================================================================================
``many.json``          The driver, the preset, and the settings of every run by name, such as "seed-3".
``NAME/``              The run folder of each (`fastlr.drivers.runs`): the same files, and on a CPU the same bits, as of a
                       single run with these settings.
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

from fastlr.drivers import worker
from fastlr.drivers.config import RunOptions, from_json, resolve
from fastlr.drivers.jobs import Job, Listen, run_jobs
from fastlr.drivers.launch import Driver
from fastlr.drivers.runs import CONFIG, LOCK, RECORDS, lock_folder, now, read_config, read_lines, replace_file
from fastlr.drivers.sweep import Grids, product
from fastlr.errors import InputError

if TYPE_CHECKING:
    from fastlr.drivers.on_ray import Cluster

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
        cluster: Where to run them (`fastlr.drivers.on_ray`); None: as processes of this machine.

    Raises:
        InputError: Folder, preset, settings or data are not usable.
    """
    preset = preset or driver.preset
    path = Path(os.path.abspath(out))
    chosen: dict[str, dict[str, Any]] = {}
    for name, settings in runs.items():
        options = resolve(driver.options, driver.presets, preset, settings)
        on_gpu = _on_gpu(options) if cluster is None else cluster.on_gpu(options)
        chosen[name] = {**settings, "threads": options.threads or _threads(on_gpu)}
        if cluster is not None and options.device == "auto":  # what this machine has does not matter
            chosen[name]["device"] = "cuda" if on_gpu else "cpu"
    _check(driver, preset, chosen)
    with _folder(path, make=True):
        if (path / MANY).exists() or (path / CONFIG).exists():
            raise InputError(f"{path} holds runs: --resume goes on with them; or choose another folder")
        others = sorted(p.name for p in path.iterdir() if p.name not in (LOCK, MANY + ".part"))
        if others:
            raise InputError(f"{path} is not empty ({', '.join(others[:3])}): choose a new folder")
        return _carry_on(driver, path, preset, chosen, {}, at_once, listen, tensorboard, cluster)


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
        known = _read(path)
        if known.get("driver") != driver.name:
            raise InputError(f"{path} holds runs of fastlr {known.get('driver')}, not of fastlr {driver.name}")
        if preset is not None and preset != known["preset"]:
            raise InputError(f"{path} was begun with the preset {known['preset']}, not {preset}: leave it out")
        begun = {name: from_json(settings) for name, settings in known["runs"].items()}
        first = next(iter(begun.values()))
        changed = _changes(driver, path, known["preset"], begun, changed)
        runs = {name: {**settings, **changed} for name, settings in begun.items()}
        if count is not None or grids is not None:
            grids, count = grids or {}, 1 if count is None else count
            if not grids and count < len(runs):
                raise InputError(f"--seeds {count}: {path} has {len(runs)} runs already; leave it out")
            wanted = product(driver, known["preset"], {**first, **changed}, grids, count)
            if not runs.keys() <= wanted.keys():
                remedy = "give all their values and seeds, and more, or leave both out"
                if not grids:
                    raise InputError(f"--seeds: the runs of {path} do not differ by their seeds alone; leave it out")
                missing = next(name for name in runs if name not in wanted)
                raise InputError(f"--grid, --seeds: {path} has {missing}, which is not among these: {remedy}")
            runs = {**wanted, **runs}
        _check(driver, known["preset"], runs)
        return _carry_on(driver, path, known["preset"], runs, changed, at_once, listen, tensorboard, cluster)


def is_many(path: str | Path) -> bool:
    """Whether a folder holds the runs of a queue."""
    return (Path(path) / MANY).is_file()


def _carry_on(
    driver: Driver,
    path: Path,
    preset: str,
    runs: dict[str, dict[str, Any]],
    changed: dict[str, Any],
    at_once: int | None,
    listen: Callable[[tuple[str, ...]], Listen],
    tensorboard: bool,
    cluster: Cluster | None,
) -> Outcome:
    if at_once is not None and at_once < 1:
        raise InputError(f"--at-once {at_once}: give at least 1")
    options = resolve(driver.options, driver.presets, preset, next(iter(runs.values())))
    share = None if cluster is None else cluster.share(options)
    record = {"driver": driver.name, "preset": preset, "runs": runs, "command": sys.argv, "date": now()}
    replace_file(path / MANY, (json.dumps(record, indent=2) + "\n").encode())
    (path / LOGS).mkdir(exist_ok=True)
    left = tuple(name for name in runs if not _finished(driver, path / name, changed))
    jobs = []
    for name in left:
        command = worker.command(driver, path / name, preset, runs[name], changed, tensorboard)
        jobs.append(Job(name, command, path / LOGS / f"{name}.txt"))
    if cluster is None or share is None:
        failed = run_jobs(jobs, _slots(options, at_once), listen(left))
    else:
        failed = cluster.run(jobs, path / MANY, share, at_once, listen(left))
    return Outcome(path, tuple(name for name in runs if name not in failed), failed)


def _check(driver: Driver, preset: str, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Meet errors in the settings and the data now, rather than in every run."""
    opened = set()
    for settings in runs.values():
        options = resolve(driver.options, driver.presets, preset, settings)
        names = tuple(value for value in vars(options).values() if isinstance(value, str))  # the data's among them
        if names not in opened:
            driver.open_data(options)
            opened.add(names)


def _changes(
    driver: Driver, path: Path, preset: str, begun: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is given of the options that may change, the others being as they were; a seed is that of the first."""
    options = [resolve(driver.options, driver.presets, preset, settings) for settings in begun.values()]
    changed = {}
    for key, value in given.items():
        before = [getattr(each, key) for each in (options[:1] if key == "seed" else options)]
        if any(each != before[0] for each in before):
            raise InputError(f"{path}: the runs differ in {key}: leave it out")
        if key in driver.changeable:
            changed[key] = value
        elif before[0] != value:
            raise InputError(f"{path}: {key} cannot change when runs are resumed; begin others in another folder")
    return changed


def _finished(driver: Driver, path: Path, changed: Mapping[str, Any]) -> bool:
    if not (path / CONFIG).exists():
        return False
    options = driver.recorded(path, read_config(path), changed, None)
    return driver.finished(dataclasses.replace(options, **changed), read_lines(path / RECORDS)[0])


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads((path / MANY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path / MANY}: {error}") from error
    if not isinstance(known, dict) or not isinstance(known.get("runs"), dict) or not known["runs"]:
        raise InputError(f"{path / MANY} is no list of runs")
    return known


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
    """Threads of a run whose options leave them open: 0, which leaves them open, on a GPU."""
    if on_gpu:
        return 0
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else 1


def _slots(options: RunOptions, at_once: int | None) -> list[dict[str, str]]:
    """The environment of each place where a run can be: GPUs in turn, unless the options name one."""
    if not _on_gpu(options):
        cores = len(os.sched_getaffinity(0))
        return [{}] * (at_once or max(1, cores // max(1, options.threads)))
    if options.device not in ("auto", "cuda"):
        return [{}] * (at_once or PER_GPU)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    names = names[: max(1, torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": names[i % len(names)]} for i in range(at_once or PER_GPU * len(names))]
