"""Every fast op against its definition in fastlr.ops.reference, at odd sizes, in its dtypes."""

import inspect
import json
import math
from functools import cache
from importlib.util import find_spec
from subprocess import CalledProcessError

import torch
import torch.nn.functional as F
from agreement import assert_near
from expected import warned
from pytest import importorskip, mark, raises, skip, warns
from torch import Tensor
from torch.testing import assert_close

from bench.convolution_cases import CONVOLUTIONS, convolution, geometry
from fastlr.errors import FastlrWarning
from fastlr.ghost.fusion.batch_norm import NODE, FixedNorm
from fastlr.ghost.rules import RULES, Site
from fastlr.ghost.sample_axis import Regular
from fastlr.ops import convolution as torch_conv
from fastlr.ops import dispatch as ops
from fastlr.ops import folded as torch_folded
from fastlr.ops import kernel_checks
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.deferred_checks import gathered
from fastlr.ops.kernel_calls import IMAGES, channels_last, draw
from fastlr.ops.linear import square_sum
from fastlr.ops.reference.folded import ACTIVATIONS

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 2e-5,
}  # low precision is raised before products
DTYPES = list(TOLERANCE)
# What is switched off is said once, and nothing else is said.
pytestmark = mark.filterwarnings("error")


def hold(name, *args, dtype):
    """Hold plain torch to the definition of an op."""
    assert_near(ops.get(name, "torch")(*args), ops.get(name, "reference")(*args), TOLERANCE[dtype])


@mark.parametrize("name", [name for name in ops.TABLE if not name.startswith("shape_images")])
def test_signatures_agree(name):
    here = [backend for backend in ops.backends(name) if backend != "triton" or find_spec("triton")]
    reference, *fast = [inspect.signature(ops.get(name, backend)) for backend in here]
    assert all(f == reference for f in fast)


@mark.parametrize("dtype", DTYPES)
@mark.parametrize(
    ("count", "groups", "rows", "inputs", "outputs"),
    [
        (1, 1, 1, 1, 1),
        (3, 1, 1, 7, 5),
        (2, 3, 2, 33, 17),
        (5, 1, 197, 12, 10),
        (3, 2, 64, 9, 31),
        (4, 1, 5, 300, 200),
    ]
    + [(2, 2, 197, 300, 700), (2, 1, 128, 290, 280)],  # Gram matrices in strips
)
def test_linear(count, groups, rows, inputs, outputs, dtype):
    a = draw(count, groups, rows, inputs, dtype=dtype)
    g = draw(count, groups, rows, outputs, dtype=dtype, seed=1)
    hold("linear_sq_norms", a, g, dtype=dtype)
    hold("linear_sq_norms", a.mT.contiguous().mT, g, dtype=dtype)
    hold("column_sq_norms", a[:, 0], g[:, 0], dtype=dtype)


@mark.parametrize("dtype", DTYPES)
def test_one_row(dtype):
    a, g = draw(4, 9, dtype=dtype), draw(4, 6, dtype=dtype, seed=1)
    hold("one_row_sq_norms", a, g, dtype=dtype)
    hold("one_row_sq_norms", a.mT.contiguous().mT, g[:, ::2], dtype=dtype)


def test_long_sums_of_squares_keep_their_digits():
    """Torch's own norm of 2^23 elements in float32 is off by more than 1e-4 on a CPU."""
    t = draw(1, (1 << 23) + 5, dtype=torch.float32)
    want = t.double().square().sum(1)
    assert_close(square_sum(t), want, rtol=1e-6, atol=0)


@mark.parametrize("dtype", DTYPES)
@mark.parametrize("transposed", [False, True])
@mark.parametrize("name", CONVOLUTIONS)
def test_conv(name, transposed, dtype):
    args = convolution(name, dtype, transposed)
    hold("conv_sq_norms", *args, dtype=dtype)
    if dtype != torch.bfloat16:
        wide = (a.double() if isinstance(a, Tensor) else a for a in args)
        assert_near(
            ops.run("conv_grads", *args),
            ops.get("conv_grads", "reference")(*wide),
            TOLERANCE[dtype],
        )


