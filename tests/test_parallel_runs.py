"""Runs that several processes do together: what one process does, whatever their number; errors are everybody's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_runs as work
import torch
from continual_cases import EVERY_INTERVENTION, SMALL, assert_same, checkpoint, comparable, lines
from test_sharded import as_torchrun
from transfer_cases import TINY

from bench.ranks import Ended, good, run_ranks
from fastlr.data import synthetic_store

CONTINUAL, TRANSFER, MEMORIZE = (f"fastlr.drivers.{name}" for name in ("continual", "transfer", "memorize"))
FINAL = "checkpoints/last.pt"


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "store"
    synthetic_store(path, classes=3, size=8, train=11, test=5)
    return str(path)


def small(images: str, **settings: Any) -> dict[str, Any]:
    plain = {**SMALL, "data": images, "model": "rank_runs:without_dropout", "threads": 1}
    return {**plain, "batch_size": 12, "norm_batch": 4, "redundancy_batch": 5, **settings}


def together(ranks: int, module: str, path: Path, settings: dict[str, Any], **changed: Any) -> list[str]:
    return good(run_ranks(ranks, work.run, module, str(path), settings, changed))


def done(ranks: int, module: str, path: Path, settings: dict[str, Any], **changed: Any) -> Path:
    assert together(ranks, module, path, settings, **changed) == [""] * ranks
    return path


def assert_close(a: Any, b: Any, rel: float = 2e-4, where: str = "") -> None:
    """Equal but for rounding; the number of processes and chosen chunks apart."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_close(a[key], b[key], rel, f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_close(x, y, rel, f"{where}/{i}")
    elif isinstance(a, torch.Tensor) and a.is_floating_point():
        torch.testing.assert_close(a, b, rtol=rel, atol=1e-4, msg=lambda text: f"{where}: {text}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, float):
        assert b == pytest.approx(a, rel=rel, abs=1e-5), where
    else:
        assert a == b, where


def training(path: Path) -> dict[str, Any]:
    return {key: value for key, value in checkpoint(path).items() if key != "random"}


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "kind", "captured"),
    [
        (2, "usual", False),
        (3, "usual", False),
        (4, "usual", False),
        (3, "usual", True),
        (2, "twice", False),
        (3, "instance", False),
    ],
)
def test_steps_are_those_of_one_process(ranks, kind, captured):
    """Uneven shares, batches of fewer parts than ranks; gradients in float64."""
    (want,) = good(run_ranks(1, work.steps, kind, False))
    results = good(run_ranks(ranks, work.steps, kind, captured))
    for each in results:
        assert each["state"] == results[0]["state"], "the same bits on every rank"
        assert each["losses"] == pytest.approx(want["losses"], rel=1e-12)
        for name, values in want["state"].items():
            assert_close(torch.tensor(values), torch.tensor(each["state"][name]), 1e-6, name)
        for name in want["state"]:
            if name.endswith("num_batches_tracked"):
                assert each["state"][name] == want["state"][name]
        if kind == "usual":
            assert each["state"]["unused.num_batches_tracked"] == 0 and want["state"]["1.num_batches_tracked"] == 20
            assert each["state"]["unused.running_var"] == [1.0] * 4
    if captured:
        assert max(each["captures"] for each in results) > 0


def test_layers_that_only_some_samples_reach():
    first, second = good(run_ranks(2, work.sometimes))
    assert first == second
    never, weight, bias = first[0]
    assert never and any(weight) and any(bias), "what rank 0 alone reaches at first is trained on both, with both's gradients"
    assert "ModelError: rank 0: sometimes.bias has a gradient in some steps only" in first[1]
    assert "ModelError: rank 0: a parameter has a gradient in some steps only" in first[2]


# -- the drivers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_continual_runs_are_those_of_one_process(tmp_path, images, ranks):
    want = done(1, CONTINUAL, tmp_path / "one", small(images))
    got = done(ranks, CONTINUAL, tmp_path / "several", small(images))
    assert_close(comparable(got), comparable(want))
    assert_close(training(got), training(want))
    config = json.loads((got / "config.json").read_text())
    assert config["processes"] == ranks and config["options"] == json.loads((want / "config.json").read_text())["options"]


