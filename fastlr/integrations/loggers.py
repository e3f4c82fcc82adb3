"""Where numbers over time go: TensorBoard, a CSV file, a JSONL file, or a function of yours.

A logger has ``log(values, step)`` and ``close()``, and is a context manager. A run that is resumed
passes ``purge_step``: what was logged at that step and later is dropped first, so that no step is
there twice.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fastlr.display.record import finite
from fastlr.errors import InputError, install
from fastlr.files import replace_file, write_errors

Values = Mapping[str, float]


@runtime_checkable
class Logger(Protocol):
    """A place that values are logged to."""

    def log(self, values: Values, step: int) -> None:
        """Record the values, by name, at a step."""

    def close(self) -> None:
        """Write what is left and let go of the file; may be called more than once."""


class _Closing(AbstractContextManager):
    """Closes at the end of a ``with`` block."""

    def close(self) -> None:
        """Do nothing: nothing is left open between two calls of ``log``."""

    def __exit__(self, *_: object) -> None:
        self.close()


class CallbackLogger(_Closing):
    """Calls a function with a dict of the values, and the step.

    For wandb, MLflow, or a list of yours.

    Example:
        >>> seen = []
        >>> logger = CallbackLogger(lambda values, step: seen.append({"step": step, **values}))
        >>> logger.log({"accuracy": 0.5}, 3)
        >>> seen
        [{'step': 3, 'accuracy': 0.5}]
    """

    def __init__(self, function: Callable[[dict[str, float], int], Any]) -> None:
        if not callable(function):
            raise InputError(
                f"CallbackLogger wants a function of (values, step), not {type(function).__name__}"
            )
        self.function = function

    def log(self, values: Values, step: int) -> None:
        """Call the function; its errors are the caller's."""
        self.function(dict(values), step)


class _FileLogger(_Closing):
    """A text file with one line a step; see the subclasses for its arguments and errors."""

    def __init__(self, path: str | Path, *, purge_step: int | None = None) -> None:
        self.path = Path(path)
        if purge_step is None and self.path.exists():
            raise InputError(
                f"{self.path} is there already: choose another file, or pass purge_step= to go on "
                "with it"
            )
        with write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            earlier = self._read() if self.path.exists() else []
            self._begin([row for row in earlier if row["step"] < purge_step])

    def log(self, values: Values, step: int) -> None:
        """Append a line; it is in the file when this returns."""
        text = self._text([_row(values, step)])
        with write_errors(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)

    def _begin(self, rows: list[dict[str, Any]]) -> None:
        """Write the file anew with these rows."""
        replace_file(self.path, self._text(rows))

    def _text(self, rows: list[dict[str, Any]]) -> str:
        """Return the lines of these rows."""
        raise NotImplementedError

    def _read(self) -> Iterable[dict[str, Any]]:
        """Yield the rows of the file, of which the last may be cut short and is then left out."""
        raise NotImplementedError

    def _damaged(self, line: int) -> InputError:
        return InputError(
            f"{self.path}, line {line}: not written by {type(self).__name__}; choose another file"
        )


class JsonLinesLogger(_FileLogger):
    """Appends one line of JSON a call to a file, such as ``{"step": 3, "accuracy": 0.5}``.

    Values that are not finite become null.

    Args:
        path: The file; missing folders are made.
        purge_step: None: the file must be new. Otherwise it may be there, and its lines from this
            step on are dropped.

    Raises:
        InputError: The file is there (without ``purge_step``), is something else, or cannot be
            written.
    """

    def _text(self, rows: list[dict[str, Any]]) -> str:
        return "".join(json.dumps(row, allow_nan=False) + "\n" for row in finite(rows))

    def _read(self) -> Iterable[dict[str, Any]]:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                is_whole = isinstance(row["step"], int) and line.endswith("\n")
            except (ValueError, KeyError, TypeError):
                is_whole = False
            if is_whole:
                yield row
            elif number < len(lines):
                raise self._damaged(number)


class CsvLogger(_FileLogger):
    """Appends one row a call to a CSV file: the step, then a column for each name.

    A new name adds a column (the file is then rewritten).

    Args:
        path: The file; missing folders are made.
        purge_step: None: the file must be new. Otherwise it may be there, and its rows from this
            step on are dropped.

    Raises:
        InputError: The file is there (without ``purge_step``), is something else, or cannot be
            written.
    """

    def log(self, values: Values, step: int) -> None:
        """Append a row; it is in the file when this returns."""
        if all(name in self.columns for name in values):
            return super().log(values, step)
        with write_errors(self.path):
            self._begin([*self._read(), _row(values, step)])

    def _begin(self, rows: list[dict[str, Any]]) -> None:
        self.columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        super()._begin([dict(zip(self.columns, self.columns)), *rows])

    def _text(self, rows: list[dict[str, Any]]) -> str:
        out = io.StringIO()
        csv.DictWriter(out, self.columns, restval="", lineterminator="\n").writerows(rows)
        return out.getvalue()

    def _read(self) -> Iterable[dict[str, Any]]:
        text = self.path.read_text(encoding="utf-8")
        rows = list(csv.reader(io.StringIO(text)))
        if not text.endswith("\n"):
            rows.pop()
        if not rows or rows[0][0] != "step":
            raise self._damaged(1)
        for number, row in enumerate(rows[1:], 2):
            try:
                cells = {name: cell for name, cell in zip(rows[0], row, strict=True) if cell != ""}
                yield {**cells, "step": int(cells["step"])}
            except (ValueError, KeyError):
                raise self._damaged(number) from None


class TensorBoardLogger(_Closing):
    """Writes scalars for TensorBoard, which ``tensorboard --logdir FOLDER`` shows.

    A ``/`` in a name makes a group.

    Args:
        folder: For the event files; made if missing.
        purge_step: What earlier event files in the folder say of this step and later is not shown
            any more.

    Raises:
        InputError: tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path, *, purge_step: int | None = None) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self.folder = Path(folder)
        with write_errors(self.folder):
            self._writer: Any = SummaryWriter(str(self.folder), purge_step=purge_step)

    def log(self, values: Values, step: int) -> None:
        """Write the values; they are on the disk when this returns."""
        if self._writer is None:
            raise InputError(
                f"the logger of {self.folder} is closed: make a new one with purge_step={step}"
            )
        with write_errors(self.folder):
            for name, value in values.items():
                self._writer.add_scalar(name, float(value), step)
            self._writer.flush()

    def close(self) -> None:
        """Close the event file; may be called more than once."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with write_errors(self.folder):
                writer.close()


def require_tensorboard() -> None:
    """Raise InputError if tensorboard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise InputError(f"tensorboard is not installed: {install('logging')}") from error


def _row(values: Values, step: int) -> dict[str, Any]:
    if "step" in values:
        raise InputError(
            "a value is called step, which is the name of the step itself: give it another name"
        )
    return {"step": step, **{name: float(value) for name, value in values.items()}}
