"""Trainings by Avalanche, for test_avalanche.py, which alone imports this: it takes 3 s."""

import warnings
from functools import partial
from unittest import mock

import torch
from integration_cases import INPUTS, N, Recorded, data, network, same_bits, seed_all
from torch import nn

import fastlr

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its solvers, which nothing here needs
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.models import IncrementalClassifier
    from avalanche.training import Naive
    from avalanche.training.plugins import EvaluationPlugin

from fastlr.integrations.avalanche import LocalRedundancyMetric


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
