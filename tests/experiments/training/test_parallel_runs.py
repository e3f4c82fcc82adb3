"""Runs of several processes give what one process gives, and errors reach every process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import rank_runs as work
import torch
from command_line import as_torchrun
from continual_cases import (
    EVERY_INTERVENTION,
    SMALL,
    as_arguments,
    assert_same,
    checkpoint,
    comparable,
    lines,
)
from kills import rows
from pytest import approx, fixture, mark, param
from rank_reductions import left_behind
from ranks import TORCHRUN, Ended, good, run_ranks
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path
from transfer_cases import TINY

CONTINUAL, TRANSFER, MEMORIZE = "continual", "transfer", "memorize"


def small(images, **settings):
    return {
        **SMALL,
        "data": images,
        "model": "rank_runs:without_dropout",
        "threads": 1,
        "norm_batch": 4,
        "tasks": 2,
        "redundancy_n": 10,
        "redundancy_batch": 5,
        **settings,
    }


def errors_of(ranks, module, path, settings, **changed):
    return good(run_ranks(ranks, work.run, module, str(path), settings, changed))


def done(ranks, module, path, settings, **changed):
    assert errors_of(ranks, module, path, settings, **changed) == ["no error"] * ranks
    return path


@fixture(scope="module")
def by_two(tmp_path_factory, images):
    """A small continual run by two ranks."""
    return done(2, CONTINUAL, tmp_path_factory.mktemp("runs") / "two", small(images, tasks=3))


def alone_and_shared(module, folder, settings, ranks=2):
    """The same run by one process, and by several."""
    return done(1, module, folder / "one", settings), done(
        ranks, module, folder / "several", settings
    )


def assert_close(a, b, rel=2e-4):
    """Equal but for the rounding of floating-point numbers and tensors."""
    named, structure = tree_flatten_with_path(a)
    others, other_structure = tree_flatten(b)
    assert structure == other_structure
    for (path, x), y in zip(named, others, strict=True):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            torch.testing.assert_close(
                x, y, rtol=rel, atol=1e-4, msg=lambda text, path=path: f"{keystr(path)}: {text}"
            )
        elif isinstance(x, torch.Tensor):
            assert torch.equal(x, y), keystr(path)
        else:
            assert y == (approx(x, rel=rel, abs=1e-5) if isinstance(x, float) else x), keystr(path)


def training(path):
    return {key: value for key, value in checkpoint(path).items() if key != "random"}


# -- steps
# --------------------------------------------------------------------------------------------------


@mark.parametrize(
    ("ranks", "kind", "captured", "updates"),
    [
        param(2, "usual", False, "every-part", marks=mark.long),
        param(2, "usual", False, "first-part", marks=mark.long),
        param(4, "usual", False, "every-part", marks=mark.long),
        (3, "usual", True, "first-part"),
        (2, "twice", False, "every-part"),
        param(3, "instance", False, "every-part", marks=mark.long),
    ],
)
def test_steps_are_those_of_one_process(ranks, kind, captured, updates):
    """Uneven shares, batches of fewer parts than ranks; gradients in float64."""
    (want,) = good(run_ranks(1, work.steps, kind, False, updates))
    results = good(run_ranks(ranks, work.steps, kind, captured, updates))
    state = results[0]["state"]
    for result in results:
        assert result["state"] == state, "the same bits on every rank"
        assert result["losses"] == approx(want["losses"], rel=1e-12)
    for name, values in want["state"].items():
        assert_close(torch.tensor(values), torch.tensor(state[name]), 1e-6)
    if kind == "usual":
        assert state["unused.num_batches_tracked"] == 0
        assert want["state"]["1.num_batches_tracked"] == (20 if updates == "every-part" else 6)
        assert state["unused.running_var"] == [1.0] * 4
    assert (max(result["captures"] for result in results) > 0) == captured


@mark.parametrize("ranks", [2, param(4, marks=mark.long)])
def test_gradients_are_reduced_in_bfloat16(ranks):
    """Ranks' bfloat16 gradients are added in float32 in rank order, and the sum is rounded.

    Running statistics stay in float32.
    """
    low, full = (good(run_ranks(ranks, work.reduced, dtype)) for dtype in ("bf16", "fp32"))
    elements = 0
    for name, gradient in low[0]["given"].items():
        own = [torch.tensor(each["own"][name]).bfloat16().float() for each in low]
        total = sum(own[1:], start=own[0])
        assert all(each["given"][name] == total.bfloat16().float().tolist() for each in low)
        assert_close(torch.tensor(gradient), torch.tensor(full[0]["given"][name]), 2**-7)
        elements += total.numel()
    (dtype, n), (other, rest) = low[0]["sent"]
    assert (dtype, n, other) == ("torch.bfloat16", elements, "torch.float32")
    assert full[0]["sent"] == [("torch.float32", elements + rest)]
    assert_same(low[0]["statistics"], full[0]["statistics"])


def test_layers_that_only_some_samples_reach():
    first, second = good(run_ranks(2, work.sometimes))
    assert first == second
    never, weight, bias = first[0]
    assert never and any(weight) and any(bias), (
        "reached by rank 0 alone at first; trained on both, with both's gradients"
    )
    assert "ModelError: rank 0: sometimes.bias has a gradient in some steps only" in first[1]
    assert "ModelError: rank 0: a parameter has a gradient in some steps only" in first[2]


# -- the drivers
# --------------------------------------------------------------------------------------------------


@mark.parametrize("ranks", [2, param(3, marks=mark.long)])
def test_continual_runs_are_those_of_one_process(tmp_path, images, by_two, ranks):
    settings = small(images, tasks=3)
    want = done(1, CONTINUAL, tmp_path / "one", settings)
    got = by_two if ranks == 2 else done(ranks, CONTINUAL, tmp_path / "several", settings)
    assert_close(comparable(got), comparable(want))
    assert_close(training(got), training(want))
    config, config_alone = (json.loads((path / "config.json").read_text()) for path in (got, want))
    assert config["processes"] == ranks
    assert config["options"] == config_alone["options"]


def test_without_batch_norm_the_bits_are_those_of_one_process(tmp_path, images):
    """Two parts on two ranks give one process's bits: a sum of two gradients has one order.

    Losses are added in another order, in float64.
    """
    settings = small(images, model="rank_runs:without_norm", norm_batch=6)
    want, got = alone_and_shared(CONTINUAL, tmp_path, settings)
    for mine, other in zip(comparable(got), comparable(want), strict=True):
        assert mine.pop("train_loss", 0) == approx(other.pop("train_loss", 0), rel=1e-14)
        assert mine == other
    assert_same(checkpoint(got), checkpoint(want))
    assert rows(got) == rows(want) != {}


@mark.parametrize("optimiser", ["adamw", param("sgd", marks=mark.long)])
def test_interventions_act_on_all_samples(tmp_path, images, optimiser):
    settings = small(
        images, optimiser=optimiser, momentum=0.5 * (optimiser == "sgd"), **EVERY_INTERVENTION
    )
    want, got = alone_and_shared(CONTINUAL, tmp_path, settings)
    acted, wanted = ([line["interventions"] for line in comparable(path)] for path in (got, want))
    assert_close(acted, wanted)
    assert_close(training(got), training(want))
    assert any(act["continual_backprop"]["replaced"] for act in acted[1:]), (
        "units were replaced, the same ones"
    )


def test_transfer_is_that_of_one_process(tmp_path):
    kwargs = {**TINY["model_kwargs"], "dropout": 0.0}
    settings = {**TINY, "model_kwargs": kwargs, "norm_batch": 8, "learning_rate": 2e-3, "epochs": 2}
    want, got = alone_and_shared(TRANSFER, tmp_path, settings)
    assert_close(comparable(got), comparable(want), rel=0.01)


@mark.parametrize("kind", ["vision", param("series", marks=mark.long)])
def test_memorization_is_that_of_one_process(tmp_path, kind):
    settings = {
        "n": 50,
        "batch_size": 16,
        "norm_batch": 8,
        "epochs": 3,
        "evaluate_every": 1,
        "seed": 5,
        "device": "cpu",
        "threads": 1,
        "dtype": "fp32",
        "measure_every": 3,
        "redundancy_n": 10,
    }
    if kind == "vision":
        settings |= {"model": "rank_runs:without_dropout", "size": 8, "classes": 3}
    else:
        settings |= {
            "model_kwargs": {**TINY["model_kwargs"], "dropout": 0.0},
            "kind": "series",
            "model": "fastlr.models.patchtst:PatchTST",
            "context": 32,
            "horizon": 6,
            "channels": 2,
        }
    want, got = alone_and_shared(MEMORIZE, tmp_path, settings)
    assert_close(comparable(got), comparable(want), rel=0.01)
    assert_close(training(got)["model"], training(want)["model"], rel=0.05)


@mark.long
def test_with_dropout_ranks_draw_for_themselves_and_a_run_is_repeatable(tmp_path, images):
    settings = small(images, model="continual_cases:net")
    first, second = (done(2, CONTINUAL, tmp_path / name, settings) for name in ("first", "second"))
    one = done(1, CONTINUAL, tmp_path / "one", settings)
    assert comparable(first) == comparable(second)
    assert_same(checkpoint(first), checkpoint(second))
    assert comparable(first) != comparable(one)


# -- resuming
# --------------------------------------------------------------------------------------------------


@mark.parametrize("ranks", [(2, 1), param((2, 3, 1, 2), marks=mark.long)])
def test_resumed_with_another_number_of_ranks(tmp_path, images, ranks):
    settings = small(images, **EVERY_INTERVENTION)
    want = done(1, CONTINUAL, tmp_path / "whole", {**settings, "tasks": len(ranks)})
    path = done(ranks[0], CONTINUAL, tmp_path / "run", {**settings, "tasks": 1})
    for tasks, number in enumerate(ranks[1:], 2):
        done(number, CONTINUAL, path, settings, tasks=tasks)
    assert [line["processes"] for line in lines(path) if line["kind"] == "resume"] == [*ranks[1:]]
    assert_close(comparable(path), comparable(want), rel=0.01)


@mark.parametrize("module", [CONTINUAL, param(TRANSFER, marks=mark.long)])
def test_a_killed_rank_ends_all_and_the_run_goes_on(tmp_path, images, by_two, module):
    settings, want = small(images, tasks=3), by_two
    if module == TRANSFER:
        settings = {**TINY, "norm_batch": 8}
        want = done(2, module, tmp_path / "whole", settings)
    path, before = tmp_path / "run", left_behind()
    other, gone = run_ranks(2, work.killed, module, str(path), settings, 2, limit=60)
    assert isinstance(gone, Ended) and "DistributedError" in other, (other, gone)
    assert left_behind() == before
    assert 2 <= len(lines(path)) < len(lines(want))
    done(2, module, path, settings)
    assert comparable(path) == comparable(want)
    assert_same(checkpoint(path), checkpoint(want))


# -- errors
# --------------------------------------------------------------------------------------------------


@mark.parametrize(
    ("settings", "says"),
    [
        (
            {"norm_batch": 0},
            "InputError: .*2 processes share a batch of 12, and 1 takes .* run with norm_batch=6",
        ),
        (
            {"norm_batch": 12},
            "InputError: .*2 processes share a batch of 12 in parts of 12, which is 1: start 1, or",
        ),
        (
            {"model": "rank_runs:averaging"},
            r"ModelError: .*1 averages over all batches \(momentum=None\)",
        ),
        (
            {"model": "rank_runs:strange"},
            "ModelError: .*training changes the buffer seen, which processes cannot",
        ),
        ({"device": "cuda:1"}, "InputError: .*cuda:1"),
        ({"learning_rate": 1e30}, "NonFiniteError: .*the loss is not finite"),
        ({"step": "graph"}, "InputError: .*cpu has no CUDA graphs"),
    ],
)
def test_errors_are_those_of_all(tmp_path, images, settings, says):
    for error in errors_of(2, CONTINUAL, tmp_path / "run", small(images, **settings)):
        assert re.match(says, error), error
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert left <= {"run.lock"} or "records.jsonl" in left, (
        "before the first record: the folder can be used again"
    )


@mark.long
def test_without_batch_norm_any_number_of_ranks_shares_a_batch(tmp_path, images):
    settings = small(images, model="rank_runs:without_norm", norm_batch=0, batch_size=4, tasks=1)
    want, got = alone_and_shared(CONTINUAL, tmp_path, settings, ranks=3)
    assert_close(comparable(got), comparable(want))


@mark.long
def test_a_measure_that_is_not_finite_is_left_out_on_all_ranks(tmp_path, images):
    names = ("local_redundancy", "local_redundancy_noise", "local_redundancy_next_task")
    few = {"measures": names, "redundancy_n": 20}  # of images of noise, one has such a value
    settings = small(images, model="rank_runs:no_noise", on_nan="skip", **few)
    want, got = alone_and_shared(CONTINUAL, tmp_path, settings)
    for line in comparable(got):
        values = [line["measures"][name]["value"] for name in names]
        assert values[1] is None and None not in (values[0], values[2]), line
    at_start, wanted = (comparable(path)[0]["measures"]["local_redundancy"] for path in (got, want))
    assert at_start == wanted


def test_a_folder_that_is_not_empty_or_holds_no_run(tmp_path, images):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/other").write_text("mine")
    errors = errors_of(2, CONTINUAL, tmp_path / "run", small(images))
    assert all("is not empty (other): choose a new folder" in error for error in errors), errors
    assert (tmp_path / "run/other").read_text() == "mine"


def command_for(images, **settings):
    options = small(images, **settings)
    del options["data"]
    return ["continual", "--data", images, "--out", "run", *as_arguments(options)]


def test_commands_under_torchrun(tmp_path, images):
    command = command_for(images)
    first, second = as_torchrun(2, tmp_path, command)
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert first[1].strip() == f"run: {tmp_path / 'run'}"
    assert second[1] == second[2] == ""
    assert [line["kind"] for line in lines(tmp_path / "run")] == ["start", "task", "task"]
    first, second = as_torchrun(2, tmp_path, command)
    assert first[0] == second[0] == 2
    assert (first[2] + second[2]).count("holds a run: --resume goes on with it") == 1
    first, second = as_torchrun(2, tmp_path, [*command, "--seeds", "2"])
    assert "without torchrun" in first[2] + second[2]


@mark.long
def test_torchrun_itself(tmp_path, images):
    """A rank is killed: torchrun ends the other, and the run goes on with one process."""
    fastlr = ["-m", "fastlr", *command_for(images, tasks=40)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2] / "helpers"), *sys.path]),
    }
    process = subprocess.Popen(
        [*TORCHRUN, *fastlr], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    records = tmp_path / "run/records.jsonl"
    while process.poll() is None and not (records.exists() and records.read_text().count("\n") > 2):
        pass
    workers = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(workers[-1]), 9)
    assert process.wait(60) != 0
    alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert not alive, alive
    resume = [sys.executable, *fastlr, "--resume"]
    where = {"cwd": tmp_path, "env": environment}
    finished = subprocess.run(resume, **where, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert lines(tmp_path / "run")[-1]["task"] == 39
