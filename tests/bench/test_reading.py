"""The counter of packed statements counts what its definitions say, and fails over a limit."""

import pytest

from bench import reading

SOURCE = '''"""A docstring counts as no statement."""

plain = [x for x in range(3)]
packed = [x if x else 1 for x in range(3)]
very = [(lambda: x)() if x else 1 for x in range(3)]


def function(a, b):
    if a and b:
        return [x for x in a for y in x]
    return 0


class Public:
    pass
'''


@pytest.fixture
def counts(tmp_path):
    """Counts of two modules, of which one only has a class of the same name."""
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "two.py").write_text("class Public:\n    pass\n" + "#" * 101 + "\n")
    return reading.count_folder(tmp_path)


def test_statements(counts):
    assert counts.statements == 11  # with pass, and the headers of if, function and class
    assert (counts.packed_statements, counts.very_packed_statements) == (2, 1)


def test_lines_and_names(counts):
    assert counts.wide == 1
    assert counts.ambiguous_names == ["Public"]


def test_branches(counts, monkeypatch, tmp_path):
    assert counts.branchy == 0
    monkeypatch.setattr(reading, "MOST_BRANCHES", 3)  # if, and, for, for
    assert [place.split()[-1] for _, place in reading.count_folder(tmp_path).branchy_functions] == [
        "function"
    ]


def test_a_limit_that_is_exceeded_is_named(counts, monkeypatch):
    monkeypatch.setattr(reading, "LIMITS", {"folder": {"wide": 0, "ambiguous": 1}})
    assert list(reading.over_limits("folder", counts)) == [
        "folder: wide is 1, its limit 0 (bench/reading.py)"
    ]
