"""The kernels of weight gradients' norms against their definitions: in Triton's interpreter and, where there is one, on a GPU.

The interpreter computes float32 only (its bfloat16 products are wrong), in a process of its own; workspaces start as NaN.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastlr import ops
from fastlr.kernel_cases import channels_last, conv_cases, convolution, draw, linear_cases, moments_cases

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 2e-3,
    torch.float16: 2e-3,
}  # on a GPU, for inputs that are rounded first


CASES = {
    (op, name): args
    for op, cases in (
        ("linear_sq_norms", linear_cases()),
        ("conv_sq_norms", conv_cases()),
        ("folded_conv_moments", moments_cases()),
    )
    for name, args in cases.items()
}


def wide_cases() -> dict[tuple[str, str], tuple]:
    """For the tiles that low precision has: sizes that choose each of them, whole and broken."""
    cases = {}
    for rows, inputs, outputs in (
        (300, 72, 136),
        (140, 129, 65),
        (60, 200, 132),
        (130, 300, 301),
        (200, 400, 400),
        (150, 70, 70),
        (140, 39, 41),
        (140, 39, 131),
    ):
        cases["linear_sq_norms", f"{rows}x{inputs}x{outputs}"] = (draw(1, 1, rows, inputs), draw(1, 1, rows, outputs))
    for inputs in (32, 40, 72):
        for outputs in (20, 64, 132):
            name = f"{inputs}-{outputs}"
            x, g = draw(1, 140, inputs), draw(1, 140, outputs)
            cases["linear_sq_norms", name] = (x[None], g[None])
            x, g = (channels_last(t, 1) for t in (draw(1, inputs, 10, 14), draw(1, outputs, 10, 14)))
            options = ([1, 1], [0, 0], [1, 1], 1)
            cases["folded_conv_moments", name] = (x, g, draw(outputs, inputs, 1, 1), draw(outputs), *options)
            x, g = (channels_last(t, 1) for t in (draw(1, inputs, 5, 4), draw(1, outputs, 3, 4)))
            weight, options = draw(outputs, inputs, 3, 2), ([2, 1], [1, 0], [1, 1])
            g = g[..., :3]
            cases["folded_conv_moments", f"3x2-{name}"] = (x, g, weight, draw(outputs), *options, 1)
            cases["conv_sq_norms", f"3x2-{name}"] = (x[:, None], g[:, None], weight, *options, False, [0, 0], 1)
    x, g, weight = draw(1, 72, 5, 4), draw(1, 132, 3, 3), draw(132, 72, 3, 2)  # too few aligned channels for vectors
    cases["folded_conv_moments", "3x2-first"] = (x, g, weight, draw(132), *options, 1)
    cases["conv_sq_norms", "3x2-first"] = (x[:, None], g[:, None], weight, *options, False, [0, 0], 1)
    kept = ("3x3", "pointwise", "3x5_grouped", "stem")
    return cases | {key: CASES[key] for key in CASES if key[1].startswith(kept) and "large" not in key[1]}


WIDE = wide_cases()
BOTH = CASES | WIDE
IDS, WIDE_IDS, BOTH_IDS = (["-".join(key) for key in cases] for cases in (CASES, WIDE, BOTH))

RUN = """
import inspect
import sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[3])
import interpreter
claims = interpreter.note_claims()
from fastlr import ops
from fastlr.kernels import conv_norms, linear_norms, product_norms

launched = set()


def configuration(name, flags):  # without the layout
    return name, tuple((key, flags[key]) for key in sorted(flags) if key in KEYS)


KEYS = {"X_PLAIN", "PACKED", "FOLDED", "OUTPUTS", "COLUMNS", "ROWS", "BLOCK", "CHUNK", "CENTRED", "num_warps", "num_stages"}


def watch(module, name):
    kernel = getattr(module, name)

    class Watched:
        def __getitem__(self, grid):
            def launch(*args, **flags):
                launched.add(configuration(name, flags))
                kernel[grid](*args, **flags)

            return launch

    setattr(module, name, Watched())


def workspace(*shape, device):
    return torch.full(shape, float("nan"), dtype=torch.float32, device=device)


def run(cases):
    return {key: ops.get(key[0], "triton")(*args) for key, args in cases.items()}


compiled = {
    (name.split("[")[1][:4], configuration(kernel.__name__, {**flags, **options}))
    for module in (linear_norms, conv_norms)
    for name, kernel, _, flags, options in module.compile_cases()
}
product_norms.workspace = linear_norms.workspace = workspace
watch(product_norms, "product_norms_kernel")
watch(linear_norms, "gram_norms_kernel")
cases, wide, left = torch.load(sys.argv[1])
results = {"claims": claims, "cases": run(cases), "left": run(left)}
with ops.using("triton"):
    results["left_run"] = {key: ops.run(key[0], *args) for key, args in left.items()}
