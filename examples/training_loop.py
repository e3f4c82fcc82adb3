"""A hand-written training loop, watched: local redundancy, its error and the weight norm.

They are written into a file every 20 steps, one line of JSON each time.

Run ``python examples/training_loop.py``.

The two lines that a loop of yours needs are marked. The training is bit for bit the same without
them.
"""

import json
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.nn.functional as F
from torch import nn

import fastlr


def data(n: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of shapes; the label says whether they are more red than blue."""
    images = fastlr.ShapeImages((3, 16, 16)).batch(0, n, seed=1)
    return images, (images[:, 0].mean((1, 2)) > images[:, 2].mean((1, 2))).long()


def main() -> None:
    """Train a small network and print what was logged."""
    folder = Path(mkdtemp(prefix="fastlr-"))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 2),
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = data()

    def log(values: dict[str, float], step: int) -> None:
        with (folder / "plasticity.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    monitor = fastlr.Monitor(  # the first line
        model,
        fastlr.ShapeImages((3, 16, 16)),
        n=256,
        every_n_steps=20,
        measures=["weight_norm"],
        log=log,
    )
    first = monitor.measure()  # at the start, where a mistake in the arguments shows at once

    for _ in range(60):
        rows = torch.randint(len(x), (64,))
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()  # the second line: after each optimizer step

    print((folder / "plasticity.jsonl").read_text())
    change, error = fastlr.paired_difference(monitor.last.estimate, first.estimate)
    print(f"last minus first, on the same images: {change:.4g} +- {error:.2g}")
    monitor.plot(folder / "plasticity.png")
    print(f"figure: {folder / 'plasticity.png'}")


if __name__ == "__main__":
    main()