def test_without_batch_norm_the_bits_are_those_of_one_process(tmp_path, images):
    """Two parts on two ranks: the sum of two gradients, in one order only. Losses are added in another, in float64."""
    settings = small(images, model="rank_runs:without_norm", norm_batch=6)
    want = done(1, CONTINUAL, tmp_path / "one", settings)
    got = done(2, CONTINUAL, tmp_path / "two", settings)
    for mine, other in zip(comparable(got), comparable(want), strict=True):
        assert mine.pop("train_loss", 0) == pytest.approx(other.pop("train_loss", 0), rel=1e-14)
        assert mine == other
    assert_same(checkpoint(got), checkpoint(want))


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_interventions_act_on_all_samples(tmp_path, images, optimiser):
    settings = small(images, optimiser=optimiser, momentum=0.5 * (optimiser == "sgd"), **EVERY_INTERVENTION)
    want = done(1, CONTINUAL, tmp_path / "one", settings)
    got = done(2, CONTINUAL, tmp_path / "two", settings)
    assert_close([line["interventions"] for line in comparable(got)], [line["interventions"] for line in comparable(want)])
    assert_close(training(got), training(want))
    replaced = [line["interventions"]["continual_backprop"]["replaced"] for line in comparable(got)[1:]]
    assert any(replaced), "units were replaced, the same ones"


def test_transfer_is_that_of_one_process(tmp_path):
    kwargs = {**TINY["model_kwargs"], "dropout": 0.0}
    settings = {**TINY, "model_kwargs": kwargs, "norm_batch": 8, "learning_rate": 2e-3, "seed": 3}
    want = done(1, TRANSFER, tmp_path / "one", settings)
    got = done(2, TRANSFER, tmp_path / "two", settings)
    assert_close(comparable(got), comparable(want), rel=0.01)


@pytest.mark.parametrize("kind", ["vision", "series"])
def test_memorization_is_that_of_one_process(tmp_path, kind):
    settings: dict[str, Any] = {"n": 50, "batch_size": 16, "norm_batch": 8, "epochs": 3, "evaluate_every": 1, "seed": 5}
    settings |= {"device": "cpu", "threads": 1, "dtype": "fp32", "measure_every": 3, "redundancy_n": 10}
    if kind == "vision":
        settings |= {"model": "rank_runs:without_dropout", "size": 8, "classes": 3}
    else:
        model = {"model_kwargs": {**TINY["model_kwargs"], "dropout": 0.0}, "kind": "series"}
        settings |= {**model, "model": "fastlr.models.patchtst:PatchTST", "context": 32, "horizon": 6, "channels": 2}
    want = done(1, MEMORIZE, tmp_path / "one", settings)
    got = done(2, MEMORIZE, tmp_path / "two", settings)
    assert_close(comparable(got), comparable(want), rel=0.01)
    assert_close(training(got)["model"], training(want)["model"], rel=0.05)


def test_with_dropout_ranks_draw_for_themselves_and_a_run_is_repeatable(tmp_path, images):
    settings = small(images, model="continual_cases:net")
    first, second = (done(2, CONTINUAL, tmp_path / name, settings) for name in ("first", "second"))
    one = done(1, CONTINUAL, tmp_path / "one", settings)
    assert comparable(first) == comparable(second)
    assert_same(checkpoint(first), checkpoint(second))
    assert comparable(first) != comparable(one)


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_resumed_with_another_number_of_ranks(tmp_path, images):
    settings = small(images, **EVERY_INTERVENTION)
    want = done(1, CONTINUAL, tmp_path / "whole", {**settings, "tasks": 4})
    path = done(2, CONTINUAL, tmp_path / "run", {**settings, "tasks": 1})
    for ranks, tasks in ((3, 2), (1, 3), (2, 4)):
        done(ranks, CONTINUAL, path, settings, tasks=tasks)
    assert [line["processes"] for line in lines(path) if line["kind"] == "resume"] == [3, 1, 2]
    assert_close(comparable(path), comparable(want), rel=0.01)


