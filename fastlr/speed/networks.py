"""The networks of the benchmark, what they must move, and the plain passes that an estimate is held against."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastlr.errors import InputError
from fastlr.inputs import ShapeImages
from fastlr.models import load_model

MAIN = "mobilenet_v3_large"
CLASSES = {"mobilenet_v3_large": 2}  # the paper's image network has two; the others keep their thousand
CALIBRATION = 64  # images behind the statistics of batch norm
LEAST_VARIANCE = 0.5  # of the layer's median: a channel that hardly varies on those images is not blown up on others


@dataclass
class Network:
    """A model in eval mode on its device, and its images.

    Attributes:
        name: torchvision's.
        model: float32, channels_last.
        images: what it is measured on.
        dtype: autocast dtype, or None.
    """

    name: str
    model: nn.Module
    images: ShapeImages
    dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def weights(self) -> torch.dtype:
        """Dtype of the parameters, which is also that of the images."""
        return next(self.model.parameters()).dtype

    @property
    def precision(self) -> str:
        """In words: ``bfloat16 autocast, float32 weights``."""
        weights = str(self.weights).removeprefix("torch.")
        return f"{str(self.dtype).removeprefix('torch.')} autocast, {weights} weights" if self.dtype else weights

    def autocast(self) -> AbstractContextManager:
        """The context of forward passes; one for each pass, as its cache of cast weights must not outlive it."""
        return torch.autocast(self.device.type, dtype=self.dtype) if self.dtype else nullcontext()

    def batch(self, count: int, start: int = 0) -> Tensor:
        """Images ``start`` to ``start + count - 1``."""
        return image_batch(self.images, start, start + count, device=self.device, dtype=self.weights)


def build(
    name: str,
    device: torch.device,
    *,
    size: int = 224,
    dtype: torch.dtype | None = None,
    calibration: int = CALIBRATION,
) -> Network:
    """Build a network, the same numbers every time, with statistics of batch norm from images of its own kind.

    At initialisation the running statistics are 0 and 1, so that in eval mode features shrink to nothing, and the head's
    outputs are nearly 0, so that rounding is most of them: its biases are drawn from a normal distribution.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = load_model(name, num_classes=CLASSES.get(name))
        head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        nn.init.normal_(head.bias)
        if not head.weight.any():  # vit_b_16's starts at zero, and with it all gradients before it
            nn.init.normal_(head.weight, std=0.02)
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = ShapeImages((3, size, size), channels_last=True)
    calibrate(model, image_batch(images, 0, calibration, seed=1, device=device))
    return Network(name, model, images, dtype)


def image_batch(
    images: Any, start: int, stop: int, *, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """Images ``start`` to ``stop - 1`` of any source of single tensors."""
    x = images.batch(start, stop, seed=seed, device=device, dtype=dtype)
    assert isinstance(x, Tensor)
    return x


def calibrate(model: nn.Module, x: Tensor) -> nn.Module:
    """Set the running statistics of every batch norm to those of ``x``; the model ends in eval mode."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in norms]
    model.eval()
    for m in norms:
        m.reset_running_stats()
        m.momentum, m.training = None, True
    with torch.no_grad():
        model(x)
    for m, momentum in zip(norms, momenta, strict=True):
        m.momentum, m.training = momentum, False
        assert m.running_var is not None
        m.running_var.clamp_(min=float(m.running_var.median()) * LEAST_VARIANCE)
    return model


# ------------------------------------------------------------------------------------------------------------- traffic
@dataclass(frozen=True)
class Traffic:
    """Elements an image moves through the convolutions and linear layers of a network, everything else fused.

    Attributes:
        inputs: elements of all layers' inputs.
        outputs: of their outputs.
        operations: floating-point operations of the forward pass.
        layers: how many.
    """

    inputs: int
    outputs: int
    operations: int
    layers: int

    def bytes(self, stage: str, element: int = 2) -> int:
        """Bytes an image: "forward" (inputs in, outputs out), "backward" (gradient, what was kept, input gradient), "norms".

        The norms read the inputs once more. Weights are not counted: a chunk of images shares them.
        """
        counts = {
            "forward": self.inputs + self.outputs,
            "backward": 2 * self.outputs + self.inputs,
            "norms": self.inputs,
        }
        return element * counts[stage]

    def estimate_bytes(self, element: int = 2) -> int:
        """Bytes an image of a whole estimate, images aside."""
        return sum(self.bytes(stage, element) for stage in ("forward", "backward", "norms"))


class _Products(TorchDispatchMode):
    """Counts the convolutions and the products with a weight matrix that a forward pass comes down to."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: D105
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            self.counts.append((args[0].numel(), out.numel(), 2 * out.numel() * args[1][0].numel()))
        elif func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            x = args[-2]
            self.counts.append((x.numel(), out.numel(), 2 * out.numel() * x.shape[1]))
        return out


def traffic(model: nn.Module, x: Tensor) -> Traffic:
    """Count on one image: every convolution and every product with a weight matrix (so not attention's own)."""
    with torch.enable_grad(), _Products() as products:
        model(x[:1])
    inputs, outputs, operations = (sum(column) for column in zip(*products.counts, strict=True))
    return Traffic(inputs, outputs, operations, len(products.counts))


# --------------------------------------------------------------------------------------------------------- plain passes
def plain_pass(network: Network, model: Callable[[Tensor], Tensor], images: Tensor, chunk: int) -> Callable[[], Any]:
    """One forward and backward pass over the images, ``chunk`` at a time, all weight gradients included.

    Args:
        network: for its precision.
        model: the network's model, or what stands for it (compiled, folded), with its parameters.
        images: on the device already; making them is not part of the pass.
        chunk: images at once.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]  # type: ignore[attr-defined]
    with torch.no_grad(), network.autocast():
        v = torch.randn_like(model(images[:chunk]))

    def run() -> None:
        for lo in range(0, len(images), chunk):
            x = images[lo : lo + chunk]
            with network.autocast():
                z = model(x)
            torch.autograd.grad(z, parameters, v[: len(x)])

    return run


def folded_model(network: Network) -> nn.Module:
    """A copy whose batch norms are folded into the convolutions before them (torch.fx).

    Raises:
        InputError: torch.fx cannot trace the model, or there is nothing to fold.
    """
    from torch.fx.experimental.optimization import fuse

    try:
        folded = fuse(copy.deepcopy(network.model).eval())
    except Exception as error:
        raise InputError(f"{network.name} cannot be folded by torch.fx: {error}") from error
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in folded.modules()):
        raise InputError(f"torch.fx left a batch norm of {network.name} unfolded")
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.model.modules()):
        raise InputError(f"{network.name} has no batch norm to fold")
    return folded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@contextmanager
def exact_float32() -> Iterator[None]:
    """No TF32 within this context: float32 products are products of float32 numbers."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` that is at most ``most``: chunks of one size.

    Examples:
        >>> largest_divisor(5000, 208), largest_divisor(7, 6)
        (200, 1)
    """
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)
