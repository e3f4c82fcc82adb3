"""Steps of the continual-learning driver: launched (plain), as a CUDA graph, compiled.

Also what each precision changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import fastlr
from bench.paired import Work, Wrong
from fastlr.experiments.continual.interventions import Intervention
from fastlr.experiments.continual.options import PRESETS, ContinualOptions
from fastlr.experiments.continual.trainer import Trainer
from fastlr.experiments.data import ClassPairs, Task, synthetic_store
from fastlr.experiments.runs.experiment import choose_device
from fastlr.experiments.runs.folder import seed_everything
from fastlr.experiments.runs.options import resolve
from fastlr.experiments.statistics.seeds import mean_over_seeds
from fastlr.models import load_model

AGREE = 5e-2  # relative difference of the loss after some steps; compiled kernels round elsewhere


class Preset(NamedTuple):
    """What is trained on: random images of a preset's options.

    ``aim``: images a second that are aimed at on an H200.
    """

    name: str
    size: int
    images: int
    epochs: int
    aim: float | None = None


# 2600 images x 100 epochs in the paper's 9.7 s; 2000 tasks of 1200 images x 250 epochs in half an
# hour
ON_GPU = (
    Preset("paper", 224, 2600, 2, 2600 * 100 / 9.7),
    Preset("dohare32", 32, 1200, 20, 2000 * 1200 * 250 / 1800),
)
ON_CPU = Preset("small", 32, 400, 1)


def trainer(preset: Preset, mode: str, device: torch.device) -> Trainer:
    """A trainer in one mode; the same parameters every time."""
    settings = {"epochs": preset.epochs, "device": str(device), "step": mode}
    options = resolve(ContinualOptions, PRESETS, preset.name, settings)
    seed_everything(0)
    model = load_model(options.model, num_classes=2, kwargs=options.model_kwargs)
    return Trainer(model, options, choose_device(options))


def random_task(preset: Preset, device: torch.device) -> Task:
    """Images of random bytes: what they show does not matter to the time."""
    generator = torch.Generator().manual_seed(0)
    shape = (preset.images, preset.size, preset.size, 3)
    x = (
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        .permute(0, 3, 1, 2)
        .to(device)
    )
    y = torch.randint(0, 2, (preset.images,), generator=generator).to(device)
    return Task(x, y, x[:100], y[:100])


def training_pair(preset: Preset, mode: str, device: torch.device) -> Work:
    """One task learned in a mode, beside launched steps."""
    task, trainers = (
        random_task(preset, device),
        [trainer(preset, each, device) for each in ("eager", mode)],
    )

    def check() -> dict[str, float]:
        for each in trainers:
            each.learn(task, 0)
        losses = [each.learn(task, 1) for each in trainers]  # this one captures
        off = abs(losses[1] / losses[0] - 1)
        if not off <= AGREE:
            raise Wrong(f"loss {losses[1]:.4g} instead of {losses[0]:.4g}")
        if device.type != "cpu" and mode not in trainers[1].step_mode:
            raise Wrong(f"ran as {trainers[1].step_mode}")
        return {
            "loss_deviation": off,
            "images": preset.images * preset.epochs,
            "aim_images_per_second": preset.aim,
        }

    plain, run = (partial(each.learn, task, 1) for each in trainers)
    return Work(plain, run, check, device)


@pytest.mark.parametrize("mode", ["graph", "compile"])
@pytest.mark.parametrize("preset", [*ON_GPU, ON_CPU], ids=lambda preset: preset.name)
def test_training(
    beside_plain: Callable, preset: Preset, mode: str, device: torch.device, quick: bool
) -> None:
    """A mode beside launched steps."""
    if (preset == ON_CPU) != (device.type == "cpu") or mode == "graph" and device.type == "cpu":
        pytest.skip("a case of another device")
    if quick and mode == "compile":
        pytest.skip("compiling takes a minute")
    beside_plain(training_pair, preset, mode, device, group=f"training, {preset.name}", name=mode)


class Still(Intervention):
    """Notes the share of weights that a step leaves as they are."""

    name = "still"

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.before = self._weights()
        self.shares: list[float] = []

    def _weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.trainer.model.parameters()])

    def after_step(self) -> None:
        """Compare with the step before."""
        now = self._weights()
        self.shares.append((now == self.before).double().mean().item())
        self.before = now


textures = cache(synthetic_store)


def learned(dtype: str, seed: int, tasks: int, epochs: int) -> dict[str, float]:
    """Learn a sequence of tasks; return accuracy, still weights and local redundancy.

    Accuracy is the mean over tasks; still weights no longer move in the last task, at whose end
    redundancy is measured.
    """
    settings: dict[str, Any] = {
        "epochs": epochs,
        "batch_size": 50,
        "norm_batch": 0,
        "seed": seed,
        "device": "cpu",
    }
    settings |= {"dtype": dtype, "model": "fastlr.models.convnet:ConvNet"}
    options = resolve(ContinualOptions, PRESETS, "paper", settings)
    seed_everything(seed)
    model = load_model(options.model, num_classes=2, kwargs={"widths": (16, 32, 64), "hidden": 64})
    trainer, sequence = (
        Trainer(model, options, choose_device(options)),
        ClassPairs(textures(), seed),
    )
    still, accuracies = Still(trainer), []
    trainer.interventions.append(still)
    for number in range(tasks):
        still.shares.clear()
        task = sequence.load(number)
        trainer.learn(task, number)
        accuracies.append(100 * trainer.accuracy(task.test_x, task.test_y))
    found = {
        "accuracy %": sum(accuracies) / tasks,
        "still in a step %": 100 * sum(still.shares) / len(still.shares),
    }
    images = fastlr.ShapeImages((3, 32, 32))
    found["LR"] = fastlr.estimate(model, images, 1000, dtype=trainer.autocast_dtype).value
    found["LR measured in float32"] = fastlr.estimate(
        copy.deepcopy(model).float(), images, 1000
    ).value
    return found


@pytest.mark.benchmark(group="precision of training")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16-weights"])
def test_precision(
    benchmark: BenchmarkFixture, dtype: str, device: torch.device, quick: bool
) -> None:
    """What a precision changes: means over seeds, with standard errors."""
    if device.type != "cpu":
        pytest.skip("a small network on the CPU")
    seeds, tasks, epochs = (2, 1, 1) if quick else (4, 10, 10)
    runs = benchmark.pedantic(
        lambda: [learned(dtype, seed, tasks, epochs) for seed in range(seeds)], rounds=1
    )
    means = {}
    for name in runs[0]:
        means[name] = mean_over_seeds([run[name] for run in runs])
    row = {
        "dtype": dtype,
        **{name: f"{mean.value:.4g} ± {mean.stderr:.2g}" for name, mean in means.items()},
    }
    benchmark.extra_info |= {"contender": dtype, "rows": [row]}
