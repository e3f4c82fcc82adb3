"""The plugin metric in Avalanche's training strategies."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch
from expected import refused
from integration_cases import INPUTS, N, random_states, same_bits
from pytest import fixture, importorskip, mark, skip

pytestmark = mark.filterwarnings("ignore")  # of Avalanche itself, several at every call


@fixture(scope="module")
def cases():
    """The trainings; Avalanche is imported for them, not in every process that collects tests."""
    importorskip("avalanche")
    return import_module("avalanche_cases")


@mark.parametrize(
    ("when", "steps"),
    [
        ({}, [0, 8, 16]),
        ({"every_n_steps": 5, "at_start": False}, [5, 10, 15]),
        ({"every_n_epochs": 3}, [0, 12]),
    ],
    ids=["experiences", "steps", "epochs"],
)
def test_training_is_bit_for_bit_the_same(cases, when, steps):
    alone, plain = cases.train()
    states = random_states()
    metric = cases.WatchedMetric(INPUTS, N, measures=["weight_norm"], **when)
    watched, plugin = cases.train(metric)
    assert same_bits(alone, watched)
    assert random_states() == states
    assert [row[0] for row in metric.rows] == steps
    assert all(row[2] == row[3] for row in metric.rows)
    curves = plugin.get_all_metrics()
    _, values = curves["local_redundancy/train_phase/train_stream"]
    assert values == [row[2] for row in metric.rows]
    assert metric.result() == values[-1]
    after_the_start = [row[2] for row in metric.rows if row[0]]
    assert [reading.value for reading in metric.course] == after_the_start
    assert set(curves) - set(plain.get_all_metrics()) == {
        f"{name}/train_phase/train_stream"
        for name in ("local_redundancy", "local_redundancy_stderr", "weight_norm")
    }


def test_a_classifier_that_grows_and_the_best_checkpoint(cases, tmp_path):
    metric = cases.WatchedMetric(INPUTS, N, keep_best=tmp_path / "best.pt")
    model, _ = cases.train(metric, cases.growing())
    assert model[-1].classifier.out_features == 4
    assert len(metric.rows) == 3
    assert all(row[2] == row[3] for row in metric.rows)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["local_redundancy"] == max(row[2] for row in metric.rows) == metric.best.value


@mark.long
def test_saved_and_loaded_with_the_strategy(cases, tmp_path):
    """The strategy is saved and loaded in a process of its own.

    Where a test has compiled a model, dill can save no optimizer any more.
    """
    path = os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), *sys.path])
    script = (
        "from pathlib import Path; import avalanche_cases; "
        f"avalanche_cases.save_and_load(Path({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    if any(
        what in done.stderr
        for what in (b"Can't pickle sentinel", b"cannot pickle 'ConfigModuleInstance' object")
    ):
        skip("dill cannot save functions of this torch")
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_mistakes(cases):
    with refused("both given"):
        cases.LocalRedundancyMetric(INPUTS, every_n_steps=1, every_n_epochs=1)
    with refused("no folder"):
        cases.LocalRedundancyMetric(INPUTS, keep_best="/no/such/folder/best.pt")
