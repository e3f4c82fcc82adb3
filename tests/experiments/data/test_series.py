"""Time series: what a file must be, and the windows that come of it."""

from datetime import datetime, timedelta

import numpy as np
import torch
from expected import refused, warned
from pytest import mark, raises

from fastlr.experiments.data import open_series, split_series
from fastlr.experiments.data.series import generated_series, read_series


def write(path, rows=40, change=lambda lines: None, step=timedelta(hours=1)):
    """Write a file of two features, a = its row and b = -2 x its row; return its path.

    ``change`` mends the lines in place.
    """
    begin = datetime(2016, 7, 1)
    lines = ["date,a,b", *(f"{begin + i * step},{i},{-2.0 * i}" for i in range(rows))]
    change(lines)
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_file_is_read_as_it_stands(tmp_path):
    table = read_series(write(tmp_path / "s.csv"))
    assert (table.name, table.columns, table.step, table.values.shape) == (
        "s",
        ("a", "b"),
        3600.0,
        (40, 2),
    )
    np.testing.assert_array_equal(
        table.values, np.stack([np.arange(40.0), -2 * np.arange(40.0)], 1)
    )

    def elsewhere(lines):
        # A byte order mark, blanks, another place and form of the date, an empty line.
        lines[:] = [
            f"{b}, {a} , 2016/7/{1 + i} 0:00"
            for i, (_, a, b) in enumerate(x.split(",") for x in lines[1:9])
        ]
        lines.insert(0, "\ufeffb,a,Timestamp")
        lines.insert(3, "")

    other = read_series(write(tmp_path / "t.csv", change=elsewhere))
    assert other.columns == ("b", "a")
    assert other.step == 86400
    assert other.values[7].tolist() == [-14.0, 7.0]
    assert other.digest != table.digest == read_series(write(tmp_path / "u.csv")).digest


