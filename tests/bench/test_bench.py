"""pytest bench/: contenders are checked before they are timed, each time paired with plain.

One record of a run gives both the table and the figure.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import contenders
import torch
from definitions import definition
from pytest import UsageError, approx, fixture, mark, raises

from bench import conftest, layers, paired, table, test_norms
from bench.paired import CannotRun, Child, Wrong, ratios
from fastlr import ops
from fastlr.errors import InputError

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@fixture(autouse=True)
def of_no_worker(monkeypatch):
    """Hide pytest-xdist from a pytest that a test begins: pytest-benchmark refuses workers."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)


def pytest_bench(*arguments):
    options = "-m pytest -q -p no:cacheprovider --quick --device=cpu".split()
    return subprocess.run(
        [sys.executable, *options, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


# -------------------------------------------------------------------------------------------------
# rounds beside plain
def test_a_child_checks_and_times_and_is_not_waited_for_without_end(monkeypatch):
    with Child(contenders.right, watch_memory=True) as child:
        assert child.ask("check") == {"deviation": 0.0, "notes": ["a note"]}
        assert child.ask("run") >= 0.02
        assert 0.01 <= child.ask("plain") < 5
        plain, run = child.ask("peaks")
        assert plain < 30 << 20 <= run < 110 << 20
        monkeypatch.setattr(paired, "LIMIT", 0.1)
        monkeypatch.setattr(child, "_made_by", (contenders.right, 60.0))
        began = time.monotonic()
        with raises(CannotRun, match="^TimeoutError"):
            child.ask("run")
    assert time.monotonic() - began < 30


@fixture(scope="module")
def child():
    """A child for several contenders; the one that kills it comes last."""
    with Child(contenders.right) as child:
        yield child


@mark.parametrize(
    "factory, part, error, says",
    [
        (contenders.wrong, "check", Wrong, "3.5 times the truth"),
        (contenders.fails, "plain", CannotRun, "^RuntimeError: no such layer$"),
        (contenders.killed, "run", CannotRun, "terminated abruptly"),
    ],
)
def test_what_goes_wrong_in_a_child_is_said(child, monkeypatch, factory, part, error, says):
    monkeypatch.setattr(child, "_made_by", (factory,))
    with raises(error, match=says):
        child.ask(part)


def test_ratios_are_taken_within_rounds():
    summary = ratios([2.0, 20.0, 4.0], [1.0, 10.0, 1.0])
    assert summary["ratio"] == 2.0
    assert summary["seconds"] == 4.0
    assert summary["plain_seconds"] == 1.0
    assert summary["ratio_p20"] == 2.0
    assert summary["ratio_p80"] == approx(3.2)
    assert ratios([1.0], [2.0])["ratio_p80"] == 0.5


# --------------------------------------------------------------------------------------------------
# the ops
def test_every_op_with_a_kernel_has_cases_of_its_own_name():
    names = set(ops.with_kernels())
    assert set(layers.CASES) == names, "add the op to bench/layers.py"


def test_all_cases_agree_with_their_definitions():
    draw = layers.Draw(CPU, torch.float32, batch=3, shrink=32)
    for name, cases in layers.CASES.items():
        for case in cases.values():
            call = case(draw)
            test_norms.check(name, ops.get(name, "torch")(*call.args, **call.options), call, CPU)


def test_the_check_sees_one_sample_a_missing_output_and_what_was_not_written():
    call = layers.CASES["channel_sums"]["64 @112"](
        layers.Draw(CPU, torch.float32, batch=4, shrink=16)
    )
    right = ops.get("channel_sums", "torch")(*call.args)
    assert test_norms.check("channel_sums", right, call, CPU) < 1e-4
    off = [t.clone() for t in right]
    off[0][3] *= 1.1
    with raises(AssertionError, match="off by 0.1 of the definition"):
        test_norms.check("channel_sums", off, call, CPU)
    with raises(AssertionError, match="off by inf"):
        test_norms.check("channel_sums", right[:1], call, CPU)
    test_norms.spoil(right, call)
    with raises(AssertionError, match="off by inf"):
        test_norms.check("channel_sums", right, call, CPU)
    assert all(t.isfinite().all() for t in call.args), "the arguments are left alone"
    (shapes,) = layers.CASES["shape_images_at"].values()
    images = shapes(layers.Draw(CPU, torch.float32, batch=3, shrink=16))
    drawn = definition("shape_images_at")(*images.args, **images.options)
    test_norms.check("shape_images_at", drawn, images, CPU)
    drawn[2, 0, 0, 0] += 1
    with raises(AssertionError, match="other bits"):
        test_norms.check("shape_images_at", drawn, images, CPU)


# --------------------------------------------------------------------------------------------------
# runs and records
def test_a_run_writes_its_record_and_xdist_is_refused(tmp_path):
    done = pytest_bench(
        "bench/test_norms.py",
        "-kfold_weights",
        f"--benchmark-json={tmp_path}/a.json",
    )
    assert done.returncode == 0, done.stdout[-2000:]
    record = table.read(tmp_path / "a.json")
    info = record["benchmarks"][0]["extra_info"]
    assert info["deviation"] <= 1e-4
    assert info["share"] > 0
    assert info["bytes"] > 0
    about = record["machine_info"]
    assert about["versions"]["torch"] == torch.__version__.split("+")[0]
    assert about["cpu"]
    assert about["threads"] == 1
    assert about["command"].startswith("pytest -q")
    assert "node" not in about
    assert all(": same" in line for line in table.compared(record, record))
    with raises(UsageError, match="leave -n out"):
        conftest.pytest_configure(Mock())


CONTENDERS = """
import contenders, pytest

CASES = [("right", False), ("wrong", True), ("fails", True), ("wrong", False)]

@pytest.mark.parametrize("name, rival", CASES)
def test_contender(beside_plain, name, rival):
    beside_plain(getattr(contenders, name), group="g", name=name, rival=rival)
"""


@mark.long
def test_a_contender_that_is_not_right_is_never_timed(tmp_path):
    """Record a wrong rival as an expected failure and a wrong fastlr as a failure, both untimed."""
    (tmp_path / "conftest.py").write_text("from bench.conftest import *\n")
    (tmp_path / "test_it.py").write_text(CONTENDERS)
    done = pytest_bench(
        tmp_path / "test_it.py",
        "-c",
        ROOT / "pyproject.toml",
        f"--benchmark-json={tmp_path}/a.json",
    )
    assert done.returncode == 1 and "1 failed, 1 passed, 2 xfailed" in done.stdout, done.stdout[
        -2000:
    ]
    record = table.read(tmp_path / "a.json")
    (right,) = record["benchmarks"]
    assert right["extra_info"]["ratio"] > 1
    assert right["stats"]["rounds"] == 3
    refused = [(each["contender"], each["kind"], each["reason"]) for each in record["refused"]]
    assert (
        refused[0]
        == refused[2]
        == ("wrong", "wrong", "3.5 times the truth (conv1.weight 15 times)")
    )
    assert refused[1] == ("fails", "cannot run", "RuntimeError: no such layer")


def row(network, contender, ratio, low, high):
    info = {
        "contender": contender,
        "ratio": ratio,
        "ratio_p20": low,
        "ratio_p80": high,
        "memory_ratio": 0.7,
    }
    return {
        "group": network,
        "fullname": f"x::{network}-{contender}",
        "extra_info": info,
        "stats": {},
    }


RECORD = {
    "machine_info": {"cpu": "a CPU"},
    "benchmarks": [row("resnet18", "fastlr", 0.5, 0.4, 0.6), row("resnet18", "loop", 2, 2, 2)],
    "refused": [
        {"group": "resnet18", "contender": "opacus", "kind": "cannot run", "reason": "no"},
        {
            "group": "resnet18",
            "contender": "backpack",
            "kind": "wrong",
            "reason": "3.5 times the truth (a 15 times)",
        },
    ],
}


def test_the_table_the_picture_and_the_comparison_of_records(tmp_path, capsys):
    assert table.markdown(RECORD).splitlines()[2] == (
        "| ResNet-18, 224x224 | **0.50** | 0.70 | 2.00 (loop over samples) | 2.00 | Opacus: "
        "cannot run; BackPACK: wrong, 3.5 times the truth |"
    )
    assert "| not timed | not timed | 2.00" in table.markdown(
        {**RECORD, "benchmarks": RECORD["benchmarks"][1:]}
    )
    # It failed as it was timed.
    broken = {"group": "resnet18", "extra_info": {"contender": "opacus", "peak_bytes": 1}}
    assert table.markdown(
        {**RECORD, "benchmarks": [*RECORD["benchmarks"], broken]}
    ) == table.markdown(RECORD)
    faster = {**RECORD, "benchmarks": [row("resnet18", "fastlr", 0.3, 0.2, 0.35)]}
    lines = list(table.compared(RECORD, faster))
    assert lines == [
        "resnet18, fastlr: 0.5 -> 0.3 of plain (0.60): faster",
        "resnet18, loop: only in the first record",
    ]
    rows = {
        "group": "probes",
        "extra_info": {"contender": "net", "rows": [{"tasks": 1, "ratio": 3.456}]},
    }
    tables = "\n".join(table.further({"benchmarks": [*RECORD["benchmarks"], rows]}))
    assert tables == "probes:\n\n| tasks | ratio |\n| --- | --- |\n| 1 | 3.46 |"
    file = tmp_path / "record.json"
    file.write_text(json.dumps(RECORD))
    assert table.main([str(file), "--figure", str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    assert "**0.50**" in capsys.readouterr().out
    for content, says in (("{}", "holds no benchmarks"), ("x", "no JSON")):
        file.write_text(content)
        with raises(InputError, match=says):
            table.read(file)
