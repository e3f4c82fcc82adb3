"""What watching a training costs beyond measurements: a ResNet-18 on random 32x32 images."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torchvision.models import resnet18

import fastlr
from fastlr.integrations import Monitor

STEPS, EVERY, BATCH = 60, 10, 64
MOST = 0.01  # of the training itself


@pytest.mark.benchmark(group="monitor")
def test_monitor(benchmark: BenchmarkFixture, device: torch.device, quick: bool) -> None:
    """Time ``monitor.step()``: its share of the loop beside estimates, and a step not due."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x, y = (
        torch.randn(BATCH, 3, 32, 32, device=device),
        torch.randint(0, 10, (BATCH,), device=device),
    )
    monitor = Monitor(
        model, fastlr.ShapeImages((3, 32, 32)), 8 if quick else 64, every_n_steps=EVERY
    )
    monitor.measure()  # plans and proves
    inside, beyond = [], []  # seconds of each call of step, and those of them that no estimate took

    def train() -> None:
        for _ in range(EVERY if quick else STEPS):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            start = time.perf_counter()
            reading = monitor.step()
            inside.append(time.perf_counter() - start)
            beyond.append(inside[-1] - (reading.estimate.seconds if reading else 0.0))

    began = time.perf_counter()
    benchmark.pedantic(train, rounds=1)
    share = sum(beyond) / (time.perf_counter() - began - sum(inside))
    idle = statistics.median(beyond)  # most steps are not due
    benchmark.extra_info |= {"contender": "resnet18", "share": share, "idle_step_seconds": idle}
    assert share <= MOST
