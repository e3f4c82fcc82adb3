"""The demo of one network: MobileNetV3-Large with a two-class head at 224x224, measured before and after a short real training.

The same synthetic images are used both times, so the difference of the two estimates is paired. ``fastlr demo network``
runs it.
"""

from __future__ import annotations

import dataclasses
import os
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import fastlr
from fastlr.errors import InputError
from fastlr.models import load_model
from fastlr.report.plots import per_layer_chart
from fastlr.report.record import machine, output_folder, progress_bar, save_images, write_json
from fastlr.report.tables import pm, top_modules

MODEL = "mobilenet_v3_large"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TARGET = 0.05  # standard error over value
ZIP = "tiny-imagenet-60.zip"


@dataclasses.dataclass(frozen=True)
class TwoClasses:
    """A small labelled data set.

    Attributes:
        name: What it is, for people.
        train_x: Images [N, 3, H, W], float32 in [0, 1].
        train_y: Labels [N], 0 or 1.
        test_x: Images that training never sees.
        test_y: Their labels.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits_pair(first: int = 3, second: int = 8, *, seed: int = 0) -> TwoClasses:
    """Return two of scikit-learn's digits (8x8, about 180 each) as colour images; 256 train, the rest test.

    Raises:
        InputError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("the demo trains on scikit-learn's digits: pip install 'fastlr[demo]'") from error
    data = load_digits()
    target = torch.as_tensor(data.target)
    chosen = ((target == first) | (target == second)).nonzero().flatten()
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))]
    x = torch.as_tensor(data.images)[chosen].float().div(16)[:, None].expand(-1, 3, -1, -1)
    y = (target[chosen] == second).long()
    return TwoClasses(f"scikit-learn's digits {first} and {second}", x[:256], y[:256], x[256:], y[256:])


def load_tiny_imagenet_pair(path: Path) -> TwoClasses:
    """Return the first two classes of a zip laid out as train/<class>/*.JPEG and val/<class>/*.JPEG (64x64).

    Raises:
        InputError: The file is not such a zip.
    """
    from PIL import Image
    from torchvision.transforms.functional import to_tensor

    def images(archive: zipfile.ZipFile, names: list[str]) -> Iterator[Tensor]:
        for name in names:
            with archive.open(name) as file:
                yield to_tensor(Image.open(file).convert("RGB"))

    try:
        with zipfile.ZipFile(path) as archive:
            files = sorted(name for name in archive.namelist() if name.lower().endswith((".jpeg", ".jpg")))
            classes = sorted({name.split("/")[1] for name in files if name.startswith("train/")})[:2]
            parts: list[Tensor] = []
            for split in ("train", "val"):
                names = [[f for f in files if f.startswith(f"{split}/{c}/")] for c in classes]
                parts.append(torch.stack([image for each in names for image in images(archive, each)]))
                parts.append(torch.tensor([label for label, each in enumerate(names) for _ in each]))
    except (OSError, zipfile.BadZipFile, RuntimeError, IndexError) as error:
        raise InputError(f"{path} is not a zip of train/<class>/*.JPEG and val/<class>/*.JPEG: {error}") from error
    if len(classes) < 2:
        raise InputError(f"{path} holds {len(classes)} classes under train/; the demo needs two")
    return TwoClasses(f"{' and '.join(classes)} of {path.name}", *parts)


