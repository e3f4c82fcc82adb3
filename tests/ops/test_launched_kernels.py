"""What real networks launch at real sizes compiles for every architecture unspilt, with no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from expected import needs_triton
from pytest import mark

from bench import compile_kernels

ROOT = Path(__file__).parents[2]
pytestmark = needs_triton


def test_a_launch_is_noted_with_its_types_and_sizes():
    from bench.convolution_cases import geometry
    from bench.launched_kernels import noted
    from fastlr import ops
    from fastlr.ops.block import Block, Loaded

    x = torch.ones(2, 32, 3, 4, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(8, 32, 1, 1, dtype=torch.bfloat16)
    given = Loaded(x), Block(weight, weight, torch.ones(4, 8), "none", geometry(2))
    with noted() as found:
        out, _ = ops.run("folded_conv", *given)
    assert not out.any(), "nothing was computed"
    ((_, _, signature, constants, options),) = found.values()
    assert signature["x"] == "*bf16"
    assert signature["bias"] == "*fp32"
    assert signature["positions"] == "i32"
    # A constant, as the launch has it.
    assert constants["ALIGN"] == 8
    assert constants["x_channel"] == 1
    assert "inputs" in options["divisible"]
    assert "positions" not in options["divisible"]
    assert torch.empty(3).shape == (3,) and ops.run("folded_conv", *given)[0].all(), (
        "all is as before"
    )


@mark.long
@mark.timeout(3600)
@mark.parametrize(
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
def test_networks_launch_what_compiles(network, dtype, architectures):
    command = [sys.executable, "-m", "bench.launched_kernels", network, dtype]
    command += map(str, architectures)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["launched"] > 3
    assert len(found["records"]) == len(architectures) * found["launched"]
    assert compile_kernels.problems(found["records"]) == []
