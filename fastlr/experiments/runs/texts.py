"""Names of a run's files, and how its ``records.jsonl`` is read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from fastlr.errors import InputError

CONFIG, RECORDS, CHECKPOINTS, LAST = "config.json", "records.jsonl", "checkpoints", "last.pt"
OUTSIDE = "resume"  # the kind of record that belongs to no step

Record = dict[str, Any]  # a line of records.jsonl


@dataclasses.dataclass(frozen=True)
class Lines:
    """The content of ``records.jsonl``.

    Attributes:
        records: Records of the whole lines.
        whole: Bytes up to the end of the last whole line.
        cut_short: Whether the beginning of a line follows.
    """

    records: list[Record]
    whole: int
    cut_short: bool


def read_lines(folder: Path) -> Lines:
    """Read the records of a run; there are none if there is no file.

    Raises:
        InputError: A line is damaged that is not the last.
    """
    path = folder / RECORDS
    data = path.read_bytes() if path.exists() else b""
    records: list[Record] = []
    whole = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = parse(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if record is None and number < len(lines):
            raise InputError(
                f"{path}, line {number}: no record of a run; restore the file from a copy"
            )
        if record is not None:
            records.append(record)
            whole += len(line)
    return Lines(records, whole, whole < len(data))


def parse(line: str | bytes) -> Record:
    """Return the record of a line, without the digest that earlier versions wrote.

    Raises:
        ValueError: It is no record.
    """
    record = json.loads(line)
    if not isinstance(record, dict) or "kind" not in record:
        raise ValueError("no record of a run")
    record.pop("digest", None)
    return record
