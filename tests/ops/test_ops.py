"""Every fast op against its definition, at odd sizes, in its dtypes."""

import inspect
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from agreement import assert_near
from definitions import definition
from pytest import mark, skip
from torch import Tensor
from torch.testing import assert_close

from bench.convolution_cases import CONVOLUTIONS, channels_last, convolution, draw, geometry
from fastlr.ghost.fusion.batch_norm import NODE, FixedNorm
from fastlr.ghost.graph.layouts import Regular
from fastlr.ghost.norms.rules import RULES, Site
from fastlr.ops import convolution as torch_conv
from fastlr.ops import dispatch as ops
from fastlr.ops import folded as torch_folded
from fastlr.ops.activations import ACTIVATIONS
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.linear import square_sum

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
    assert_near(ops.get(name, "torch")(*args), definition(name)(*args), TOLERANCE[dtype])


@mark.parametrize("name", [name for name in ops.TABLE if not name.startswith("shape_images")])
def test_signatures_agree(name):
    fast = [ops.get(name, "torch")]
    if ops.TABLE[name].kernel is not None and find_spec("triton"):
        fast.append(ops.get(name, "triton"))
    assert all(inspect.signature(f) == inspect.signature(definition(name)) for f in fast)


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
            definition("conv_grads")(*wide),
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
        got = ops.get("linear_sq_norms", "torch")(*given)
        want = definition("linear_sq_norms")(*given)
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
    args = (x[:, None], g[:, None], weight, how)
    got, want = ops.get("conv_sq_norms", "torch")(*args), definition("conv_sq_norms")(*args)
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
        _, kept = definition("folded_conv")(*forward)
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
        want = definition("folded_conv")(Loaded(x), block, added)
        out, kept, product = torch_folded.folded_and_unfolded_convolution(x, block, residual)
        assert_near((out, kept), want, TOLERANCE[dtype])
        g = draw(2, 40, 5, 4, dtype=dtype, seed=6)
        args = (Loaded(x), Gradients(g), kept, block, True)
        got = ops.run("folded_conv_backward", *args, product)
        assert_near(got, definition("folded_conv_backward")(*args), TOLERANCE[dtype])
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
    got = ops.get("linear_sq_norms", "torch")(a, g)
    want = definition("linear_sq_norms")(a, g)
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
            return FixedNorm.apply(inputs, *given, 1e-5, "norm"), parameters
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
