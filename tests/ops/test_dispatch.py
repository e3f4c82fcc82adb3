"""Kernels are trusted by one comparison; where they are wrong or do not compile, torch serves.

Kernels that are plain torch, spoilt or not, stand in for those of a GPU.
"""

import math
import time
from functools import cache
from subprocess import CalledProcessError
from threading import Thread

import torch
from definitions import definition
from expected import warned
from pytest import importorskip, mark, raises
from torch import nn
from torch.utils._pytree import tree_leaves

import fastlr
from bench.convolution_cases import draw, geometry
from fastlr.ops import dispatch as ops
from fastlr.ops import kernel_checks, linear
from fastlr.ops.deferred_checks import gathered

A, G = draw(12, 1, 5, 3), draw(12, 1, 5, 4)


def gpu_with(monkeypatch, kernel):
    """Act as on a GPU whose kernels are ``kernel(name)``; return what was asked."""
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
    monkeypatch.setattr(ops, "_trust", ops.Trust())
    return asked


def spoilt(spoil, op=None):
    """Kernels that give what plain torch gives, but for what ``spoil`` does to the first tensor."""

    def kernel(name):
        right = getattr(__import__(f"fastlr.ops.{ops.TABLE[name].torch}", fromlist=[name]), name)

        def run(*args):
            result = right(*args)
            if op in (None, name):
                spoil(tree_leaves(result)[0])
            return result

        return run

    return kernel


def nothing(t):
    """Spoil nothing."""


def failing(error):
    def fail(*args, **options):
        raise error

    return lambda name: fail


# -- kernels that do not compile
# --------------------------------------------------------------------------------------------------


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
    want = ops.run("linear_sq_norms", A, G)
    asked = gpu_with(monkeypatch, failing(error))
    with warned(f"linear_sq_norms: Triton could not compile or load.*{remedy}"):
        assert torch.equal(ops.run("linear_sq_norms", A, G), want)
    assert torch.equal(ops.run("linear_sq_norms", A, G), want)
    ops.run("linear_sq_norms", A[:, :, :4], G[:, :, :4])
    assert asked.count("linear_sq_norms") == 1, "not tried again"


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
    for error in (
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        TypeError("no"),
        ValueError(),
    ):
        gpu_with(monkeypatch, failing(error))
        with raises(type(error)):
            ops.run("linear_sq_norms", A, A)
    gpu_with(monkeypatch, failing(RuntimeError("PassManager::run failed")))
    with ops.using("triton"), raises(RuntimeError):  # asked for by name, as in tests and benchmarks
        ops.run("linear_sq_norms", A, A)


# -- kernels that are wrong
# --------------------------------------------------------------------------------------------------


def one_sample(t):
    t[-2] *= 1.1


def last_rows(t):
    t[-3:] = 0


def one_tile(t):
    t[:, -8:] = 0


def not_written(t):
    t[5:7] = math.nan


def only_in_bfloat16(t):
    if t.dtype == torch.bfloat16:
        t *= 1.1


