"""The whole estimate over synthetic images beside plain passes, by network, precision and mode.

Plain passes are over the same images.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from bench.cases import MAIN, Case, as_double, calibrate, image_network, loop_norms
from bench.paired import Work, Wrong
from fastlr import Estimate, LocalRedundancy, ShapeImages, ops
from fastlr.ghost.fusion.calls import NO_NORM
from fastlr.ghost.fusion.mode import unfolded

FULL, LOW = 1e-3, 2e-2  # root mean square of the samples' relative deviations: float32, 16 bits
AS_TORCH = (
    2.0  # times the error of torch's own backward pass in the same precision, where that is more
)


class Mode(NamedTuple):
    """A way of running the estimate: backend of ops, folded batch norms, chunks as a CUDA graph.

    Backend None: as usual.
    """

    backend: str | None = None
    folded: bool = True
    graph: bool = True


MODES = {
    "default": Mode(),
    "launched": Mode(graph=False),
    "unfolded": Mode(graph=False, folded=False),
    "torch ops": Mode("torch", False, False),
}
ON_CPU = ("default", "unfolded")


class Network:
    """A network in eval mode on its device, channels_last; its images; its precision's autocast."""

    def __init__(
        self, name: str, precision: str, size: int, device: torch.device, calibration: int = 64
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Any = image_network(name, size)
        model = model.to(device, memory_format=torch.channels_last)
        self.device, self.images = device, ShapeImages((3, size, size), channels_last=True)
        calibrate(
            model, self.images.batch(0, calibration, seed=1, device=device, dtype=torch.float32)
        )
        low = precision.endswith("weights")  # the weights themselves in 16 bits, without autocast
        self.model: nn.Module = model.bfloat16() if low else model
        self.weights = torch.bfloat16 if low else torch.float32
        self.dtype = torch.bfloat16 if precision == "bfloat16" else None

    def autocast(self) -> Any:
        """Return a new context for one forward pass.

        Its cache of cast weights must not outlive the pass.
        """
        return torch.autocast(self.device.type, dtype=self.dtype) if self.dtype else nullcontext()

    def batch(self, count: int) -> Tensor:
        """The first images, in the dtype of the weights."""
        return self.images.batch(0, count, seed=0, device=self.device, dtype=self.weights)

    def plain(self, model: Any, images: Tensor, chunk: int) -> Callable[[], None]:
        """Return what runs a model forward and backward over the images in chunks.

        It is the network's model, or what stands for it.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad(), self.autocast():
            v = torch.randn_like(model(images[:chunk]))

        def run() -> None:
            for x in images.split(chunk):
                with self.autocast():
                    z = model(x)
                torch.autograd.grad(z, parameters, v[: len(x)])

        return run

    def estimator(self, n: int, chunk: int | None = None) -> LocalRedundancy:
        """Of the network."""
        return LocalRedundancy(self.model, self.images, n, dtype=self.dtype, batch_size=chunk)


def measure(estimator: LocalRedundancy, mode: Mode) -> Estimate:
    """Measure in a mode."""
    folding = nullcontext() if mode.folded else unfolded()
    without_graphs = mock.patch.object(estimator.chunks.replays, "recorder", None)
    replaying = nullcontext() if mode.graph else without_graphs
    with ops.using(mode.backend), folding, replaying:
        return estimator.measure()


def unfolded_blocks(estimator: LocalRedundancy) -> list[str]:
    """Return which batch norms ran unfolded in the last forward pass, and why."""
    modules = estimator.view.module.modules()
    norms = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules)
    engine = estimator.passes.engine
    blocks = engine.folding.blocks
    disabled = blocks.disabled or engine.ladder.reason
    if norms and disabled:
        return [f"no batch norm is folded: {disabled}"]
    reasons = blocks.not_folded | blocks.refused
    unfolded_names = [name for name, reason in reasons.items() if reason != NO_NORM]
    problems = [f"{name} is not folded: {reasons[name]}" for name in unfolded_names]
    if len(blocks.folded) < norms and not problems:
        problems.append(f"only {len(blocks.folded)} of {norms} batch norms are folded")
    return problems


def check_mode(estimator: LocalRedundancy, mode: Mode) -> None:
    """Raise Wrong where the estimate did not run as the mode says."""
    # Where all images are one chunk, the second captures.
    estimate = [measure(estimator, mode) for _ in range(2)][-1]
    problems = [note for note in estimate.notes if "CUDA graph" not in note]
    replays = estimator.chunks.replays
    if estimator.view.device.type == "cuda" and mode.graph and not replays.held:
        problems.append(replays.note or "no chunk was captured as a CUDA graph")
    slow = sorted(name for name, route in estimate.routes.items() if route in ("loop", "node"))
    if slow:
        problems.append(f"{len(slow)} parameters by a slow route, first {slow[0]}")
    if mode.folded:
        problems += unfolded_blocks(estimator)
    if problems:
        raise Wrong("; ".join(problems))


def check_norms(network: Network, mode: Mode, samples: int) -> dict[str, float]:
    """Hold the mode's own per-sample values to float64 on the first images.

    The tolerances are FULL, LOW and AS_TORCH.
    """
    x = network.batch(samples)
    estimator = network.estimator(samples, samples)
    values = measure(estimator, mode).per_sample.to(x.device)
    with torch.no_grad(), network.autocast():
        z = network.model(x)
    v = estimator.passes.cotangent(range(samples), x, scaled=False)(z.double())
    case = Case(network.model, x)
    truth, own = loop_norms(as_double(case), v), loop_norms(case, v, under=network.autocast)
    truth, own = (torch.stack(list(norms.values())).sum(0) for norms in (truth, own))
    off, torch_off = (float((found / truth - 1).square().mean().sqrt()) for found in (values, own))
    limit = max(
        FULL if network.dtype is None and x.dtype == torch.float32 else LOW, AS_TORCH * torch_off
    )
    if not off <= limit:
        raise Wrong(
            f"norms are off by {off:.2g} (root mean square), torch's own by {torch_off:.2g}"
        )
    return {"deviation_rms": off, "torch_deviation_rms": torch_off}


def estimate_pair(
    name: str,
    precision: str,
    mode: str,
    n: int,
    size: int,
    samples: int,
    device: torch.device,
    chunk: int | None = None,
) -> Work:
    """Return a network's estimate in one mode beside an eager plain pass over as many images.

    Both run in chunks of ``chunk`` images; default: as many as the estimate would take.
    """
    network = Network(name, precision, size, device, calibration=min(64, 4 * n))
    chunk = chunk or largest_divisor(n, network.estimator(n).chunks.first_size())
    estimator = network.estimator(n, chunk)

    def check() -> dict[str, Any]:
        # Of float32 numbers, exact products.
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with exact if precision == "float32" else nullcontext():
            found = check_norms(network, MODES[mode], samples)
        check_mode(estimator, MODES[mode])
        return {**found, "n": n, "chunk": chunk, "size": size}

    plain = network.plain(network.model, network.batch(n), chunk)
    return Work(plain, partial(measure, estimator, MODES[mode]), check, device)


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` that is at most ``most``: chunks of one size."""
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)


