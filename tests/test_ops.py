"""Every fast op against its definition in fastlr.reference, at odd sizes, in the dtypes it meets."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr import kernel_checks, ops, torch_conv, torch_folded
from fastlr.checks import gathered
from fastlr.errors import FastlrWarning
from fastlr.ghost.fixed_norm import NODE, FixedNorm
from fastlr.ghost.layout import Regular
from fastlr.ghost.rules import RULES, Site
from fastlr.kernel_cases import CONVOLUTIONS, convolution, draw
from fastlr.reference.folded import ACTIVATIONS
from fastlr.torch_ops import square_sum

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5}  # low precision is raised before products
DTYPES = list(TOLERANCE)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Relative to the largest value of the definition."""
    assert got.shape == want.shape
    assert float((got.double() - want).abs().max()) <= TOLERANCE[dtype] * float(want.abs().max())


def both(name: str, *args: object, dtype: torch.dtype) -> None:
    """Run an op on both backends."""
    got, want = ops.get(name, "torch")(*args), ops.get(name, "reference")(*args)
    for a, b in zip(*[(t if isinstance(t, tuple) else (t,)) for t in (got, want)], strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize(
    "name", [name for name in ops.TABLE if len(ops.backends(name)) > 1 and "triton" not in ops.backends(name)]
)
def test_signatures_agree(name: str) -> None:
    reference, *fast = [inspect.signature(ops.get(name, backend)) for backend in ops.backends(name)]
    assert all(f == reference for f in fast)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "groups", "rows", "inputs", "outputs"),
    [(1, 1, 1, 1, 1), (3, 1, 1, 7, 5), (2, 3, 2, 33, 17), (5, 1, 197, 12, 10), (3, 2, 64, 9, 31), (4, 1, 5, 300, 200)]
    + [(2, 2, 197, 300, 700), (2, 1, 128, 290, 280)],  # Gram matrices in strips
)
def test_linear(count: int, groups: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    a, g = draw(count, groups, rows, inputs, dtype=dtype), draw(count, groups, rows, outputs, dtype=dtype, seed=1)
    both("linear_sq_norms", a, g, dtype=dtype)
    both("linear_sq_norms", a.mT.contiguous().mT, g, dtype=dtype)


def test_long_sums_of_squares_keep_their_digits() -> None:
    """Torch's own norm of 2^23 elements in float32 is off by more than 1e-4 on a CPU."""
    t = draw(1, (1 << 23) + 5, dtype=torch.float32)
    want = t.double().square().sum(1)
    close(square_sum(t), want, torch.float32)
    assert abs(float(square_sum(t) / want - 1)) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv(name: str, transposed: bool, dtype: torch.dtype) -> None:
    args = convolution(name, dtype, transposed)
    both("conv_sq_norms", *args, dtype=dtype)
    if dtype != torch.bfloat16:
        close(
            ops.run("conv_grads", *args),
            ops.get("conv_grads", "reference")(*(a.double() if isinstance(a, Tensor) else a for a in args)),
            dtype,
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["3x3", "3x3_strided", "depthwise", "pointwise", "stem", "depthwise_5_strided"])
def test_conv_channels_last(name: str, dtype: torch.dtype) -> None:
    x, g, *rest = convolution(name, dtype, False)
    x, g = (t.movedim(2, -1).contiguous().movedim(-1, 2) for t in (x, g))
    both("conv_sq_norms", x, g, *rest, dtype=dtype)


NEARLY_CONSTANT = [(torch.float64, 1e-5, 1e-10), (torch.float32, 1e-3, 1e-4)]  # noise, relative error


def nearly_constant(shape: tuple[int, ...], noise: float) -> Tensor:
    """The same numbers at all places of the last axis, but for noise."""
    generator = torch.Generator().manual_seed(sum(shape))
    one, rest = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((*shape[:-1], 1), shape))
    return one + noise * rest


