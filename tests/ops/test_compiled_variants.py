"""A kernel is compared with its twin when a compiled variant is new.

That is known without a GPU, by asking the launchers.
"""

import interpreter
import pytest
import torch
from pytest import importorskip, mark

from bench import kernel_cases
from bench.convolution_cases import geometry
from fastlr import ops
from fastlr.ops import dispatch, kernel_calls, kernel_checks
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.deferred_checks import gathered

importorskip("triton")
launching = importorskip("fastlr.kernels.launching")


def kind(name, *args):
    return kernel_checks.kind_of_call(dispatch._kernel_launcher(name), args, ops.SAMPLES[name])


def pointwise(channels, *, size=(4, 4), count=2):
    """A pointwise folded convolution from as many channels to as many, in bf16, channels last."""
    x = torch.ones(count, channels, *size, dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    weight = torch.ones(channels, channels, 1, 1, dtype=torch.bfloat16)
    return Loaded(x), Block(weight, weight, torch.ones(4, channels), "none", geometry(2))


def backward(channels, *size):
    """The backward pass of a pointwise folded convolution in bf16."""
    x, block = pointwise(channels, size=size)
    return x, Gradients(x.tensor), x.tensor, block, True


def rows(count, width):
    a = torch.ones(2, 1, count, width)
    return a, a


ALIKE = {  # calls that look alike: what decides between them is in no signature
    "a tile": ("folded_conv", pointwise(64), pointwise(112)),
    "a split": ("folded_conv_backward", backward(96, 32, 34), backward(96, 32, 62)),
    "a form": ("linear_sq_norms", rows(35, 80), rows(41, 80)),
}


@mark.parametrize("case", ALIKE)
def test_calls_that_look_alike_are_of_two_kinds_where_variants_differ(case):
    name, *calls = ALIKE[case]
    alike = {kernel_checks.signature(args, ops.SAMPLES[name]) for args in calls}
    assert len(alike) == 1
    assert len({kind(name, *args) for args in calls}) == 2


def test_other_values_and_samples_are_no_new_kind():
    a, g = torch.randn(12, 1, 5, 3), torch.randn(12, 1, 5, 4)
    assert kind("linear_sq_norms", a, g) == kind("linear_sq_norms", 2 * a[:11], g[:11])
    assert kind("channel_sums", a, a) == kind("channel_sums", a[:9], a[:9])


def test_asking_launches_nothing():
    (noted,) = kernel_checks.variants(
        dispatch._kernel_launcher("dense_sq_norms"), (torch.ones(3, 7),)
    )
    assert noted.startswith("row_norms_kernel(norms=*float64, a=*float32, g=None, norms_of_g=None")
    assert "a_column=i32 1" in noted
    assert "BLOCK=1024, num_warps=4" in noted
    with launching.asked() as outer, launching.asked() as inner:
        ops.get("dense_sq_norms", "triton")(torch.ones(3, 7))
    assert inner == [noted]
    assert outer == []


def test_a_new_variant_is_compared_at_its_first_call(monkeypatch):
    """Kernels that give what plain torch does, launched as on a GPU."""
    compared = []

    def agrees(self, name, kind, kernel, twin, args, *_):
        compared.append(args[0].tensor.shape[1])
        self._known.add((name, kind, -1))
        return True

    monkeypatch.setattr(kernel_checks.Comparisons, "agrees", agrees)
    monkeypatch.setattr(dispatch, "_comparisons", kernel_checks.Comparisons())
    monkeypatch.setattr(dispatch, "_on_gpu", lambda args: True)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    asked = []
    plain = dispatch.get

    def get(name, backend):
        asked.append(backend)
        return plain(name, "torch")

    monkeypatch.setattr(dispatch, "get", get)
    for channels in (64, 112, 64, 112):
        ops.run("folded_conv", *pointwise(channels))
    assert compared == [64, 112]
    with gathered():  # as while a graph is captured
        asked.clear()
        ops.run("folded_conv", *pointwise(64, count=3))
        ops.run("folded_conv", *pointwise(112, count=3))
        assert asked == ["triton"] * 2, "more samples, the same variants"
        ops.run("folded_conv", *pointwise(80))
        assert asked[2:] == ["triton"], "between them, a variant that was compared"
        ops.run("folded_conv", *pointwise(24))
        assert asked[3:] == ["torch"], "a new variant cannot be compared now: plain torch"
    assert compared == [64, 112]


def test_zeros_are_replaced_by_numbers_on_as_many_samples():
    """What is compared is the compiled variant of the call.

    So it is where nothing can be learnt of its own numbers, too.
    """
    seen = []

    def kernel(x):
        seen.append(len(x))
        return x.double().square().sum(1) * (1 + (len(x) > 20) * x.double().mean(1))

    def twin(x):
        return x.double().square().sum(1)

    assert kernel_checks.compared(kernel, twin, (torch.zeros(30, 4),), (0,)).share > 1
    assert seen == [30, 30]
    assert kernel_checks.compared(kernel, twin, (torch.zeros(12, 4),), (0,)).share <= 1


def triton_keys(seed, calls):
    """Kinds of calls of random sizes, each with what Triton itself would compile for it."""
    jit = importorskip("triton.runtime.jit")
    if not hasattr(jit, "create_function_from_signature"):
        pytest.skip("this version of Triton tells nothing without a GPU")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend, binders = make_backend(GPUTarget("cuda", 90, 32)), {}
    found = []
    plain = launching.variant

    def both(kernel, args, constants):
        if kernel not in binders:
            binders[kernel] = jit.create_function_from_signature(
                kernel.signature, kernel.params, backend
            )
        bound = binders[kernel](*args, **constants)
        own = [part for part in bound if isinstance(part, (list, tuple))]
        constexprs = {p.name: str(constants[p.name]) for p in kernel.params if p.is_constexpr}
        options = {key: value for key, value in constants.items() if key not in constexprs}
        found.append(
            str((kernel.fn.__name__, own, sorted(constexprs.items()), sorted(options.items())))
        )
        return plain(kernel, args, constants)

    generator = torch.Generator().manual_seed(seed)
    names = [
        name
        for name in ops.TABLE
        if "triton" in ops.backends(name) and not name.startswith("shape_images")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "variant", both)
        for name in names:
            cases = list(kernel_cases.CASES[name]().values())
            for index in torch.randperm(len(cases), generator=generator)[:calls].tolist():
                for dtype in (torch.float32, torch.bfloat16):
                    given = kernel_calls.moved(name, cases[index], torch.device("cpu"), dtype)
                    found.clear()
                    yield f"{name}: {kind(name, *given)}", tuple(dict.fromkeys(found))
        for channels in (16, 24, 48, 64, 80, 112, 128, 200):
            for side in (1, 3, 8, 31, 62):
                forward = "folded_conv", pointwise(channels, size=(side, side))
                for name, given in (
                    forward,
                    ("folded_conv_backward", backward(channels, side, side)),
                ):
                    found.clear()
                    yield f"{name}: {kind(name, *given)}", tuple(dict.fromkeys(found))


def check_kinds(seed, calls):
    keys = {}
    launched = 0
    for name, key in triton_keys(seed, calls):
        launched += bool(key)
        assert keys.setdefault(name, key) == key, "one kind, two compiled variants"
    assert launched > 4 * calls


def test_a_kind_is_compiled_once():
    check_kinds(0, 6)


@mark.long
@mark.parametrize("seed", range(4))
def test_many_kinds_are_compiled_once(seed):
    check_kinds(seed, 60)


RUN = """
import test_compiled_variants as here
from fastlr.ops import dispatch, kernel_checks, using, run
results = []
agrees = kernel_checks.Comparisons.agrees
def noted(self, name, kind, *given):
    results.append((name, kind))
    return agrees(self, name, kind, *given)
kernel_checks.Comparisons.agrees = noted
with using("triton", checked=True):
    for channels in (20, 28, 20, 28):
        run("folded_conv", *here.in_float32(channels))
"""


def in_float32(channels):
    x, block = pointwise(channels)
    weight = block.weight.float()
    return Loaded(x.tensor.float()), block._replace(weight=weight, folded=weight)


@mark.long
def test_variants_are_known_in_the_interpreter(tmp_path):
    found = interpreter.interpreted(RUN, tmp_path)
    assert [name for name, _ in found] == ["folded_conv"] * len(found)
    assert len(set(found)) == len(found), "a kind is compared once"
    assert found[0][1] == kind("folded_conv", *in_float32(20)), "the same in every process"
