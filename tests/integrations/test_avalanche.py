"""The plugin metric in Avalanche's training strategies."""

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from expected import refused
from integration_cases import INPUTS, N, Recorded, data, network, random_states, same_bits, seed_all
from pytest import importorskip, mark, skip
from torch import nn

import fastlr

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its solvers, which nothing here needs
    importorskip("avalanche")
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.models import IncrementalClassifier
    from avalanche.training import Naive
    from avalanche.training.plugins import EvaluationPlugin

from fastlr.integrations.avalanche import LocalRedundancyMetric

pytestmark = mark.filterwarnings("ignore")  # of Avalanche itself, several at every call


def growing():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), IncrementalClassifier(8, 2))


def prepare(model, metric=None):
    """Two experiences of two classes, two epochs of four iterations each: (benchmark, strategy)."""
    seed_all()
    x, y = data()
    parts = [(x, y), (x + 1, y + 2 if isinstance(model[-1], IncrementalClassifier) else 1 - y)]
    benchmark = tensors_benchmark(parts, parts, task_labels=[0, 0])
    plugin = EvaluationPlugin(
        accuracy_metrics(epoch=True), *([metric] if metric else []), loggers=[]
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    options = {"train_mb_size": 16, "train_epochs": 2, "evaluator": plugin}
    return benchmark, Naive(
        model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), **options
    )


def train(metric=None, model=None):
    """Returns (model, evaluation plugin)."""
    model = model or network()
    benchmark, strategy = prepare(model, metric)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    return model, strategy.evaluator


class WatchedMetric(Recorded, LocalRedundancyMetric):
    def estimate(self, strategy):
        return fastlr.estimate(strategy.model, INPUTS, N).value


@mark.parametrize(
    ("when", "steps"),
    [
        ({}, [0, 8, 16]),
        ({"every_n_steps": 5, "at_start": False}, [5, 10, 15]),
        ({"every_n_epochs": 3}, [0, 12]),
    ],
    ids=["experiences", "steps", "epochs"],
)
def test_training_is_bit_for_bit_the_same(when, steps):
    alone, plain = train()
    states = random_states()
    metric = WatchedMetric(INPUTS, N, measures=["weight_norm"], **when)
    watched, plugin = train(metric)
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


def test_a_classifier_that_grows_and_the_best_checkpoint(tmp_path):
    metric = WatchedMetric(INPUTS, N, keep_best=tmp_path / "best.pt")
    model, _ = train(metric, growing())
    assert model[-1].classifier.out_features == 4
    assert len(metric.rows) == 3
    assert all(row[2] == row[3] for row in metric.rows)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["local_redundancy"] == max(row[2] for row in metric.rows) == metric.best.value


def save_and_load(folder):
    trained = train(WatchedMetric(INPUTS, N))
    benchmark, strategy = prepare(network(), WatchedMetric(INPUTS, N))
    strategy.train(benchmark.train_stream[0])
    save_checkpoint(strategy, str(folder / "strategy.pkl"))
    again = prepare(network(), WatchedMetric(INPUTS, N))[1]
    # What this call of Avalanche means, from before torch 2.6.
    load = partial(torch.load, weights_only=False)
    with mock.patch("avalanche.checkpointing.checkpoint.torch.load", load):
        again, done = maybe_load_checkpoint(again, str(folder / "strategy.pkl"))
    assert done == 1
    again.train(benchmark.train_stream[1])
    assert same_bits(trained[0], again.model)
    found = again.evaluator.get_all_metrics()["local_redundancy/train_phase/train_stream"]
    assert found == trained[1].get_all_metrics()["local_redundancy/train_phase/train_stream"]


@mark.long
def test_saved_and_loaded_with_the_strategy(tmp_path):
    """The strategy is saved and loaded in a process of its own.

    Where a test has compiled a model, dill can save no optimizer any more.
    """
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers"), *sys.path]
    )
    script = (
        "from pathlib import Path; import test_avalanche; "
        f"test_avalanche.save_and_load(Path({str(tmp_path)!r}))"
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


def test_mistakes():
    with refused("both given"):
        LocalRedundancyMetric(INPUTS, every_n_steps=1, every_n_epochs=1)
    with refused("no folder"):
        LocalRedundancyMetric(INPUTS, keep_best="/no/such/folder/best.pt")
