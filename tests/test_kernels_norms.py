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
from test_ops import CONVOLUTIONS, convolution
from torch import Tensor

from fastlr import ops

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 2e-3,
    torch.float16: 2e-3,
}  # on a GPU, for inputs that are rounded first


LARGE = ("3x3_large", "stem")  # slow in the interpreter


def draw(*shape: int, seed: int = 0, offset: float = 0.3) -> Tensor:
    """Normal numbers with an offset, so that a missing or a doubled part would show."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) + offset


def channels_last(t: Tensor, axis: int) -> Tensor:
    """The same values with the channels last in memory."""
    return t.movedim(axis, -1).contiguous().movedim(-1, axis)


def linear_cases() -> dict[str, tuple]:
    """a, g of every form and layout; shapes (B, N, T, I, O)."""
    cases = {}
    shapes = {
        "one": (1, 1, 1, 1, 1),
        "one-row": (3, 2, 1, 7, 5),
        "two-rows": (2, 3, 2, 33, 17),
        "tall": (2, 1, 133, 12, 10),
        "two-tiles": (2, 1, 20, 9, 131),
        "two-tiles-square": (2, 1, 150, 70, 70),
        "whole-tiles": (1, 2, 64, 64, 32),
        "gram": (2, 2, 9, 67, 130),
        "gram-one-block": (1, 1, 32, 64, 128),
        "gram-blocks": (2, 1, 70, 300, 257),
        "gram-vectors": (1, 2, 60, 200, 132),
        "gram-blocks-vectors": (1, 1, 124, 256, 260),
    }
    for name, (count, groups, rows, inputs, outputs) in shapes.items():
        a, g = draw(count, groups, rows, inputs), draw(count, groups, rows, outputs, seed=1)
        cases[name] = (a, g)
        if inputs + outputs < 140 or name == "gram-vectors":
            cases[f"{name}-rows-last"] = (a.mT.contiguous().mT, g.mT.contiguous().mT)
            cases[f"{name}-mixed"] = (a.mT.contiguous().mT, g)
            cases[f"{name}-strided"] = (
                draw(count, groups, rows, 2, 2 * inputs, seed=2)[..., 1, ::2],
                draw(count + 1, groups, rows, outputs, 3, seed=3)[1:, ..., 1],
            )
    # Activations far from zero and gradients that sum to nearly nothing: uncentred Gram matrices err by 4e-4 here.
    a, g = draw(2, 1, 48, 150, offset=100), draw(2, 1, 48, 170)
    cases["gram-common-part"] = (a, g - g.mean(2, keepdim=True) + 1e-4)
    cases["heads"] = tuple(draw(2, 5, 3, n).transpose(1, 2) for n in (8, 20))  # a view, as attention has them
    cases["expanded"] = (draw(2, 1, 20, 6), draw(2, 1, 1, 6).expand(2, 1, 20, 6))
    return cases


def covered(name: str) -> bool:
    """What is tested here: one or two dimensions; depthwise with one image a sample is in test_kernels_folded."""
    channels, outputs, kernel, *_, groups, _, images = CONVOLUTIONS[name]
    return len(kernel) < 3 and not (groups == channels == outputs and images == 1)


def conv_cases() -> dict[str, tuple]:
    cases = {}
    for name in filter(covered, CONVOLUTIONS):
        x, g, *rest = convolution(name, torch.float32, False)
        cases[name] = (x, g, *rest)
        cases[f"{name}-channels-last"] = (channels_last(x, 2), channels_last(g, 2), *rest)
        if name not in LARGE:
            cases[f"{name}-mixed"] = (x, channels_last(g, 2), *rest)
            cases[f"{name}-transposed"] = convolution(name, torch.float32, True)
    x, g, *rest = convolution("3x3", torch.float32, False)
    wide = torch.stack([x, 0 * x], -1)[..., 0]  # a view with strides that are all larger than 1
    cases["3x3-strided-view"] = (wide, torch.cat([g, g], 2)[:, :, : g.shape[2]], *rest)
    none = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    cases["3x3-tap-a-tile"] = (draw(2, 1, 33, 5, 6), draw(2, 1, 34, 3, 4), draw(34, 33, 3, 3), *none)
    vectors = (draw(2, 1, 40, 6, 6), draw(2, 1, 72, 4, 4), draw(72, 40, 3, 3))  # channels divisible by the load width
    cases["3x3-vectors"] = (*vectors, *none)
    cases["3x3-vectors-channels-last"] = (*(channels_last(t, 2) for t in vectors[:2]), vectors[2], *none)
    grouped = (draw(2, 2, 80, 5, 5), draw(2, 2, 70, 3, 3), draw(70, 40, 3, 3), *none[:-1], 2)
    cases["3x3-tap-a-tile-grouped"] = grouped
    cases["dilated"] = (draw(2, 1, 5, 9, 12), draw(2, 1, 7, 5, 8), draw(7, 5, 3, 3), [1, 1], [0, 1], [2, 3], *none[3:])
    one = ([2], [0], [1], False, [0], 1)
    cases["1d-pointwise-strided"] = (draw(2, 1, 20, 17), draw(2, 1, 10, 9), draw(10, 20, 1), *one)
    cases["images-kept-apart"] = tuple(
        t[:, ::2] if k < 2 else t for k, t in enumerate((draw(2, 4, 6, 5, 7), draw(2, 4, 9, 5, 7), draw(9, 6, 1, 1)))
    ) + ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return cases


def folded_cases() -> dict[str, tuple]:
    cases = {}
    for name, (x, g, weight, stride, padding, dilation, transposed, _, groups) in conv_cases().items():
        if not transposed and not groups == x.shape[2] == g.shape[2]:
            scale = draw(g.shape[2], seed=4)
            cases[name] = (x[:, 0], g[:, 0], weight, scale, stride, padding, dilation, groups)
    x, g, weight, scale, *rest = cases["3x3-tap-a-tile"]
    cases["weight-channels-last"] = (x, g, channels_last(weight, 1), scale, *rest)
    for inputs, outputs, size in ((16, 70, 12), (70, 24, 7), (8, 8, 14)):  # whole and broken tiles on either side
        x, g = draw(2, inputs, size, size), draw(2, outputs, size, size)
        shape = (draw(outputs, inputs, 1, 1), draw(outputs, seed=4), [1, 1], [0, 0], [1, 1], 1)
        cases[f"pointwise-{inputs}-{outputs}"] = (x, g, *shape)
        cases[f"pointwise-{inputs}-{outputs}-channels-last"] = (channels_last(x, 1), channels_last(g, 1), *shape)
    return cases


CASES = {
    (op, name): args
    for op, cases in (
        ("linear_sq_norms", linear_cases()),
        ("conv_sq_norms", conv_cases()),
        ("folded_conv_moments", folded_cases()),
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
results = {"cases": run(cases), "left": run(left)}
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
    x, g, *rest = folded_cases()["3x3"]
    left["folded_conv_moments", "float64"] = (x.double(), g.double(), *rest)
    return left


LEFT = left_to_torch()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Every case by the kernels in the interpreter."""
    folder = tmp_path_factory.mktemp("norms")
    torch.save((CASES, WIDE, LEFT), folder / "cases.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(folder / "cases.pt"), str(folder / "results.pt"), str(Path(__file__).parent)]
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
