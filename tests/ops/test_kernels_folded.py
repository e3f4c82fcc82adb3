"""The kernels of the folded path against their definitions: in the interpreter, and on a GPU.

The interpreter is Triton's; a GPU is used where there is one.

The tiles that low precision has are tried by making float32 calls choose them: see interpreter.py.
"""

import definitions
import interpreter
import torch
from agreement import assert_near, pairs
from expected import needs_gpu, needs_triton
from kernel_calls import moved
from pytest import fixture, mark
from torch import Tensor

from bench.convolution_cases import case, depthwise_cases, folded_calls
from fastlr import ops
from fastlr.ops.activations import ACTIVATIONS
from fastlr.ops.block import changed

pytestmark = needs_triton
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


CASES = folded_calls()


def norms_of(calls):
    """Calls of the ops for norms alone, of the same convolution."""
    loaded, gradients, _, block, _ = calls["folded_conv_backward"]
    x, g = loaded.tensor, gradients.output
    return {
        "folded_conv_sq_norms": (x, g, block),
        "conv_sq_norms": (x[:, None], g[:, None], block.weight, block.geometry),
    }


NORMS = {
    name: norms_of(calls)
    for name, calls in depthwise_cases().items()
    if name not in ACTIVATIONS and "before" not in name
}
x, g, weight, geometry = NORMS["no-padding"]["conv_sq_norms"]
NORMS["transposed"] = {"conv_sq_norms": (g, x, weight, geometry._replace(transposed=True))}
SLOW = (
    "^(depthwise-|)((rows|columns)-split|3x5|5x5|7x7|even|wide|dilation-stride|stride-3|silu"
    "|gelu_tanh|sliced|expanded|residual-other|(planes|last|x-last)-odd)"
    "|^depthwise-(before-)?(relu6?|gelu|gelu_tanh|silu|none)$"
    "|^depthwise-(before-(mean-stride|rows-split|stride-more|mean-columns)"
    "|norms-only|no-padding|1x1-stride|x-last|planes|last|residual|before-hardswish)$"
    # what another case that is quick has too: its options, strides or split
    "|^(residual|no-padding)$|^pointwise-((last|x-last|expanded)-odd|planes|sliced|split"
    "|few-positions-gate)$"
)
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
    "mean-of-no-activation": case(
        2, 5, 5, (5, 7), "none", kernel=3, padding=1, groups=5, mean=True
    ),
}


def in_low_precision(args):
    """A call of the forward pass in bfloat16, and in float32 on the same values."""
    low = moved("folded_conv", args, torch.device("cpu"), torch.bfloat16)
    return low, tuple(changed(lambda a, _: a.float() if isinstance(a, Tensor) else a, low))


MEANS = {
    name: in_low_precision(calls["folded_conv"])
    for name, calls in CASES.items()
    if calls["folded_conv"][3]
}

