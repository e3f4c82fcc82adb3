"""The kernels of the folded path against their definitions: in Triton's interpreter and, where there is one, on a GPU.

The interpreter computes float32 only (its bfloat16 products are wrong), in a process of its own; all new memory is NaN
there. The tiles that low precision has are tried by making float32 calls choose them.
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
from fastlr.kernel_cases import case, depthwise_cases, folded_calls
from fastlr.reference.folded import ACTIVATIONS

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


CASES = folded_calls()


def norms_of(calls: dict) -> dict:
    """Calls of the ops for norms alone, of the same convolution."""
    x, g, _, _, _, weight, scale, *options, groups, _ = calls["folded_conv_backward"]
    zero = [0] * (x.ndim - 2)
    return {
        "folded_conv_moments": (x, g, weight, scale, *options, groups),
        "conv_sq_norms": (x[:, None], g[:, None], weight, *options, False, zero, groups),
    }


NORMS = {name: norms_of(calls) for name, calls in depthwise_cases().items() if name not in ACTIVATIONS}
x, g, *rest = NORMS["no-padding"]["conv_sq_norms"]
NORMS["transposed"] = {"conv_sq_norms": (g, x, *rest[:4], True, *rest[5:])}
LOW = {  # chosen for the tiles of low precision
    "expand": case(2, 8, 40, (9, 8), "hardswish"),
    "expand-far": case(1, 24, 136, (6, 7), "relu"),
    "square": case(2, 16, 16, (9, 8), "gelu"),
    "square-planes": case(2, 24, 72, (6, 8), "hardswish", "planes"),
    "project": case(1, 136, 40, (6, 7), "none"),
    "odd": case(1, 37, 17, (9, 7), "hardswish"),
    "split": case(1, 8, 16, (40, 40), "relu"),
    "3x3": case(2, 24, 24, (9, 9), "hardswish", kernel=3, padding=1, groups=24),
    "5x5": case(1, 16, 16, (9, 12), "relu", kernel=5, padding=2, stride=2, groups=16),
}
LEFT = {
    "dense": case(2, 4, 6, (5, 5), kernel=3, padding=1),
    "grouped": case(2, 4, 6, (5, 5), groups=2),
    "multiplier": case(2, 4, 8, (5, 5), kernel=3, groups=4),
    "padded": case(2, 4, 8, (5, 5), padding=1),
    "three-axes": case(2, 4, 8, (3, 4, 5), layout="planes"),
    "large-kernel": case(1, 2, 2, (13, 14), kernel=13, padding=6, groups=2),
}

RUN = """
import inspect
import sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[3])
import interpreter
claims = interpreter.note_claims()
from fastlr import ops
from fastlr.kernels import depthwise, folded_depthwise, folded_pointwise

