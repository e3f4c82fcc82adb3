"""Log the records of a run as scalars while the run goes on: a mirror of ``records.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastlr.errors import InputError, install, warn
from fastlr.experiments.runs.progress import Progress, Report
from fastlr.experiments.runs.texts import RECORDS

TENSORBOARD = "tensorboard"  # folder in that of the run
Record = Mapping[str, Any]


class Mirror:
    """Logs each record of a run after it was committed.

    The first update logs all records in the run's folder and drops what was logged before, so that
    the log of a resumed run is complete. If logging fails, the run continues without its log, after
    a warning.

    The step is the number of steps of the run that are done, 0 for the start. Names: those of the
    record (``accuracy``, ``train_loss``), ``forgetting`` (accuracy on the task before: right after
    it, minus now), ``measures/NAME`` with ``measures/NAME_stderr``, and ``seconds/NAME``. What is
    missing is left out.

    Args:
        path: The run folder; the log is in its folder ``tensorboard``.

    Raises:
        InputError: tensorboard is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        require_tensorboard()
        self._path = Path(path)
        self._writer: Any = None
        self._read = 0  # bytes of the records that are logged
        self._failed = False
        self._step, self._accuracy = 0, None

    def update(self) -> None:
        """Log the records that have been committed since the last call."""
        if self._failed:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._path / TENSORBOARD), purge_step=0)
            with open(self._path / RECORDS, "rb") as file:
                file.seek(self._read)
                for line in file:
                    self._log(json.loads(line))
                self._read = file.tell()
            self._writer.flush()
        except OSError as error:
            self._failed = True
            warn(f"the run continues without its log: {error}")

    def close(self) -> None:
        """Close the log, to which nothing is left to be written."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()

    def _log(self, record: Record) -> None:
        if record["kind"] == "resume":
            return
        values = _numbers(record)
        if self._accuracy is not None and "previous_accuracy" in values:
            values["forgetting"] = self._accuracy - values["previous_accuracy"]
        for name, measure in record.get("measures", {}).items():
            numbers = _numbers({"": measure.get("value"), "_stderr": measure.get("stderr")})
            values |= {f"measures/{name}{ending}": value for ending, value in numbers.items()}
        values |= {
            f"seconds/{name}": value for name, value in _numbers(record.get("seconds", {})).items()
        }
        for name, value in values.items():
            self._writer.add_scalar(name, value, self._step)
        self._step, self._accuracy = self._step + 1, values.get("accuracy")


@contextmanager
def mirrored(path: str | Path, tensorboard: bool, report: Report) -> Iterator[Report]:
    """Yield a report callback that also logs committed records, if ``tensorboard`` is true."""
    if not tensorboard:
        yield report
        return
    mirror = Mirror(path)

    def both(at: Progress) -> None:
        report(at)
        if at.record is not None:
            mirror.update()

    try:
        yield both
        mirror.update()  # of a run that was complete
    finally:
        mirror.close()


def require_tensorboard() -> None:
    """Raise InputError if tensorboard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise InputError(f"tensorboard is not installed: {install('logging')}") from error


def _numbers(record: Record) -> dict[str, Any]:
    """Return the measured numbers; whole ones in a record are counts and positions."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, float) and math.isfinite(value)
    }