def plain_pair(kind: str, n: int, device: torch.device) -> Work:
    """Return another plain pass beside the eager one, in bfloat16 autocast.

    It is compiled, folded by torch.fx, or both.
    """
    from torch.fx.experimental.optimization import fuse

    network = Network(MAIN, "bfloat16", 224, device)
    images, chunk = network.batch(n), largest_divisor(n, 256)
    model: Any = network.model
    if "folded" in kind:
        model = fuse(copy.deepcopy(model)).to(memory_format=torch.channels_last)
    if "compiled" in kind:
        model = torch.compile(model, dynamic=False)
    return Work(
        *(network.plain(each, images, chunk) for each in (network.model, model)), device=device
    )


PRECISIONS = ("bfloat16", "float32", "bfloat16 weights")
CASES = [  # network, precision, mode; the headline first
    *itertools.product([MAIN], PRECISIONS[:2], MODES),
    *itertools.product(["resnet50", "vit_b_16"], PRECISIONS, ["default"]),
    (MAIN, PRECISIONS[2], "default"),
]


@pytest.mark.parametrize("name, precision, mode", CASES)
def test_estimate(
    beside_plain: Callable, name: str, precision: str, mode: str, device: torch.device, quick: bool
) -> None:
    """Time n = 5000 images of 224x224 on a GPU, and a few small ones on a CPU.

    The headline is never made smaller.
    """
    headline = (name, precision) == (MAIN, "bfloat16")
    if device.type == "cuda":
        n, size, samples = 5000 if headline else 2000, 224, 64
        if quick and not (headline and mode == "default"):
            pytest.skip("the headline alone in a quick run")
    else:
        n, size, samples = (4, 32, 2) if quick else (32, 96, 4)
        if (name, precision) != (MAIN, "float32") or mode not in ON_CPU:
            pytest.skip("a case of the GPU")
    arguments = name, precision, mode, n, size, samples, device
    beside_plain(estimate_pair, *arguments, group=f"estimate, {name}", name=f"{precision}, {mode}")


@pytest.mark.parametrize("kind", ["compiled", "folded", "folded, compiled"])
def test_plain(beside_plain: Callable, kind: str, device: torch.device, quick: bool) -> None:
    """What plain itself takes when it is compiled or folded: a user may compare with that."""
    if device.type != "cuda" or quick:
        pytest.skip("a case of the GPU's full run")
    beside_plain(plain_pair, kind, 5000, device, group=f"estimate, {MAIN}", name=f"plain, {kind}")
