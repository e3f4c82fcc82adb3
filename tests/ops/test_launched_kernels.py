"""What real networks launch at real sizes compiles for every architecture unspilt, with no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import compile_kernels
import pytest
import torch

HELPERS, KERNELS = (Path(__file__).parents[2] / part for part in ("tests/helpers", "kernels"))
OTHERS = {
    "row_norms_kernel",
    "draw_shapes_kernel",
    "paint_kernel",
}  # that no layer of drawn_kernels.py launches
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


# Bytes that a variant which no network of the above launches may spill, and the share that may.
SLIGHT, RARE = (
    64,
    0.02,
)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seed", "architecture"), [(1, 80), (2, 90), (3, 100)])
def test_random_layers_launch_what_compiles(seed: int, architecture: int) -> None:
    found = compiled("drawn_kernels.py", seed, 120, architecture)
    records = found["records"]
    assert found["launched"] > 300 and len(records) == found["launched"]
    written = {
        name
        for file in KERNELS.glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)
    }
    assert set(found["kernels"]) == written - OTHERS  # each of those that these layers have
    spilling = [record for record in records if record["spills"]]
    assert compile_kernels.problems([{**record, "spills": 0} for record in records]) == []
    assert all(record["spills"] <= SLIGHT for record in spilling) and len(spilling) <= RARE * len(
        records
    ), spilling