RUN = """
import inspect
from itertools import product
from bench import kernel_variants
from fastlr.kernels import depthwise, folded_depthwise, folded_pointwise
from fastlr.kernels.launching import DTYPES


def run(cases):
    calls = [(name, op, args) for name, of in cases.items() for op, args in of.items()]
    return {(name, op): ops.get(op, "triton")(*args) for name, op, args in calls}


cases, norms, low, left, means = given
results = {"norms": run(norms), "cases": run(cases), "left": run(left)}
results["again"] = run(dict(list(cases.items())[::10]))
results["means"] = {}
for name, pair in means.items():
    results["means"][name] = [ops.get("folded_conv", "triton")(*args)[1] for args in pair]
with ops.using("triton"):
    backward = {name: calls["folded_conv_backward"] for name, calls in left.items()}
    results["left_run"] = {n: ops.run("folded_conv_backward", *a) for n, a in backward.items()}

pointwise_cases = kernel_variants.folded_pointwise()
tiles = [(folded_pointwise, "forward_tile"), (folded_pointwise, "backward_tile")]
for module, name in tiles + [(folded_depthwise, "forward_tile"), (depthwise, "backward_tile")]:
    def chosen(dtype, *args, choose=getattr(module, name), **options):
        return choose(torch.bfloat16, *args, **options)
    setattr(module, name, chosen)
results["low"] = run(low)
results["tiles"] = {}
for module, name in tiles:
    choose = inspect.signature(getattr(module, name)).parameters["choose"].default
    sizes = [16 << i for i in range(7)]
    found = {
        (str(dtype), choose(dtype, o, i, *rest))
        for dtype in DTYPES for o in sizes for i in sizes
        for rest in ([(1,), (4,)] if name == "forward_tile" else
                     product(("gelu", "hardswish", "relu"), (0, 1), (1, 4)))
    }
    results["tiles"][name] = {(dtype, tuple(tile)) for dtype, tile in found if tile}
results["compiled"] = {"forward_tile": set(), "backward_tile": set()}
for name, kernel, signature, flags, options in pointwise_cases:
    tile = tuple(flags[key] for key in ("POSITIONS", "OUTPUTS", "INPUTS"))
    tile += options["num_warps"], options["num_stages"]
    dtypes = {"*fp32": ["torch.float32"], "*bf16": ["torch.bfloat16", "torch.float16"]}
    found = {(dtype, tile) for dtype in dtypes.get(signature["x"], [])}
    results["compiled"][name.split("-")[0].split("[")[0] + "_tile"] |= found
"""


@fixture(scope="module")
def interpreted(request, tmp_path_factory):
    """The cases by the kernels in the interpreter, some twice."""
    cases, norms = (interpreter.chosen(request, some, SLOW) for some in (CASES, NORMS))
    return interpreter.interpreted(
        RUN, tmp_path_factory.mktemp("folded"), (cases, norms, LOW, LEFT, MEANS)
    )


def check_results(got, want, tolerance):
    """Hold each result close to its definition.

    Squared norms are compared relative to themselves, others relative to the largest value.
    """
    for a, b in pairs(got, want):
        assert_near(a, b, tolerance, of="element" if b is not None and b.ndim == 1 else "result")


def definition(op, args):
    return definitions.definition(op)(*args)


@mark.parametrize("op", ["folded_conv", "folded_conv_backward"])
@mark.parametrize("name", interpreter.params(CASES, SLOW))
def test_kernels_agree_with_the_definition(name, op, interpreted):
    args, got = CASES[name][op], interpreted["cases"][name, op]
    check_results(got, definition(op, args), TOLERANCE[torch.float32])
    if op == "folded_conv_backward":
        assert got[1].dtype == torch.float64
        return
    x, block, _, mean = args
    if not mean:
        assert (got[1] is got[0]) == (block.activation in ("none", "relu", "relu6"))
        assert all(t.dtype == x.tensor.dtype for t in got)


@mark.parametrize("name", MEANS)
def test_means_are_rounded_once(name, interpreted):
    """Whether one program makes them, which writes them itself, or several."""
    low, wide = interpreted["means"][name]
    assert low.dtype == torch.bfloat16 and wide.dtype == torch.float32
    assert torch.equal(low, wide.bfloat16())
    check_results(wide, definition("folded_conv", MEANS[name][1])[1], TOLERANCE[torch.float32])


@mark.parametrize("name", interpreter.params(NORMS, SLOW))
def test_norms_of_depthwise_convolutions(name, interpreted):
    for op, args in NORMS[name].items():
        got = interpreted["norms"][name, op]
        assert pairs(got, got)[0][0].dtype == torch.float64
        check_results(got, definition(op, args), TOLERANCE[torch.float32])


@mark.parametrize("op", ["folded_conv", "folded_conv_backward"])
@mark.parametrize("name", list(LOW))
def test_tiles_of_low_precision(name, op, interpreted):
    check_results(
        interpreted["low"][name, op], definition(op, LOW[name][op]), TOLERANCE[torch.float32]
    )


def test_same_call_same_bits(interpreted):
    assert len(interpreted["again"]) > 8
    for key, again in interpreted["again"].items():
        for a, b in zip(again, interpreted["cases"][key], strict=True):
            assert a is b is None or torch.equal(a, b), key


