"""The benchmark of reductions: it checks before it measures, and its record says what was measured."""

from __future__ import annotations

import json

import pytest

from bench import reductions


def test_sizes_go_from_1_kb_to_1_gb():
    assert reductions.sizes(4096) == [2**10, 2**13, 2**16, 2**19, 2**22, 2**25, 2**28, 2**30]
    assert reductions.sizes(0.01) == [1024, 8192]


def test_the_slowest_rank_counts():
    found = [{"seconds": {1024: {"a": [1.0, 5.0, 2.0]}}}, {"seconds": {1024: {"a": [3.0, 1.0, 2.0]}}}]
    (row,) = reductions.joined(2, found)
    assert row["seconds"] == 3.0 and row["repeats"] == 3
    assert row["bus_bytes_per_second"] == pytest.approx(1024 / 3)


def test_a_small_run(tmp_path, capsys):
    record = tmp_path / "reductions.json"
    arguments = ["--device", "cpu", "--ranks", "1", "2", "--largest", "0.001", "--rounds", "1", "--json", str(record)]
    assert reductions.main(arguments) == 0
    found = json.loads(record.read_text())
    assert found["ranks"]["2"]["wrong"] == found["ranks"]["1"]["wrong"] == []
    assert found["environment"]["command"].startswith("python")
    names = {row["name"] for row in found["rows"] if row["ranks"] == 2}
    assert {"gloo all_reduce", "reduce_sq_norm, torch.distributed"} <= names
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert {row["bytes"] for row in found["rows"]} == {1024}
    assert "1 KB" in capsys.readouterr().out


def test_wrong_sums_are_not_timed(monkeypatch):
    monkeypatch.setattr(reductions, "run_ranks", lambda *_, **__: [
        {"route": ["extension", "x"], "errors": {}, "wrong": ["all_reduce, extension, 1000 elements"], "seconds": {}}
    ])  # fmt: skip
    assert reductions.main(["--device", "cpu", "--ranks", "2"]) == 1


@pytest.mark.parametrize("arguments", [["--ranks", "9"], ["--rounds", "0"], ["--device", "tpu"]])
def test_arguments_are_checked(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        reductions.main(arguments)
    assert caught.value.code == 2
    capsys.readouterr()
