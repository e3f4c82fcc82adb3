"""Kernels of a first estimate are compiled side by side before it, and nothing depends on it."""

from contextlib import contextmanager
from functools import partial

import torch
from expected import needs_triton
from pytest import fixture, importorskip, mark
from torch import nn

import fastlr
from bench import launched_kernels
from fastlr import ops
from fastlr.estimator import chunks, compilation
from fastlr.estimator.compilation import compile_kernels, side_by_side
from fastlr.ops import cudnn
from fastlr.ops.torch_private import cudnn_enabled

pytestmark = needs_triton


def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish()
    depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU()
    pointwise = nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24), nn.ReLU()
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)
    return nn.Sequential(*layers, *depthwise, *pointwise, *end).eval()


def estimator(inputs=None, **options):
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    inputs = inputs or fastlr.TensorInputs(images)
    return fastlr.LocalRedundancy(net(), inputs, 8, batch_size=4, progress=False, **options)


@contextmanager
def as_on_an_h100(number):
    """Let Triton compile for a GPU that is not there, whose number no other test has."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class NoDevice:
        def get_current_device(self):
            return number

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    before = driver._active
    driver.set_active(NoDevice())
    try:
        yield
    finally:
        driver.set_active(before)


def measured(found, model, x, v, note):
    with ops.noting_launches(note):
        found.append(fastlr.per_sample_grad_sq_norms(model, x, v))


@fixture
def noted(monkeypatch):
    """The passes whose kernels would be compiled; chunks are as on a GPU."""
    runs = []

    def note(run, device):
        runs.append(device)
        run(lambda *launch: None)

    monkeypatch.setattr(compilation, "side_by_side", note)
    return runs


def as_on_a_gpu(one):
    one.chunks.on_gpu = True
    return one


def test_all_that_a_pass_launches_is_compiled(monkeypatch, tmp_path):
    """For another GPU than this machine's, into Triton's cache; a launch finds it there."""
    importorskip("triton.runtime._async_compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    model, x = net(), torch.randn(4, 3, 8, 8)
    v = torch.randn(4, 10)
    launched = launched_kernels.launched(net(), x, torch.float32, fastlr.Categorical())
    found = []
    with as_on_an_h100(90):
        side_by_side(partial(measured, found, model, x, v), torch.device("cpu"))
    names = {case[1].fn.__name__ for case in launched.values()} - {"categorical_root_kernel"}
    compiled = {path.stem for path in tmp_path.rglob("*.cubin")}
    assert len(names) > 5
    assert names - compiled <= {"fisher_root_kernel"}, "cotangents are given here"
    want = fastlr.per_sample_grad_sq_norms(net(), x, v)
    torch.testing.assert_close(found[0], want, rtol=1e-4, atol=0)


def test_kernels_that_do_not_compile_are_left_to_their_launches(monkeypatch, tmp_path):
    importorskip("triton.runtime._async_compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.nvidia.compiler import CUDABackend

    monkeypatch.setattr(CUDABackend, "add_stages", lambda *_: 1 / 0)
    x, v, found = torch.randn(4, 3, 8, 8), torch.randn(4, 10), []
    with as_on_an_h100(91):
        side_by_side(partial(measured, found, net(), x, v), torch.device("cpu"))
    torch.testing.assert_close(found[0], fastlr.per_sample_grad_sq_norms(net(), x, v))
    assert not [*tmp_path.rglob("*.cubin")]


def test_an_estimate_is_the_same_and_its_engine_untouched(noted):
    plain, one = estimator(), as_on_a_gpu(estimator())
    expected = plain.measure()
    found = one.measure()
    assert found.value == expected.value
    assert one.engine.audits.failed == 0
    assert one.engine.audits.passed == plain.engine.audits.passed
    assert one.engine.independence.comparisons == plain.engine.independence.comparisons == 1
    assert len(noted) == 1


def test_a_model_that_was_measured_before_is_not_compiled_again(noted):
    one = as_on_a_gpu(estimator())
    one.measure()
    one.measure()
    again = fastlr.LocalRedundancy(one.model, one.options.inputs, 8, batch_size=4)
    as_on_a_gpu(again).measure()
    assert len(noted) == 1


class Augmented(torch.utils.data.Dataset):
    """Images with noise of torch's own generator, as augmented ones have."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3, 8, 8), index / 8) + torch.randn(3, 8, 8)


def test_inputs_that_draw_draw_the_same_whether_kernels_were_compiled(noted):
    values = []
    for prepared in (lambda one: one, as_on_a_gpu):
        torch.manual_seed(2)
        values.append(prepared(estimator(fastlr.TensorInputs(Augmented()))).measure().value)
    assert len(noted) == 1
    assert values[0] == values[1]


def test_cudnn_plans_nothing_of_what_kernels_will_serve(noted, monkeypatch):
    monkeypatch.setattr(cudnn, "PLANNED_ON", ("cpu",))
    one, seen = estimator(), []
    one.model[0].register_forward_hook(lambda *_: seen.append(cudnn_enabled()))
    compile_kernels(one.passes, 0, 4)
    assert seen and not any(seen)
    assert cudnn_enabled()


def test_a_failure_leaves_the_estimate_as_it_is(monkeypatch):
    def fail(*_):
        raise ImportError("no asynchronous compiler in this version of Triton")

    monkeypatch.setattr(compilation, "side_by_side", fail)
    assert as_on_a_gpu(estimator()).measure().value == estimator().measure().value


def test_nothing_is_compiled_on_a_cpu(noted):
    estimator().measure()
    assert not noted


@mark.parametrize(("cores", "ranks", "threads"), [(64, "1", 16), (64, "8", 8), (2, "8", 1)])
def test_ranks_of_a_machine_share_its_cores(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(compilation.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert compilation.threads() == threads


def test_tritons_files_are_hashed_once(monkeypatch):
    thread = compilation.hash_triton_in_background()
    thread.join()
    assert compilation.hash_triton_in_background() is thread
    assert chunks.hash_triton_in_background is compilation.hash_triton_in_background
