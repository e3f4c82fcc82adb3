"""Which variants of the kernels a network launches, found with no GPU: ``python launched_kernels.py NETWORK [BATCH]``.

The network is planned in plain torch (bf16 autocast, channels_last) and run once more with every op on its Triton kernel,
where each launch is noted instead of made; its results are zeros. A variant is what Triton would compile for the launch:
types of the arguments, constants, and which of them are 1 or multiples of 16. Printed: JSON, {variant: resource usage}
for each architecture, by the compiler of compile_kernels.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import compile_kernels
import torch
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

import fastlr
from fastlr import ops

POINTERS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg")


def variant(kernel: JITFunction, args: tuple, given: dict[str, Any]) -> tuple:
    """The case for compile_kernels.compile_case that a launch with these arguments needs."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in given.items() if k in kernel.arg_names}
    signature, constants, divisible = {}, {}, []
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            divisible.append(
                name
            )  # what torch allocates is aligned; views that are not have the same code, or narrower
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            if value == 1 and not parameter.do_not_specialize:
                constants[name] = 1
                continue
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64" if value < 1 << 63 else "u64"
            if value % 16 == 0 and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
                divisible.append(name)
        else:
            signature[name] = "fp32"
    options = {key: given[key] for key in OPTIONS if key in given}
    blocks = ",".join(f"{k}={v}" for k, v in constants.items() if k.isupper())
    sizes = ",".join(f"{k}{'%16' * (k in divisible)}" for k, kind in signature.items() if not kind.startswith("*"))
    ones = ",".join(k for k, v in constants.items() if not k.isupper())
    kinds = "/".join(dict.fromkeys(kind[1:] for kind in signature.values() if kind.startswith("*")))
    label = f"{kernel.__name__}[{kinds};{blocks};1:{ones};{sizes}]"
    return label, kernel, signature, constants, options | {"divisible": tuple(divisible)}


@contextmanager
def noted() -> Iterator[dict[str, tuple]]:
    """Note the variants that are launched instead of launching them; new memory is zero."""
    found: dict[str, tuple] = {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **given: Any) -> None:
        case = variant(self, args, given)
        found.setdefault(case[0], case)

    before = JITFunction.run, torch.empty, torch.empty_like
    empty, empty_like = before[1:]
    JITFunction.run = run
    torch.empty = lambda *size, **options: empty(*size, **options).zero_()
    torch.empty_like = lambda t, **options: empty_like(t, **options).zero_()
    try:
        with ops.using("triton"):
            yield found
    finally:
        JITFunction.run, torch.empty, torch.empty_like = before


def launched(model: nn.Module, x: Tensor, dtype: torch.dtype) -> dict[str, tuple]:
    """The variants that one chunk of an estimate of ``model`` launches, the inputs' generation left out."""
    predictive = fastlr.Categorical()
    index = torch.arange(len(x))

    def cotangent(z: Tensor) -> Tensor:
        return predictive.cotangent(z, "rademacher", index, 0)

    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        fastlr.per_sample_grad_sq_norms(model, x, cotangent)
        with noted() as found:
            fastlr.per_sample_grad_sq_norms(model, x, cotangent)
    return found


def main() -> None:
    """Compile what a torchvision network launches and print it."""
    import torchvision

    name, batch = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=2).eval().to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    found = launched(model, x, torch.bfloat16)
    records = [compile_kernels.compile_case(case, arch) for case in found.values() for arch in (80, 90, 100)]
    print(json.dumps({"launched": len(found), "records": records}))


if __name__ == "__main__":
    main()
