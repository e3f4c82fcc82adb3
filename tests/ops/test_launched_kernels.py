"""What real networks launch at real sizes compiles for every architecture unspilt, with no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import compile_kernels

HELPERS = Path(__file__).parents[1] / "helpers"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def test_a_launch_is_noted_with_its_types_and_sizes() -> None:
    from launched_kernels import noted

    from bench.convolution_cases import geometry
    from fastlr import ops
    from fastlr.ops.block import Block, Loaded

    x = torch.ones(2, 32, 3, 4, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(8, 32, 1, 1, dtype=torch.bfloat16)
    given = Loaded(x), Block(weight, weight, torch.ones(4, 8), "none", geometry(2))
    with noted() as found:
        out, _ = ops.run("folded_conv", *given)
    assert not out.any(), "nothing was computed"
    ((_, _, signature, constants, options),) = found.values()
    assert (
        signature["x"] == "*bf16"
        and signature["bias"] == "*fp32"
        and signature["positions"] == "i32"
    )
    # A constant, as the launch has it.
    assert constants["ALIGN"] == 8 and constants["x_channel"] == 1
    assert "inputs" in options["divisible"] and "positions" not in options["divisible"]
    assert torch.empty(3).shape == (3,) and ops.run("folded_conv", *given)[0].all(), (
        "all is as before"
    )


def compiled(script: str, *args: object) -> dict[str, Any]:
    """What a script prints, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(HELPERS / script), *map(str, args)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("network", "dtype", "architectures"),
    [
        ("mobilenet_v3_large", "bf16", [80, 90, 100]),  # ReLU, Hardswish, squeeze-and-excitation
        ("resnet50", "bf16", [80, 90, 100]),
        ("vit_b_16", "bf16", [80, 90, 100]),
        ("mobilenet_v3_large", "fp32", [90]),
        ("mobilenet_v3_large", "fp16", [90]),
        ("efficientnet_b0", "bf16", [90]),  # SiLU
        ("mobilenet_v2", "bf16", [90]),  # ReLU6, no activation
        ("convnext_tiny", "bf16", [90]),  # GELU, layer norm, depthwise 7x7
        ("patchtst", "bf16", [90]),
    ],
)
def test_networks_launch_what_compiles(network: str, dtype: str, architectures: list[int]) -> None:
    found = compiled("launched_kernels.py", network, dtype, *architectures)
    assert found["launched"] > 3 and len(found["records"]) == len(architectures) * found["launched"]
    assert compile_kernels.problems(found["records"]) == []
