"""Estimates and tables of reports are those committed in bench/results/cpu/frozen."""

import json

from pytest import approx, mark

from bench import frozen

# How close another processor comes. Networks and the statistics of their batch norms are made in
# float32 and cast, so float64 is no closer than float32's rounding of them (PatchTST: 1.6e-8).
CLOSE = {"float32": 1e-4, "float64": 1e-6, "bfloat16": 5e-2}


@mark.long
def test_estimates_are_the_same_to_the_bit(tmp_path):
    frozen.make_estimates(tmp_path)
    old, new = (
        json.loads((folder / "estimates.json").read_text()) for folder in (frozen.FROZEN, tmp_path)
    )
    if old["made_by"] == new["made_by"]:
        assert list(frozen.estimates_that_differ(old, new)) == []
    if not frozen.torch_has_lstms_in_bfloat16():
        del old["lstm bfloat16"]
    assert old.keys() == new.keys()
    for name in old.keys() - {"made_by"}:
        value, wanted = (float.fromhex(table[name]["value"]) for table in (new, old))
        assert value == approx(wanted, rel=CLOSE[name.split()[-1]]), name
        assert new[name]["routes"] == old[name]["routes"]


@mark.long
def test_tables_are_the_same_but_for_last_digits(tmp_path):
    """Processors of one name add in other orders, so not to the last digit."""
    frozen.make_reports(tmp_path)
    assert list(frozen.tables_that_differ(frozen.FROZEN, tmp_path)) == []


def test_estimates_that_differ_are_listed():
    old = {"net": {"value": "0x1p-1", "stderr": "0x1p-4"}}
    new = {"net": {"value": "0x1p-2", "stderr": "0x1p-4"}, "other": {"value": "0x1p-1"}}
    assert list(frozen.estimates_that_differ(old, new)) == [
        "net.value: 0x1p-1, now 0x1p-2",
        "other.value: None, now 0x1p-1",
    ]


@mark.parametrize(
    ("old", "new", "alike"),
    [
        ("r = 0.123456789", "r = 0.123456788", True),
        ("0.12 ± 0.03", "0.13 ± 0.03", True),  # rounded the other way
        ("1,230 of 5e-7", "1,231 of 5e-7", True),
        ("-0.0000", "0.0000", True),  # -1e-9 and 1e-9
        ("it has fallen by 3", "it fell by 3", True),  # texts are not compared
        ("-0.02", "0.02", False),
        ("0.12", "0.14", False),
        ("1.23456789", "1.23466789", False),
        ("1 2", "1", False),
    ],
)
def test_last_digits_are_rounding_and_all_else_is_not(tmp_path, old, new, alike):
    for folder, cell in (("old", old), ("new", new)):
        (tmp_path / folder / "reports").mkdir(parents=True)
        (tmp_path / folder / "reports/a.csv").write_text(f'column\n"{cell}"\n')
    assert alike == (not list(frozen.tables_that_differ(tmp_path / "old", tmp_path / "new")))


def test_a_missing_row_or_table_differs(tmp_path):
    for folder, rows in (("old", "1\n2\n"), ("new", "1\n")):
        (tmp_path / folder / "reports").mkdir(parents=True)
        (tmp_path / folder / "reports/a.csv").write_text(f"column\n{rows}")
    (tmp_path / "old/reports/b.csv").write_text("column\n1\n")
    (tmp_path / "new/reports/c.csv").write_text("column\n1\n")
    assert list(frozen.tables_that_differ(tmp_path / "old", tmp_path / "new")) == [
        "reports/a.csv: 2 rows, now 1",
        "reports/b.csv: missing",
        "reports/c.csv: only in the new folder",
    ]
