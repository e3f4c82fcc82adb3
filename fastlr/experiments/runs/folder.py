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

Where several ranks work on a run, rank 0 alone reads and writes the folder, and only it needs one;
the others get what it finds there (`opened`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastlr.distributed.sharding import ALONE, Team, team
from fastlr.errors import InputError, first_line, warn
from fastlr.experiments.runs.texts import (
    CHECKPOINTS,
    CONFIG,
    LAST,
    OUTSIDE,
    RECORDS,
    parse,
    read_lines,
)
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

_NO_LOCK = -1


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
    """The folder of one run, locked by this process, or by rank 0 of those that work on it.

    Make one by :meth:`create` or :meth:`resume`, in a ``with`` block. Every rank calls the same
    methods in the same order; those of a rank that holds no lock write nothing.

    Attributes:
        members: The ranks that work on the run.
        path: Path of the folder.
        config: The content of ``config.json``.
        state: That of the last checkpoint when the run was resumed; None if there is none yet.
        records: The records so far, those of kind "resume" included.
    """

    members: Team = ALONE

    def __init__(self, path: Path = Path(), lock: int = _NO_LOCK) -> None:
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
        before_lock(folder, _refuse_used)
        run = cls(folder, lock_folder(folder, make=True))
        try:
            _refuse_used(run.path)
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
            run._read()
        except BaseException:
            run.close()
            raise
        return run

    @property
    def _writes(self) -> bool:
        return self._lock != _NO_LOCK

    def set_config(self, config: Mapping[str, Any]) -> None:
        """Replace ``config.json`` atomically."""
        self.config = dict(config)
        if self._writes:
            text = json.dumps(self.config, indent=2, allow_nan=False)
            replace_file(self.path / CONFIG, text + "\n")

    def abandon(self) -> None:
        """Leave the folder as it was before `create`, if no step was done.

        This is for a run whose options turned out not to work.
        """
        if self._writes and not self._steps:
            for file in [*(self.path / CHECKPOINTS).iterdir(), self.path / CONFIG]:
                file.unlink(missing_ok=True)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record that belongs to no step (of kind "resume"), and flush it to disk."""
        self._append(_line(record))

    def commit(self, record: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """End a step: write the checkpoint, with the record in it, then append the record.

        Every rank has the record of rank 0 afterwards.

        Args:
            record: What goes into ``records.jsonl``: strict JSON (no NaN).
            state: Tensors, numbers, texts, and lists and dictionaries of them.

        Raises:
            FastlrError: The disk is full; records and the checkpoint before are as they were.
        """
        line = _line(record)
        whole = {"steps": self._steps + 1, "line": line, "state": dict(state)}
        self.write_checkpoint(LAST, whole)
        self._append(line)
        self.records[-1] = self.members.share(self.records[-1])[0]

    def write_checkpoint(self, name: str, content: Any) -> None:
        """Write a file of ``checkpoints/`` atomically."""
        if self._writes:
            save_file(self.path / CHECKPOINTS / name, content)

    def read_checkpoint(self, name: str) -> Any:
        """Read a file of ``checkpoints/`` onto the CPU; None if it is not there.

        Raises:
            InputError: It cannot be read.
        """
        return self.members.broadcast(self._content_of(name) if self._writes else None)

    def _content_of(self, name: str) -> Any:
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
        if not self._writes:
            return
        data = values.to(torch.float32).cpu().contiguous().numpy().astype("<f4").tobytes()
        with disk_errors(self.path):
            file = os.open(self.path / CHECKPOINTS / name, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.lseek(file, row * len(data), os.SEEK_SET)
                write_all(file, data)
                os.fsync(file)
            finally:
                os.close(file)

    def _append(self, line: str) -> None:
        """Write the line of a record, and count it among the records."""
        record = parse(line)
        if self._writes:
            self._write_line(line + "\n")
        self.records.append(record)
        if record["kind"] != OUTSIDE:
            self._steps += 1

    def _write_line(self, line: str) -> None:
        path = self.path / RECORDS
        with disk_errors(self.path), open(path, "ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                write_all(file.fileno(), line.encode())
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), before)
                raise

    def _read(self) -> None:
        path = self.path / RECORDS
        self.config, lines = read_object(self.path / CONFIG), read_lines(self.path)
        self.records = lines.records
        if lines.cut_short:
            warn(f"{path}: dropped an incomplete last line")
            with disk_errors(self.path):
                os.truncate(path, lines.whole)
        of_steps = [record for record in self.records if record["kind"] != OUTSIDE]
        self._steps = len(of_steps)
        last = self.read_checkpoint(LAST)
        if last is None:
            if self._steps:
                raise InputError(
                    f"{self.path} has records but no {CHECKPOINTS}/{LAST}: begin the run anew"
                )
            return
        steps, record = last["steps"], parse(last["line"])
        if steps == self._steps + 1:  # killed before it was appended
            self._append(last["line"])
        elif steps != self._steps or of_steps[-1] != record:
            raise InputError(
                f"{self.path / CHECKPOINTS / LAST} is of step {steps} and does not belong to "
                f"the {self._steps} steps of {RECORDS}: restore the file from a copy, or begin "
                "the run anew"
            )
        self.state = last["state"]

    def close(self) -> None:
        """Give the lock back; may be called more than once."""
        if self._writes:
            os.close(self._lock)
            self._lock = _NO_LOCK

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(record: Mapping[str, Any]) -> str:
    """Return the line of a record."""
    return json.dumps(record, allow_nan=False)


def opened(work: Callable[[], Run]) -> Run:
    """Return the run that ``work`` creates or resumes; with several ranks, rank 0 alone does that.

    What rank 0 raises is raised on all of them, as they wait for each other where it writes a step.

    Args:
        work: Such as ``lambda: Run.resume(path)``.

    Raises:
        InputError, FastlrError: As ``work`` does, on all ranks.
    """
    members = team()
    run = work() if members.rank == 0 else Run()
    if members.size == 1:
        return run
    run.members = members
    try:
        texts = json.dumps([str(run.path), run.config, run.records])
        texts, run.state = members.broadcast((texts, run.state))
    except BaseException:
        run.close()
        raise
    path, run.config, run.records = json.loads(texts)
    run.path = Path(path)
    return run


def before_lock(path: Path, refuse: Callable[[Path], None]) -> None:
    """Look at a folder that has no lock yet, so that one that is refused gets no file of ours.

    Raises:
        InputError: The folder cannot be read, or as ``refuse`` does.
    """
    if path.is_dir() and not (path / LOCK).exists():
        with disk_errors(path):
            refuse(path)


def _refuse_used(path: Path) -> None:
    """Raise InputError if a folder holds a run or other things."""
    if (path / CONFIG).exists():
        raise InputError(f"{path} holds a run: --resume goes on with it; or choose another folder")
    leftovers = {LOCK, CONFIG + ".part"}  # of a process that was killed in `Run.create`
    if (path / CHECKPOINTS).is_dir() and not any((path / CHECKPOINTS).iterdir()):
        leftovers.add(CHECKPOINTS)
    refuse_other_files(path, leftovers)


def refuse_other_files(path: Path, names: Collection[str]) -> None:
    """Raise InputError if a folder holds anything but files of these names."""
    others = sorted(file.name for file in path.iterdir() if file.name not in names)
    if others:
        raise InputError(f"{path} is not empty ({', '.join(others[:3])}): choose a new folder")


@cache
def commit_of_source() -> str | None:
    """Return the git commit that fastlr runs from; None if it is not known.

    It is marked "+changes" if files differ from it. Of a process it is looked for once: what it has
    imported stays.
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