@pytest.mark.parametrize("module", [CONTINUAL, TRANSFER])
def test_a_killed_rank_ends_all_and_the_run_goes_on(tmp_path, images, module):
    settings = small(images) if module == CONTINUAL else {**TINY, "norm_batch": 8}
    want = done(2, module, tmp_path / "whole", settings)
    path, before = tmp_path / "run", set(os.listdir("/dev/shm"))
    other, gone = run_ranks(2, work.killed, module, str(path), settings, 2, limit=60)
    assert isinstance(gone, Ended) and "DistributedError" in other, (other, gone)
    assert set(os.listdir("/dev/shm")) <= before
    assert 2 <= len(lines(path)) < len(lines(want))
    done(2, module, path, settings)
    assert comparable(path) == comparable(want)
    assert_same(checkpoint(path), checkpoint(want))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"norm_batch": 0}, "InputError: .*2 processes share a batch of 12, and 1 takes .* run with norm_batch=6"),
        ({"norm_batch": 12}, "InputError: .*2 processes share a batch of 12 in parts of 12, which is 1: start 1, or"),
        ({"model": "rank_runs:averaging"}, r"ModelError: .*1 averages over all batches \(momentum=None\)"),
        ({"model": "rank_runs:Strange"}, "ModelError: .*training changes the buffer seen, which processes cannot share"),
        ({"device": "cuda:1"}, "InputError: .*cuda:1"),
        ({"learning_rate": 1e30}, "NonFiniteError: .*the loss is not finite"),
        ({"step": "graph"}, "InputError: .*cpu has no CUDA graphs"),
    ],
)
def test_errors_are_those_of_all(tmp_path, images, settings, says):
    found = together(2, CONTINUAL, tmp_path / "run", small(images, **settings))
    for each in found:
        assert re.match(says, each), found
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert left <= {"run.lock"} or "records.jsonl" in left, "before the first record: the folder can be used again"


def test_without_batch_norm_any_number_of_ranks_shares_a_batch(tmp_path, images):
    settings = small(images, model="rank_runs:without_norm", norm_batch=0, batch_size=4, tasks=1)
    want = done(1, CONTINUAL, tmp_path / "one", settings)
    got = done(3, CONTINUAL, tmp_path / "three", settings)
    assert_close(comparable(got), comparable(want))


def test_a_measure_that_is_not_finite_is_left_out_on_all_ranks(tmp_path, images):
    names = ("local_redundancy", "local_redundancy_noise", "local_redundancy_next_task")
    settings = small(images, model="rank_runs:NoNoise", on_nan="skip", measures=names)
    want = done(1, CONTINUAL, tmp_path / "one", settings)
    got = done(2, CONTINUAL, tmp_path / "two", settings)
    for line in comparable(got):
        values = [line["measures"][name]["value"] for name in names]
        assert values[1] is None and None not in (values[0], values[2]), line
        line["measures"]["local_redundancy_noise"]["error"] = ""
    for line in (wanted := comparable(want)):
        line["measures"]["local_redundancy_noise"]["error"] = ""
    assert [line["measures"] for line in wanted][0]["local_redundancy"] == comparable(got)[0]["measures"]["local_redundancy"]


def test_a_folder_that_is_not_empty_or_holds_no_run(tmp_path, images):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/other").write_text("mine")
    found = together(2, CONTINUAL, tmp_path / "run", small(images))
    assert all("is not empty (other): choose a new folder" in each for each in found), found
    assert (tmp_path / "run/other").read_text() == "mine"


def test_commands_under_torchrun(tmp_path, images):
    given = [f"{key}={value}" for key, value in small(images).items() if key != "data"]
    options = [word for setting in given for word in ("--set", setting)]
    command = ["continual", "--data", images, "--out", "run", *options]
    first, second = as_torchrun(2, tmp_path, command)
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert first[1].strip() == f"run: {tmp_path / 'run'}" and second[1] == second[2] == ""
    assert [line["kind"] for line in lines(tmp_path / "run")] == ["start", "task", "task", "task"]
    first, second = as_torchrun(2, tmp_path, command)
    assert first[0] == second[0] == 2
    assert (first[2] + second[2]).count("holds a run: --resume goes on with it") == 1
    first, second = as_torchrun(2, tmp_path, [*command, "--seeds", "2"])
    assert "without torchrun" in first[2] + second[2]


@pytest.mark.long
def test_torchrun_itself(tmp_path, images):
    """A rank is killed: torchrun ends the other, and the run goes on with one process."""
    given = [f"{key}={value}" for key, value in small(images, tasks=40).items() if key != "data"]
    options = [word for setting in given for word in ("--set", setting)]
    fastlr = ["-m", "fastlr", "continual", "--data", images, "--out", "run", *options]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.Popen([*launch, *fastlr], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    records = tmp_path / "run/records.jsonl"
    while process.poll() is None and not (records.exists() and records.read_text().count("\n") > 2):
        pass
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[-1]), 9)
    assert process.wait(60) != 0
    alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert not alive, alive
    finished = subprocess.run(
        [sys.executable, *fastlr, "--resume"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    assert lines(tmp_path / "run")[-1]["task"] == 39
