"""Log the records of a run as scalars while the run goes on: a mirror of ``records.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastlr.errors import FastlrError, warn
from fastlr.experiments.runs.integrity import RECORDS
from fastlr.experiments.runs.progress import Progress, Report
from fastlr.integrations.loggers import Logger, TensorBoardLogger, require_tensorboard

TENSORBOARD = "tensorboard"  # folder in that of the run
Record = Mapping[str, Any]


class Mirror:
    """Logs each record of a run after it was committed.

    First of all it logs the records that are in the run's folder already.

    So a resumed run makes the log whole again, whatever was lost with the process before. A logger
    that fails is given up with a warning: the run goes on, and its records are whole.

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
        self._logger: Logger | None = None
        self._read = 0  # bytes of the records that are logged
        self._given_up = False
        self._step, self._accuracy = 0, None

    def update(self) -> None:
        """Log the records that have been committed since the last call."""
        with self._carefully(), open(self._path / RECORDS, "rb") as file:
            file.seek(self._read)
            for line in file:
                self._log(json.loads(line))
            self._read = file.tell()

    def close(self) -> None:
        """Close the log."""
        if self._logger is not None:
            with self._carefully():
                self._logger.close()

    @contextmanager
    def _carefully(self) -> Iterator[None]:
        """Go on without a log where it fails."""
        try:
            yield
        except FastlrError as error:
            if not self._given_up:
                text = f"the run goes on without its log: {error}"
                warn(text)
            self._given_up = True

    def _log(self, record: Record) -> None:
        if record["kind"] == "resume" or self._given_up:
            return
        if self._logger is None:  # what was logged from step 0 on is dropped
            self._logger = TensorBoardLogger(self._path / TENSORBOARD, purge_step=0)
        values = _numbers(record)
        if self._accuracy is not None and "previous_accuracy" in values:
            values["forgetting"] = self._accuracy - values["previous_accuracy"]
        for name, measure in record.get("measures", {}).items():
            numbers = _numbers({"": measure.get("value"), "_stderr": measure.get("stderr")})
            values |= {f"measures/{name}{ending}": value for ending, value in numbers.items()}
        values |= {
            f"seconds/{name}": value for name, value in _numbers(record.get("seconds", {})).items()
        }
        self._logger.log(values, self._step)
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


def _numbers(record: Record) -> dict[str, Any]:
    """Return the measured numbers; whole ones in a record are counts and positions."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, float) and math.isfinite(value)
    }