for name in ("empty", "empty_like"):
    def filled(*args, make=getattr(torch, name), **kwargs):
        made = make(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made
    setattr(torch, name, filled)


def run(cases):
    return {(name, op): ops.get(op, "triton")(*args) for name, ops_of in cases.items() for op, args in ops_of.items()}


cases, norms, low, left = torch.load(sys.argv[1])
results = {"claims": claims}
results |= {"norms": run(norms), "cases": run(cases), "again": run(dict(list(cases.items())[::3])), "left": run(left)}
with ops.using("triton"):
    results["left_run"] = {name: ops.run("folded_conv_backward", *a["folded_conv_backward"]) for name, a in left.items()}

pointwise_cases = folded_pointwise.compile_cases()
tiles = [(folded_pointwise, "forward_tile"), (folded_pointwise, "backward_tile")]
for module, name in tiles + [(folded_depthwise, "forward_tile"), (depthwise, "backward_tile")]:
    def chosen(dtype, *args, choose=getattr(module, name)):
        return choose(torch.bfloat16, *args)
    setattr(module, name, chosen)
results["low"] = run(low)
results["tiles"] = {}
for module, name in tiles:
    choose = inspect.signature(getattr(module, name)).parameters["choose"].default
    sizes = [16 << i for i in range(7)]
    found = {
        (str(dtype), choose(dtype, o, i, *rest))
        for dtype in folded_pointwise.DTYPES for o in sizes for i in sizes
        for rest in ([(1,), (4,)] if name == "forward_tile" else
                     [(act, last, align) for act in ("gelu", "hardswish", "relu") for last in (0, 1) for align in (1, 4)])
    }
    results["tiles"][name] = {(dtype, tuple(tile)) for dtype, tile in found if tile}
results["compiled"] = {"forward_tile": set(), "backward_tile": set()}
for name, kernel, signature, flags, options in pointwise_cases:
    tile = (*(flags[key] for key in ("POSITIONS", "OUTPUTS", "INPUTS")), options["num_warps"], options["num_stages"])
    dtypes = {"*fp32": ["torch.float32"], "*bf16": ["torch.bfloat16", "torch.float16"]}.get(signature["x"], [])
    results["compiled"][name.split("-")[0].split("[")[0] + "_tile"] |= {(dtype, tile) for dtype in dtypes}
results["signatures"] = {
    name: [list(inspect.signature(ops.get(name, b)).parameters) for b in ("reference", "triton")]
    for name in ("folded_conv", "folded_conv_backward")
}
torch.save(results, sys.argv[2])
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Every case by the kernels in the interpreter, some twice."""
    folder = tmp_path_factory.mktemp("folded")
    torch.save((CASES, NORMS, LOW, LEFT), folder / "cases.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(folder / "cases.pt"), str(folder / "results.pt"), str(Path(__file__).parent)]
    command = [sys.executable, "-c", RUN, *files]
    subprocess.run(command, check=True, env=environment)
    return torch.load(folder / "results.pt", weights_only=False)


def check(found: tuple, wanted: tuple, tolerance: float) -> None:
    """Each result is there and close to its definition: squared norms relative to themselves, others to the largest."""
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted, strict=True):
        if want is None:
            assert got is None
            continue
        assert got.shape == want.shape
        scale = want.double().abs()
        if want.ndim > 1:
            scale = scale.max() + 1e-30
        assert ((got.cpu().double() - want.cpu().double()).abs() <= tolerance * scale.cpu()).all()


def definition(op: str, args: tuple) -> tuple:
    return ops.get(op, "reference")(*args)


@pytest.mark.parametrize("op", ["folded_conv", "folded_conv_backward"])
@pytest.mark.parametrize("name", list(CASES))
def test_kernels_agree_with_the_definition(name, op, interpreted):
    args, found = CASES[name][op], interpreted["cases"][name, op]
    check(found, definition(op, args), TOLERANCE[torch.float32])
    if op == "folded_conv":
        assert (found[1] is found[0]) == (args[3] in ("none", "relu", "relu6"))
        assert all(t.dtype == args[0].dtype for t in found)
    else:
        assert found[1].dtype == torch.float64


@pytest.mark.parametrize("name", list(NORMS))
def test_norms_of_depthwise_convolutions(name, interpreted):
    for op, args in NORMS[name].items():
        found, wanted = interpreted["norms"][name, op], definition(op, args)
        if op == "conv_sq_norms":
            found, wanted = (found,), (wanted,)
        assert found[0].dtype == torch.float64
        check(found, wanted, TOLERANCE[torch.float32])


@pytest.mark.parametrize("op", ["folded_conv", "folded_conv_backward"])
@pytest.mark.parametrize("name", list(LOW))
def test_tiles_of_low_precision(name, op, interpreted):
    check(interpreted["low"][name, op], definition(op, LOW[name][op]), TOLERANCE[torch.float32])


def test_same_call_same_bits(interpreted):
    assert len(interpreted["again"]) > 20
    for key, found in interpreted["again"].items():
        for a, b in zip(found, interpreted["cases"][key], strict=True):
            assert a is b is None or torch.equal(a, b), key


@pytest.mark.parametrize("name", [name for name in CASES if "norms-only" not in name])
def test_input_gradient_is_that_of_autograd(name, interpreted):
    x, grad, kept, act, folded, _, _, *options, _ = CASES[name]["folded_conv_backward"]
    bias = CASES[name]["folded_conv"][2].double()
    leaf = x.double().requires_grad_()
    pre = torch.ops.aten.convolution(leaf, folded.double(), bias, *options[:3], False, [0] * (x.ndim - 2), options[3])
    (want,) = torch.autograd.grad(ACTIVATIONS[act](pre), leaf, grad.double())
    check(interpreted["cases"][name, "folded_conv_backward"][:1], (want,), TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", list(CASES))
def test_output_has_the_memory_format_of_the_input(name, interpreted):
    x, out = CASES[name]["folded_conv"][0], interpreted["cases"][name, "folded_conv"][0]
    if x.ndim == 4 and x.shape[1] > 1 and x.stride(1) == 1:
        assert out.is_contiguous(memory_format=torch.channels_last)
    else:
        assert out.is_contiguous()


@pytest.mark.parametrize("name", list(LEFT))
def test_other_convolutions_are_left_to_plain_torch(name, interpreted):
    assert interpreted["left"][name, "folded_conv_backward"] is NotImplemented
    assert name == "large-kernel" or interpreted["left"][name, "folded_conv"] is NotImplemented
    wanted = definition("folded_conv_backward", LEFT[name]["folded_conv_backward"])
    check(interpreted["left_run"][name], wanted, TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", ["forward_tile", "backward_tile"])
def test_every_pointwise_tile_is_compiled(name, interpreted):
    assert interpreted["tiles"][name]
    assert interpreted["tiles"][name] - interpreted["compiled"][name] == set()


def test_what_kernels_tell_the_compiler_holds(interpreted):
    """That a size, stride or address is a multiple of what is loaded at once: on a GPU a false claim goes wrong silently."""
    assert interpreted["claims"] == []


def test_signatures_are_those_of_the_definitions(interpreted):
    for reference, triton in interpreted["signatures"].values():
        assert reference == triton


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def layers() -> dict[str, dict]:
    """Layers of MobileNetV3-Large, a few samples of them."""
    return {
        "16-64": case(3, 16, 64, (112, 112), "relu"),
        "64-24": case(3, 64, 24, (56, 56), "none"),
        "72-40": case(3, 72, 40, (28, 28), "none"),
        "40-240": case(3, 40, 240, (28, 28), "hardswish"),
        "240-80": case(3, 240, 80, (14, 14), "none"),
        "112-672": case(3, 112, 672, (14, 14), "hardswish"),
        "64-3x3": case(3, 64, 64, (112, 112), "relu", kernel=3, padding=1, stride=2, groups=64),
        "120-5x5": case(3, 120, 120, (28, 28), "relu", kernel=5, padding=2, groups=120),
        "672-5x5": case(3, 672, 672, (14, 14), "hardswish", kernel=5, padding=2, stride=2, groups=672),
        "960-5x5": case(3, 960, 960, (7, 7), "hardswish", kernel=5, padding=2, groups=960),
    }


def on_gpu(args: tuple, dtype: torch.dtype, op: str) -> tuple[tuple, tuple]:
    """The arguments rounded to ``dtype``, on the GPU and, in float32, on the CPU; W, s and the bias stay float32."""
    kept = {"folded_conv": (2,), "folded_conv_backward": (5, 6)}[op]

    def rounded(i: int, a: object) -> object:
        return a.to(dtype) if isinstance(a, Tensor) and i not in kept else a

    low = tuple(rounded(i, a) for i, a in enumerate(args))
    gpu = tuple(a.cuda() if isinstance(a, Tensor) else a for a in low)
    return gpu, tuple(a.float() if isinstance(a, Tensor) else a for a in low)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("op", ["folded_conv", "folded_conv_backward"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_gpu_agrees_with_the_definition(dtype, op):
    for name, calls in (CASES | LOW | layers()).items():
        gpu, wide = on_gpu(calls[op], dtype, op)
        found = ops.get(op, "triton")(*gpu)
        if found is NotImplemented:  # then what serves must do
            found = ops.run(op, *gpu)
        try:
            check(found, definition(op, wide), TOLERANCE[dtype])
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_same_call_same_bits():
    for calls in (CASES | layers()).values():
        for op, args in calls.items():
            gpu, _ = on_gpu(args, torch.bfloat16, op)
            for a, b in zip(ops.run(op, *gpu), ops.run(op, *gpu), strict=True):
                assert a is b is None or torch.equal(a, b)
