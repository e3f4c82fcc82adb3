"""Find which variants of the kernels random layers launch, with no GPU.

Usage: ``python drawn_kernels.py SEED LAYERS ARCH...``.

Kernel size, stride, padding, dilation, groups, channels, image size, dtype, memory format,
activation and residual of a convolution are drawn, as are the sizes of linear layers, norms, gates
and embeddings; every op that such a layer can need is called on its Triton kernel, where each
launch is noted instead of made (launched_kernels.py). Printed: JSON, {"launched": variants,
"records": resource usage of each on each architecture}, by the compiler of compile_kernels.py.
"""

from __future__ import annotations

import json
import random
import sys
from math import log2

import compile_kernels
import torch
from launched_kernels import noted
from torch import Tensor

from fastlr import ops
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.reference.folded import ACTIVATIONS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BATCH, ELEMENTS = 3, 1 << 20  # of one sample, at most


class Draw:
    """Random layers of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def size(self, largest: int) -> int:
        """Draw a size from 1 to ``largest``, log-uniformly, half of the time a multiple of 8."""
        n = round(2 ** self.random.uniform(0, log2(largest)))
        return min(largest, -(-n // 8) * 8) if self.random.random() < 0.5 else n

    def tensor(self, dtype: torch.dtype, *shape: int, planes: bool = False) -> Tensor:
        """Zeros [B, C, H, W], with the channels last unless ``planes``."""
        return torch.zeros(shape, dtype=dtype).to(
            memory_format=torch.contiguous_format if planes else torch.channels_last
        )

    def convolution(self) -> None:
        """A convolution as a folded block, and its norms by themselves."""
        pick, dtype = self.random.choice, self.random.choice(DTYPES)
        kind = pick(("pointwise", "depthwise", "dense", "grouped"))
        kernel = [1, 1] if kind == "pointwise" else [pick((1, 2, 3, 3, 4, 5, 7)) for _ in range(2)]
        stride = pick(((1, 1), (1, 1), (2, 2), (2, 1), (3, 3)))
        dilation = pick(((1, 1), (1, 1), (1, 1), (2, 2), (1, 3)))
        padding = tuple(
            pick((0, d * (k - 1) // 2, k - 1)) for k, d in zip(kernel, dilation, strict=True)
        )
        groups = (
            1
            if kind in ("pointwise", "dense")
            else pick((2, 3, 8))
            if kind == "grouped"
            else self.size(512)
        )
        inputs, outputs = (
            (groups, groups)
            if kind == "depthwise"
            else (groups * self.size(512 // groups) for _ in range(2))
        )
        side = [
            self.size(min(128, max(8, int((ELEMENTS / max(inputs, outputs)) ** 0.5))))
            for _ in range(2)
        ]
        geometry = ConvGeometry(stride, padding, dilation, groups=groups)
        size = geometry.output_size(side, kernel)
        if min(size) < 1:  # the kernel does not fit: draw again
            self.convolution()
            return
        planes = [self.random.random() < 0.3 for _ in range(2)]
        x = self.tensor(dtype, BATCH, inputs, *side, planes=planes[0])
        g = self.tensor(dtype, BATCH, outputs, *size, planes=planes[1])
        weight, ones = torch.zeros(outputs, inputs // groups, *kernel), torch.zeros(outputs)
        act = pick(tuple(ACTIVATIONS))
        made = ops.run("fold_weights", dtype, (1e-5,), weight, None, ones, ones, ones, ones)[0]
        block = Block(weight, *made, act, geometry)
        _, kept = ops.run("folded_conv", Loaded(x), block, pick((None, Loaded(g))))
        want_input = pick((True, True, False))
        ops.run("folded_conv_backward", Loaded(x), Gradients(g), kept, block, want_input)
        images = pick((1, 1, BATCH))  # of a sample
        given = (t.view(-1, images, *t.shape[1:]) if images == 1 else t[None] for t in (x, g))
        ops.run("conv_sq_norms", *given, weight, geometry)
        ops.run("channel_sums", x[:, None], x[:, None])

    def linear(self) -> None:
        """Run the ops of a linear layer, feature norms, a bias, an embedding and a cotangent.

        The cotangent is a classifier's.
        """
        dtype = self.random.choice(DTYPES)
        rows, inputs, outputs = self.size(512), self.size(1024), self.size(1024)
        groups = self.random.choice((1, 1, 4))
        a, g = (torch.zeros(BATCH, groups, rows, n, dtype=dtype) for n in (inputs, outputs))
        ops.run("linear_sq_norms", a, g)
        x = a[:, 0].contiguous()
        mean = torch.zeros(BATCH, rows, 1)
        ops.run("layer_norm_sums", x, x, mean, mean)
        ops.run("rms_norm_sums", x, x, mean)
        ops.run(
            "broadcast_sums",
            x,
            self.random.choice((None, x)),
            self.random.choice(([1], [2], [1, 2])),
        )
        ops.run("embedding_sq_norms", torch.zeros(BATCH, rows, dtype=torch.int64), x)
        ops.run("categorical_root_cotangent", g[:, 0], torch.arange(BATCH), 0)


def main() -> None:
    """Compile what the layers of a seed launch and print it."""
    seed, layers, *architectures = map(int, sys.argv[1:])
    draw = Draw(seed)
    with noted() as found:
        for k in range(layers):
            draw.convolution() if k % 4 else draw.linear()
    records = [
        compile_kernels.compile_case(case, arch)
        for case in found.values()
        for arch in architectures
    ]
    kernels = sorted({kernel.__name__ for _, kernel, *_ in found.values()})
    print(json.dumps({"launched": len(found), "kernels": kernels, "records": records}))


if __name__ == "__main__":
    main()
