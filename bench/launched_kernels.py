"""Find which variants of the kernels a network launches, with no GPU.

Usage: ``python -m bench.launched_kernels NETWORK DTYPE ARCH...``.

The network is planned in plain torch (bf16 or fp16: autocast, channels_last; fp32: as it is) and
run once more with every op on its Triton kernel, where each launch is noted instead of made; its
results are zeros. A variant is what Triton would compile for the launch: types of the arguments,
constants, and which of them are 1 or multiples of 16. Printed: JSON, {variant: resource usage} for
each architecture, by the compiler of compile_kernels.py.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

import fastlr
from bench import compile_kernels, noting
from fastlr import ops
from fastlr.errors import FastlrWarning
from fastlr.kernels.launching import FUSED
from fastlr.ops import tuning

POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
BATCH = 4


def variant(kernel: JITFunction, args: tuple, given: dict[str, Any]) -> tuple:
    """The case for compile_kernels.compile_case that a launch with these arguments needs."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        k: v for k, v in given.items() if k in kernel.arg_names
    }
    signature, constants, divisible = {}, {}, []
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            # What torch allocates is aligned; views that are not have the same code, or narrower.
            divisible.append(name)
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            if value == 1 and not parameter.do_not_specialize:
                constants[name] = 1
                continue
            signature[name] = _integer_kind(value)
            if value % 16 == 0 and not (
                parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            ):
                divisible.append(name)
        else:
            signature[name] = "fp32"
    options = {key: given[key] for key in (*OPTIONS, *FUSED) if key in given}
    blocks = ",".join(f"{k}={v}" for k, v in constants.items() if k.isupper())
    sizes = ",".join(
        f"{k}{'%16' * (k in divisible)}"
        for k, kind in signature.items()
        if not kind.startswith("*")
    )
    ones = ",".join(k for k, v in constants.items() if not k.isupper())
    kinds = "/".join(dict.fromkeys(kind[1:] for kind in signature.values() if kind.startswith("*")))
    label = f"{kernel.__name__}[{kinds};{blocks};1:{ones};{sizes}]"
    return label, kernel, signature, constants, options | {"divisible": tuple(divisible)}


def _integer_kind(value: int) -> str:
    """Return Triton's type of an integer argument."""
    if -(1 << 31) <= value < 1 << 31:
        return "i32"
    return "i64" if value < 1 << 63 else "u64"


@contextmanager
def noted() -> Iterator[dict[str, tuple]]:
    """Note the variants that are launched instead of launching them; new memory is zero."""
    found: dict[str, tuple] = {}

    def note(kernel: JITFunction, args: tuple, given: dict[str, Any], _: int) -> None:
        case = variant(kernel, args, given)
        found.setdefault(case[0], case)

    with noting.noted(note):
        yield found


def launched(model: nn.Module, x: Tensor, dtype: torch.dtype, predictive: Any) -> dict[str, tuple]:
    """Return the variants that one chunk of an estimate launches, input generation left out."""
    index = torch.arange(len(x))

    def cotangent(z: Tensor) -> Tensor:
        return predictive.cotangent(z, "rademacher", index, 0)

    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        with ops.noting_launches():
            fastlr.per_sample_grad_sq_norms(model, x, cotangent)
        # Kernels that compute nothing would pass no audit.
        with noted() as found, warnings.catch_warnings():
            warnings.simplefilter("error", FastlrWarning)
            fastlr.per_sample_grad_sq_norms(model, x, cotangent, check=False)
    return found


def main() -> None:
    """Compile what a network launches, PatchTST or one of torchvision's, and print it."""
    import torchvision

    from fastlr.models.patchtst import PatchTST

    name, dtype, *architectures = sys.argv[1:]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    torch.manual_seed(0)
    predictive: Any
    if name == "patchtst":
        model = PatchTST().eval()
        x = torch.randn(BATCH, 512, 7)
        predictive = fastlr.Gaussian()
    else:
        model = torchvision.models.get_model(name, num_classes=2).eval()
        if isinstance(model, torchvision.models.VisionTransformer):
            # Its other blocks launch the same, and a check of all takes 6 GB.
            model.encoder.layers = model.encoder.layers[:2]
        x = torch.randn(BATCH, 3, 224, 224)
        predictive = fastlr.Categorical()
        if dtype != "fp32":
            model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    found: dict[str, tuple] = {}
    records = []
    for arch in map(int, architectures):
        with tuning.assuming(arch):
            found = launched(model, x, kind, predictive)
        records += [compile_kernels.compile_case(case, arch) for case in found.values()]
    print(json.dumps({"launched": len(found), "records": records}))


if __name__ == "__main__":
    main()