@mark.parametrize("dtype", [torch.float64, torch.float32])
@mark.parametrize(
    "name", ["3x3", "3x3_strided", "depthwise", "pointwise", "stem", "depthwise_5_strided"]
)
def test_conv_channels_last(name, dtype):
    x, g, *rest = convolution(name, dtype, False)
    hold("conv_sq_norms", channels_last(x), channels_last(g), *rest, dtype=dtype)


# Noise, relative error.
NEARLY_CONSTANT = [(torch.float64, 1e-5, 1e-10), (torch.float32, 1e-3, 1e-4)]


def nearly_constant(shape, noise):
    """The same numbers at all places of the last axis, but for noise."""
    generator = torch.Generator().manual_seed(sum(shape))
    one, rest = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in ((*shape[:-1], 1), shape)
    )
    return one + noise * rest


def sums_to_zero(shape):
    """Over the last axis."""
    t = draw(*shape, dtype=torch.float64, seed=1)
    return t - t.mean(-1, keepdim=True)


@mark.parametrize(("dtype", "noise", "error"), NEARLY_CONSTANT)
@mark.parametrize("swapped", [False, True])
@mark.parametrize(
    ("rows", "inputs", "outputs"), [(6, 64, 64), (6, 96, 64), (6, 64, 96), (128, 300, 280)]
)
def test_linear_of_nearly_constant_rows(rows, inputs, outputs, swapped, dtype, noise, error):
    """The rows' common part cancels where the other side sums to zero, in Gram matrices too.

    The shapes are such that take Gram matrices.
    """
    a = nearly_constant((2, 2, inputs, rows), noise).mT.to(dtype)
    g = sums_to_zero((2, 2, outputs, rows)).mT.to(dtype)
    a, g = (g, a) if swapped else (a, g)
    for given in ((a, g), (a.contiguous(), g.contiguous())):
        got, want = (
            ops.get("linear_sq_norms", backend)(*given) for backend in ("torch", "reference")
        )
        assert_close(got, want, rtol=error, atol=0)


@mark.parametrize(("dtype", "noise", "error"), NEARLY_CONSTANT)
@mark.parametrize(("channels", "outputs"), [(64, 80), (80, 64)])
@mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_conv_of_nearly_constant_images(kernel, stride, channels, outputs, dtype, noise, error):
    size, side = 5, (5 - kernel) // stride + 1
    x = nearly_constant((3, channels, size * size), noise).view(3, channels, size, size).to(dtype)
    g = sums_to_zero((3, outputs, side * side)).view(3, outputs, side, side).to(dtype)
    weight = draw(outputs, channels, kernel, kernel, dtype=dtype)
    how = geometry(2, stride)
    assert torch_conv.gram_pays(x, g, weight.shape, how)
    got, want = (
        ops.get("conv_sq_norms", b)(x[:, None], g[:, None], weight, how)
        for b in ("torch", "reference")
    )
    assert_close(got, want, rtol=error, atol=0)


@mark.parametrize("name", ["depthwise", "depthwise_5_strided", "1d_depthwise"])
def test_depthwise_forms_agree(name):
    """The form for GPUs is plain torch too: hold it to the one for CPUs."""
    x, g, weight, how = convolution(name, torch.float64, False)
    args = (x[:, 0], g[:, 0], weight.shape[2:], how)
    assert_close(torch_conv._depthwise_taps(*args), torch_conv.depthwise_grads(*args))


@mark.parametrize("dtype", DTYPES)
def test_layer_norm_sums_of_large_samples(dtype):
    """In one pass a sample; small ones are among the cases of test_kernels_sums.py."""
    x, g = draw(2, 300, 220, dtype=dtype), draw(2, 300, 220, dtype=dtype, seed=1)
    mean = x.double().mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.double().var(-1, keepdim=True, correction=0) + 1e-5)
    hold("layer_norm_sums", x, g, mean, rstd, dtype=dtype)


# -- folded convolutions
# ------------------------------------------------------------------------------------------------

