"""Rank a run's checkpoints by local redundancy, from Python and by ``fastlr rank``.

All are measured on the same images.

Run ``python examples/rank_checkpoints.py``.
"""

from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.nn.functional as F
from torch import nn

import fastlr
from fastlr.cli.main import main as fastlr_command


def network(num_classes: int = 2) -> nn.Module:
    """What ``--model rank_checkpoints:network`` calls."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 16 * 16, 32), nn.ReLU(), nn.Linear(32, num_classes)
    )


def train(folder: Path) -> list[Path]:
    """Train, and save a state dict every 40 steps."""
    torch.manual_seed(0)
    model, paths = network(), []
    images = fastlr.ShapeImages((3, 16, 16)).batch(0, 512, seed=1)
    labels = (images[:, 0].mean((1, 2)) > images[:, 2].mean((1, 2))).long()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(1, 121):
        rows = torch.randint(len(images), (64,))
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 0:
            paths.append(folder / f"step{step}.pt")
            torch.save(model.state_dict(), paths[-1])
    return paths


def main() -> None:
    """Train and rank."""
    paths = train(Path(mkdtemp(prefix="fastlr-")))

    model, estimates = network(), {}
    for path in paths:
        model.load_state_dict(torch.load(path, weights_only=True))
        estimates[path.stem] = fastlr.estimate(model, fastlr.ShapeImages((3, 16, 16)), n=500)
    first, second, *_ = sorted(estimates, key=lambda name: -estimates[name].value)
    difference, error = fastlr.paired_difference(estimates[first], estimates[second])
    print(f"{first} is above {second} by {difference:.4g} +- {error:.2g}\n")

    # The same from a shell: fastlr rank step*.pt --model rank_checkpoints:network --size 16 -n 500
    options = [
        "--model",
        "rank_checkpoints:network",
        "--size",
        "16",
        "-n",
        "500",
        "--device",
        "cpu",
    ]
    raise SystemExit(fastlr_command(["rank", *map(str, paths), *options]))


if __name__ == "__main__":
    main()
