"""Launches, memory traffic and predicted time of one planned chunk on a GPU, counted without one.

``python -m bench.traffic mobilenet_v3_large --batch 8`` plans the network on the CPU, then makes
one more chunk with every op on its Triton kernel, where launches are noted instead of made. Counted
are Triton's launches and every operation of ATen that would be one (not views, not allocations); of
each launch the bytes of all tensors that it touches, each taken once. The prediction is ``bytes /
(fraction * bandwidth) + launches * gap``; it knows neither caches nor latency.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import fastlr
from bench.cases import calibrate, image_network
from fastlr import ops
from fastlr.ops.deferred_checks import gathered

BANDWIDTHS = {"a100": 2.0, "h100": 3.35, "h200": 4.8, "b200": 8.0}  # TB/s, the vendor's figures
FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "is_same_size",
    "set_",
    "as_strided_",
}


@dataclass
class Traffic:
    """What a chunk launches.

    Attributes:
        launches: By kernel or operation.
        bytes: Touched, by the same.
    """

    launches: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Note one launch and the tensors that it touches."""
        self.launches[name] += 1
        self.bytes[name] += sum({_place(t): _bytes(t) for t in tensors}.values())


def _place(t: Tensor) -> tuple:
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape


def _bytes(t: Tensor) -> int:
    """Bytes of the elements that differ: axes of stride 0 are read once."""
    count = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride else 1
    return count * t.element_size() if t.numel() else 0


class _Operations(TorchDispatchMode):
    """Adds the operations of ATen that are launches on a GPU."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        name, known = func.overloadpacket.__name__, {t.untyped_storage()._cdata for t in given}
        written = any(
            a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
        )
        view = bool(made) and not written and all(t.untyped_storage()._cdata in known for t in made)
        if not view and name not in FREE and any(t.numel() for t in made):
            self.traffic.add(name, [*given, *made])
        return result


def _zeroed(t: Tensor) -> Tensor:
    """Fill with zeros, which no GPU would: not counted."""
    with _disable_current_modes():
        return t.zero_()


@contextmanager
def noted(note: Callable[[Any, tuple, dict[str, Any]], None]) -> Iterator[None]:
    """Call ``note(kernel, arguments, options)`` in place of launching a Triton kernel.

    New memory is zero.
    """
    from triton.runtime.jit import JITFunction

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **given: Any) -> None:
        note(self, args, given)

    before = JITFunction.run, torch.empty, torch.empty_like
    empty, empty_like = before[1:]
    # Over the one that it inherits.
    Tensor.new_empty = Tensor.new_zeros  # type: ignore[method-assign]
    JITFunction.run = run  # type: ignore[method-assign]

    def zeros_for_empty(*size: Any, **options: Any) -> Tensor:
        return _zeroed(empty(*size, **options))

    def zeros_for_empty_like(t: Tensor, **options: Any) -> Tensor:
        return _zeroed(empty_like(t, **options))

    torch.empty = zeros_for_empty  # type: ignore[assignment]
    torch.empty_like = zeros_for_empty_like  # type: ignore[assignment]
    try:
        with ops.using("triton"):
            yield
    finally:
        JITFunction.run, torch.empty, torch.empty_like = before  # type: ignore[method-assign]
        del Tensor.new_empty


def chunk_traffic(
    model: torch.nn.Module, inputs: Any, batch: int, dtype: torch.dtype | None, **options: Any
) -> Traffic:
    """Count one planned chunk of an estimate.

    Args:
        model: On the CPU.
        inputs: With a kernel that makes them (``from_device``), or any.
        batch: Inputs of the chunk.
        dtype: Of autocast.
        options: Others of `fastlr.LocalRedundancy`.
    """
    estimator = fastlr.LocalRedundancy(
        model, inputs, batch, batch_size=batch, dtype=dtype, progress=False, **options
    )
    with ops.using("triton", twins=True):  # the plan is of the graph that there is on a GPU
        estimator.measure()
    passes = estimator.chunks.passes
    plan = passes.engine.plan()
    if plan is None:
        raise SystemExit(
            "this model has no plan that needs no look at the batch: it is not captured on a GPU "
            "either"
        )
    first = torch.zeros(1, dtype=torch.int64)
    made = getattr(inputs, "_options", None)
    how = made(0, inputs.table(), passes.dtype_on_device) if made else {}
    x = None if made else passes.inputs(0, batch)

    def note(kernel: Any, args: tuple, given: dict[str, Any]) -> None:
        traffic.add(kernel.__name__, [t for t in (*args, *given.values()) if isinstance(t, Tensor)])

    for _ in range(2):  # tables are made by the first, as before a capture
        traffic = Traffic()
        with noted(note), _Operations(traffic), gathered(), passes.autocast():
            if made:
                x = ops.get("shape_images_from", "triton")(first, batch, **how)
            passes.engine.run_planned(plan, x, passes.cotangent(first + torch.arange(batch), x))
    return traffic


def main() -> None:
    """Print the table of a network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="a torchvision or timm name")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--gpu", choices=BANDWIDTHS, default="h200")
    parser.add_argument("--bandwidth", type=float, help="TB/s; else the vendor's figure for --gpu")
    parser.add_argument(
        "--fraction", type=float, default=0.85, help="of the bandwidth that kernels reach"
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=1.5,
        help="microseconds that a launch in a graph costs beside its bytes",
    )
    parser.add_argument(
        "--images", type=int, default=5000, help="of the estimate whose time is predicted"
    )
    parser.add_argument("--chunk", type=int, default=1000, help="images a chunk there")
    given = parser.parse_args()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[given.dtype]
    torch.manual_seed(0)
    images = fastlr.ShapeImages((3, given.size, given.size), channels_last=True)
    model: Any = image_network(given.network, given.size)
    model = model.to(memory_format=torch.channels_last)
    calibrate(model, images.batch(0, 8, seed=1))
    traffic = chunk_traffic(model, images, given.batch, dtype)

    table = Table(box=None, header_style="bold")
    for column in ("kernel or operation", "launches", "MB an image", "share"):
        table.add_column(column, justify="left" if column.startswith("kernel") else "right")
    total = sum(traffic.bytes.values())
    for name in sorted(traffic.bytes, key=lambda name: -traffic.bytes[name]):
        touched = traffic.bytes[name]
        table.add_row(
            name,
            f"{traffic.launches[name]}",
            f"{touched / given.batch / 1e6:.2f}",
            f"{touched / total:.1%}",
        )
    launches = sum(traffic.launches.values())
    table.add_row("all", f"{launches}", f"{total / given.batch / 1e6:.2f}", "", style="bold")
    console = Console(highlight=False)
    console.print(table)
    bandwidth = 1e12 * (given.bandwidth or BANDWIDTHS[given.gpu]) * given.fraction
    seconds = (
        total / given.batch * given.images / bandwidth
        + launches * -(-given.images // given.chunk) * given.gap * 1e-6
    )
    console.print(
        f"predicted, not measured: {1e3 * seconds:.0f} ms for {given.images} images in chunks of "
        f"{given.chunk} on one {given.gpu.upper()} ({bandwidth / 1e12:.2f} TB/s reached, "
        f"{given.gap} us a launch)"
    )


if __name__ == "__main__":
    main()
