"""Read run folders of any experiment: ``config.json`` and ``records.jsonl``.

The latter has one JSON object a line.

Measures may be missing, further keys are ignored, and a last line that a crash cut short is
dropped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastlr.errors import FastlrWarning, InputError, few, warn
from fastlr.experiments.runs.texts import CONFIG, RECORDS, Record, read_lines
from fastlr.files import read_object

Array = NDArray[np.float64]
ON_A_MACHINE = ("device", "threads")  # options that change no more than the last bits
_SHOWN = 5  # odd things in a message
_CONFIGURATIONS = 4  # in a message


AnyRun = TypeVar("AnyRun", bound="RunFolder")
Key = TypeVar("Key", bound=Hashable)


@dataclass
class RunFolder:
    """The records of a run as a table: a row a step, a column each number of its records.

    The drivers' own kinds of runs say what their steps are, and what follows from the columns.

    Attributes:
        path: The run folder.
        config: ``config.json``; empty if there is none.
        untrained: The record of the network before training; empty if there is none.
        rows: Step to its record: of several for one step, as after a crash, the last counts.
    """

    path: Path
    config: Record = field(default_factory=dict)
    untrained: Record = field(default_factory=dict)
    rows: dict[int, Record] = field(default_factory=dict)

    experiment: ClassVar[str]  # in words, for messages
    driver: ClassVar[str]  # its name
    row: ClassVar[str]  # kind of the records of steps
    step: ClassVar[str]  # their entry that numbers the steps
    untrained_is_row: ClassVar[bool] = True  # number 0
    required: ClassVar[tuple[str, ...]] = ("start",)  # kinds, one of which there must be
    numbers: ClassVar[tuple[str, ...]] = ()  # entries of a step that must be finite numbers

    @property
    def name(self) -> str:
        """The last part of the path, with its parent's for folders called seed-0, seed-1, ..."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if path.name.startswith("seed-") else path.name

    @property
    def options(self) -> dict[str, Any]:
        """The options that the run was begun with; empty if they are not known."""
        return as_dict(self.config, "options")

    @property
    def full_options(self) -> dict[str, Any]:
        """The same with what its version of fastlr meant where it does not say."""
        from fastlr.experiments.runs.experiment import find_driver

        driver = find_driver(self.driver)
        where_untold = {**dataclasses.asdict(driver.options()), **driver.untold_by_old_runs}
        return {**where_untold, **self.options}

    @property
    def digest(self) -> str | None:
        """The digest of the run's data; None if the configuration does not say."""
        return as_dict(self.config, "data").get("digest")

    @classmethod
    def read(cls: type[AnyRun], path: str | Path) -> AnyRun:
        """Read a run folder.

        Raises:
            InputError: There is no records.jsonl, it is damaged, or holds no record of such a run.
        """
        run = cls(Path(path))
        run.config = read_config(run.path)
        file = run.path / RECORDS
        if not file.is_file():
            raise InputError(f"{run.path} is no run folder: there is no {RECORDS}")
        lines = read_lines(run.path)
        if lines.cut_short:
            warn(f"{file}: the last line is incomplete and is left out")
        for number, record in enumerate(lines.records, 1):
            try:
                run.add(record)
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{file}, record {number} is damaged: {error!r}") from error
        odd = run.odd()
        if odd:
            warn(f"{file}: {few(odd, _SHOWN, '; ')}")
        if {record["kind"] for record in lines.records}.isdisjoint(cls.required):
            raise InputError(f"{file} holds no records of {run.experiment}: nothing to report yet")
        return run

    def add(self, record: Record) -> None:
        """Take a line of ``records.jsonl``; of several for one step the last counts.

        Raises:
            ValueError, KeyError, TypeError: The line is damaged.
        """
        if record["kind"] == "start":
            check_numbers(record, self.numbers)
            self.untrained = record
            if self.untrained_is_row:
                self.rows[0] = record
        elif record["kind"] == self.row:
            check_numbers(record, self.numbers)
            self.rows[self.step_of(record)] = record

    def step_of(self, record: Record) -> int:
        """Return the number of a record's step.

        Raises:
            ValueError, KeyError: There is none.
        """
        step = record[self.step]
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10_000_000:
            raise ValueError(f"{self.step} {step!r}")
        return step

    def odd(self) -> list[str]:
        """Return sentences on records that are missing, or readable but not usable."""
        missing = sorted(set(range(len(self))) - self.rows.keys())
        return [f"no record of {self.step} {step}" for step in missing]

    def __len__(self) -> int:
        return max(self.rows, default=-1) + 1

    def measure(self, name: str, key: str = "value") -> Array:
        """Return a column: a measure, or another number of the records, at steps 0 to the last.

        It is NaN where nothing was recorded.

        Args:
            name: Name of the measure or number.
            key: Which number of the measure's entry: "value", or another ("stderr").
        """
        return self._column(lambda record: measured(record, name).get(key))

    def seconds(self, name: str) -> Array:
        """Return the seconds that "train", "evaluate" or a measure took at each step."""
        return self._column(lambda record: as_dict(record, "seconds").get(name))

    def _column(self, entry: Callable[[Record], Any]) -> Array:
        values = np.full(len(self), np.nan)
        for step, record in self.rows.items():
            values[step] = number(entry(record))
        return values

    @property
    def records(self) -> list[Record]:
        """All records that seconds are told of, in the order of their steps."""
        return [self.rows[step] for step in sorted(self.rows)]

    def spent(self, name: str = "") -> float:
        """Return the seconds of all records, or those of one thing, such as "train"."""
        told = [entry for record in self.records for entry in as_dict(record, "seconds").items()]
        return math.fsum(finite([number(value) for key, value in told if name in ("", key)]))

    def names(self, key: str) -> list[str]:
        """Return the names in an entry of the steps' records, in the order of first appearance."""
        entries = [as_dict(record, key) for record in self.rows.values()]
        return list(dict.fromkeys(name for entry in entries for name in entry))

    @property
    def measures(self) -> list[str]:
        """The names of the measures that were recorded at any step."""
        return self.names("measures")

    def definition(self, name: str) -> str:
        """The definition of a measure, in the words of the record; empty if they are missing."""
        texts = (measured(record, name).get("definition") for record in self.rows.values())
        return next((str(text) for text in texts if text), "")

    @property
    def machine(self) -> str:
        """The machine's name in the configuration; empty if it does not say."""
        return str(self.config.get("machine", ""))