def sums_to_zero(shape: tuple[int, ...]) -> Tensor:
    """Over the last axis."""
    t = draw(*shape, dtype=torch.float64, seed=1)
    return t - t.mean(-1, keepdim=True)


@pytest.mark.parametrize(("dtype", "noise", "error"), NEARLY_CONSTANT)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(6, 64, 64), (6, 96, 64), (6, 64, 96), (128, 300, 280)])
def test_linear_of_nearly_constant_rows(
    rows: int, inputs: int, outputs: int, swapped: bool, dtype: torch.dtype, noise: float, error: float
) -> None:
    """The common part of rows cancels where the other side sums to zero: the shapes are such that take Gram matrices."""
    a = nearly_constant((2, 2, inputs, rows), noise).mT.to(dtype)
    g = sums_to_zero((2, 2, outputs, rows)).mT.to(dtype)
    a, g = (g, a) if swapped else (a, g)
    for given in ((a, g), (a.contiguous(), g.contiguous())):
        got, want = (ops.get("linear_sq_norms", backend)(*given) for backend in ("torch", "reference"))
        assert float((got / want - 1).abs().max()) <= error


@pytest.mark.parametrize(("dtype", "noise", "error"), NEARLY_CONSTANT)
@pytest.mark.parametrize(("channels", "outputs"), [(64, 80), (80, 64)])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2)])
def test_conv_of_nearly_constant_images(
    kernel: int, stride: int, channels: int, outputs: int, dtype: torch.dtype, noise: float, error: float
) -> None:
    size, side = 5, (5 - kernel) // stride + 1
    x = nearly_constant((3, channels, size * size), noise).view(3, channels, size, size).to(dtype)
    g = sums_to_zero((3, outputs, side * side)).view(3, outputs, side, side).to(dtype)
    weight = draw(outputs, channels, kernel, kernel, dtype=dtype)
    assert torch_conv.gram_pays(x, g, weight.shape, [0, 0])
    options = ([stride] * 2, [0, 0], [1, 1], False, [0, 0], 1)
    got = ops.get("conv_sq_norms", "torch")(x[:, None], g[:, None], weight, *options)
    want = ops.get("conv_sq_norms", "reference")(x[:, None].double(), g[:, None].double(), weight.double(), *options)
    assert float((got / want - 1).abs().max()) <= error


@pytest.mark.parametrize("name", ["depthwise", "depthwise_5_strided", "1d_depthwise"])
def test_depthwise_forms_agree(name: str) -> None:
    """The form for GPUs is plain torch too: hold it to the one for CPUs."""
    x, g, weight, stride, padding, dilation, *_ = convolution(name, torch.float64, False)
    args = (x[:, 0], g[:, 0], weight.shape[2:], stride, padding, dilation)
    torch.testing.assert_close(torch_conv._depthwise_taps(*args), torch_conv.depthwise_grads(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "rows", "width", "table"), [(1, 1, 1, 1), (3, 17, 5, 4), (4, 9, 33, 1000)])
def test_embedding(count: int, rows: int, width: int, table: int, dtype: torch.dtype) -> None:
    ids = torch.randint(table, (count, rows), generator=torch.Generator().manual_seed(0))
    both("embedding_sq_norms", ids, draw(count, rows, width, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 2, 5), (2, 1, 6, 7, 9), (4, 3, 5, 11), (2, 1, 3, 3, 2, 5), (3, 1, 64, 56, 1)]
)
def test_channel_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, g = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    both("channel_sums", x, g, dtype=dtype)
    if len(shape) == 5:
        both("channel_sums", x.movedim(2, -1).contiguous().movedim(-1, 2), g, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (2, 197, 33), (2, 300, 220)])
def test_layer_norm_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, g = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    mean = x.double().mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.double().var(-1, keepdim=True, correction=0) + 1e-5)
    both("layer_norm_sums", x, g, mean, rstd, dtype=dtype)


# -- folded convolutions ------------------------------------------------------------------------------------------------