FOLDABLE = [name for name, layer in CONVOLUTIONS.items() if layer.images == 1]  # of a sample


def moments_case(name, dtype, last):
    """Arguments of folded_conv_sq_norms for a named convolution."""
    x, g, weight, how = convolution(name, dtype, False)
    x, g = (channels_last(t, 1) if last else t for t in (x[:, 0], g[:, 0]))
    return x, g, block_of(weight, how, dtype)


def block_of(weight, how, dtype, act="none"):
    """A block with this weight and numbers of the channels that are drawn."""
    bias = draw(1, len(weight), dtype=weight.dtype, seed=4)
    channels = torch.cat([bias, draw(3, len(weight), dtype=weight.dtype, seed=3)])
    folded = (weight * channels[1].view(-1, *[1] * (weight.ndim - 1))).to(dtype)
    return Block(weight, folded, channels, act, how)


@mark.parametrize("last", [False, True])
@mark.parametrize("dtype", DTYPES)
@mark.parametrize("name", FOLDABLE)
def test_folded_conv_sq_norms(name, dtype, last):
    hold("folded_conv_sq_norms", *moments_case(name, dtype, last), dtype=dtype)


@mark.parametrize("act", ACTIVATIONS)
@mark.parametrize("name", ["3x3_strided", "depthwise", "pointwise", "stem", "1d_depthwise"])
def test_folded_conv_and_its_backward(name, act):
    for dtype in (torch.float64, torch.float32):
        x, g, block = moments_case(name, dtype, True)
        block = block._replace(activation=act)
        forward = (Loaded(x), block)
        hold("folded_conv", *forward, dtype=dtype)
        _, kept = ops.get("folded_conv", "reference")(*forward)
        hold("activation_grad", g, kept, act, dtype=dtype)
        backward = (Loaded(x), Gradients(g), kept, block)
        hold("folded_conv_backward", *backward, True, dtype=dtype)
        assert ops.run("folded_conv_backward", *backward, False)[0] is None


@mark.parametrize("act", ["none", "relu", "relu6", "hardswish"])
@mark.parametrize("add", [False, True])
def test_the_unfolded_product_serves_as_well(act, add):
    """Where Gram matrices serve, the convolution is kept for its output and moments.

    No second convolution is made.
    """
    for dtype in (torch.float64, torch.float32):
        x = draw(2, 24, 5, 4, dtype=dtype)
        weight = draw(40, 24, 3, 3, dtype=torch.float64, seed=1)
        residual = draw(2, 40, 5, 4, dtype=dtype, seed=5) if add else None
        block = block_of(weight, geometry(2, padding=1), dtype, act)
        assert torch_folded.keeps_unfolded_convolution(x, weight, block.geometry)
        added = Loaded(residual) if add else None
        want = ops.get("folded_conv", "reference")(Loaded(x), block, added)
        out, kept, product = torch_folded.folded_and_unfolded_convolution(x, block, residual)
        assert_near((out, kept), want, TOLERANCE[dtype])
        g = draw(2, 40, 5, 4, dtype=dtype, seed=6)
        args = (Loaded(x), Gradients(g), kept, block, True)
        got = ops.run("folded_conv_backward", *args, product)
        assert_near(got, ops.get("folded_conv_backward", "reference")(*args), TOLERANCE[dtype])
        # then gamma's gradient is <W, M> / sigma, and that comes from the product
        block.statistics[2] = 0
        got, other = (ops.run("folded_conv_backward", *args, factor * product) for factor in (1, 2))
        assert_close(other[3], 4 * got[3])


