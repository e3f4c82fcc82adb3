"""Multivariate time series, split in time, normalised, and cut into windows by index.

They are read from CSV files such as ETT's, or generated.
"""

from __future__ import annotations

import csv
import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlr.errors import InputError, warn
from fastlr.ops.philox import STREAMS, check_seed, normals

DATES = ("date", "datetime", "timestamp", "time")  # names of the date column, in any case
_FORMATS = ("%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d")  # besides ISO 8601
_DAY, _WEEK = 24, 168
_FEATURES = 7  # of a generated series, called F0, F1, ...
_OUTLIER = 1e4  # times the median distance from the median


@dataclass(frozen=True)
class Table:
    """A series as it was read or made.

    Attributes:
        name: Name of the file without its ending, or "generated:SEED".
        path: The file; None if it was generated.
        columns: Names of the features.
        values: ``[rows, features]``, float64, in the unit of the file.
        step: Seconds from row to row.
    """

    name: str
    path: Path | None
    columns: tuple[str, ...]
    values: NDArray[np.float64]
    step: float

    @property
    def digest(self) -> str:
        """SHA-256 of the names and values."""
        text = "\n".join(self.columns).encode()
        return hashlib.sha256(text + np.ascontiguousarray(self.values).tobytes()).hexdigest()


def open_series(name: str, rows: int = 4000) -> Table:
    """Return the series called ``name``.

    Args:
        name: The path of a CSV file; the name of one in the folder that the environment variable
            FASTLR_DATA names, with or without ".csv" (``ETTh1``); or ``generated`` or
            ``generated:SEED`` for `generated_series`.
        rows: Rows of a generated series.

    Raises:
        InputError: There is no such series, or it is unusable (see `read_series`).
    """
    if name.partition(":")[0] == "generated":
        seed = name.partition(":")[2] or "0"
        if not seed.isdecimal():
            raise InputError(f"{name}: write generated:SEED with a whole number")
        return generated_series(rows, seed=int(seed))
    if Path(name).is_file():
        return read_series(name)
    folder = os.environ.get("FASTLR_DATA", "")
    for ending in ("", ".csv"):
        if folder and name and (Path(folder) / (name + ending)).is_file():
            return read_series(Path(folder) / (name + ending))
    file = f"{name.removesuffix('.csv')}.csv"
    where = f"FASTLR_DATA={folder} holds no {file}" if folder else "FASTLR_DATA is not set"
    raise InputError(
        f"no series {name or '(empty name)'}: there is no such file, and {where}; give the path of "
        "a CSV file with a date column (ETT: github.com/zhouhaoyi/ETDataset), or generated"
    )


