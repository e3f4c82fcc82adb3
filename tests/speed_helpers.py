"""What the tests of the benchmark share: a tiny network, an empty record, cases measured on the CPU."""

from __future__ import annotations

import os

import torch
from rich.console import Console
from torch import nn

from fastlr.speed import clock, kernels, record, run

CPU = torch.device("cpu")


def tiny(name: str, num_classes: int | None = None) -> nn.Module:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    setting = [
        InvertedResidualConfig(8, 3, 16, 8, True, "HS", 1, 1, 1.0),
        InvertedResidualConfig(8, 3, 16, 8, False, "RE", 2, 1, 1.0),
    ]
    return MobileNetV3(setting, last_channel=16, num_classes=num_classes or 5)


def empty() -> record.Record:
    made = record.Record(
        {"cpu": "none", "gpu": None, "threads": 1, "versions": {}, "date": "2000-01-01"}, vars(settings())
    )
    made.ceilings = {"copy": {"bytes_per_second": 1e10}, "matmul": {"operations_per_second": 1e11, "dtype": "float32"}}
    return made


def settings() -> run.Settings:
    return run.settings_for(CPU, quick=True)


def measure_cases(pairs, found: record.Record | None = None, **how) -> record.Record:
    found = found or empty()
    options = {"dtype": torch.float32, "batch": 3, "repeats": 2, "bandwidth": 1e10, "rate": 1e11, "shrink": 16} | how
    kernels.section(found, CPU, clock.HostTimer(), pairs, **options)
    return found


def text(renderable, width: int = 80) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        console.print(renderable)
    return console.export_text()