@mark.parametrize(
    ("change", "kept"),
    [({}, True), ({"dtype": torch.bfloat16}, False), ({"size": 30}, False), ({"groups": 2}, False)],
)
def test_where_the_unfolded_product_is_kept(change, kept):
    size = change.get("size", 5)
    groups = change.get("groups", 1)
    dtype = change.get("dtype", torch.float32)
    x = torch.zeros(2, 24, size, size, dtype=dtype)
    weight = torch.zeros(40, 24 // groups, 3, 3)
    assert (
        torch_folded.keeps_unfolded_convolution(x, weight, geometry(2, padding=1, groups=groups))
        is kept
    )


def test_folded_backward_in_slices(monkeypatch):
    """Going through the batch a sample at a time changes nothing."""
    x, g, block = moments_case("3x3", torch.float64, True)
    args = (Loaded(x), Gradients(g), g, block, True)
    whole = ops.run("folded_conv_backward", *args)
    monkeypatch.setattr(torch_folded, "SLICE_BYTES", 1)
    assert_close(whole, ops.run("folded_conv_backward", *args))


# -- digits that are not lost
# ------------------------------------------------------------------------------------------


@mark.parametrize(("rows", "width"), [(1, 80), (3, 80), (3, 256)])
def test_products_of_small_sums_are_not_zero(rows, width):
    """Products of sums whose squares vanish in float32 are not zero.

    They are tried in one row, in direct products and in Gram matrices.
    """
    a, g = (1e-12 * draw(2, 1, rows, width, dtype=torch.float32, seed=seed) for seed in (0, 1))
    got, want = (ops.get("linear_sq_norms", backend)(a, g) for backend in ("torch", "reference"))
    assert float(want.max()) < 1e-40
    assert_close(got, want, rtol=1e-5, atol=0)


@mark.parametrize("kind", ["group", "batch", "batch of vectors", "fixed"])
def test_norm_layers_keep_their_digits_where_means_are_large(kind):
    """Norm layers keep their digits for inputs around 1e4, equal in float32 and float64.

    The rules are tried alone, as torch's own are coarser.
    """
    shape = (3, 8) if kind == "batch of vectors" else (3, 8, 6, 7)
    x = draw(*shape, dtype=torch.float32, seed=1, offset=1e4)
    v = draw(*shape, dtype=torch.float32, seed=2)
    weight, bias, mean, var = (1 + 0.1 * t for t in draw(4, 8, dtype=torch.float32, seed=3).abs())
    mean = mean + 1e4

    def output(dtype):
        given = [t.to(dtype) for t in (weight, bias, mean, var)]
        parameters = [t.requires_grad_() for t in given[:2]]
        inputs = x.to(dtype).requires_grad_()
        if kind == "group":
            return F.group_norm(inputs, 2, *parameters), parameters
        if kind == "fixed":
            return FixedNorm.apply(inputs, *given, 1e-5), parameters
        return F.batch_norm(inputs, *given[2:], *parameters), parameters

    made = output(torch.float32)[0]
    node = made.grad_fn
    if kind == "group" and not hasattr(node, "_saved_eps"):
        skip("this torch's node does not tell eps, as of 2.15: its own backward formula serves")
    slots = {1: torch.Size((8,)), 2: torch.Size((8,))}
    site = Site(node, (v,), {0: Regular(0, 1, 1)}, 3, slots)
    with torch.no_grad():
        found = RULES[NODE if kind == "fixed" else node.name()](site, [1, 2])
    z, parameters = output(torch.float64)
    for b in range(3):
        cotangent = torch.zeros_like(z)
        cotangent[b] = v[b]
        for slot, want in zip(
            (1, 2), torch.autograd.grad(z, parameters, cotangent, retain_graph=True), strict=True
        ):
            assert float((found[slot].dense(b, b + 1)[0] - want).abs().max()) <= 2e-6 * float(
                want.abs().max()
            )


# -- kernels that cannot be compiled here
# -------------------------------------------------------------------------------


def failing(monkeypatch, error):
    """As on a GPU whose Triton raises ``error`` for every kernel; see `with_kernel`."""

    def fail(*args, **options):
        raise error

    return with_kernel(monkeypatch, lambda name: fail)


def with_kernel(monkeypatch, kernel):
    """Act as on a GPU with unknown kernels; return the ops whose kernel, then twin, was asked."""
    asked = []
    plain = ops.get

    def get(name, backend):
        function = kernel(name) if backend == "triton" else plain(name, backend)

        def noted(*args, **options):
            asked.append(name if backend == "triton" else f"{name}, {backend}")
            return function(*args, **options)

        return noted

    monkeypatch.setattr(ops, "get", get)
    monkeypatch.setattr(ops, "_on_gpu", lambda args: True)
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(ops, "_comparisons", kernel_checks.Comparisons())
    return asked


@mark.parametrize(
    "kind", ["pass", "shared memory", "assembler", "compiler", "headers", "image", "architecture"]
)
def test_a_kernel_that_does_not_compile_is_replaced_and_said(monkeypatch, kind):
    errors = importorskip("triton.runtime.errors")
    error, remedy = {
        "pass": (RuntimeError("PassManager::run failed"), "report"),
        "shared memory": (errors.OutOfResources(300000, 232448, "shared memory"), "report"),
        "assembler": (errors.PTXASError("Internal Triton PTX codegen error"), "report"),
        "compiler": (
            RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
            "CC",
        ),
        "headers": (CalledProcessError(1, ["gcc", "main.c"]), "headers"),
        "image": (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "report"),
        "architecture": (
            RuntimeError("Triton Error [CUDA]: no kernel image is available for execution"),
            "report",
        ),
    }[kind]
    asked = failing(monkeypatch, error)
    a = draw(2, 1, 5, 3, dtype=torch.float32)
    g = draw(2, 1, 5, 4, dtype=torch.float32)
    want = ops.get("linear_sq_norms", "torch")(a, g)
    with warned(f"linear_sq_norms: Triton could not compile or load.*{remedy}"):
        assert torch.equal(ops.run("linear_sq_norms", a, g), want)
    assert torch.equal(ops.run("linear_sq_norms", a, g), want)
    assert asked.count("linear_sq_norms") == 1, "not tried again"
    ops.run("linear_sq_norms", a[:, :, :4], g[:, :, :4])
    assert asked.count("linear_sq_norms") == 2, "other sizes are another kernel"


def test_images_are_the_definitions_where_their_kernel_does_not_load(monkeypatch):
    importorskip("triton")
    asked = failing(
        monkeypatch, RuntimeError("Triton Error [CUDA]: device kernel image is invalid")
    )
    with warned("shape_images_(from|at): Triton could not compile or load"):
        assert not ops.images_agree(torch.device("cpu"), IMAGES[0])
    assert not ops.images_agree(torch.device("cpu"), IMAGES[0])
    assert asked.count("shape_images_from") == 1


def test_no_kernel_runs_on_amd(monkeypatch):
    importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(ops, "has_triton", cache(ops.has_triton.__wrapped__))
    monkeypatch.setattr(ops, "_on_gpu", lambda args: True)
    with warned("AMD"):
        assert ops.backend_for() == "torch"
    assert ops.backend_for() == "torch"


def test_what_a_kernel_does_wrong_is_not_hidden(monkeypatch):
    importorskip("triton")
    a = draw(2, 1, 5, 3, dtype=torch.float32)
    for error in (
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        TypeError("no"),
        ValueError(),
    ):
        failing(monkeypatch, error)
        with raises(type(error)):
            ops.run("linear_sq_norms", a, a)
    failing(monkeypatch, RuntimeError("PassManager::run failed"))
    with ops.using("triton"), raises(RuntimeError):  # asked for by name, as in tests and benchmarks
        ops.run("linear_sq_norms", a, a)


# -- kernels that are wrong
# ----------------------------------------------------------------------------------------------


def wrong_in(sample, factor):
    """Kernels that give the definition but for one sample."""

    def kernel(name):
        right = getattr(__import__(ops.TABLE[name]["torch"], fromlist=[name]), name)

        def spoilt(*args):
            result = right(*args)
            first = result[0] if isinstance(result, tuple) else result
            first[sample : sample + 1] *= factor
            return result

        return spoilt

    return kernel


def calls_of(dtype):
    """An op with one result and one with two, twelve samples."""
    a = draw(12, 1, 5, 3, dtype=dtype)
    g = draw(12, 1, 5, 4, dtype=dtype)
    x = draw(12, 1, 6, 7, dtype=dtype)
    return {"linear_sq_norms": (a, g), "channel_sums": (x, x.flip(0))}


@mark.parametrize("op", ["linear_sq_norms", "channel_sums"])
@mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1.02), (torch.bfloat16, 1.2), (torch.float32, math.nan)]
)
def test_a_wrong_kernel_is_switched_off_at_its_first_call(monkeypatch, op, dtype, factor):
    args = calls_of(dtype)[op]
    want = ops.get(op, "torch")(*args)
    asked = with_kernel(monkeypatch, wrong_in(11, factor))
    short = str(dtype).removeprefix("torch.")
    with warned(rf"{op}: its Triton kernel is off by .*\[12, 1, .*\({short}\)"):
        found = ops.run(op, *args)
    assert_close(found, want, rtol=0, atol=0)
    assert [name for name, _ in ops.switched_off()] == [op]
    asked.clear()
    ops.run(op, *args)
    ops.run(op, *(t[:9] for t in args))  # another call of this kind
    assert asked == [f"{op}, torch"] * 2
    assert not ops.switched_off()[1:]