FOLDABLE = [name for name, case in CONVOLUTIONS.items() if case[-1] == 1]  # one image a sample


def folded_case(name: str, dtype: torch.dtype, channels_last: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple]:
    """x, output-shaped values, weight, scale and options of a named convolution."""
    x, g, weight, stride, padding, dilation, _, _, groups = convolution(name, dtype, False)
    x, g = x[:, 0], g[:, 0]
    if channels_last:
        x, g = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, g))
    scale = draw(len(weight), dtype=weight.dtype, seed=3)
    return x, g, weight, scale, (stride, padding, dilation, groups)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FOLDABLE)
def test_folded_conv_moments(name: str, dtype: torch.dtype, channels_last: bool) -> None:
    x, g, weight, scale, options = folded_case(name, dtype, channels_last)
    both("folded_conv_moments", x, g, weight, scale, *options, dtype=dtype)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("name", ["3x3_strided", "depthwise", "pointwise", "stem", "1d_depthwise"])
def test_folded_conv_and_its_backward(name: str, act: str) -> None:
    for dtype in (torch.float64, torch.float32):
        x, g, weight, scale, options = folded_case(name, dtype, True)
        folded = (weight * scale.view(-1, *[1] * (weight.ndim - 1))).to(dtype)
        bias = draw(len(weight), dtype=dtype, seed=4)
        forward = (x, folded, bias, act, *options)
        both("folded_conv", *forward, dtype=dtype)
        _, kept = ops.get("folded_conv", "reference")(*forward)
        both("activation_grad", g, kept, act, dtype=dtype)
        both("folded_conv_backward", x, g, kept, act, folded, weight, scale, *options, True, dtype=dtype)
        assert ops.run("folded_conv_backward", x, g, kept, act, folded, weight, scale, *options, False)[0] is None


@pytest.mark.parametrize("act", ["none", "relu", "relu6", "hardswish"])
@pytest.mark.parametrize("add", [False, True])
def test_the_unfolded_product_serves_as_well(act: str, add: bool) -> None:
    """Where Gram matrices serve, the convolution is kept: the same output and moments, and no second convolution."""
    for dtype in (torch.float64, torch.float32):
        x, weight = draw(2, 24, 5, 4, dtype=dtype), draw(40, 24, 3, 3, dtype=torch.float64, seed=1)
        scale, bias = draw(40, dtype=torch.float64, seed=3), draw(40, dtype=torch.float64, seed=4)
        residual = draw(2, 40, 5, 4, dtype=dtype, seed=5) if add else None
        options = ((1, 1), (1, 1), (1, 1), 1)
        assert torch_folded.keeps_product(x, weight, *options)
        folded = (weight * scale.view(-1, 1, 1, 1)).to(dtype)
        want = ops.get("folded_conv", "reference")(x, folded, bias, act, *options, residual)
        out, kept, product = torch_folded.conv_and_product(x, weight, scale, bias, act, options, residual)
        close(out, want[0].double(), dtype)
        close(kept, want[1].double(), dtype)
        g = draw(2, 40, 5, 4, dtype=dtype, seed=6)
        args = (x, g, kept, act, folded, weight, scale, *options, True)
        found = ops.run("folded_conv_backward", *args, product)
        for a, b in zip(found, ops.get("folded_conv_backward", "reference")(*args), strict=True):
            close(a, b.double(), dtype)
        other = ops.run("folded_conv_backward", *args, 2 * product)
        torch.testing.assert_close(other[2], 2 * found[2])  # it is what <W, M> comes from