class Folding(nn.Module):
    """Convolutions that are folded, a linear layer and an embedding's worth of ops."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24), nn.Hardswish()),
        )
        self.head = nn.Linear(24, 10)
        self.eval()

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


@mark.parametrize(
    ("op", "spoil", "dtype"),
    [
        ("one_row_sq_norms", one_sample, None),
        ("one_row_sq_norms", last_rows, None),
        ("folded_conv_backward", one_tile, None),
        ("folded_conv_backward", one_sample, torch.bfloat16),
        ("folded_conv", one_tile, None),
        ("folded_conv", one_tile, torch.bfloat16),
        ("folded_conv", last_rows, None),
        ("folded_conv", not_written, torch.bfloat16),
        ("folded_conv", only_in_bfloat16, torch.bfloat16),
        ("fold_weights", one_tile, None),
        ("categorical_root_cotangent", one_sample, None),
    ],
)
def test_a_wrong_kernel_is_found_named_and_replaced(monkeypatch, op, spoil, dtype):
    """The estimate is that of plain torch, to the bit."""
    inputs = fastlr.TensorInputs(draw(24, 3, 9, 11))

    def value():
        return fastlr.estimate(Folding(), inputs, 24, batch_size=24, dtype=dtype).per_sample

    gpu_with(monkeypatch, spoilt(nothing))
    want = value()
    assert not ops._trust.switched_off
    assert op in {key[0] for key, _ in ops._trust.compared.items()}
    asked = gpu_with(monkeypatch, spoilt(spoil, op))
    with warned(f"{op}: its Triton kernel is off by .* for tensors of .*Plain torch serves"):
        found = value()
    assert torch.equal(found, want)
    assert list(ops._trust.switched_off) == [op]
    asked.clear()
    assert torch.equal(value(), want)
    assert op not in asked


@mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_kernel_is_compared_once_a_size(monkeypatch, dtype):
    args = A.to(dtype), G.to(dtype)
    asked = gpu_with(monkeypatch, spoilt(nothing))
    want = ops.run("linear_sq_norms", *args)
    assert asked == ["linear_sq_norms", "linear_sq_norms, torch"]
    asked.clear()
    assert torch.equal(ops.run("linear_sq_norms", *args), want)
    assert asked == ["linear_sq_norms"]
    ops.run("linear_sq_norms", *(t[:11] for t in args))
    assert asked[-1] == "linear_sq_norms, torch", "another size is compared again"
    assert not ops._trust.switched_off


def test_large_batches_are_compared_part_by_part(monkeypatch):
    monkeypatch.setattr(kernel_checks, "ELEMENTS", 2 * A[0].numel())
    asked = gpu_with(monkeypatch, spoilt(nothing))
    ops.run("linear_sq_norms", A, G)
    assert asked.count("linear_sq_norms, torch") >= 6
    gpu_with(monkeypatch, spoilt(lambda t: t[7:8].mul_(1.01)))
    with warned("linear_sq_norms: its Triton kernel is off by 0.01"):
        ops.run("linear_sq_norms", A, G)


def test_sums_that_cancel_are_not_mistaken_for_errors(monkeypatch):
    """The bias gradient is rounding alone, and the kernel adds in another order."""
    gpu_with(monkeypatch, lambda name: lambda g, other, axes: g.flip(1).cumsum(1)[:, -1])
    g = draw(4, 4000, 3, dtype=torch.float64)
    g = (g - g.mean(1, keepdim=True)).float()
    ops.run("broadcast_sums", g, None, [1])
    assert not ops._trust.switched_off


def test_zeros_are_no_proof(monkeypatch):
    """A kernel that is wrong gives zero for zero gradients; it is compared again."""
    gpu_with(monkeypatch, spoilt(lambda t: t.mul_(2)))
    assert not ops.run("linear_sq_norms", A, 0 * G).any()
    assert not ops._trust.switched_off
    with warned("linear_sq_norms"):
        ops.run("linear_sq_norms", A, G)


def test_one_result_of_zeros_is_no_proof(monkeypatch):
    """The input gradient behind a scale of zero, say, while other sums are not zero."""

    def twice(a, g):
        return (2 * a).sum(1), g.sum(1)

    def get(name, backend):
        return twice if backend == "triton" else sums

    def sums(a, g):
        return a.sum(1), g.sum(1)

    monkeypatch.setitem(ops.TABLE, "sums", ops.Op("sums", "sums", (0, 1)))
    gpu_with(monkeypatch, failing(RuntimeError()))
    monkeypatch.setattr(ops, "get", get)
    ones = torch.ones(3, 4)
    ops.run("sums", 0 * ones, ones)
    assert not ops._trust.switched_off
    with warned("sums: its Triton kernel is off by 1 "):
        assert ops.run("sums", ones, ones)[0].tolist() == [4.0] * 3


def test_squares_that_float32_hardly_holds_are_no_errors(monkeypatch):
    gpu_with(monkeypatch, spoilt(lambda t: t[3].mul_(1.2)))
    g = G.clone()
    g[3] *= 1e-22
    ops.run("linear_sq_norms", A, g)
    assert not ops._trust.switched_off


def test_results_are_held_to_the_tolerance_of_plain_torchs_dtype(monkeypatch):
    def in_bfloat16(a, g):
        return 1.01 * linear.linear_sq_norms(a, g).bfloat16()

    gpu_with(monkeypatch, {"linear_sq_norms": in_bfloat16}.get)
    with warned("linear_sq_norms: its Triton kernel is off"):
        ops.run("linear_sq_norms", A, G)


def test_a_number_where_zero_is_right_is_wrong(monkeypatch):
    gpu_with(monkeypatch, spoilt(lambda t: t.add_(1e-20)))
    with warned("linear_sq_norms.*off by inf"):
        assert not ops.run("linear_sq_norms", A, 0 * G).any()


def test_no_comparison_while_a_graph_is_captured(monkeypatch):
    asked = gpu_with(monkeypatch, spoilt(nothing))
    with gathered():
        ops.run("linear_sq_norms", A, G)
    assert asked == ["linear_sq_norms, torch"], "not compared yet: plain torch"
    ops.run("linear_sq_norms", A, G)
    asked.clear()
    with gathered():
        ops.run("linear_sq_norms", A, G)
        ops.run("linear_sq_norms", A[:10], G[:10])
    assert asked == ["linear_sq_norms", "linear_sq_norms, torch"]


def test_images_are_compared_to_every_bit(monkeypatch):
    options = {"size": (3, 8, 9), "rectangles": 2, "circles": 2, "seed": 1, "dtype": torch.float32}
    right = {name: definition(name) for name in ("shape_images_from", "shape_images_at")}
    first, numbers = torch.tensor([6]), torch.tensor([6, 7, 8])

    def one_bit(first, n, **how):
        images = right["shape_images_from"](first, n, **how)
        images[-1, 0, 0, 0] += 2.0**-20
        return images

    asked = gpu_with(monkeypatch, right.__getitem__)
    assert ops.images_agree("shape_images_from", (first, 3), numbers, options)
    asked.clear()
    assert ops.images_agree("shape_images_from", (first, 3), numbers, options | {"seed": 2})
    assert not asked
    assert ops.images_agree("shape_images_from", (first, 2), numbers[:2], options)
    assert asked, "another number of images is compared again"
    gpu_with(monkeypatch, {**right, "shape_images_from": one_bit}.__getitem__)
    with warned("shape_images_from: its Triton kernel gives other images"):
        assert not ops.images_agree("shape_images_from", (first, 3), numbers, options)
    assert ops.images_agree("shape_images_at", (numbers,), numbers, options)


def test_images_are_plain_torchs_where_their_kernel_does_not_load(monkeypatch):
    importorskip("triton")
    error = RuntimeError("Triton Error [CUDA]: device kernel image is invalid")
    asked = gpu_with(monkeypatch, failing(error))
    numbers, options = torch.tensor([0, 1]), {"size": (3, 8, 9)}
    with warned("shape_images_at: Triton could not compile or load"):
        assert not ops.images_agree("shape_images_at", (numbers,), numbers, options)
    assert not ops.images_agree("shape_images_at", (numbers,), numbers, options)
    assert asked == ["shape_images_at"]


def test_threads_note_launches_in_turn():
    """Each leaves the choice of backends as it was."""
    order = []

    def note(thread):
        with ops.noting_launches():
            order.append((thread, "begins"))
            time.sleep(0.01)
            order.append((thread, "ends"))

    threads = [Thread(target=note, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [what for _, what in order] == ["begins", "ends"] * 4
    assert ops._choice == ops.Choice()


def test_another_thread_may_note_launches_meanwhile(monkeypatch):
    """A call that begins while launches are noted ends as it began, and the other way round."""
    importorskip("triton")
    on = ops.has_triton

    def ends_or_begins():
        monkeypatch.setattr(ops, "_choice", ops.Choice("triton", note=print))
        return on()

    monkeypatch.setattr(ops, "has_triton", ends_or_begins)
    want = ops.get("linear_sq_norms", "torch")(A, G)
    assert torch.equal(ops.run("linear_sq_norms", A, G), want)


def test_calls_have_one_key_where_kernels_see_no_difference():
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
    assert len({ops._key_of_call("", call) for call in calls}) == len(calls)
    assert ops._key_of_call("", (t, 5)) == ops._key_of_call("", (t, 7)), "a seed"