def test_two_kinds_that_disagree_switch_off_the_op(monkeypatch):
    asked = with_kernel(monkeypatch, wrong_in(0, 2.0))
    a, g = calls_of(torch.float32)["linear_sq_norms"]
    with warns(FastlrWarning):
        ops.run("linear_sq_norms", a, g)
        ops.run("linear_sq_norms", a.double().half(), g.half())
    asked.clear()
    ops.run("linear_sq_norms", a.bfloat16(), g.bfloat16())
    assert asked == ["linear_sq_norms, torch"]
    found = json.loads(json.dumps(ops.switched_off()))
    with_kernel(monkeypatch, wrong_in(0, 1.0))  # another rank, whose kernels agree
    ops.run("linear_sq_norms", a, g)
    assert ops.switched_off() == []
    ops.switch_off(found)
    assert ops.switched_off() == found
    asked = with_kernel(monkeypatch, wrong_in(0, 1.0))
    ops.switch_off(found)
    ops.run("linear_sq_norms", a, g)
    assert asked == ["linear_sq_norms, torch"]


@mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@mark.parametrize("op", ["linear_sq_norms", "channel_sums"])
def test_a_right_kernel_is_compared_once(monkeypatch, op, dtype):
    args = calls_of(dtype)[op]
    asked = with_kernel(monkeypatch, wrong_in(11, 1.0))
    want = ops.run(op, *args)
    assert asked[0] == op
    assert len(asked) > 1
    for given in (args, tuple(t[:11] for t in args), args):  # another batch of this kind as well
        asked.clear()
        found = ops.run(op, *given)
        assert asked == [op], "no comparison"
    assert_close(found, want, rtol=0, atol=0)
    assert ops.switched_off() == []