def run_folders(paths: Iterable[str | Path]) -> list[Path]:
    """Return run folders; a folder of several runs stands for all of them, in order.

    Its runs are in folders ``seed-0``, ``seed-1``, and so on.

    Raises:
        InputError: A path is no run folder and holds none; or one run is named twice.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if (path / RECORDS).exists():
            folders.append(path)
            continue
        inside = [file.parent for file in path.glob("*/records.jsonl")]
        inside.sort(key=_natural)
        if not inside:
            raise InputError(
                f"{path} is no run folder: neither it nor a folder in it holds records.jsonl"
            )
        begun = {file.parent for file in path.glob("*/config.json")}
        empty = sorted(folder.name for folder in begun.difference(inside))
        if empty:
            warn(f"{path}: left out what has no records yet ({', '.join(empty)})")
        folders += inside
    if not folders:
        raise InputError("no run folder given")
    (path, count), *_ = Counter(folder.resolve() for folder in folders).most_common(1)
    if count > 1:
        raise InputError(f"{path} is given twice: a run counts once")
    return folders


def refuse_copies(runs: Sequence[RunFolder]) -> None:
    """Check that no two runs of a driver have the same seed, options and data.

    Such runs are one, however long and wherever they are.

    Options that may change when a run is resumed, such as the number of tasks, do not tell runs
    apart, nor does the number of threads. Runs that do not say their seed are not compared.

    Raises:
        InputError: Two are one run.
    """
    from fastlr.experiments.runs.experiment import find_driver

    known: dict[str, RunFolder] = {}
    for run in runs:
        if "seed" not in run.options:
            continue
        settings = without(run.full_options, find_driver(run.driver).changeable + ON_A_MACHINE)
        earlier = known.setdefault(json.dumps([settings, run.digest], sort_keys=True), run)
        if earlier is not run:
            longer = max(earlier, run, key=_lines)
            raise InputError(
                f"{earlier.path} and {run.path} have the same seed ({run.options['seed']}) and the "
                "same options, so one is a copy or a part of the other and no further evidence: "
                f"give {longer.path} alone"
            )


def _lines(run: RunFolder) -> int:
    return (run.path / RECORDS).read_bytes().count(b"\n")


def refuse_mixtures(
    runs: Sequence[RunFolder], settings: Sequence[Mapping[str, Any]], remedy: str = ""
) -> None:
    """Check that runs have the same settings, as far as all of them tell.

    Args:
        runs: Runs to pool.
        settings: Settings of each run.
        remedy: What can be done besides giving fewer runs.

    Raises:
        InputError: They differ: the message says in what, and which belong together.
    """
    different = [key for key in settings[0] if told_by_all_but_differs(key, settings)]
    if not different:
        return
    told = []
    for setting in settings:
        told.append(", ".join(f"{key}={_in_short(setting[key])}" for key in different))
    groups = grouped(runs, told)
    listed = []
    for text, alike in groups:
        paths = " ".join(str(run.path) for run in alike)
        listed.append(f"{text}: {paths}")
    raise InputError(
        f"these are runs of {len(groups)} configurations, which are not pooled: give the run "
        f"folders of one ({few(listed, _CONFIGURATIONS, '; ')}){remedy}"
    )


def without(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return options but for those of some names."""
    return {name: value for name, value in options.items() if name not in names}


