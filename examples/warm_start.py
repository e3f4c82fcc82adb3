"""Half of the images, then all: is the start of higher local redundancy the better one?

Run ``python examples/warm_start.py STORE SEEDS FIRST EPOCHS``, STORE by ``fastlr data prepare``.

ResNet-18 learns half of ten classes' images, then all (Ash and Adams 2020, arXiv:1910.08475), from
new weights (cold), the first stage's (warm), or these shrunk and perturbed. What is in
``warm-start.jsonl`` is not run again.
"""

import json
import sys
from collections import defaultdict
from functools import lru_cache
from itertools import combinations, product

import matplotlib.pyplot as plt
import numpy as np
import torch
from torchvision.models import resnet18

import fastlr
from fastlr.experiments.data import ImageStore, normalise

COUNT, FIRST, EPOCHS = [int(given) for given in sys.argv[2:]] + [5, 0, 30][len(sys.argv) - 2 :]
STORE = ImageStore.open(sys.argv[1])
(IMAGES, LABELS), (TEST, ANSWERS) = (STORE.load(range(10), split) for split in ("train", "test"))
# Shares of old and new weights; the last, Adam's rate and the batch as in JordanAsh/warm_start.
ARMS = {"cold": (0, 1), "warm": (1, 0), "shrink and perturb": (0.4, 0.1)}
RATE, BATCH = 1e-3, 128
VALUES = ["own at the start", "shapes at the start", "own at the end", "shapes at the end"]


def train(model, x, y):
    """Train for one stage, with a new optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, x, y):
    """Return the share of right answers."""
    return (model.eval()(x).argmax(1) == y).double().mean().item()


@lru_cache(maxsize=1)
def first_stage(seed):
    """Return images and labels in this seed's order, and a model that learned their first half."""
    torch.manual_seed(seed)
    order, model = torch.randperm(len(LABELS)), resnet18(num_classes=10)
    x, y = normalise(IMAGES[order]), LABELS[order]
    train(model, x[: len(x) // 2], y[: len(x) // 2])
    return x, y, model


def second_stage(seed, arm):
    """Train on all images, and measure. Own inputs: every second image, so of both halves."""
    x, y, trained = first_stage(seed)
    torch.manual_seed(seed + 1_000_000)  # new weights and batches that all arms share
    model = resnet18(num_classes=10)
    for new, old in zip(model.parameters(), trained.parameters(), strict=True):
        new.data = ARMS[arm][0] * old.data + ARMS[arm][1] * new.data
    torch.optim.swa_utils.update_bn(x.split(BATCH), model)  # so that eval() is of these weights
    inputs = {"own": fastlr.TensorInputs(x[::2]), "shapes": fastlr.ShapeImages((3, *x.shape[2:]))}
    row = {"half": accuracy(trained, x[: len(x) // 2], y[: len(x) // 2])}
    for value in VALUES:
        if value == "own at the end":
            train(model, x, y)
        row[value] = fastlr.estimate(model, inputs[value.split()[0]], len(inputs["own"])).value
    return row | {"all": accuracy(model, x, y), "test": accuracy(model, normalise(TEST), ANSWERS)}


table = defaultdict(list)
with open("warm-start.jsonl", "a+") as file:
    file.seek(0)
    rows = {tuple(row.pop("run")): row for row in map(json.loads, file)}
    for seed, arm in product(range(FIRST, FIRST + COUNT), ARMS):
        run = (seed, arm, EPOCHS, STORE.digest)
        if run not in rows:
            rows[run] = second_stage(seed, arm)
            print(json.dumps({"run": run, **rows[run]}), file=file, flush=True)
        for key, value in rows[run].items():
            table[arm, key].append(value)
for (arm, key), values in table.items():
    print(f"{arm}, {key}: {np.mean(values):.4g} +- {np.std(values, ddof=1) / COUNT**0.5:.2g}")
print("In how many seeds has the better of two arms the higher value?", *VALUES, sep="; ")
for one, other in combinations(ARMS, 2):
    better, *higher = (np.subtract(table[one, k], table[other, k]) for k in ("test", *VALUES))
    print(f"{one} or {other}:", *(np.count_nonzero(better * change > 0) for change in higher))
figure, axes = plt.subplots(1, 4, sharey=True, figsize=(14, 4), layout="constrained")
for arm, (axis, value) in product(ARMS, zip(axes, VALUES, strict=True)):
    axis.plot(np.log10(table[arm, value]), table[arm, "test"], "o", label=arm)
    axis.set(xlabel=f"log10 of local redundancy, {value}", ylabel="test accuracy")
axes[0].legend()
figure.savefig("warm-start.png", dpi=120)
