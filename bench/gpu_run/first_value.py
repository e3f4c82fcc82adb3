"""Seconds to a first value of MobileNetV3-Large, from the start of the process and by stage.

``python -m bench.gpu_run.first_value``. Run once without and once with compiled kernels in Triton's
cache, it gives the time to a cold and to a warm first value. On a CPU a few small images are used.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def process_start() -> float:
    """Return when this process started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def main() -> None:
    """Measure, and print a line per stage."""
    started = process_start()
    import torch
    import torchvision

    import fastlr

    def show(stage: str, since: float) -> None:
        print(f"{stage}: {time.time() - since:.2f} s", flush=True)

    show("imports", started)
    device, size, n, chunk = "cpu", 32, 8, 4
    if torch.cuda.is_available():
        device, size, n, chunk = "cuda", 224, 5000, 500
    torch.manual_seed(0)
    model: Any = torchvision.models.mobilenet_v3_large().eval()
    model = model.to(device, memory_format=torch.channels_last)
    next(model.parameters()).detach().sum().item()
    show("model on the device, since the start of the process", started)
    images = fastlr.ShapeImages((3, size, size), channels_last=True)
    stages: dict[str, dict[str, Any]] = {
        "first value": {},
        "second value, with a new estimator": {},
        f"third value, with batch_size={chunk}": {"batch_size": chunk},
    }
    for stage, options in stages.items():
        begun = time.time()
        estimate = fastlr.estimate(model, images, n, dtype="bf16", progress=False, **options)
        show(stage, begun)
        if stage == "first value":
            show("first value, since the start of the process", started)
        print(
            f"  {estimate.value:.6g} +- {estimate.stderr:.2g}, chunks of {estimate.batch_size}, "
            f"notes {list(estimate.notes)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