@mark.parametrize(
    ("line", "text", "message"),
    [
        (5, "2016-07-01 04:00:00,x,1", r"s.csv, line 6, column a: 'x' is no finite number"),
        (5, "2016-07-01 04:00:00,1,", r"line 6, column b: the cell is empty"),
        (5, "2016-07-01 04:00:00,1,nan", r"line 6, column b: 'nan' is no finite number"),
        (5, "2016-07-01 04:00:00,1", r"line 6: 2 cells, but the header has 3"),
        (5, "yesterday,1,1", r"line 6, column date: 'yesterday' is no date"),
        (
            5,
            "2016-07-01 03:00:00,1,1",
            r"line 6, column date: .* is not later than 2016-07-01 03:00:00: sort the rows",
        ),
        (
            6,
            "",
            r"line 8, column date: 2016-07-01 06:00:00 leaves a gap after .* 04:00:00 .*3600 s",
        ),
        (0, "day,a,b", r"no date column among day, a, b"),
        (0, "date,time,b", r"2 columns that could be the date column"),
        (0, "date,a,a", r"two columns called a"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, line, text, message):
    path = write(tmp_path / "s.csv", change=lambda lines: lines.__setitem__(line, text))
    with refused(message):
        read_series(path)


@mark.filterwarnings("error")
def test_a_cell_that_flattens_its_column_is_named(tmp_path):
    with warned(r"s.csv, line 6, column a: 1e\+300 is more than 10000 times as far from"):
        read_series(
            write(
                tmp_path / "s.csv",
                change=lambda lines: lines.__setitem__(5, "2016-07-01 04:00:00,1e300,1"),
            )
        )

    def rare(lines):
        for i, line in enumerate(lines[1:]):
            lines[1 + i] = f"{line.rpartition(',')[0]},{i == 7:d}"

    assert read_series(write(tmp_path / "t.csv", change=rare)).values[:, 1].sum() == 1


def test_files_that_are_none(tmp_path):
    for content, message in (
        (b"", "no date column among nothing"),
        (b"date\n2016-07-01\n", "no column besides date"),
        (b"date,a\n2016-07-01,1\n", "has 1 rows"),
        (b"day,a\n2016-07-01,1\n", "separate columns by commas"),
        ("date,a\n2016-07-01,1\n".encode("utf-16"), "no CSV file of numbers in UTF-8"),
        (
            b"date,a\n2016-07-01," + b"1" * (1 << 18),
            "in UTF-8: field larger",
        ),
    ):
        (tmp_path / "x.csv").write_bytes(content)
        with refused(message):
            read_series(tmp_path / "x.csv")
    with refused("cannot read .*: No such file"):
        read_series(tmp_path / "none.csv")


def test_months_are_even_steps(tmp_path):
    def months(lines):
        lines[1:] = [f"2016-{1 + i:02d}-01,{i},{i}" for i in range(12)]

    assert read_series(write(tmp_path / "m.csv", change=months)).step == 31 * 86400


def test_a_series_is_found_by_name(tmp_path, monkeypatch):
    write(tmp_path / "here.csv")
    monkeypatch.delenv("FASTLR_DATA", raising=False)
    with refused("no series here: .* FASTLR_DATA is not set; give the path"):
        open_series("here")
    monkeypatch.setenv("FASTLR_DATA", str(tmp_path))
    assert (
        open_series("here").digest
        == open_series("here.csv").digest
        == open_series(str(tmp_path / "here.csv")).digest
    )
    with refused("no series ETTm1: .* holds no ETTm1.csv"):
        open_series("ETTm1")
    with refused("no series none.csv: .* holds no none.csv; give"):
        open_series("none.csv")
    assert open_series("generated:3", rows=50).digest == generated_series(50, seed=3).digest
    with refused("generated:SEED"):
        open_series("generated:x")


def test_generated_series_repeat_by_day_and_week():
    table = generated_series(rows=4032, seed=5)  # 24 weeks
    again = generated_series(rows=200, seed=5)
    other = generated_series(rows=4032, seed=6)
    np.testing.assert_array_equal(again.values, table.values[:200])
    assert table.name == "generated:5"
    assert table.path is None
    assert table.step == 3600
    assert np.abs(table.values - other.values).min(0).max() > 0, "seeds give different series"
    power = np.abs(np.fft.rfft(table.values - table.values.mean(0), axis=0)) ** 2
    strongest = np.argsort(power[2:], axis=0)[-1] + 2
    assert set(strongest) == {4032 // 24}, "the daily cycle"
    around = np.median(power[15:40], axis=0)
    assert (power[24] > 30 * around).all(), "the weekly cycle"


def test_windows_are_rows_of_their_part(tmp_path):
    table = read_series(write(tmp_path / "s.csv", rows=100))
    split = split_series(table, context=6, horizon=3)
    assert (len(split.train), len(split.validation)) == (80 - 8, 20 - 8)
    a = np.arange(80.0)
    np.testing.assert_allclose(split.mean, [a.mean(), -2 * a.mean()])
    np.testing.assert_allclose(split.std, [a.std(), 2 * a.std()])
    for windows, first in ((split.train, 0), (split.validation, 80)):
        index = torch.tensor([0, 5, len(windows) - 1])
        x, y = windows.batch(index)
        assert x.shape == (3, 6, 2)
        assert y.shape == (3, 3, 2)
        assert x.dtype == torch.float32
        whole = torch.cat([x, y], 1).double().numpy() * split.std + split.mean
        wanted = first + index[:, None] + torch.arange(9)
        np.testing.assert_allclose(whole[..., 0], wanted, atol=1e-4)
        np.testing.assert_allclose(whole[..., 1], -2 * wanted, atol=1e-4)
    assert split.train.values.mean(0).abs().max() < 1e-6
    assert split.train.to("cpu", torch.float64).batch(torch.tensor([1]))[0].dtype == torch.float64
    with raises(IndexError):
        split.validation.batch(torch.tensor([len(split.validation)]))


def test_too_short_and_constant_series_are_named(tmp_path):
    table = read_series(write(tmp_path / "s.csv", rows=100))
    with refused("100 rows, 80 for training and 20 for validation: .* need 21 in each, 105 in all"):
        split_series(table, context=15, horizon=6)
    split_series(table, context=15, horizon=5)

    def constant(lines):
        lines[1:81] = [line.rpartition(",")[0] + ",7" for line in lines[1:81]]

    with refused("column b: constant in the first 80 rows"):
        split_series(
            read_series(write(tmp_path / "c.csv", rows=100, change=constant)), context=6, horizon=3
        )


def test_the_hourly_series_of_the_benchmark(fastlr_data):
    table = open_series("ETTh1")
    assert table.values.shape == (17420, 7)
    assert table.columns[-1] == "OT"
    split = split_series(table)
    assert (len(split.train), len(split.validation)) == (13329, 2877)
