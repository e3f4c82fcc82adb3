"""``fastlr bench``: the speed of the estimate on this machine beside plain passes.

Every result is compared with float64 before it is timed.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.benchmark import Compare, Measurement, Timer

import fastlr
from fastlr.cli.options import check_folders, device_of
from fastlr.display.record import write_json
from fastlr.errors import InputError, ModelError
from fastlr.models import load_model

NETWORKS = {"mobilenet_v3_large": 2, "resnet18": 1000, "vit_b_16": 1000}  # and their classes
# Of a sample's squared norm; in float32, ReLUs whose input is zero within rounding move it by 1e-4.
TOLERANCE = 2e-2
CHECKED = 2
README_BATCH, README_SIZE = 16, 224  # of the table in README


def true_sq_norms(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """Return the squared norms [B] of each sample's gradient of <v, output>, in float64.

    Each takes one backward pass, of the sample beside a copy of itself.
    """
    wide = copy.deepcopy(model).double()
    parameters = [p for p in wide.parameters() if p.requires_grad]
    norms = []
    for row, cotangent in zip(x.double(), v.double()):
        pair = torch.stack([cotangent, torch.zeros_like(cotangent)])
        gradients = torch.autograd.grad(
            wide(torch.stack([row, row])), parameters, pair, allow_unused=True
        )
        norms.append(sum(float(g.square().sum()) for g in gradients if g is not None))
    return torch.tensor(norms, dtype=torch.float64)


def measure(
    name: str, device: torch.device, batch: int, size: int, seconds: float
) -> list[Measurement]:
    """Time a plain forward and backward pass of one network, and fastlr's gradient norms.

    The norms are compared with float64 first.

    Raises:
        ModelError: fastlr's norms are not right here.
    """
    torch.manual_seed(0)
    kwargs = {"image_size": size} if name.startswith("vit") else {}
    model = load_model(name, num_classes=NETWORKS[name], kwargs=kwargs).to(device).eval()
    x = fastlr.ShapeImages((3, size, size)).batch(
        0, batch, seed=0, device=device, dtype=torch.float32
    )
    v = torch.randn(batch, NETWORKS[name], generator=torch.Generator().manual_seed(1)).to(device)
    norms = fastlr.per_sample_grad_sq_norms(model, x, v)
    assert isinstance(norms, Tensor) and isinstance(x, Tensor)
    truth = true_sq_norms(model, x[:CHECKED], v[:CHECKED])
    deviation = float((norms[:CHECKED].cpu().double() / truth - 1).abs().max())
    if not deviation <= TOLERANCE:
        raise ModelError(
            f"{name}: norms are off by {deviation:.2g} of float64 here; please report it"
        )
    parameters = [p for p in model.parameters() if p.requires_grad]

    def plain_pass() -> object:
        return torch.autograd.grad(model(x), parameters, v)

    def own_norms() -> object:
        return fastlr.per_sample_grad_sq_norms(model, x, v)

    statements = {"plain forward+backward": plain_pass, "fastlr, per-sample norms": own_norms}
    return [
        Timer(
            "run()",
            globals={"run": run},
            label=f"batch {batch}, {size}x{size}, float32, {device}",
            sub_label=name,
            description=description,
            num_threads=torch.get_num_threads(),
        ).blocked_autorange(min_run_time=seconds)
        for description, run in statements.items()
    ]


def compare(a: Path, b: Path) -> str:
    """Return two records side by side, by the ratio of fastlr to plain.

    Raises:
        InputError: a file cannot be read or is no record.
    """
    records = []
    for path in (a, b):
        try:
            records.append(
                {row["network"]: row["ratio"] for row in json.loads(path.read_text())["rows"]}
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is no record of fastlr bench --json ({error})") from error
    names = [name for name in records[0] if name in records[1]]
    return "\n".join(
        f"{n}: {records[0][n]:.2f} -> {records[1][n]:.2f} of a plain pass" for n in names
    )


def run(
    device: str | None, quick: bool, json_file: Path | None, pair: tuple[Path, Path] | None
) -> None:
    """Measure and print, write the record, or compare two.

    Args:
        device: to measure; None: a GPU if there is one.
        quick: one small network.
        json_file: where the record goes.
        pair: two records to compare instead.

    Raises:
        InputError: an argument is wrong. ModelError: fastlr's numbers are not right on this
            machine.
    """
    console = Console()
    if pair is not None:
        console.print(compare(*pair), highlight=False)
        return
    place = device_of(device)
    check_folders(json=json_file)
    batch, size = (8, 64) if quick else (8, 96)
    if place.type == "cuda":
        batch, size = 64, 224
    measurements, rows = [], []
    for name in list(NETWORKS)[: 1 if quick else None]:
        plain, own = measure(name, place, batch, size, 0.3 if quick else 3.0)
        measurements += [plain, own]
        rows.append({"network": name, "seconds": own.median, "plain_seconds": plain.median})
        rows[-1]["ratio"] = own.median / plain.median
    Compare(measurements).print()
    for row in rows:
        console.print(f"{row['network']}: {row['ratio']:.2f} of a plain pass", highlight=False)
    if place.type == "cpu":
        console.print(
            f"These are not README's ratios, which are for {README_BATCH} images of "
            f"{README_SIZE}x{README_SIZE}: with {batch} of {size}x{size}, the fixed cost of each "
            "layer weighs more. make bench-peers repeats README's table.",
            highlight=False,
        )
    if json_file is not None:
        about = {
            "fastlr": fastlr.__version__,
            "torch": torch.__version__,
            "device": str(place),
            "batch": batch,
        }
        write_json(json_file, {**about, "size": size, "rows": rows})
