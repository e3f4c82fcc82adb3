"""Run folders of any driver, read back: ``config.json`` and ``records.jsonl``, one JSON object a line.

Readers take what is there: further keys are ignored, and a last line that a crash cut short is dropped.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlr.errors import FastlrWarning, InputError


@dataclass
class RunFolder:
    """What every kind of run has.

    Attributes:
        path: The run folder.
        config: ``config.json``; empty if there is none.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)

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
    def machine(self) -> str:
        """What the configuration says about the machine: its "machine", "gpu" or "device", at any depth of two."""
        places = [self.config, *(value for value in self.config.values() if isinstance(value, dict))]
        for key in ("machine", "gpu", "device"):
            for place in places:
                if isinstance(place.get(key), str) and place[key] not in ("", "auto"):
                    return str(place[key])
        return ""


def run_folders(paths: Iterable[str | Path]) -> list[Path]:
    """Return run folders; a folder of several runs (``seed-0``, ``seed-1``, ...) stands for all of them, in order.

    Raises:
        InputError: A path is no run folder and holds none; or one run is named twice.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if (path / "records.jsonl").exists():
            folders.append(path)
            continue
        inside = sorted((p.parent for p in path.glob("*/records.jsonl")), key=lambda p: _natural(p.name))
        if not inside:
            raise InputError(f"{path} is no run folder: neither it nor a folder in it holds records.jsonl")
        begun = (p.parent for p in path.glob("*/config.json"))
        empty = sorted(p.name for p in begun if not (p / "records.jsonl").exists())
        if empty:
            warnings.warn(f"{path}: left out what has no records yet ({', '.join(empty)})", FastlrWarning, stacklevel=3)
        folders += inside
    if not folders:
        raise InputError("no run folder given")
    seen = [folder.resolve() for folder in folders]
    twice = next((str(folder) for folder in seen if seen.count(folder) > 1), None)
    if twice:
        raise InputError(f"{twice} is given twice: a run counts once")
    return folders


def driver_of(paths: Iterable[str | Path]) -> str:
    """Return the name of the driver whose runs the folders hold; "continual" where no configuration says.

    Raises:
        InputError: They are of several drivers, or as `run_folders`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastlrWarning)  # said again by those who read the runs
        named = {str(read_config(folder).get("driver", "continual")): folder for folder in run_folders(paths)}
    if len(named) > 1:
        (one, first), (other, second) = list(named.items())[:2]
        raise InputError(f"{first} is a run of fastlr {one}, {second} of fastlr {other}: report on them apart")
    return next(iter(named))


def read_records(folder: Path, take: Callable[[dict[str, Any]], None]) -> None:
    """Give every record to ``take``, which raises ValueError, KeyError or TypeError for a damaged one.

    Damaged lines are left out with a warning.

    Raises:
        InputError: There is no records.jsonl.
    """
    file = folder / "records.jsonl"
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{folder} is no run folder: cannot read records.jsonl ({error.strerror or error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            take(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            last = not any(rest.strip() for rest in lines[number:])
            what = "the last line is incomplete" if last else f"line {number} is damaged ({_short(error)})"
            warnings.warn(f"{file}: {what} and is left out", FastlrWarning, stacklevel=3)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``; empty, with a warning if it is damaged."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} cannot be read ({_short(error)}): reporting without it", FastlrWarning, stacklevel=3)
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


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:80]