def test_sums_that_cancel_are_not_mistaken_for_errors(monkeypatch):
    """A bias gradient of rounding alone teaches nothing of the kernel's sums but their size.

    The kernel adds in another order.
    """

    def backwards(name):
        return lambda g, other, axes: g.flip(1).cumsum(1)[:, -1]

    with_kernel(monkeypatch, backwards)
    g = draw(4, 4000, 3, dtype=torch.float64)
    g = (g - g.mean(1, keepdim=True)).float()
    ops.run("broadcast_sums", g, None, [1])
    assert ops.switched_off() == []


def test_zeros_are_no_proof(monkeypatch):
    """Gradients behind a zero residual branch prove nothing: drawn numbers are compared instead."""
    with_kernel(monkeypatch, wrong_in(0, 2.0))
    a, g = calls_of(torch.float32)["linear_sq_norms"]
    with warned("linear_sq_norms"):
        assert not ops.run("linear_sq_norms", a, 0 * g).any()


def test_no_comparison_while_a_graph_is_captured(monkeypatch):
    asked = with_kernel(monkeypatch, wrong_in(11, 1.0))
    args = calls_of(torch.float32)["linear_sq_norms"]
    with gathered():
        ops.run("linear_sq_norms", *args)
    assert asked == ["linear_sq_norms, torch"], "not compared yet: plain torch"
    ops.run("linear_sq_norms", *args)
    asked.clear()
    with gathered():
        ops.run("linear_sq_norms", *args)
        ops.run("linear_sq_norms", *(t[:10] for t in args))
    assert asked == ["linear_sq_norms"] * 2