@pytest.mark.parametrize(
    ("change", "kept"), [({}, True), ({"dtype": torch.bfloat16}, False), ({"size": 30}, False), ({"groups": 2}, False)]
)
def test_where_the_unfolded_product_is_kept(change: dict, kept: bool) -> None:
    size, groups, dtype = change.get("size", 5), change.get("groups", 1), change.get("dtype", torch.float32)
    x, weight = torch.zeros(2, 24, size, size, dtype=dtype), torch.zeros(40, 24 // groups, 3, 3)
    assert torch_folded.keeps_product(x, weight, (1, 1), (1, 1), (1, 1), groups) is kept


def test_folded_backward_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going through the batch a sample at a time changes nothing."""
    x, g, weight, scale, options = folded_case("3x3", torch.float64, True)
    args = (x, g, g, "none", weight, weight, scale, *options, True)
    whole = ops.run("folded_conv_backward", *args)
    monkeypatch.setattr(torch_folded, "SLICE_BYTES", 1)
    for a, b in zip(whole, ops.run("folded_conv_backward", *args), strict=True):
        torch.testing.assert_close(a, b)


# -- digits that are not lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_small_sums_are_not_zero(rows: int) -> None:
    """In float32 the product of the two sums of squares would be."""
    a, g = (1e-12 * draw(2, 1, rows, 80, dtype=torch.float32, seed=seed) for seed in (0, 1))
    got, want = (ops.get("linear_sq_norms", backend)(a, g) for backend in ("torch", "reference"))
    assert float(want.max()) < 1e-42
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["group", "batch", "batch of vectors", "fixed"])
def test_norm_layers_keep_their_digits_where_means_are_large(kind: str) -> None:
    """Inputs around 1e4, which are the same numbers in float32 and float64; the rules alone, as torch's own are coarser."""
    shape = (3, 8) if kind == "batch of vectors" else (3, 8, 6, 7)
    x, v = draw(*shape, dtype=torch.float32, seed=1, offset=1e4), draw(*shape, dtype=torch.float32, seed=2)
    weight, bias, mean, var = (1 + 0.1 * t for t in draw(4, 8, dtype=torch.float32, seed=3).abs())
    mean = mean + 1e4

    def output(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
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
    slots = {1: torch.Size((8,)), 2: torch.Size((8,))}
    site = Site(node, (v,), {0: Regular(0, 1, 1)}, 3, slots)
    with torch.no_grad():
        found = RULES[NODE if kind == "fixed" else node.name()](site, [1, 2])
    z, parameters = output(torch.float64)
    for b in range(3):
        cotangent = torch.zeros_like(z)
        cotangent[b] = v[b]
        for slot, want in zip((1, 2), torch.autograd.grad(z, parameters, cotangent, retain_graph=True), strict=True):
            assert float((found[slot].dense(b, b + 1)[0] - want).abs().max()) <= 2e-6 * float(want.abs().max())


# -- kernels that cannot be compiled here -------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[str]:
    """As on a GPU whose Triton raises ``error`` for every kernel; see `with_kernel`."""

    def fail(*args: Any) -> None:
        raise error

    return with_kernel(monkeypatch, lambda name: fail)


def with_kernel(monkeypatch: pytest.MonkeyPatch, kernel: Callable[[str], Callable[..., Any]]) -> list[str]:
    """As on a GPU with such kernels and nothing known of them; the ops of which the kernel and then the twin were asked."""
    asked: list[str] = []
    plain = ops.get

    def get(name: str, backend: str) -> Callable[..., Any]:
        function = kernel(name) if backend == "triton" else plain(name, backend)

        def noted(*args: Any, **options: Any) -> Any:
            asked.append(name if backend == "triton" else f"{name}, {backend}")
            return function(*args, **options)

        return noted

    monkeypatch.setattr(ops, "get", get)
    monkeypatch.setattr(ops, "_on_gpu", lambda args: True)
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(ops, "_serves", {})
    monkeypatch.setattr(ops, "_held", kernel_checks.Held())
    monkeypatch.setattr(ops, "_said", set())
    return asked


@pytest.mark.parametrize("kind", ["pass", "shared memory", "assembler", "compiler", "headers"])
def test_a_kernel_that_does_not_compile_is_replaced_and_said(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    error, remedy = {
        "pass": (RuntimeError("PassManager::run failed"), "report"),
        "shared memory": (errors.OutOfResources(300000, 232448, "shared memory"), "report"),
        "assembler": (errors.PTXASError("Internal Triton PTX codegen error"), "report"),
        "compiler": (RuntimeError("Failed to find C compiler. Please specify via CC environment variable."), "CC"),
        "headers": (CalledProcessError(1, ["gcc", "main.c"]), "headers"),
    }[kind]
    asked = failing(monkeypatch, error)
    a, g = draw(2, 1, 5, 3, dtype=torch.float32), draw(2, 1, 5, 4, dtype=torch.float32)
    want = ops.get("linear_sq_norms", "torch")(a, g)
    with pytest.warns(FastlrWarning, match=f"linear_sq_norms: Triton could not compile.*{remedy}"):
        assert torch.equal(ops.run("linear_sq_norms", a, g), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert torch.equal(ops.run("linear_sq_norms", a, g), want)
        assert asked.count("linear_sq_norms") == 1, "not tried again"
        ops.run("linear_sq_norms", a[:, :, :4], g[:, :, :4])
        assert asked.count("linear_sq_norms") == 2, "other sizes are another kernel"


def test_what_a_kernel_does_wrong_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    a = draw(2, 1, 5, 3, dtype=torch.float32)
    for error in (RuntimeError("CUDA error: an illegal memory access was encountered"), TypeError("no"), ValueError()):
        failing(monkeypatch, error)
        with pytest.raises(type(error)):
            ops.run("linear_sq_norms", a, a)
    failing(monkeypatch, RuntimeError("PassManager::run failed"))
    with ops.using("triton"), pytest.raises(RuntimeError):  # asked for by name, as in tests and benchmarks
        ops.run("linear_sq_norms", a, a)


# -- kernels that are wrong ----------------------------------------------------------------------------------------------


def wrong_in(sample: int, factor: float) -> Callable[[str], Callable[..., Any]]:
    """Kernels that give the definition but for one sample."""

    def kernel(name: str) -> Callable[..., Any]:
        right = getattr(__import__(ops.TABLE[name]["torch"], fromlist=[name]), name)

        def spoilt(*args: Any) -> Any:
            result = right(*args)
            first = result[0] if isinstance(result, tuple) else result
            first[sample : sample + 1] *= factor
            return result

        return spoilt

    return kernel


def calls_of(dtype: torch.dtype) -> dict[str, tuple]:
    """An op with one result and one with two, twelve samples."""
    a, g = draw(12, 1, 5, 3, dtype=dtype), draw(12, 1, 5, 4, dtype=dtype)
    x = draw(12, 1, 6, 7, dtype=dtype)
    return {"linear_sq_norms": (a, g), "channel_sums": (x, x.flip(0))}


@pytest.mark.parametrize("op", ["linear_sq_norms", "channel_sums"])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.02), (torch.bfloat16, 1.2), (torch.float32, math.nan)])
def test_a_wrong_kernel_is_switched_off_at_its_first_call(
    monkeypatch: pytest.MonkeyPatch, op: str, dtype: torch.dtype, factor: float
) -> None:
    args = calls_of(dtype)[op]
    want = ops.get(op, "torch")(*args)
    asked = with_kernel(monkeypatch, wrong_in(11, factor))
    short = str(dtype).removeprefix("torch.")
    with pytest.warns(FastlrWarning, match=rf"{op}: its Triton kernel is off by .*\[12, 1, .*\({short}\)"):
        found = ops.run(op, *args)
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    assert [name for name, _ in ops.switched_off()] == [op]
    asked.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.run(op, *args)
        ops.run(op, *(t[:9] for t in args))  # another call of this kind
    assert asked == [f"{op}, torch"] * 2
    assert not ops.switched_off()[1:]


def test_two_kinds_that_disagree_switch_off_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = with_kernel(monkeypatch, wrong_in(0, 2.0))
    a, g = calls_of(torch.float32)["linear_sq_norms"]
    with pytest.warns(FastlrWarning):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["linear_sq_norms", "channel_sums"])