choose_tile, gram_block = product_norms.choose_tile, linear_norms.gram_block
low = torch.bfloat16
product_norms.choose_tile = linear_norms.choose_tile = lambda dtype, *a, **k: choose_tile(low, *a, **k)
linear_norms.gram_block = lambda dtype, *a: gram_block(low, *a)
linear_norms.CENTRED[torch.float32] = False
results["unknown"] = {("fp32", found) for found in launched} - compiled
launched = set()
results["wide"] = run(wide)
results["unknown"] |= {("bf16", found) for found in launched} - compiled
results["not_run"] = {c for c in compiled if c[0] == "bf16"} - {("bf16", found) for found in launched}
results["signatures"] = {
    name: [list(inspect.signature(ops.get(name, b)).parameters) for b in ("reference", "triton")]
    for name in ("linear_sq_norms", "conv_sq_norms", "folded_conv_moments")
}
torch.save(results, sys.argv[2])
"""


def left_to_torch() -> dict[tuple[str, str], tuple]:
    """What the kernels must hand on."""
    a, g = linear_cases()["tall"]
    pairs = {"float64": (a.double(), g.double()), "two-dtypes": (a, g.bfloat16()), "empty": (a[:, :, :0], g[:, :, :0])}
    left = {("linear_sq_norms", name): args for name, args in pairs.items()}
    left["conv_sq_norms", "3d"] = convolution("3d", torch.float32, False)
    x, g, *rest = moments_cases()["3x3"]
    left["folded_conv_moments", "float64"] = (x.double(), g.double(), *rest)
    return left


LEFT = left_to_torch()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Every case by the kernels in the interpreter."""
    folder = tmp_path_factory.mktemp("norms")
    torch.save((CASES, WIDE, LEFT), folder / "cases.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-c",
        RUN,
        str(folder / "cases.pt"),
        str(folder / "results.pt"),
        str(Path(__file__).parent),
    ]
    subprocess.run(command, check=True, env=environment)
    return torch.load(folder / "results.pt", weights_only=False)


def check(got: object, key: tuple[str, str], args: tuple, tolerance: float) -> None:
    """Each result is there, and close to its definition relative to the largest value."""
    assert got is not NotImplemented
    want = ops.get(key[0], "reference")(*args)
    if key[0] != "folded_conv_moments":
        got, want = (got,), (want,)
    assert len(got) == len(want)
    assert got[0].dtype == torch.float64
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert float((a.double().cpu() - b.cpu()).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize("key", CASES, ids=IDS)
def test_interpreted(key: tuple[str, str], interpreted: dict) -> None:
    check(interpreted["cases"][key], key, CASES[key], 2e-5)


@pytest.mark.parametrize("key", WIDE, ids=WIDE_IDS)
def test_tiles_of_low_precision(key: tuple[str, str], interpreted: dict) -> None:
    check(interpreted["wide"][key], key, WIDE[key], 2e-5)


@pytest.mark.parametrize("key", LEFT, ids=["-".join(key) for key in LEFT])
def test_left_to_torch(key: tuple[str, str], interpreted: dict) -> None:
    assert interpreted["left"][key] is NotImplemented
    got, want = interpreted["left_run"][key], ops.get(key[0], "torch")(*LEFT[key])
    torch.testing.assert_close(got, want)


def test_every_configuration_that_was_chosen_is_compiled(interpreted: dict) -> None:
    assert interpreted["unknown"] == set()
    assert interpreted["not_run"] == set()


def test_what_kernels_tell_the_compiler_holds(interpreted: dict) -> None:
    """That a size, stride or address is a multiple of what is loaded at once: on a GPU a false claim goes wrong silently."""
    assert interpreted["claims"] == []


def test_signatures_agree(interpreted: dict) -> None:
    for name, (reference, kernel) in interpreted["signatures"].items():
        assert kernel == reference, name


def on_gpu(args: tuple, dtype: torch.dtype) -> tuple:
    """The same on the GPU, data in the dtype; parameters (weights, scales) stay as they are."""
    moved = [a.cuda() if isinstance(a, Tensor) else a for a in args]
    moved[:2] = (t.to(dtype) for t in moved[:2])
    return tuple(moved)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("key", BOTH, ids=BOTH_IDS)
def test_gpu(key: tuple[str, str], dtype: torch.dtype) -> None:
    args = on_gpu(BOTH[key], dtype)
    got = ops.get(key[0], "triton")(*args)
    check(got, key, args, TOLERANCE[dtype])
    again = ops.get(key[0], "triton")(*args)
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, again)), strict=True):
        assert torch.equal(a, b)
