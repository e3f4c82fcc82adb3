"""Relative variance of one draw of each probe, on small two-class networks before and after training.

    python -m bench.probe_variance [--out bench/results/cpu] [--n 2000] [--seed 0]

Networks are trained on a sequence of two-class tasks (pairs of scikit-learn's digits, 16x16), weights carried over, and
measured on synthetic shapes. "Relative variance" is Var(value of one image) / mean^2: over images and over draws. The
standard error of an estimate from n images is value * sqrt(relative variance / n).

For two classes the rademacher value r of an image is its label expectation, p0 p1 g with g = ||J^T (1, -1)||^2, and a
sampled label gives p1^2 g with probability p0 and p0^2 g with probability p1. So the variance of the sampled probe is
known: E s^2 = mean of r^2 (p0^3 + p1^3) / (p0 p1). That is the column "sampled"; "drawn" is the same measured from
draws, which misses what the draws miss in confident networks: labels so rare that none was drawn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fastlr
from bench.timing import environment

TASKS = (0, 1, 4, 10)  # tasks trained before each measurement
EPOCHS = 8
TRAINED_RATIO = 3.0  # the claim: on trained networks, sampled has at least this many times the variance of rademacher


class Attention(nn.Module):
    """A pre-norm transformer of two blocks on 4x4 patches."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, 16, 16] to logits [B, 2]."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.blocks(tokens).mean(1))


def mlp() -> nn.Module:
    """Return a perceptron with two hidden ReLU layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2))


def convolutional(act: type[nn.Module], norm: bool) -> nn.Module:
    """Return three strided convolutions with or without batch norm, and a two-class head."""
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(a, b, 3, 2, 1, bias=not norm), *([nn.BatchNorm2d(b)] if norm else []), act()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4, 2))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP, ReLU": mlp,
    "CNN, ReLU": lambda: convolutional(nn.ReLU, norm=False),
    "CNN, BatchNorm, ReLU": lambda: convolutional(nn.ReLU, norm=True),
    "CNN, BatchNorm, Hardswish": lambda: convolutional(nn.Hardswish, norm=True),
    "Transformer": Attention,
}


def tasks(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (images [N, 3, 16, 16], labels in {0, 1}) of one random pair of digits after another."""
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = nn.functional.interpolate(images, size=(16, 16), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.as_tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    while True:
        first, second = torch.randperm(10, generator=generator)[:2].tolist()
        chosen = (labels == first) | (labels == second)
        yield images[chosen].contiguous(), (labels[chosen] == second).long()


def train(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> float:
    """Train on one task and return its training accuracy."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x), generator=generator).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def relative_variance(values: Tensor) -> float:
    """Return Var / mean^2 of one value."""
    return float(values.var() / values.mean().square())


def measure(model: nn.Module, inputs: fastlr.ShapeImages, n: int, seed: int) -> dict[str, float]:
    """Return the estimate and the relative variance of one draw of each probe."""
    rademacher = fastlr.estimate(model, inputs, n, seed=seed)
    sampled = fastlr.estimate(model, inputs, n, seed=seed, probe="sampled")
    batch = fastlr.estimate(model, inputs, n, seed=seed, probe="batch", batch_size=50)
    with torch.no_grad():
        model.eval()
        log_p = model(inputs.batch(0, n, seed=seed)).double().log_softmax(1)
    r = rademacher.per_sample
    odds = (log_p * 3).exp().sum(1) / log_p.sum(1).exp()
    mean = r.mean()
    return {
        "value": rademacher.value,
        "rel_stderr": rademacher.rel_stderr,
        "confidence": float(log_p.amax(1).exp().mean()),
        "rademacher": relative_variance(r),
        "sampled": float((r.square() * odds).mean() / mean.square() - 1),
        "sampled_drawn": relative_variance(sampled.per_sample),
        "sampled_value": sampled.value,
        "batch_of_50": relative_variance(batch.per_sample) * 50,  # for each image spent
    }


def table(rows: list[dict]) -> str:
    """Return the rows as a markdown table."""
    lines = [
        "| network | tasks | mean confidence | LR | rademacher | sampled | (drawn) | batch of 50, times 50 "
        "| sampled / rademacher |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['network']} | {row['tasks']} | {row['confidence']:.4f} | {row['value']:.3g} "
            f"| {row['rademacher']:.2f} | {row['sampled']:.2f} | {row['sampled_drawn']:.2f} "
            f"| {row['batch_of_50']:.1f} | {row['ratio']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train, measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu"))
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, rows, where = time.time(), [], environment()
    inputs = fastlr.ShapeImages(size=(3, 16, 16))
    for name, build in NETWORKS.items():
        torch.manual_seed(options.seed)
        model, stream, accuracy = build(), tasks(options.seed), float("nan")
        for done in range(max(TASKS) + 1):
            if done:
                accuracy = train(model, *next(stream), seed=done)
            if done in TASKS:
                row = {"network": name, "tasks": done, "train_accuracy": accuracy}
                row |= measure(model, inputs, options.n, options.seed)
                row["ratio"] = row["sampled"] / row["rademacher"]
                rows.append(row)
                print(
                    f"{name}, {done} tasks: {row['ratio']:.1f} times the variance ({time.time() - start:.0f} s)",
                    flush=True,
                )
    trained = [row["ratio"] for row in rows if row["tasks"]]
    claim = f"trained networks: sampled has {min(trained):.1f} to {max(trained):.1f} times the variance of rademacher"
    print(f"\n{table(rows)}\n\n{claim}")
    record = {
        "what": "relative variance of one draw of each probe",
        "claim": claim,
        "holds": min(trained) >= TRAINED_RATIO,
        "n": options.n,
        "seed": options.seed,
        "epochs_per_task": EPOCHS,
        "inputs": repr(inputs),
        "environment": where,
        "seconds": time.time() - start,
        "rows": [{key: None if value != value else value for key, value in row.items()} for row in rows],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "probe_variance.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    notes = f"Relative variance of one draw, n = {options.n} images of {inputs!r}, seed {options.seed}; {claim}."
    source = (
        f"`{where['command']}` at commit {where['commit'][:12]}, {where['cpu']}, {where['threads']} threads, "
        f"torch {where['versions']['torch']}, {where['date']}."
    )
    (options.out / "probe_variance.md").write_text(f"{notes}\n\n{source}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
