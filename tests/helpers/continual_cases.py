"""What the tests of the continual-learning driver share: networks, a small run, its readers."""

import json

import torch
from continual_runs import read_lines as lines
from torch import nn

from fastlr.experiments.continual import experiment
from fastlr.experiments.continual.options import PRESETS, WITHOUT_ABLATION, ContinualOptions
from fastlr.experiments.continual.trainer import Trainer
from fastlr.experiments.runs.options import resolve


def net(num_classes=2):
    """A small network with everything that is random or has state in training."""
    features = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
    ]
    return nn.Sequential(*features, nn.Dropout(0.2), nn.Linear(36, num_classes))


SMALL = {
    "model": "continual_cases:net",
    "device": "cpu",
    "dtype": "fp32",
    "tasks": 3,
    "epochs": 2,
    "batch_size": 12,
    "norm_batch": 6,
    "learning_rate": 1e-2,
    "redundancy_n": 20,
    "measure_images": 16,
    "flip": True,
    "measures": WITHOUT_ABLATION,
}

EVERY_INTERVENTION = {
    "shrink": 0.9,
    "perturb": 0.01,
    "reset_every": 2,
    "l2_init": 0.01,
    "cbp_rate": 0.1,
    "cbp_maturity": 2,
    "redo_every": 3,
    "replay_images": 9,
    "ewc": 3.0,
    "ewc_images": 5,
}


def as_arguments(settings):
    """Options as the command line takes them."""
    texts = {tuple: ",".join, dict: json.dumps}
    return [f"--set={key}={texts.get(type(value), str)(value)}" for key, value in settings.items()]


def no_activation(num_classes=2):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))


class Watching(nn.Module):
    """Keeps the images that it sees."""

    def __init__(self):
        super().__init__()
        self.head, self.seen = nn.Linear(192, 2), []

    def forward(self, x):
        if self.training:
            self.seen.append(x.detach().clone())
        return self.head(x.flatten(1))


def begin(path, images, **settings):
    """Begin a run of the preset "paper" with `SMALL` and these settings; return its records."""
    experiment.begin(path, "paper", {**SMALL, "data": images, **settings})
    return lines(path)


def comparable(path):
    """The records without what tells of the interruption, times, and digests, which times enter."""
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "digest")}
        for line in lines(path)
        if line["kind"] != "resume"
    ]


def checkpoint(path):
    return torch.load(path / "checkpoints/last.pt", weights_only=True)["state"]


def assert_same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def plain(num_classes=2):
    features = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(144, num_classes))


def trainer(network=plain, **settings):
    torch.manual_seed(0)
    options = resolve(ContinualOptions, PRESETS, "paper", {**SMALL, **settings})
    return Trainer(network(), options, torch.device("cpu"))