def test_a_right_kernel_is_compared_once(monkeypatch: pytest.MonkeyPatch, op: str, dtype: torch.dtype) -> None:
    args = calls_of(dtype)[op]
    asked = with_kernel(monkeypatch, wrong_in(11, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = ops.run(op, *args)
        assert asked[0] == op and len(asked) > 1
        for given in (args, tuple(t[:11] for t in args), args):  # another batch of this kind as well
            asked.clear()
            found = ops.run(op, *given)
            assert asked == [op], "no comparison"
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    assert ops.switched_off() == []


def test_sums_that_cancel_are_not_mistaken_for_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that has no gradient but rounding: nothing is learnt of the kernel's sums, in another order, but their size."""

    def backwards(name: str) -> Callable[..., Any]:
        return lambda g, other, axes: g.flip(1).cumsum(1)[:, -1]

    with_kernel(monkeypatch, backwards)
    g = draw(4, 4000, 3, dtype=torch.float64)
    g = (g - g.mean(1, keepdim=True)).float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.run("broadcast_sums", g, None, [1])
    assert ops.switched_off() == []


def test_zeros_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients behind a residual branch that starts at zero: the kernel is compared on numbers drawn instead."""
    with_kernel(monkeypatch, wrong_in(0, 2.0))
    a, g = calls_of(torch.float32)["linear_sq_norms"]
    with pytest.warns(FastlrWarning, match="linear_sq_norms"):
        assert not ops.run("linear_sq_norms", a, 0 * g).any()


def test_no_comparison_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_that_runs_out_in_the_comparison_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    asked = with_kernel(monkeypatch, wrong_in(11, 1.0))
    args = calls_of(torch.float32)["linear_sq_norms"]
    with monkeypatch.context() as patch:
        patch.setattr(kernel_checks, "_deviation", starved)
        assert ops.run("linear_sq_norms", *args).isfinite().all()
    asked.clear()
    ops.run("linear_sq_norms", *args)
    assert len(asked) > 1, "compared as soon as there is memory"


def test_images_are_held_to_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    define = ops.get("shape_images_from", "reference")
    options = {"size": (3, 8, 9), "rectangles": 2, "circles": 2, "seed": 1, "table": None, "dtype": torch.float32}

    def one_bit(first: Tensor, n: int, **how: Any) -> Tensor:
        images = define(first, n, **how)
        images[-1, 0, 0, 0] += 2.0**-20
        return images

    right = {name: ops.get(name, "reference") for name in ("shape_images_from", "shape_images_at")}
    asked = with_kernel(monkeypatch, right.__getitem__)
    assert ops.images_agree(torch.device("cpu"), options)
    asked.clear()
    assert ops.images_agree(torch.device("cpu"), {**options, "seed": 2}) and not asked
    with_kernel(monkeypatch, {**right, "shape_images_from": one_bit}.__getitem__)
    with pytest.warns(FastlrWarning, match="shape_images_from"):
        assert not ops.images_agree(torch.device("cpu"), options)


def test_a_kind_of_call_is_what_kernels_go_by() -> None:
    t = torch.zeros(5, 16, 6, 8)
    given = [t, t.contiguous(memory_format=torch.channels_last), t[..., :7], t.half(), torch.zeros(5, 20, 6, 8)]
    given += [torch.zeros(5, 16, 6, 9)[..., 1:], torch.zeros(1 + t.numel())[1:].view(t.shape), t[..., :1].expand_as(t)]
    calls = [(each, [1, 1], True) for each in given] + [(t, [2, 1], True), (t, [1, 1], False)]
    kinds = [kernel_checks.signature(call, (0,)) for call in calls]
    assert len(set(kinds)) == len(kinds)
    assert kernel_checks.signature((torch.ones(6, 16, 6, 8), [1, 1], True), (0,)) == kinds[0]