def test_memory_that_runs_out_in_the_comparison_breaks_nothing(monkeypatch):
    def starved(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    asked = with_kernel(monkeypatch, wrong_in(11, 1.0))
    args = calls_of(torch.float32)["linear_sq_norms"]
    with monkeypatch.context() as patch:
        patch.setattr(kernel_checks, "_deviation", starved)
        assert ops.run("linear_sq_norms", *args).isfinite().all()
    asked.clear()
    ops.run("linear_sq_norms", *args)
    assert len(asked) > 1, "compared as soon as there is memory"


def test_images_are_held_to_every_bit(monkeypatch):
    define = ops.get("shape_images_from", "reference")
    options = {
        "size": (3, 8, 9),
        "rectangles": 2,
        "circles": 2,
        "seed": 1,
        "table": None,
        "dtype": torch.float32,
    }

    def one_bit(first, n, **how):
        images = define(first, n, **how)
        images[-1, 0, 0, 0] += 2.0**-20
        return images

    right = {name: ops.get(name, "reference") for name in ("shape_images_from", "shape_images_at")}
    asked = with_kernel(monkeypatch, right.__getitem__)
    assert ops.images_agree(torch.device("cpu"), options)
    asked.clear()
    assert ops.images_agree(torch.device("cpu"), {**options, "seed": 2})
    assert not asked
    with_kernel(monkeypatch, {**right, "shape_images_from": one_bit}.__getitem__)
    with warned("shape_images_from"):
        assert not ops.images_agree(torch.device("cpu"), options)


def test_kernels_are_held_to_all_digits():
    """The twin's products on a GPU are without TF32, and the user's setting is restored."""
    flags = [(torch.backends.cudnn, "allow_tf32"), (torch.backends.cuda.matmul, "allow_tf32")]
    flags.append((torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"))
    before = [getattr(of, name) for of, name in flags]
    seen = list[bool]()

    def twin(x):
        seen.extend(getattr(of, name) for of, name in flags)
        return x.sum(1)

    try:
        for of, name in flags:
            setattr(of, name, True)
        kernel_checks.compared(lambda x: x.sum(1), twin, (torch.ones(3, 4),), (0,))
        assert seen
        assert not any(seen)
        assert all(getattr(of, name) for of, name in flags)
    finally:
        for (of, name), value in zip(flags, before, strict=True):
            setattr(of, name, value)


def test_a_kind_of_call_is_what_kernels_go_by():
    t = torch.zeros(5, 16, 6, 8)
    given = [
        t,
        t.contiguous(memory_format=torch.channels_last),
        t[..., :7],
        t.half(),
        torch.zeros(5, 20, 6, 8),
    ]
    given += [
        torch.zeros(5, 16, 6, 9)[..., 1:],
        torch.zeros(1 + t.numel())[1:].view(t.shape),
        t[..., :1].expand_as(t),
    ]
    how = geometry(2, padding=1, groups=8)
    calls = [(variant, how, True) for variant in given] + [(t, how, False)]
    calls += [
        (t, how._replace(**{name: (2, 1)}), True)
        for name in ("stride", "padding", "dilation", "output_padding")
    ]
    calls += [(t, how._replace(transposed=True), True), (t, how._replace(groups=4), True)]
    for kinds in (
        [kernel_checks.signature(call, (0,)) for call in calls],
        [ops._key_of_call("", call) for call in calls],
    ):
        assert len(set(kinds)) == len(kinds)
    other = (torch.ones(6, 16, 6, 8), how._replace(groups=24), True)
    assert kernel_checks.signature(other, (0,)) == kernel_checks.signature(calls[0], (0,))