def read_series(path: str | Path) -> Table:
    """Read a CSV file: a header, a column of dates, and any number of numeric columns.

    The numeric columns are the features.

    Dates (column "date", "datetime", "timestamp" or "time") are in ISO 8601 or as 2016/7/1 0:00,
    and rows must follow each other in even steps: a step more than half as long again as the median
    is a gap (so months are even).

    The file is in UTF-8, with commas between cells.

    Raises:
        InputError: No such file; a cell that is empty, no number or not finite, a date that cannot
            be read, a row with too few or many cells, a gap or a step back: each named with line
            and column. No date column, no feature, two columns of one name, fewer than two rows.
    """
    path = Path(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return _read(path, csv.reader(file))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no CSV file of numbers in UTF-8: {error}") from error


def _read(path: Path, reader: Iterator[list[str]]) -> Table:
    header = [cell.strip() for cell in next(reader, [])]
    date_column = _date_column(path, header)
    named = header[date_column]
    columns = header[:date_column] + header[date_column + 1 :]
    dates: list[datetime] = []
    lines: list[int] = []
    values: list[list[float]] = []
    for row in reader:
        if not any(cell.strip() for cell in row):
            continue
        lines.append(reader.line_num)  # type: ignore[attr-defined]
        where = f"{path}, line {lines[-1]}"
        if len(row) != len(header):
            raise InputError(f"{where}: {len(row)} cells, but the header has {len(header)}")
        dates.append(_date(row.pop(date_column).strip(), f"{where}, column {named}"))
        values.append([_number(cell, f"{where}, column {of}") for of, cell in zip(columns, row)])
    if len(values) < 2:
        raise InputError(f"{path} has {len(values)} rows: a series needs at least two")
    step = _even_step(path, named, dates, lines)
    table = Table(path.stem, path.absolute(), tuple(columns), np.array(values), step)
    _warn_of_outliers(table, lines)
    return table


def _date_column(path: Path, header: list[str]) -> int:
    """Return the place of the column of dates; refuse a header that is not that of a series."""
    named = [i for i, cell in enumerate(header) if cell.lower() in DATES]
    if len(named) != 1:
        count = "no" if not named else f"{len(named)} columns that could be the"
        raise InputError(
            f"{path}: {count} date column among {', '.join(header[:8]) or 'nothing'}: name one of "
            "them date, and separate columns by commas"
        )
    if len(header) == 1:
        raise InputError(f"{path} has no column besides {header[0]}: there is nothing to forecast")
    for name in header:
        if header.count(name) > 1:
            raise InputError(
                f"{path} has two columns called {name or '(empty name)'}: give each a name of its "
                "own"
            )
    return named[0]


def _warn_of_outliers(table: Table, lines: list[int]) -> None:
    """Warn of a cell so far out that normalising flattens the rest of its column to a line."""
    for column, cells in zip(table.columns, table.values.T):
        with np.errstate(over="ignore"):
            distance = np.abs(cells - np.median(cells))
        changing = distance[distance > 0]
        at = int(distance.argmax())
        if len(changing) and distance[at] > _OUTLIER * np.median(changing):
            warn(
                f"{table.path}, line {lines[at]}, column {column}: {cells[at]:g} is more than "
                f"{_OUTLIER:g} times as far from the median as other cells are, and flattens the "
                "column when it is normalised; mend it if it is an error"
            )


def _number(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        what = f"{text.strip()!r} is no finite number" if text.strip() else "the cell is empty"
        raise InputError(f"{where}: {what}; fill it in, or leave the column out")
    return number


def _date(text: str, where: str) -> datetime:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        pass
    for form in _FORMATS:
        try:
            return datetime.strptime(text, form)
        except ValueError:
            continue
    raise InputError(f"{where}: {text!r} is no date; write 2016-07-01 00:00:00")


def _even_step(path: Path, column: str, dates: list[datetime], lines: list[int]) -> float:
    steps = np.array([(after - before).total_seconds() for before, after in zip(dates, dates[1:])])
    usual = float(np.median(steps))
    for i, step in enumerate(steps):
        if step <= 0 or step > 1.5 * usual:
            what = f"leaves a gap after {dates[i]} (the usual step is {usual:g} s): mend the rows"
            if step <= 0:
                what = f"is not later than {dates[i]}: sort the rows by {column}, each date once"
            raise InputError(
                f"{path}, line {lines[i + 1]}, column {column}: {dates[i + 1]} {what}; windows "
                "need even steps"
            )
    return usual


def generated_series(rows: int = 4000, *, seed: int = 0) -> Table:
    """Make an hourly series with daily and weekly cycles: for the demo and tests, not for findings.

    Each of its 7 features has a level, a daily cycle with a second harmonic, a weekly cycle, a slow
    drift and noise that forgets its past with 0.9 a step; half of the noise is common to all.
    Amplitudes and phases differ from feature to feature and from seed to seed. The same numbers on
    every machine, up to the last bits of sines.

    Args:
        rows: Hours.
        seed: In ``[0, 2**64)``.

    Raises:
        InputError: Fewer than two rows, or a seed out of range.

    Example:
        >>> generated_series(rows=100).values.shape
        (100, 7)
    """
    check_seed(seed)
    if rows < 2:
        raise InputError(f"a generated series of {rows} rows: give at least 2")

    def draw(start: int, count: int, width: int) -> NDArray[np.float64]:
        stream = STREAMS["generated series"]
        noise = normals(
            start,
            start + count,
            (width,),
            stream=stream,
            seed=seed,
            dtype=torch.float64,
            device="cpu",
        )
        return noise.numpy()

    shape = draw(0, 8, _FEATURES)  # the noise of hour t is drawn at index 8 + t
    hours = np.arange(rows, dtype=np.float64)[:, None]
    day, week = 2 * np.pi * hours / _DAY, 2 * np.pi * hours / _WEEK
    values = 10 + 5 * shape[0]
    values = values + (1.5 + 0.5 * np.abs(shape[1])) * np.sin(day + shape[2])
    values = values + (0.4 + 0.2 * np.abs(shape[3])) * np.sin(2 * day + 2 * shape[4])
    values = values + (0.8 + 0.4 * np.abs(shape[5])) * np.sin(week + 2 * shape[6])
    values = values + 0.5 * np.sin(2 * np.pi * hours / 2000 + 2 * shape[7])
    noise = draw(8, rows, _FEATURES + 1)
    noise = 0.3 * (noise[:, :1] + noise[:, 1:]) / math.sqrt(2)
    state = np.zeros(_FEATURES)
    for hour in range(rows):
        state = 0.9 * state + noise[hour]
        values[hour] += state
    names = tuple(f"F{i}" for i in range(_FEATURES))
    return Table(f"generated:{seed}", None, names, values, 3600.0)


@dataclass(frozen=True)
class Windows:
    """Windows of a part of a series that lies on a device.

    A window is a copy of rows only while it is in a batch.

    Attributes:
        values: ``[rows, features]``, normalised.
        context: Rows that are seen.
        horizon: Rows after them that are forecast.
    """

    values: Tensor
    context: int
    horizon: int

    def __len__(self) -> int:
        return len(self.values) - self.context - self.horizon + 1

    def batch(
        self,
        index: Tensor,  # [B] int64
    ) -> tuple[Tensor, Tensor]:
        """Return the windows that begin at rows ``index``, and what follows each of them.

        Shapes: ``[B, context, features]`` and ``[B, horizon, features]``.
        """
        rows = index[:, None] + torch.arange(self.context + self.horizon, device=index.device)
        windows = self.values[rows]
        return windows[:, : self.context], windows[:, self.context :]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Windows:
        """Return the windows on a device, in a dtype."""
        return Windows(self.values.to(device, dtype), self.context, self.horizon)


@dataclass(frozen=True)
class SplitSeries:
    """A series split in time into a training and a validation part.

    Both are normalised by the mean and standard deviation of each feature in the first.

    Attributes:
        table: What it was made of.
        train: Windows that lie in the first part.
        validation: Windows that lie in the rest; none reaches back into the first part.
        mean: Mean of each feature in the first part, float64.
        std: Standard deviation (over n), likewise.
    """

    table: Table
    train: Windows
    validation: Windows
    mean: NDArray[np.float64]
    std: NDArray[np.float64]


def split_series(
    table: Table, context: int = 512, horizon: int = 96, share: float = 0.8
) -> SplitSeries:
    """Split a series into training and validation windows (paper, appendix A.2).

    Args:
        table: The series.
        context: Rows of a window that are seen.
        horizon: Rows that follow them.
        share: Share of the rows, the first ones, for training.

    Returns:
        The windows, float32 on the CPU.

    Raises:
        InputError: Too few rows in either part, or a feature that does not change in the first.

    Example:
        >>> split = split_series(generated_series(rows=1000), context=48, horizon=12)
        >>> _, targets = split.train.batch(torch.tensor([0, 5]))
        >>> len(split.train), len(split.validation), targets.shape
        (741, 141, torch.Size([2, 12, 7]))
    """
    if context < 1 or horizon < 1 or not 0 < share < 1:
        raise InputError(
            f"context={context}, horizon={horizon}, share={share}: give two counts and a share in "
            "(0, 1)"
        )
    rows, window = len(table.values), context + horizon
    train_rows = math.floor(share * rows + 1e-9)
    source = table.path or table.name
    if min(train_rows, rows - train_rows) < window:
        least = math.ceil(window / min(share, 1 - share) - 1e-9)
        raise InputError(
            f"{source} has {rows} rows, {train_rows} for training and {rows - train_rows} for "
            f"validation: windows of {context} + {horizon} need {window} in each, {least} in all; "
            "give more rows, or a smaller context or horizon"
        )
    mean, std = table.values[:train_rows].mean(0), table.values[:train_rows].std(0)
    for column, deviation, centre in zip(table.columns, std, mean):
        if not deviation > 1e-12 * abs(centre):
            raise InputError(
                f"{source}, column {column}: constant in the first {train_rows} rows; leave the "
                "column out"
            )
    scaled = torch.from_numpy(((table.values - mean) / std).astype(np.float32))
    train, validation = scaled[:train_rows].contiguous(), scaled[train_rows:].contiguous()
    return SplitSeries(
        table, Windows(train, context, horizon), Windows(validation, context, horizon), mean, std
    )
