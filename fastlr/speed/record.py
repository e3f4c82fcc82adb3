"""The record of a benchmark: rows, checks, sections that fail without stopping the others, JSON.

Every section runs in a ``try`` of its own; what goes wrong is in the record, and makes the exit code non-zero.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fastlr.errors import InputError
from fastlr.report.record import write_json
from fastlr.speed.clock import first_line

FORMAT = "fastlr-bench 1"
UNITS = {
    "seconds": "s (median; _p20 and _p80 are quantiles over repeats)",
    "repeats": "timed repeats behind the quantiles",
    "bytes": "B that must be read and written, each input and output once",
    "operations": "floating-point operations (a multiplication and an addition are two)",
    "bytes_per_second": "B/s",
    "operations_per_second": "1/s",
    "share": "of the measured copy bandwidth",
    "deviation": "||out - ref|| / ||ref||, the worst sample and output, reference in float64",
    "images_per_second": "1/s, training images",
    "peak_bytes": "B of device memory above what was held before, at the first call (proof and capture included)",
    "floor_seconds": "s: the larger of bytes over measured bandwidth and operations over the measured product's rate",
    "ratio": "of seconds to those of ``against`` in the same round (median; quantiles as for seconds)",
}
Say = Callable[[str], None]


class Section(NamedTuple):
    """A part of a benchmark: its name, about how many seconds it takes, and what it does."""

    name: str
    estimate: float
    run: Callable[[], None]


class Record:
    """What a run has found so far.

    Attributes:
        rows: one measured thing each: ``section``, ``name``, ``status`` ("ok", "wrong", "error", "dropped",
            "not covered") and numbers, whose names are those of UNITS.
        checks: ``section``, ``name``, ``value``, ``limit``, ``ok``: value <= limit; ``target`` marks an aim, which can
            be missed without anything being wrong.
        sections: ``name``, ``status``, ``seconds`` and, if it failed, ``error`` and ``traceback``.
    """

    def __init__(self, environment: dict[str, Any], settings: dict[str, Any]) -> None:
        self.environment, self.settings = environment, settings
        self.ceilings: dict[str, dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.sections: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def add(self, section: str, name: str, status: str = "ok", **values: Any) -> dict[str, Any]:
        """Add a row and return it."""
        row = {"section": section, "name": name, "status": status, **values}
        self.rows.append(row)
        return row

    def check(self, section: str, name: str, value: float, limit: float, *, target: bool = False) -> bool:
        """Add a check that ``value`` is at most ``limit``; NaN fails."""
        ok = bool(value <= limit)
        entry = {"section": section, "name": name, "value": value, "limit": limit, "ok": ok, "target": target}
        self.checks.append(entry)
        return ok

    def note(self, text: str) -> None:
        """Add a remark for people, once."""
        if text not in self.notes:
            self.notes.append(text)

    @contextmanager
    def attempt(self, section: str, name: str) -> Iterator[None]:
        """Record an error inside as a row of this name, and go on."""
        try:
            yield
        except Exception as error:
            self.add(section, name, "error", error=first_line(error), traceback=traceback.format_exc(limit=-6))

    def find(self, section: str, name: str) -> dict[str, Any] | None:
        """The row of this section and name, if there is one."""
        return next((r for r in self.rows if r["section"] == section and r["name"] == name), None)

    @property
    def failures(self) -> list[str]:
        """What is wrong or failed, in words; empty if nothing is."""
        found = [f"{s['name']}: {s['error']}" for s in self.sections if s["status"] == "error"]
        for row in self.rows:
            if row["status"] in ("wrong", "error"):
                found.append(f"{row['section']}, {row['name']}: {row['status']}: {row.get('error', '?')}")
        for check in self.checks:
            if not check["ok"] and not check["target"]:
                found.append(f"{check['section']}, {check['name']}: {_above(check)}")
        return found

    @property
    def missed(self) -> list[str]:
        """Targets that were not reached, in words."""
        found = [c for c in self.checks if c["target"] and not c["ok"]]
        return [f"{c['section']}, {c['name']}: {_above(c)}" for c in found]

    @property
    def dropped(self) -> list[str]:
        """Sections and rows that the budget left no time for."""
        parts = [s["name"] for s in self.sections if s["status"] == "dropped"]
        rows = [f"{r['section']}: {r['name']}" for r in self.rows if r["status"] == "dropped"]
        return parts + rows

    def document(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "format": FORMAT,
            "environment": self.environment,
            "settings": self.settings,
            "units": UNITS,
            "ceilings": self.ceilings,
            "sections": self.sections,
            "checks": self.checks,
            "failures": self.failures,
            "missed": self.missed,
            "dropped": self.dropped,
            "notes": self.notes,
            "rows": self.rows,
        }

    @staticmethod
    def of(document: dict[str, Any]) -> Record:
        """The record that a document was made from."""
        record = Record(document["environment"], document["settings"])
        for name in ("ceilings", "rows", "checks", "sections", "notes"):
            setattr(record, name, document[name])
        for check in record.checks:  # JSON has no infinity and no NaN: they come back as null
            check["value"] = math.nan if check["value"] is None else check["value"]
        return record

    def save(self, path: str | Path) -> None:
        """Write the document as JSON (``-``: stdout)."""
        write_json(path, self.document())


def _above(check: dict[str, Any]) -> str:
    return f"{check['value']:.3g} is above {check['limit']:.3g}"


def load(path: str | Path) -> Record:
    """Read a record that :meth:`Record.save` wrote.

    Raises:
        InputError: there is no such file, or it is no record of a benchmark.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON ({error}): give a file written by fastlr bench --json") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path} is no record of this version ({FORMAT}): give a file written by fastlr bench --json")
    return Record.of(document)


def run_sections(
    record: Record,
    sections: list[Section],
    budget: float,
    *,
    say: Say = lambda text: None,
    after: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run sections in order; one that would not end within the budget is dropped, one that fails is recorded.

    Args:
        record: where results go.
        sections: in order of importance.
        budget: seconds for all of them together.
        say: told what is being done.
        after: called after each section: saves, frees memory.
        clock: seconds.
    """
    start = clock()
    for section in sections:
        left = budget - (clock() - start)
        entry: dict[str, Any] = {"name": section.name, "status": "ok", "seconds": 0.0}
        record.sections.append(entry)
        if section.estimate > left:
            entry["status"] = "dropped"
            entry["error"] = f"it takes about {section.estimate:.0f} s and {max(0.0, left):.0f} s are left"
            say(f"{section.name}: dropped, {entry['error']}")
            continue
        say(f"{section.name} ...")
        begun = clock()
        try:
            section.run()
        except Exception as error:
            entry |= {"status": "error", "error": first_line(error), "traceback": traceback.format_exc(limit=-8)}
            say(f"{section.name}: {entry['error']}")
        entry["seconds"] = round(clock() - begun, 2)
        try:
            after()
        except Exception as error:
            entry |= {"status": "error", "error": f"afterwards: {first_line(error)}"}
            say(f"{section.name}: {entry['error']}")
