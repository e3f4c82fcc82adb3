"""Read a run's ``config.json`` and ``records.jsonl``, and find damage to them by their digests.

Each line of the records ends with a digest of its text and of the digest before it, so that a line
that was changed, removed, added or moved does not follow from the one before. ``config.json`` ends
with a digest of its content. Either every part of a folder carries one, or none does: those that
were begun before there were digests have none, and go on without.

The checkpoint says how many steps there are, and holds the record of the last one: by that a file
that was shortened is found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastlr.display.record import counted
from fastlr.errors import InputError
from fastlr.files import read_object

CONFIG, RECORDS, CHECKPOINTS, LAST = "config.json", "records.jsonl", "checkpoints", "last.pt"
OUTSIDE = "resume"  # the kind of record that belongs to no step
_KEY = "digest"
_AT_END = re.compile(r',\s+"digest": "([0-9a-f]{32})"\s*}\s*$')
_RESTORE = "restore the file from a copy, or begin the run anew"

Record = dict[str, Any]  # a line of records.jsonl


def with_digest(line: str, before: str) -> str:
    """Return a line of JSON with its digest as the last entry.

    Args:
        line: A JSON object.
        before: The digest of the line before; empty for the first.
    """
    return f'{line[:-1]}, "{_KEY}": "{_digest(before + line)}"}}'


def digest_of(line: str) -> str:
    """Return the digest that a line ends with; empty if there is none."""
    carried = _AT_END.search(line)
    return carried[1] if carried else ""


def without_digest(text: str) -> str:
    """Return a line of records, or the text of ``config.json``, without its digest."""
    return _AT_END.sub("}", text)


def config_with_digest(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the digest of its content as the last entry."""
    as_read = json.loads(json.dumps(config))
    return {**config, _KEY: _digest(_sorted(as_read))}


def check_digests(folder: Path, config: dict[str, Any], data: bytes) -> str | None:
    """Hold the configuration and the lines of a run to their digests.

    Args:
        folder: Of the run, for messages.
        config: What ``config.json`` holds, empty if there is none; its digest is taken out.
        data: The lines of ``records.jsonl``. The beginning of a line at its end is passed over.

    Returns:
        The digest of the last line, empty if there is no line; None if neither file carries
        digests.

    Raises:
        InputError: A digest fails.
    """
    stated = config.pop(_KEY, None)
    if stated is not None and stated != _digest(_sorted(config)):
        raise InputError(f"{folder / CONFIG} is not as it was written: {_RESTORE}")
    lines = data.decode(errors="replace").split("\n")
    if not digest_of(lines[-1]):
        lines.pop()  # nothing, or the beginning of a line
    if stated is None and not any(map(digest_of, lines)):
        return None
    if stated is None and (folder / CONFIG).exists():
        raise InputError(
            f"{folder / CONFIG} carries no digest, but {RECORDS} does: it is not as it was "
            f"written; {_RESTORE}"
        )
    before = ""
    for number, line in enumerate(lines, 1):
        if not _follows(line, before):
            remedy = f"remove it, --resume does its step again; or {_RESTORE}"
            raise InputError(
                f"{folder / RECORDS}, line {number}: not as it was written after the line before "
                "(a line was changed, removed, added or moved): "
                f"{remedy if number == len(lines) else _RESTORE}"
            )
        before = digest_of(line)
    return before


def record_in_checkpoint_alone(
    folder: Path, records: Sequence[Record], digest: str | None, steps: int, line: str
) -> Record | None:
    """Hold a run's records to its last checkpoint.

    Args:
        folder: Of the run, for messages.
        records: Its records.
        digest: Of the last one's line; None in folders without digests.
        steps: How many steps were done at the checkpoint.
        line: The line of the last of them.

    Returns:
        The record of this line, where the process ended before it was written; None if it is there.

    Raises:
        InputError: More records are missing, or that one is another.
    """
    of_steps = [record for record in records if record["kind"] != OUTSIDE]
    last = parse(line)
    if len(of_steps) >= steps:
        if of_steps[steps - 1] == last:
            return None
        raise InputError(
            f"{folder / RECORDS} holds another record of step {steps} than {CHECKPOINTS}/{LAST}: "
            f"{_RESTORE}"
        )
    if len(of_steps) < steps - 1 or (digest is not None and not _follows(line, digest)):
        raise InputError(
            f"{folder / RECORDS} was shortened: it holds {counted(len(of_steps), 'step')}, "
            f"{CHECKPOINTS}/{LAST} is of step {steps}: {_RESTORE}"
        )
    return last


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """What the text files of a run hold.

    Attributes:
        config: The content of ``config.json``.
        records: Those of the whole lines.
        digest: Of the last whole line, empty if there is no line; None in folders without digests.
        whole: Bytes up to the end of the last whole line.
        cut_short: Whether the beginning of a line follows.
    """

    config: dict[str, Any]
    records: list[Record]
    digest: str | None
    whole: int
    cut_short: bool


def read_files(folder: Path) -> TextFiles:
    """Read ``config.json`` and ``records.jsonl`` of a run.

    Raises:
        InputError: The former is not there, or one of them is damaged.
    """
    if not (folder / CONFIG).exists():
        raise InputError(f"{folder} holds no run: there is no {CONFIG}")
    config = read_object(folder / CONFIG)
    path = folder / RECORDS
    data = path.read_bytes() if path.exists() else b""
    digest = check_digests(folder, config, data[: data.rfind(b"\n") + 1])
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
    return TextFiles(config, records, digest, whole, whole < len(data))


def parse(line: str | bytes) -> Record:
    """Return a line's record, its digest left out.

    Raises:
        ValueError: It is no record.
    """
    record = json.loads(line)
    if not isinstance(record, dict) or "kind" not in record:
        raise ValueError("no record of a run")
    record.pop(_KEY, None)
    return record


def _follows(line: str, before: str) -> bool:
    """Return True if a line is as it was written after one with the digest ``before``."""
    return line == with_digest(without_digest(line), before)


def _sorted(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
