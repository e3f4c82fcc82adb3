"""Log the records of a run as scalars while the run goes on: a mirror of ``records.jsonl``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastlr.errors import FastlrError, FastlrWarning
from fastlr.experiments.runs.folder import RECORDS, read_lines
from fastlr.experiments.runs.progress import Progress, Report
from fastlr.integrations.loggers import Logger, TensorBoardLogger, require_tensorboard

TENSORBOARD = "tensorboard"  # folder in that of the run
Record = Mapping[str, Any]


class Mirror:
    """Logs each record of a run after it was committed; use it in a ``with`` block.

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
        self._given_up = False
        self._step, self._accuracy = 0, None

    def update(self, record: Record) -> None:
        """Log a record that has just been committed, which is in the folder's records too."""
        if self._logger is None:
            self._carefully(self._catch_up)
        else:
            self._carefully(partial(self._log, record))

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        """Close the logger; first log the folder's records if no update came.

        None comes for a run that was complete.
        """
        if kind is None and self._logger is None:
            self._carefully(self._catch_up)
        if self._logger is not None:
            self._carefully(self._logger.close)

    def _carefully(self, action: Callable[[], None]) -> None:
        if self._given_up:
            return
        try:
            action()
        except FastlrError as error:
            self._given_up = True
            warnings.warn(f"the run goes on without its log: {error}", FastlrWarning, stacklevel=3)

    def _catch_up(self) -> None:
        records = read_lines(self._path / RECORDS)[0]
        if records:
            # What was logged from step 0 on is dropped.
            self._logger = TensorBoardLogger(self._path / TENSORBOARD, purge_step=0)
        for record in records:
            self._log(record)

    def _log(self, record: Record) -> None:
        assert self._logger is not None
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
        self._logger.log(values, self._step)
        self._step, self._accuracy = self._step + 1, values.get("accuracy")


@contextmanager
def mirrored(path: str | Path, tensorboard: bool, report: Report) -> Iterator[Report]:
    """Yield a report callback that also logs committed records, if ``tensorboard`` is true."""
    if not tensorboard:
        yield report
        return
    with Mirror(path) as mirror:

        def both(at: Progress) -> None:
            report(at)
            if at.record is not None:
                mirror.update(at.record)

        yield both


def _numbers(record: Record) -> dict[str, Any]:
    """Return the measured numbers; whole ones in a record are counts and positions."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, float) and math.isfinite(value)
    }
