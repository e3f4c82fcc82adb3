"""The demo: a run, a measurement and a report in one folder, that agree with each other; at full size in the long tests."""

from __future__ import annotations

import io
import json
import os
import time

import pytest
import torch
from PIL import Image
from rich.console import Console

import fastlr
from fastlr import demo
from fastlr.analysis import read_run
from fastlr.cli import main
from fastlr.errors import InputError
from fastlr.models.convnet import ConvNet

SMALL = {"tasks": 3, "epochs": 1, "synthetic_classes": 3, "redundancy_n": 8, "measure_images": 8, "threads": 0}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A small demo: (its folder, its record, what it printed)."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "out"
    console = Console(file=io.StringIO(), width=80, highlight=False)
    record = demo.run(folder, seed=1, n=16, settings=SMALL, console=console)
    return folder, record, console.file.getvalue()


def test_everything_it_names_is_there(shown):
    folder, record, text = shown
    for name in ("run/report/index.html", "run", "per-layer.png", "demo.json"):
        assert f"   {folder / name}" in text and (folder / name).exists()
    picture = Image.open(folder / "per-layer.png").convert("L")
    assert min(picture.size) > 100 and picture.getextrema()[1] - picture.getextrema()[0] > 50
    assert json.loads((folder / "demo.json").read_text())["seed"] == record["seed"] == 1
    lines = [line for line in text.splitlines() if str(folder) not in line]
    assert max(map(len, lines)) <= 80, max(lines, key=len)


def test_what_it_shows_of_the_run_is_in_the_records(shown):
    folder, _, text = shown
    run = read_run(folder / "run")
    assert len(run) == 3 and run.config["preset"] == "demo" and run.config["options"]["seed"] == 1
    rows = [line.split() for line in text[: text.index("Per cent")].splitlines() if " to " in line]
    assert len(rows) == 3
    for t, row in enumerate(rows):
        assert row[:3] == [f"{t}", "to", f"{t}"] and row[3] == f"{100 * run.accuracy[t]:.1f}"
        assert float(row[6]) == pytest.approx(run.measure("local_redundancy")[t], rel=1e-3)
    assert [row[4] for row in rows] == [f"{100 * lost:.1f}" for lost in run.forgetting[:2]] + ["–"]
    assert "Too short for correlations" in text and "Forgetting: what" in text


def test_the_measurement_is_the_estimate_of_the_checkpoints(shown):
    folder, record, text = shown
    images = fastlr.ShapeImages(size=(3, 32, 32))
    checkpoints = folder / "run" / "checkpoints"
    states = torch.load(checkpoints / "initial.pt"), torch.load(checkpoints / "last.pt")["state"]["model"]
    for state, name in zip(states, ("initial", "trained")):
        model = ConvNet()
        model.load_state_dict(state)
        wanted = fastlr.estimate(model, images, n=16, seed=1)
        assert record[name]["value"] == pytest.approx(wanted.value, rel=1e-5)
        assert record[name]["stderr"] == pytest.approx(wanted.stderr, rel=1e-4)
    gap = record["trained"]["value"] - record["initial"]["value"]
    assert record["paired_difference"]["value"] == pytest.approx(gap, rel=1e-6)
    assert "177,218 parameters" in text and "fastlr.estimate(model," in text


def test_a_demo_that_was_interrupted_is_gone_on_with(tmp_path):
    console = Console(file=io.StringIO(), width=80, highlight=False)
    demo._carry_out(console, tmp_path / "run", {"seed": 2, **SMALL, "tasks": 1})
    assert "is there" not in console.file.getvalue()
    demo._carry_out(console, tmp_path / "run", {"seed": 2, **SMALL})
    assert "is there: going on with it" in console.file.getvalue() and len(read_run(tmp_path / "run")) == 3
    with pytest.raises(InputError, match="begun with seed=2, not 3"):
        demo._carry_out(console, tmp_path / "run", {"seed": 3, **SMALL})


def test_the_command(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    for part in ((), ("network",)):
        assert main(["demo", *part, "--output", str(tmp_path / "file" / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["demo", "networks"]) == 2
    assert "choose one of tasks, network" in capsys.readouterr().err
    called = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run", lambda output, seed: called.append((str(output), seed)))
    assert main(["demo", "--seed", "4"]) == 0
    assert called == [("demo-output", 4)]


@pytest.mark.long
def test_full_size_takes_at_most_three_minutes_and_shows_correlations(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    console = Console(file=io.StringIO(), width=80, highlight=False)
    begin = time.perf_counter()
    try:
        demo.run(tmp_path, console=console)
    finally:
        torch.set_num_threads(threads)
    assert time.perf_counter() - begin < 180
    assert "correlation beyond" in console.file.getvalue()
    assert read_run(tmp_path / "run").accuracy[:20].mean() > 0.65