def told_by_all_but_differs(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all settings tell an option, and not all the same value."""
    told_by_all = all(key in setting for setting in settings)
    return told_by_all and any(setting[key] != settings[0][key] for setting in settings)


def grouped(runs: Sequence[AnyRun], keys: Iterable[Key]) -> list[tuple[Key, list[AnyRun]]]:
    """Put runs of equal keys together; keys and runs stay in their order."""
    groups: dict[Key, list[AnyRun]] = {}
    for run, key in zip(runs, keys):
        groups.setdefault(key, []).append(run)
    return list(groups.items())


def driver_of(paths: Iterable[str | Path]) -> str:
    """Return the name of the experiment whose runs the folders hold.

    It is "continual" where no configuration says.

    Raises:
        InputError: They are of several drivers, or as `run_folders`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastlrWarning)  # reading the runs warns again
        folders = {
            str(read_config(folder).get("driver", "continual")): folder
            for folder in run_folders(paths)
        }
    if len(folders) > 1:
        (driver, folder), (other_driver, other) = list(folders.items())[:2]
        raise InputError(
            f"{folder} is a run of fastlr {driver}, {other} of fastlr {other_driver}: report on "
            "them apart"
        )
    return next(iter(folders))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``; empty if there is none."""
    return read_object(folder / CONFIG) if (folder / CONFIG).exists() else {}


def as_dict(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an entry that should be a dictionary; an empty one if it is none."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float:
    """Return the value as a finite float; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def all_measures(runs: Iterable[RunFolder]) -> list[str]:
    """Return the names of the measures that any of several runs recorded, as they come."""
    return list(dict.fromkeys(name for run in runs for name in run.measures))


def on_machines(runs: Iterable[RunFolder]) -> list[str]:
    """Return the sentence that says where runs were; nothing where no run says it."""
    machines = "; ".join(dict.fromkeys(run.machine for run in runs if run.machine))
    return [f"On {machines}."] if machines else []


def check_numbers(record: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError if an entry of a record is no finite number, KeyError if it is not there."""
    for name in names:
        if math.isnan(number(record[name])):
            raise ValueError(f"{name} {record[name]!r}")


def finite(values: ArrayLike) -> Array:
    """Return those of the values that are finite numbers."""
    array = np.asarray(values, dtype=np.float64)
    return array[np.isfinite(array)]


def logarithm(values: Array) -> Array:
    """Return the natural logarithm of values; NaN where there is none."""
    return np.log(np.where(values > 0, values, np.nan))


def mean_of_known(values: ArrayLike) -> float:
    """Return the mean of those that are finite; NaN if none is."""
    known = finite(values)
    return float(known.mean()) if len(known) else math.nan


def measured(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a measure's entry of a record: its "value", "stderr", "definition" and other keys.

    Of another number of the record, such as a loss, it is the "value" alone.
    """
    entry = as_dict(record, "measures").get(name, record.get(name))
    return entry if isinstance(entry, dict) else {"value": entry}


def _natural(path: Path) -> list[tuple[str, int]]:
    """Return by what a folder is sorted, so that seed-2 comes before seed-10."""
    texts_and_numbers = re.findall(r"(\D*)(\d*)", path.name)
    return [(text, int(digits or -1)) for text, digits in texts_and_numbers]


def _in_short(value: Any) -> str:
    """Return an option's value in at most 40 characters."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