def as_input(x: Tensor, size: int) -> Tensor:
    """Resize images [N, 3, h, w] in [0, 1] to ``size`` and normalise them with ImageNet's mean and deviation."""
    x = F.interpolate(x, size=(size, size), mode="nearest" if x.shape[-1] < 32 else "bilinear")
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def train(
    model: nn.Module, data: TwoClasses, *, size: int, steps: int, batch: int, lr: float, seed: int
) -> Iterator[tuple[int, float]]:
    """Train in place with SGD (Nesterov momentum 0.9), yielding (step, loss); the model ends in eval().

    A few dozen steps are too few for the running statistics of batch normalisation (momentum 0.01 in MobileNetV3), so
    these are estimated anew at the end, as the average over six batches of training images.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    model.train()
    order = torch.empty(0, dtype=torch.long)
    for step in range(steps):
        while len(order) < batch:
            order = torch.cat([order, torch.randperm(len(data.train_y), generator=generator)])
        rows, order = order[:batch], order[batch:]
        loss = F.cross_entropy(model(as_input(data.train_x[rows], size)), data.train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step + 1, loss.item()
    optimizer.zero_grad()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average over the batches that follow
    with torch.no_grad():
        rows = torch.randperm(len(data.train_y), generator=generator)[: 6 * batch]
        for part in rows.split(batch):
            model(as_input(data.train_x[part], size))
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, size: int, batch: int = 16) -> float:
    """Return the share of images [N, 3, h, w] whose largest output is their label [N]."""
    right = [model(as_input(a, size)).argmax(1) == b for a, b in zip(x.split(batch), y.split(batch))]
    return torch.cat(right).double().mean().item()


def run(
    output: str | os.PathLike[str] = "demo-network",
    *,
    seed: int = 0,
    size: int = 224,
    steps: int = 32,
    batch: int = 16,
    lr: float = 0.05,
    min_n: int = 512,
    max_n: int = 1024,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure, train, measure again; print what happens and leave the charts and numbers in ``output``.

    With FASTLR_DATA set to a folder that holds ``tiny-imagenet-60.zip``, its first two classes are trained on,
    otherwise two of scikit-learn's digits.

    Args:
        output: Folder for ``demo.json``, ``per-layer.png`` and ``images.png``; made if needed.
        seed: Of the initial parameters, the training and the synthetic images.
        size: Height and width of all images.
        steps: Training steps.
        batch: Images a step.
        lr: Learning rate.
        min_n: Least number of synthetic images of an estimate.
        max_n: Largest; between the two, until the standard error is 5 % of the value.
        console: Where to print; stdout if None.

    Returns:
        The record written to ``demo.json``.

    Raises:
        InputError: No data to train on, or ``output`` is not writable.
    """
    say = console or Console(highlight=False)
    folder = output_folder(output)
    begin = time.perf_counter()
    archive = Path(os.environ.get("FASTLR_DATA", "")) / ZIP
    given = bool(os.environ.get("FASTLR_DATA")) and archive.is_file()
    data = load_tiny_imagenet_pair(archive) if given else load_digits_pair(seed=seed)

    torch.manual_seed(seed)
    model = load_model(MODEL, num_classes=2).eval()
    images = fastlr.ShapeImages(size=(3, size, size))
    say.print(f"{MODEL}, two classes, {size}x{size}, {sum(p.numel() for p in model.parameters()):,} parameters, CPU")

    say.print("[bold]1. Local redundancy at initialisation")
    options: dict[str, Any] = {"seed": seed, "target_rel_stderr": TARGET, "min_n": min_n, "max_n": max_n}
    estimator = fastlr.LocalRedundancy(model, images, **options)  # plans and proves once, measures twice
    before = _measure(say, estimator)
    say.print("[bold]2. Training")
    say.print(f"   {data.name}, {steps} steps of {batch} images, SGD, learning rate {lr}")
    training = _train(say, model, data, size=size, steps=steps, batch=batch, lr=lr, seed=seed)
    say.print("[bold]3. Local redundancy after training, on the same synthetic images")
    after = _measure(say, estimator)
    common = min(before.n, after.n)
    difference, stderr = fastlr.paired_difference(_first(after, common), _first(before, common))
    sigmas = f", {abs(difference) / stderr:.1f} standard errors" if stderr > 0 else ""
    say.print(f"   change: {pm(difference, stderr)} (paired on the first {common} images{sigmas})")
    for name, result in (("at initialisation", before), ("after training", after)):
        say.print(f"[bold]{name}")
        say.print(top_modules(result.per_parameter, 4))

    per_layer_chart(
        {"at initialisation": before, "after training": after},
        folder / "per-layer.png",
        title=f"{MODEL}: local redundancy by layer, in network order",
    )
    save_images(folder / "images.png", images, seed=seed)
    record = {
        "machine": machine(),
        "command": f"fastlr demo network --seed {seed}",
        "model": MODEL,
        "size": size,
        "seed": seed,
        "initial": before.to_dict(),
        "training": {"data": data.name, "steps": steps, "batch": batch, "lr": lr, **training},
        "trained": after.to_dict(),
        "paired_difference": {"value": difference, "stderr": stderr, "n": common},
        "seconds": time.perf_counter() - begin,
    }
    write_json(folder / "demo.json", record)
    say.print(f"{record['seconds']:.0f} s in all. Look at:")
    for name, what in (
        ("per-layer.png", "each layer's share, before and after"),
        ("images.png", "the first synthetic images"),
        ("demo.json", "every number above"),
    ):
        say.print(f"   {folder / name}  {what}", soft_wrap=True)
    return record


def _measure(say: Console, estimator: fastlr.LocalRedundancy) -> fastlr.Estimate:
    with progress_bar("   images", estimator.total) as progress:
        estimator.progress = progress
        result = estimator.measure()
    say.print(f"   [bold]{pm(result.value, result.stderr)}[/] ({100 * result.rel_stderr:.1f} %), ", end="")
    say.print(f"{result.n} images, {result.seconds:.0f} s")
    if result.rel_stderr > TARGET:
        say.print(f"   (max_n reached before the aim of {100 * TARGET:.0f} %: the gradients are heavy-tailed)")
    return result


def _first(estimate: fastlr.Estimate, n: int) -> fastlr.Estimate:
    """Cut an estimate to its first ``n`` images: those are the same for both, however many each has needed."""
    assert estimate.per_sample is not None  # it was just measured
    part = estimate.per_sample[:n]
    stderr = part.std().item() / len(part) ** 0.5
    return dataclasses.replace(
        estimate, per_sample=part, n=n, inputs_used=n, inputs_digest="", value=part.mean().item(), stderr=stderr
    )


def _train(say: Console, model: nn.Module, data: TwoClasses, *, size: int, **options: Any) -> dict[str, float]:
    begin = time.perf_counter()
    losses = []
    with say.status("   training") as status:
        for step, loss in train(model, data, size=size, **options):
            losses.append(loss)
            status.update(f"   step {step}/{options['steps']}, loss {loss:.3f}")
    last = sum(losses[-8:]) / len(losses[-8:])
    seconds = time.perf_counter() - begin
    train_accuracy = accuracy(model, data.train_x[:96], data.train_y[:96], size)
    test_accuracy = accuracy(model, data.test_x, data.test_y, size)
    say.print(f"   loss {losses[0]:.3f} -> {last:.3f} (mean of the last {len(losses[-8:])}), {seconds:.0f} s")
    say.print(f"   accuracy {100 * train_accuracy:.0f} % on 96 training images, ", end="")
    say.print(f"{100 * test_accuracy:.0f} % on {len(data.test_y)} unseen ones")
    return {
        "first_loss": losses[0],
        "last_loss": last,
        "train_accuracy": train_accuracy,
        "test_accuracy": test_accuracy,
        "train_seconds": seconds,
    }
