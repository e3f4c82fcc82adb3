"""A run folder: one writer, append-only records, atomic checkpoints, resumption after a crash.

=====================  ============================================================================
``config.json``        What runs: resolved options, versions, commit, command, data; written when
                       the run begins.
``records.jsonl``      One JSON object a line, flushed to disk with every line.
``checkpoints/``       ``last.pt`` (replaced atomically), files that are written once, such as
                       ``initial.pt``, and files of rows of numbers (`Run.write_row`).
``run.lock``           Held by the process that writes.
=====================  ============================================================================

The checkpoint is the point of commitment: `Run.commit` writes the state *together with the record
of the step that led there*, and then appends the record. Whatever the moment of a crash, the
checkpoint says which records there must be: a line that is missing is appended when the run is
opened again, an incomplete last line is dropped, and nothing else is ever removed. So a step is
either done, with its record and its state, or it is done anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastlr.errors import FastlrWarning, InputError, first_line
from fastlr.files import (
    LOCK,
    disk_errors,
    lock_folder,
    read_object,
    read_tensors,
    replace_file,
    save_file,
    write_all,
)

CONFIG, RECORDS, CHECKPOINTS, LAST = "config.json", "records.jsonl", "checkpoints", "last.pt"
VERSION = 1
_OUTSIDE = "resume"  # the kind of record that belongs to no step


def stream_seed(seed: int, *use: int | str) -> int:
    """Return a seed in ``[0, 2**63)`` for one use of randomness.

    It is a pure function of the run's seed and the use.

    It is the first 63 bits of a SHA-256, so that streams of different uses, tasks and seeds are
    unrelated.

    Example:
        >>> stream_seed(0, "task", 3) == stream_seed(0, "task", 3) != stream_seed(0, "task", 4)
        True
    """
    digest = hashlib.sha256(json.dumps([seed, *use]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (every device), numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators, in a form that a checkpoint can hold.

    They are tensors and numbers.
    """
    generator: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = generator
    version, internal, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [
            name,
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "python": [version, list(internal), following],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put the global generators into the states that `random_states` returned."""
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, internal, following = states["python"]
    random.setstate((version, tuple(internal), following))


class Run:
    """The folder of one run, locked by this process.

    Make one by :meth:`create` or :meth:`resume`, in a ``with`` block.

    Attributes:
        path: Of the folder.
        config: The content of ``config.json``.
        state: That of the last checkpoint when the run was resumed; None if there is none yet.
        records: The records so far, those of kind "resume" included.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock
        self.config: dict[str, Any] = {}
        self.state: dict[str, Any] | None = None
        self.records: list[dict[str, Any]] = []
        self._steps = 0  # records that belong to a step

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> Run:
        """Begin a run in a new or empty folder.

        Raises:
            InputError: The folder holds a run or other things, cannot be made, or is being written
                by another process.
            FastlrError: The disk is full.
        """
        folder = Path(os.path.abspath(path))
        run = cls(folder, lock_folder(folder, make=True))
        try:
            if (run.path / CONFIG).exists():
                raise InputError(
                    f"{run.path} holds a run: --resume goes on with it; or choose another folder"
                )
            leftovers = {LOCK, CONFIG + ".part"}  # of a process that was killed right here
            if (run.path / CHECKPOINTS).is_dir() and not any((run.path / CHECKPOINTS).iterdir()):
                leftovers.add(CHECKPOINTS)
            refuse_other_files(run.path, leftovers)
            with disk_errors(run.path):
                (run.path / CHECKPOINTS).mkdir(exist_ok=True)
            run.set_config(config)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def resume(cls, path: str | Path) -> Run:
        """Open a run to go on with it: mend the records' end and read the last checkpoint.

        Raises:
            InputError: There is no run, it is damaged, or another process writes it.
        """
        folder = Path(os.path.abspath(path))
        if not (folder / CONFIG).is_file():
            raise InputError(
                f"{folder} holds no run to go on with: leave --resume out to begin one"
            )
        run = cls(folder, lock_folder(folder, make=False))
        try:
            run.config = read_config(folder)
            run._read()
        except BaseException:
            run.close()
            raise
        return run

    def set_config(self, config: Mapping[str, Any]) -> None:
        """Replace ``config.json`` atomically."""
        self.config = dict(config)
        replace_file(self.path / CONFIG, json.dumps(self.config, indent=2, allow_nan=False) + "\n")

    def abandon(self) -> None:
        """Leave the folder as it was before `create`, if no step was done.

        This is for a run whose options turned out not to work.
        """
        if not self._steps:
            for file in [*(self.path / CHECKPOINTS).iterdir(), self.path / CONFIG]:
                file.unlink(missing_ok=True)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record that belongs to no step (of kind "resume"), and flush it to disk."""
        if record["kind"] != _OUTSIDE:
            raise InputError(
                f"records of kind {record['kind']} are written by commit, with the state they led "
                "to"
            )
        self._append(dict(record))

    def commit(self, record: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """End a step: write the checkpoint, with the record in it, then append the record.

        Args:
            record: What goes into ``records.jsonl``: strict JSON (no NaN).
            state: Tensors, numbers, texts, and lists and dictionaries of them.

        Raises:
            FastlrError: The disk is full; records and the checkpoint before are as they were.
        """
        line = _line(record)
        whole = {"version": VERSION, "steps": self._steps + 1, "line": line, "state": dict(state)}
        self.write_checkpoint(LAST, whole)
        self._append(json.loads(line))

    def write_checkpoint(self, name: str, content: Any) -> None:
        """Write a file of ``checkpoints/`` atomically."""
        save_file(self.path / CHECKPOINTS / name, content)

    def read_checkpoint(self, name: str) -> Any:
        """Read a file of ``checkpoints/`` onto the CPU; None if it is not there.

        Raises:
            InputError: It cannot be read.
        """
        path = self.path / CHECKPOINTS / name
        if not path.exists():
            return None
        try:
            return read_tensors(path)
        except InputError as error:
            raise InputError(f"{error}, or begin the run anew") from error
        except Exception as error:  # zip, pickle and torch each raise their own
            raise InputError(
                f"{path} is damaged ({first_line(error)}): begin the run anew"
            ) from error

    def write_row(self, name: str, row: int, values: torch.Tensor) -> None:
        """Write a row of float32 numbers into a file of ``checkpoints/``, all rows of one length.

        Written before the step that it belongs to is committed, it is there whenever the step's
        record is; a step that is done anew writes it anew.
        """
        data = values.to(torch.float32).cpu().contiguous().numpy().astype("<f4").tobytes()
        with disk_errors(self.path):
            file = os.open(self.path / CHECKPOINTS / name, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.lseek(file, row * len(data), os.SEEK_SET)
                write_all(file, data)
                os.fsync(file)
            finally:
                os.close(file)

    def _append(self, record: dict[str, Any]) -> None:
        path = self.path / RECORDS
        with disk_errors(self.path), open(path, "ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                write_all(file.fileno(), (_line(record) + "\n").encode())
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), before)
                raise
        self.records.append(record)
        if record["kind"] != _OUTSIDE:
            self._steps += 1

    def _read(self) -> None:
        path = self.path / RECORDS
        self.records, whole, size = read_lines(path)
        if whole < size:
            warnings.warn(f"{path}: dropped an incomplete last line", FastlrWarning, stacklevel=3)
            with disk_errors(self.path):
                os.truncate(path, whole)
        self._steps = sum(record["kind"] != _OUTSIDE for record in self.records)
        last = self.read_checkpoint(LAST)
        if last is None:
            if self._steps:
                raise InputError(
                    f"{self.path} has records but no {CHECKPOINTS}/{LAST}: begin the run anew"
                )
            return
        if last.get("version") != VERSION or not 0 <= last["steps"] - self._steps <= 1:
            raise InputError(
                f"{self.path / CHECKPOINTS / LAST} (version {last.get('version')}, "
                f"{last.get('steps')} steps) does not belong to the {self._steps} records of "
                f"{RECORDS}: begin the run anew"
            )
        if last["steps"] > self._steps:  # the process ended between the checkpoint and the record
            self._append(json.loads(last["line"]))
        self.state = last["state"]

    def close(self) -> None:
        """Give the lock back; may be called more than once."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_other_files(path: Path, names: Collection[str]) -> None:
    """Raise InputError if a folder holds anything but files of these names."""
    others = sorted(file.name for file in path.iterdir() if file.name not in names)
    if others:
        raise InputError(f"{path} is not empty ({', '.join(others[:3])}): choose a new folder")


def read_config(path: str | Path) -> dict[str, Any]:
    """Read ``config.json`` of a run.

    Raises:
        InputError: It is not there or damaged.
    """
    file = Path(path) / CONFIG
    if not file.exists():
        raise InputError(f"{path} holds no run: there is no {CONFIG}")
    return read_object(file)


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int, int]:
    """Read records: (records, bytes up to the end of the last whole one, bytes of the file).

    Raises:
        InputError: A line other than the last is no record.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0, 0
    records: list[dict[str, Any]] = []
    whole = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if not isinstance(record, dict) or "kind" not in record:
            if number < len(lines):
                raise InputError(
                    f"{path}, line {number}: no record of a run; restore the file from a copy"
                )
            break
        records.append(record)
        whole += len(line)
    return records, whole, len(data)


def commit_of_source() -> str | None:
    """Return the git commit that fastlr runs from; None if it is not known.

    It is marked "+changes" if files differ from it.
    """
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(", ", ": "))
