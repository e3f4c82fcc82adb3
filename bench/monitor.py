"""What watching a training costs beyond the measurements themselves.

``python -m bench.monitor`` trains a ResNet-18 on random 32x32 images with a `Monitor` and reports the time inside
``monitor.step()`` that is not spent in an estimate or a measure, as a share of the loop; and the time of a step that is not
due. Writes bench/results/cpu/monitor.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torchvision.models import resnet18

import fastlr
from bench.timing import environment, quantile
from fastlr.integrations import Monitor


def main() -> None:
    """Train, measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--n", type=int, default=64)
    options = parser.parse_args()
    where = environment()
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    monitor = Monitor(model, fastlr.ShapeImages((3, 32, 32)), options.n, every_n_steps=options.every)
    monitor.measure()  # plans and proves
    inside, idle, estimates = 0.0, [], 0.0
    began = time.perf_counter()
    for _ in range(options.steps):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        start = time.perf_counter()
        reading = monitor.step()
        took = time.perf_counter() - start
        inside += took
        if reading is None:
            idle.append(took)
        else:
            estimates += reading.estimate.seconds
    loop = time.perf_counter() - began
    record = {
        "what": "time in Monitor.step() beyond the measurements, as a share of the training loop",
        "share": (inside - estimates) / loop,
        "share_of_training_alone": (inside - estimates) / (loop - inside),
        "idle_step_seconds_median": quantile(idle, 0.5),
        "loop_seconds": loop,
        "measuring_seconds": estimates,
        "options": {"steps": options.steps, "every_n_steps": options.every, "n": options.n, "batch": len(x)},
        "environment": where,
    }
    print(
        f"{100 * record['share']:.3f} % of the loop ({100 * record['share_of_training_alone']:.3f} % of the training alone); "
        f"a step that is not due takes {1e6 * record['idle_step_seconds_median']:.1f} us; "
        f"loop {loop:.1f} s, of which {estimates:.1f} s are measurements"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "monitor.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
