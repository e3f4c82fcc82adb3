"""What changes of structure must keep, as commit 116e285 made it: see bench/frozen.py."""

import json
from pathlib import Path

from pytest import approx, mark

from bench import frozen

FROZEN = Path(frozen.__file__).parent / "results/cpu/frozen"
# How close another processor comes. Networks and the statistics of their batch norms are made in
# float32 and cast, so float64 is no closer than float32's rounding of them (PatchTST: 1.6e-8).
CLOSE = {"float32": 1e-4, "float64": 1e-6, "bfloat16": 5e-2}


@mark.long
def test_estimates_are_the_same_to_the_bit(tmp_path):
    frozen.make_estimates(tmp_path, tmp_path)
    old, new = (
        json.loads((folder / "estimates.json").read_text()) for folder in (FROZEN, tmp_path)
    )
    if old["made_by"] == new["made_by"]:
        assert list(frozen.values_that_differ("estimates", old, new)) == []
    if not frozen.torch_has_lstms_in_bfloat16():
        del old["lstm bfloat16"]
    assert old.keys() == new.keys()
    for name in old.keys() - {"made_by"}:
        value, wanted = (float.fromhex(table[name]["value"]) for table in (new, old))
        assert value == approx(wanted, rel=CLOSE[name.split()[-1]]), name
        assert new[name]["routes"] == old[name]["routes"]


@mark.long
def test_reports_are_the_same_but_for_last_digits(tmp_path):
    """Processors of one name add in other orders, so not to the last digit."""
    frozen.make_reports(tmp_path, FROZEN)
    for path in frozen.files(FROZEN / "reports"):
        old, new = (folder / "reports" / path for folder in (FROZEN, tmp_path))
        assert list(frozen.texts_that_differ_beyond_rounding(old, new, str(path))) == []


def test_differences_are_listed(tmp_path):
    for name, value in (("old", 0.5), ("new", 0.25)):
        for room in ("runs", "reports"):
            (tmp_path / name / room).mkdir(parents=True)
        (tmp_path / name / "estimates.json").write_text(json.dumps({"net": {"value": value}}))
        (tmp_path / name / "reports/a.md").write_text(f"value {value}\n")
        (tmp_path / name / "runs/a.jsonl").write_text(json.dumps({"a": value, "seconds": value}))
    assert list(frozen.compared(tmp_path / "old", tmp_path / "new")) == [
        "estimates.net.value: 0.5, now 0.25",
        "runs/a.jsonl:0.a: 0.5, now 0.25",
        "reports/a.md: -value 0.5",
        "reports/a.md: +value 0.25",
    ]


@mark.parametrize(
    ("old", "new", "alike"),
    [
        ("r = 0.123456789", "r = 0.123456788", True),
        ("r = 0.12 ± 0.03", "r = 0.13 ± 0.03", True),  # rounded the other way
        ("1,230 of 5e-7", "1,231 of 5e-7", True),
        ("| -0.0000 |", "| 0.0000 |", True),  # -1e-9 and 1e-9
        ("-0.02", "0.02", False),
        ("r = 0.12", "r = 0.14", False),
        ("r = 1.23456789", "r = 1.23466789", False),
        ("it has fallen by 3", "it has risen by 3", False),
        ("1 2", "1", False),
    ],
)
def test_last_digits_are_rounding_and_all_else_is_not(tmp_path, old, new, alike):
    paths = tmp_path / "old.md", tmp_path / "new.md"
    for path, text in zip(paths, (old, new), strict=True):
        path.write_text(text)
    assert alike == (list(frozen.texts_that_differ_beyond_rounding(*paths, "it")) == [])
