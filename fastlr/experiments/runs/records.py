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
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastlr.errors import FastlrWarning, InputError, few

Array = NDArray[np.float64]
_SHOWN = 5  # odd things in a message


AnyRun = TypeVar("AnyRun", bound="RunFolder")


@dataclass
class RunFolder(ABC):
    """The records of a run, of any experiment.

    Attributes:
        path: The run folder.
        config: ``config.json``; empty if there is none.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)

    experiment: ClassVar[str]  # in words, for messages
    required: ClassVar[tuple[str, ...]]  # kinds of records, one of which there must be

    @property
    def name(self) -> str:
        """The last part of the path, with its parent's for folders called seed-0, seed-1, ..."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if path.name.startswith("seed-") else path.name

    @property
    def options(self) -> dict[str, Any]:
        """The options that the run was begun with; empty if they are not known."""
        return as_dict(self.config, "options")

    @classmethod
    def read(cls: type[AnyRun], path: str | Path) -> AnyRun:
        """Read a run folder; damaged lines of its records are left out with a warning.

        Raises:
            InputError: There is no records.jsonl, or it holds no record of such a run.
        """
        run = cls(Path(path))
        run.config = read_config(run.path)
        file = run.path / "records.jsonl"
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            reason = error.strerror or error
            raise InputError(
                f"{run.path} is no run folder: cannot read records.jsonl ({reason})"
            ) from error
        kinds = set()
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                run.add(record := json.loads(line))
                kinds.add(record["kind"])
            except (ValueError, KeyError, TypeError) as error:
                is_last = not any(rest.strip() for rest in lines[number:])
                damage = (
                    "the last line is incomplete"
                    if is_last
                    else f"line {number} is damaged ({_short(error)})"
                )
                warnings.warn(f"{file}: {damage} and is left out", FastlrWarning, stacklevel=3)
        odd = run.odd()
        if odd:
            warnings.warn(f"{file}: {few(odd, _SHOWN, '; ')}", FastlrWarning, stacklevel=3)
        if kinds.isdisjoint(cls.required):
            raise InputError(f"{file} holds no records of {run.experiment}: nothing to report yet")
        return run

    def odd(self) -> list[str]:
        """Return sentences on records that are readable but not usable.

        An example is "no record of task 3".
        """
        return []

    @abstractmethod
    def add(self, record: dict[str, Any]) -> None:
        """Take a line of ``records.jsonl``; of several for one step the last counts.

        Raises:
            ValueError, KeyError, TypeError: The line is damaged.
        """

    @property
    def machine(self) -> str:
        """The machine's name in the configuration: its "machine", "gpu" or "device".

        They are looked for at most one level down.
        """
        places = [
            self.config,
            *(value for value in self.config.values() if isinstance(value, dict)),
        ]
        for key in ("machine", "gpu", "device"):
            for place in places:
                if isinstance(place.get(key), str) and place[key] not in ("", "auto"):
                    return str(place[key])
        return ""


def run_folders(paths: Iterable[str | Path]) -> list[Path]:
    """Return run folders; a folder of several runs stands for all of them, in order.

    Its runs are in folders ``seed-0``, ``seed-1``, and so on.

    Raises:
        InputError: A path is no run folder and holds none; or one run is named twice.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if (path / "records.jsonl").exists():
            folders.append(path)
            continue
        inside = sorted(
            (p.parent for p in path.glob("*/records.jsonl")), key=lambda p: _natural(p.name)
        )
        if not inside:
            raise InputError(
                f"{path} is no run folder: neither it nor a folder in it holds records.jsonl"
            )
        begun = (p.parent for p in path.glob("*/config.json"))
        empty = sorted(p.name for p in begun if not (p / "records.jsonl").exists())
        if empty:
            warnings.warn(
                f"{path}: left out what has no records yet ({', '.join(empty)})",
                FastlrWarning,
                stacklevel=3,
            )
        folders += inside
    if not folders:
        raise InputError("no run folder given")
    repeated = [
        path for path, count in Counter(folder.resolve() for folder in folders).items() if count > 1
    ]
    if repeated:
        raise InputError(f"{repeated[0]} is given twice: a run counts once")
    return folders


def refuse_copies(runs: Sequence[RunFolder], driver: str) -> None:
    """Check that no two runs have the same seed, options and data.

    Such runs are one, however long and wherever they are.

    Options that may change when a run is resumed, such as the number of tasks, do not tell runs
    apart, nor does the number of threads. Runs that do not say their seed are not compared.

    Args:
        runs: Of one driver.
        driver: Its name.

    Raises:
        InputError: Two are one run.
    """
    from fastlr.experiments.runs.experiment import find_driver

    of = find_driver(driver)
    known: dict[str, RunFolder] = {}
    for run in runs:
        if "seed" not in run.options:
            continue
        options = {**dataclasses.asdict(of.options()), **of.before, **run.options}
        settings = {
            key: value
            for key, value in options.items()
            if key not in (*of.changeable, "device", "threads")
        }
        text = json.dumps([settings, as_dict(run.config, "data").get("digest")], sort_keys=True)
        earlier = known.setdefault(text, run)
        if earlier is not run:
            raise InputError(
                f"{earlier.path} and {run.path} have the same seed ({run.options['seed']}) and the "
                "same options, so one is a copy or a part of the other and no further evidence: "
                f"give {_longer(earlier, run).path} alone"
            )


def _longer(first: RunFolder, second: RunFolder) -> RunFolder:
    """Return the run with more lines of records, of equal ones the first."""
    return max(
        first, second, key=lambda run: (run.path / "records.jsonl").read_bytes().count(b"\n")
    )


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
    """Return the content of ``config.json``; empty, with a warning if it is damaged."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{file} cannot be read ({_short(error)}): reporting without it",
            FastlrWarning,
            stacklevel=3,
        )
        return {}
    return config if isinstance(config, dict) else {}


def as_dict(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an entry that should be a dictionary; an empty one if it is none."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float:
    """Return the value as a finite float; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def check_numbers(record: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError if an entry of a record is no finite number, KeyError if it is not there."""
    for name in names:
        if math.isnan(number(record[name])):
            raise ValueError(f"{name} {record[name]!r}")


def finite(values: ArrayLike) -> Array:
    """Return those of the values that are finite numbers."""
    array = np.asarray(values, dtype=np.float64)
    return array[np.isfinite(array)]


def measured(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a measure's entry of a record: its "value", "stderr", "definition" and other keys."""
    entry = as_dict(record, "measures").get(name)
    return entry if isinstance(entry, dict) else {"value": entry}


def seconds(record: Mapping[str, Any], name: str) -> float:
    """Return the seconds that a record gives for something, such as "train"; NaN if it does not."""
    return number(as_dict(record, "seconds").get(name))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:80]
