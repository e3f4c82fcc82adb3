"""Launches and memory traffic of one planned chunk on a GPU, counted without one.

``python -m bench.traffic mobilenet_v3_large`` plans the network on the CPU with a few images, then
makes a chunk of a thousand with every op on its Triton kernel, where launches are noted instead of
made. Counted are Triton's launches and every operation of ATen that would be one (not views, not
allocations); of each launch the bytes of all tensors that it touches, each taken once. So are two
launches that cuDNN makes beside a convolution's: the addition of its bias, and the padding of its
input channels to a multiple of eight where they are adjacent and of 16 bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastlr
from bench import noting
from bench.cases import calibrate, image_network
from fastlr import ops
from fastlr.estimator.cuda_graph import norms_of_planned_batch
from fastlr.ops import folded, tuning
from fastlr.ops.deferred_checks import gathered

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
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


class Launch(NamedTuple):
    """One launch.

    Attributes:
        name: Name of the kernel or the operation.
        touched: Bytes of the tensors that it reads or writes, each tensor once.
    """

    name: str
    touched: int


@dataclasses.dataclass
class Traffic:
    """What a chunk launches.

    Attributes:
        made: All launches, in order.
    """

    made: list[Launch] = dataclasses.field(default_factory=list)

    @property
    def launches(self) -> dict[str, int]:
        """Number of launches per kernel or operation."""
        counts: dict[str, int] = defaultdict(int)
        for launch in self.made:
            counts[launch.name] += 1
        return counts

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes touched per kernel or operation."""
        sums: dict[str, int] = defaultdict(int)
        for launch in self.made:
            sums[launch.name] += launch.touched
        return sums

    def add(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Note one operation and the tensors that it touches."""
        self.made.append(Launch(name, _touched(tensors)))

    def add_kernel(self, kernel: Any, args: tuple, given: dict[str, Any], programs: int) -> None:
        """Note the launch of a kernel: a `bench.noting.Note`."""
        values = [*args, *(given[name] for name in given if name in kernel.arg_names)]
        self.add(kernel.__name__, [value for value in values if isinstance(value, Tensor)])

    def add_beside_convolution(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Note what cuDNN launches beside a convolution: padding of its input, its bias."""
        channels = x.shape[1]
        if x.element_size() == 2 and x.stride(1) == 1 and channels % 8:
            padded = _bytes(x) * (-channels % 8 + channels) // channels
            # Written, and read by the convolution in place of the input.
            self.made.append(Launch("padding of channels", 2 * padded))
        if bias is not None:
            self.made.append(Launch("add_ of a bias", 2 * _bytes(out) + _bytes(bias)))


def _touched(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each place in memory once."""
    return sum({_place(t): _bytes(t) for t in tensors}.values())


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
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        known = {t.untyped_storage()._cdata for t in given}
        written = any(
            a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
        )
        view = bool(made) and not written and all(t.untyped_storage()._cdata in known for t in made)
        if not view and name not in FREE and any(t.numel() for t in made):
            self.traffic.add(name, [*given, *made])
        if name == "convolution":
            self.traffic.add_beside_convolution(args[0], args[2], result)
        return result


def chunk_traffic(
    model: torch.nn.Module,
    inputs: Any,
    batch: int,
    dtype: torch.dtype | None,
    count: int | None = None,
    **options: Any,
) -> Traffic:
    """Count one planned chunk of an estimate.

    Args:
        model: On the CPU.
        inputs: With a kernel that makes them (``from_device``), or any.
        batch: Inputs of the chunk that is planned.
        dtype: Of autocast.
        count: Inputs of the chunk that is counted, if others.
        options: Others of `fastlr.LocalRedundancy`.
    """
    count = count or batch
    estimator = fastlr.LocalRedundancy(
        model, inputs, batch, batch_size=batch, dtype=dtype, progress=False, **options
    )
    with ops.noting_launches():  # the plan is of the graph that there is on a GPU
        estimator.measure()
    passes = estimator.chunks.passes
    plan = passes.engine.plan
    if plan is None or not plan.is_by_rules:
        raise SystemExit(
            "this model has no plan that needs no look at the batch: it is not captured on a GPU "
            "either"
        )
    # Where samples are in a batch does not hang on how many there are.
    shapes = (count, *plan.key.shapes[1:])
    larger = dataclasses.replace(plan, key=plan.key._replace(shapes=shapes))
    first = torch.zeros(1, dtype=torch.int64)
    made = getattr(inputs, "_options", None)
    how = made(0, inputs.table(), passes.dtype) if made else {}

    def go_through(plan: Any, traffic: Traffic) -> None:
        with (
            noting.noted(traffic.add_kernel),
            _Operations(traffic),
            gathered(),
            passes.autocast(),
            # A GPU takes the whole batch where a CPU takes slices of it.
            mock.patch.object(folded, "SLICE_BYTES", math.inf),
        ):
            index = first + torch.arange(plan.count)
            if made:
                x = ops.get("shape_images_from", "triton")(first, plan.count, **how)
            else:
                x = passes.inputs(0, plan.count)
            norms_of_planned_batch(passes.engine, plan, x, passes.cotangent(index, x))

    go_through(plan, Traffic())  # tables are made by the first, as before a capture
    traffic = Traffic()
    go_through(larger, traffic)
    return traffic


def of_network(
    name: str, size: int = 224, dtype: str = "bf16", count: int = 1000, batch: int = 2
) -> Traffic:
    """Count a chunk of images of a torchvision or timm network, planned with ``batch`` images."""
    torch.manual_seed(0)
    images = fastlr.ShapeImages((3, size, size), channels_last=True)
    model: Any = image_network(name, size)
    model = model.to(memory_format=torch.channels_last)
    calibrate(model, images.batch(0, batch, seed=1))
    return chunk_traffic(model, images, batch, AUTOCAST_DTYPES[dtype], count)


def _arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="a torchvision or timm name")
    parser.add_argument("--batch", type=int, default=2, help="images of the chunk that is planned")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=AUTOCAST_DTYPES, default="bf16")
    parser.add_argument("--chunk", type=int, default=1000, help="images of the chunk counted")
    parser.add_argument(
        "--arch", type=int, default=90, help="compute capability that kernels are chosen for"
    )
    return parser.parse_args()


def main() -> None:
    """Print the table of a network."""
    given = _arguments()
    with tuning.assuming(given.arch):
        traffic = of_network(given.network, given.size, given.dtype, given.chunk, given.batch)
    Console(highlight=False).print(_table(traffic, given.chunk))


def _table(traffic: Traffic, count: int) -> Table:
    """Launches and bytes an image by kernel and operation, those of most bytes first."""
    table = Table(box=None, header_style="bold")
    for column in ("kernel or operation", "launches", "MB an image", "share"):
        table.add_column(column, justify="left" if column.startswith("kernel") else "right")
    touched, launches = traffic.bytes, traffic.launches
    total = sum(touched.values())
    for name in sorted(touched, key=lambda name: -touched[name]):
        of_image = f"{touched[name] / count / 1e6:.2f}"
        table.add_row(name, f"{launches[name]}", of_image, f"{touched[name] / total:.1%}")
    everything = f"{len(traffic.made)}", f"{total / count / 1e6:.2f}"
    table.add_row("all", *everything, "", style="bold")
    return table


if __name__ == "__main__":
    main()