@mark.parametrize(
    "name",
    interpreter.params((name for name in CASES if CASES[name]["folded_conv_backward"][4]), SLOW),
)
def test_input_gradient_is_that_of_autograd(name, interpreted):
    x, gradients, _, block, _ = CASES[name]["folded_conv_backward"]
    leaf = x.tensor.double().requires_grad_()
    active = ACTIVATIONS[x.activation](leaf)
    gate = torch.ones((), dtype=torch.float64) if x.gate is None else x.gate.double()
    gate.requires_grad_()
    pre = torch.ops.aten.convolution(
        active * gate, block.folded.double(), block.bias.double(), *block.geometry
    )
    out = ACTIVATIONS[block.activation](pre)
    mean = out.mean(list(range(2, pre.ndim)), keepdim=True)
    outputs = (out if gradients.mean is None else pre, active, mean)
    pairs = zip(outputs, gradients, strict=True)
    given = [(output, g.double()) for output, g in pairs if g is not None]
    wanted = (active if x.gradient_at_output else leaf, gate)
    outputs, grads = zip(*given, strict=True)
    want = torch.autograd.grad(outputs, wanted, grads)
    got = interpreted["cases"][name, "folded_conv_backward"]
    check_results((got[0], *got[5:]), want if gate.ndim else want[:1], TOLERANCE[torch.float32])


@mark.parametrize("name", interpreter.params(CASES, SLOW))
def test_output_has_the_memory_format_of_the_input(name, interpreted):
    x = CASES[name]["folded_conv"][0].tensor
    out = interpreted["cases"][name, "folded_conv"][0]
    if x.ndim == 4 and x.shape[1] > 1 and x.stride(1) == 1:
        assert out.is_contiguous(memory_format=torch.channels_last)
    else:
        assert out.is_contiguous()


@mark.parametrize("name", list(LEFT))
def test_other_convolutions_are_left_to_plain_torch(name, interpreted):
    assert interpreted["left"][name, "folded_conv_backward"] is NotImplemented
    if name not in ("large-kernel", "mean-of-no-activation"):
        assert interpreted["left"][name, "folded_conv"] is NotImplemented
    wanted = definition("folded_conv_backward", LEFT[name]["folded_conv_backward"])
    check_results(interpreted["left_run"][name], wanted, TOLERANCE[torch.float32])


@mark.parametrize("name", ["forward_tile", "backward_tile"])
def test_every_pointwise_tile_is_compiled(name, interpreted):
    assert interpreted["tiles"][name]
    assert interpreted["tiles"][name] - interpreted["compiled"][name] == set()


# --- on a GPU
# --------------------------------------------------------------------------------------------------


def on_gpu(args, dtype, op):
    """The arguments on the GPU, data rounded to ``dtype``, and those in float32 on the CPU."""
    gpu = moved(op, args, torch.device("cuda"), dtype)
    return gpu, tuple(changed(lambda a, _: a.cpu().float() if isinstance(a, Tensor) else a, gpu))


@needs_gpu
@mark.parametrize("op", ["folded_conv", "folded_conv_backward"])
@mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_gpu_agrees_with_the_definition(dtype, op):
    for name, calls in (CASES | LOW).items():
        gpu, wide = on_gpu(calls[op], dtype, op)
        got = ops.get(op, "triton")(*gpu)
        if got is NotImplemented:  # then what serves must do
            got = ops.run(op, *gpu)
        try:
            check_results(got, definition(op, wide), TOLERANCE[dtype])
        except AssertionError as error:
            raise AssertionError(name) from error


@needs_gpu
def test_gpu_same_call_same_bits():
    for calls in CASES.values():
        for op, args in calls.items():
            gpu, _ = on_gpu(args, torch.bfloat16, op)
            for a, b in zip(ops.run(op, *gpu), ops.run(op, *gpu), strict=True):
                assert a is b is None or torch.equal(a, b)
