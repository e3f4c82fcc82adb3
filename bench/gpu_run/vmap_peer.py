"""The headline's work by ``torch.func.vmap``, and by plain passes: milliseconds for all images.

``python -m bench.gpu_run.vmap_peer``. torch's vmap of batch norm may refuse bfloat16 inputs with
float32 weights, so it is also timed with bfloat16 weights and in float32. On a CPU a few small
images are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor
from torch.func import functional_call, grad, vmap

import fastlr
from bench.paired import seconds_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALLS = 4  # the first is not counted
CLASSES = 1000


class Peer:
    """MobileNetV3-Large and how it runs.

    Args:
        autocast: True to run it under bfloat16 autocast.
        low: True for weights in bfloat16.
    """

    def __init__(self, autocast: bool = False, low: bool = False) -> None:
        torch.manual_seed(0)
        model: Any = torchvision.models.mobilenet_v3_large().eval()
        model = model.to(DEVICE, memory_format=torch.channels_last)
        self.model = model.bfloat16() if low else model
        self.autocast, self.dtype = autocast, torch.bfloat16 if low else torch.float32
        self.parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        self.buffers = dict(self.model.named_buffers())

    def context(self) -> Any:
        """Return a new context for one forward pass."""
        return torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.autocast)

    def plain(self, x: Tensor, v: Tensor, chunk: int) -> None:
        """Run one forward and backward pass per chunk."""
        for images, cotangent in zip(x.split(chunk), v.split(chunk), strict=True):
            with self.context():
                z = self.model(images)
            torch.autograd.grad(z.float(), list(self.model.parameters()), cotangent)

    def per_sample(self, x: Tensor, v: Tensor, chunk: int) -> Tensor:
        """Return the squared gradient norm of each sample."""

        def product(parameters: dict[str, Tensor], image: Tensor, cotangent: Tensor) -> Tensor:
            with self.context():
                z = functional_call(self.model, (parameters, self.buffers), (image[None],))
            return (z[0].float() * cotangent).sum()

        def sq_norm(image: Tensor, cotangent: Tensor) -> Tensor:
            grads = grad(product)(self.parameters, image, cotangent)
            return torch.stack([g.float().square().sum() for g in grads.values()]).sum()

        return vmap(sq_norm, chunk_size=chunk)(x, v)


def show(name: str, peer: Peer, function: Callable[..., object], chunk: int) -> None:
    """Time a way of running in chunks of one size, and print it; print why it cannot run."""
    size, n, least = (224, 5000, 1000) if DEVICE.type == "cuda" else (32, 8, 4)
    count = max(least // chunk, 1) * chunk
    images = fastlr.ShapeImages((3, size, size), channels_last=True)
    x: Any = images.batch(0, count, seed=0, device=DEVICE, dtype=torch.float32)
    x = x.to(peer.dtype)
    v = torch.randn(count, CLASSES, device=DEVICE)
    try:
        first, *later = [seconds_of(lambda: function(x, v, chunk), DEVICE) for _ in range(CALLS)]
    except RuntimeError as error:  # also where memory runs out
        print(f"{name}, chunks of {chunk}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        torch.cuda.empty_cache()
        return
    median = sorted(later)[len(later) // 2]
    print(
        f"{name}, chunks of {chunk}: {1e3 * median * n / count:.1f} ms for {n} images (measured "
        f"on {count}; first call {first:.2f} s)",
        flush=True,
    )


def main() -> None:
    """Measure, and print a line per way and size of the chunks."""
    chunks, whole = ((32, 64, 128, 256), 1000) if DEVICE.type == "cuda" else ((2, 4), 4)
    peer = Peer(autocast=True)
    show("plain, bfloat16 autocast", peer, peer.plain, whole)
    peers = {
        "vmap, bfloat16 autocast": peer,
        "vmap, bfloat16 weights": Peer(low=True),
        "vmap, float32": Peer(),
    }
    for name, peer in peers.items():
        for chunk in chunks:
            show(name, peer, peer.per_sample, chunk)


if __name__ == "__main__":
    main()
