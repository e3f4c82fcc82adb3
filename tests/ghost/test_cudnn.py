"""cuDNN is off for verification, and as the user has set it for the pass that is measured."""

import os

import pytest
import torch
import torch.nn.functional as F
from convolution_problems import counted
from exact import assert_norms, truth
from expected import needs_triton
from single_samples import Written
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision import models

import fastlr
from bench.cases import calibrate
from fastlr.estimator import eval_mode
from fastlr.ghost.api import engine_for
from fastlr.ops import cudnn
from fastlr.ops.cudnn import cudnn_as_user_set, never_cudnn, without_cudnn
from fastlr.ops.torch_private import cudnn_enabled

CPU = torch.device("cpu")
NO_PARAMETERS = ()


@pytest.fixture
def planned(monkeypatch):
    """Have cuDNN switched for a CPU as for a GPU."""
    monkeypatch.setattr(cudnn, "PLANNED_ON", ("cpu",))
    monkeypatch.setattr(cudnn, "narrow_products", lambda device: False)


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def noted(model, seen):
    """Note of each forward pass how many samples it has, and whether cuDNN is on."""
    model[0].register_forward_hook(lambda _, x, __: seen.append((len(x[0]), cudnn_enabled())))
    return model


@pytest.mark.parametrize("of_user", [True, False])
def test_only_the_measured_pass_runs_by_cudnn(planned, of_user):
    seen = []
    model = noted(convolutional(), seen)
    x, v = torch.randn(9, 3, 4, 4), torch.randn(9, 3)
    with torch.backends.cudnn.flags(enabled=of_user, allow_tf32=False):
        fastlr.per_sample_grad_sq_norms(model, x, v)
        verification = len(seen)
        fastlr.per_sample_grad_sq_norms(model, x, v)
        assert cudnn_enabled() is of_user
    assert {on for size, on in seen[:verification] if size != 9} == {False}
    assert seen[verification] == (9, of_user)


class Noting(torch.autograd.Function):
    """The identity, which notes of each backward pass whether cuDNN is on."""

    seen = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Noting.seen.append((len(g), cudnn_enabled()))
        return g


@pytest.mark.parametrize("count", [1, 5])
def test_backward_passes_that_are_measured_run_by_cudnn(planned, count):
    """That of a single sample, too. Marked passes find the samples below the custom function."""
    model = Written(lambda m, x: Noting.apply(m.net(x)), net=convolutional())
    x, v = torch.randn(count, 3, 4, 4), torch.randn(count, 3)
    fastlr.per_sample_grad_sq_norms(model, x, v)
    Noting.seen.clear()
    fastlr.per_sample_grad_sq_norms(model, x, v)
    assert (count, True) in Noting.seen


@pytest.mark.parametrize("count", [1, 5])
def test_checkpointed_parts_run_again_as_they_ran(planned, count):
    """PyTorch requires it, as cuDNN's operators save other tensors."""

    def part(x):
        return F.layer_norm(x, (3,), x.new_ones(3) if cudnn_enabled() else None)

    def forward(m, x):
        return Noting.apply(checkpoint(part, m.net(x), use_reentrant=False))

    model = Written(forward, net=convolutional())
    x, v = torch.randn(count, 3, 4, 4), torch.randn(count, 3)
    got = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
    assert_norms(got, truth(model, (x,), v).norms, 1e-3, 1e-6)
    assert not engine_for(model).plan.by_sample


def test_the_loop_runs_by_cudnn(planned):
    seen = []
    model = noted(convolutional(), seen)
    model[0].weight.register_hook(lambda g: g * (g > 0))
    x, v = torch.randn(4, 3, 4, 4), torch.randn(4, 3)
    fastlr.per_sample_grad_sq_norms(model, x, v)
    seen.clear()
    fastlr.per_sample_grad_sq_norms(model, x, v)
    single = [on for size, on in seen if size < 4]
    assert sum(single) >= 4, "a pass a sample is measured"


def test_cudnn_stays_on_where_the_measured_pass_uses_tf32(planned, monkeypatch):
    """Native kernels have more digits than TF32: comparing the two would refuse sound models."""
    monkeypatch.setattr(cudnn, "narrow_products", lambda device: True)
    one, wide = torch.ones(1), torch.ones(1).double()
    with without_cudnn(CPU, [one]):
        assert cudnn_enabled()
        with without_cudnn(CPU, [wide]):
            assert not cudnn_enabled()
        with without_cudnn(CPU, [one], compared=False):
            assert not cudnn_enabled()
        with torch.autocast("cpu"), without_cudnn(CPU, [one]):
            assert not cudnn_enabled()
        assert cudnn_enabled()


def test_cudnn_stays_on_for_volumes(planned):
    """Native kernels copy all that a kernel meets in a volume."""
    with without_cudnn(CPU, nn.Conv3d(2, 3, 3).parameters(), compared=False):
        assert cudnn_enabled()
    with without_cudnn(CPU, nn.Conv2d(2, 3, 3).parameters()):
        assert not cudnn_enabled()


def test_cudnn_is_put_back_after_an_error(planned):
    before = cudnn_enabled()
    with pytest.raises(fastlr.FastlrError):
        x = torch.full((4, 3), torch.nan)
        fastlr.per_sample_grad_sq_norms(nn.Linear(3, 2), x, torch.ones(4, 2))
    assert cudnn_enabled() is before


VERIFY = lambda: without_cudnn(CPU, NO_PARAMETERS)  # noqa: E731
MEASURE = lambda: cudnn_as_user_set(CPU)  # noqa: E731


@pytest.mark.parametrize("of_user", [True, False])
@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (VERIFY, MEASURE, True),
        (MEASURE, VERIFY, True),
        (VERIFY, VERIFY, False),
        (never_cudnn, MEASURE, False),
        (MEASURE, never_cudnn, False),
    ],
)
@pytest.mark.parametrize("first_ends_first", [True, False])
def test_contexts_of_two_threads_leave_the_users_setting(
    planned, of_user, first, second, both, first_ends_first
):
    """Whichever thread ends first."""
    with torch.backends.cudnn.flags(enabled=of_user):
        contexts = [first(), second()]
        for context in contexts:
            context.__enter__()
        assert cudnn_enabled() is (of_user and both)
        for context in contexts if first_ends_first else reversed(contexts):
            context.__exit__(None, None, None)
        assert cudnn_enabled() is of_user


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_estimates_that_overlap_leave_cudnns_options(planned):
    """On a GPU sums have a fixed order, and recurrent layers run without cuDNN."""
    options = torch.backends.cudnn
    before = options.enabled, options.benchmark, options.deterministic
    gpu = torch.device("cuda")
    contexts = [eval_mode._repeatable([layer], gpu) for layer in (nn.LSTM(2, 3), nn.Linear(2, 3))]
    for context in contexts:
        context.__enter__()
    assert (options.enabled, options.benchmark, options.deterministic) == (False, False, True)
    contexts[0].__exit__(None, None, None)
    assert (options.enabled, options.benchmark, options.deterministic) == (before[0], False, True)
    contexts[1].__exit__(None, None, None)
    assert (options.enabled, options.benchmark, options.deterministic) == before


@needs_triton
@pytest.mark.parametrize(
    "name, planned_problems",
    [
        pytest.param("mobilenet_v3_large", 1, id="only the first layer"),
        pytest.param("resnet18", 15, id="forward and input gradient of each shape"),
    ],
)
def test_a_first_estimate_plans_the_shapes_of_its_chunk_alone(monkeypatch, name, planned_problems):
    """cuDNN takes 20 to 40 ms for each problem, and was given 747 by MobileNetV3-Large."""
    torch.manual_seed(0)
    model = models.get_model(name, num_classes=4).to(memory_format=torch.channels_last)
    images = fastlr.ShapeImages((3, 32, 32), channels_last=True)
    calibrate(model, images.batch(0, 8, seed=1))
    how = {"dtype": torch.bfloat16, "batch_size": 8, "progress": False}
    with counted(monkeypatch) as problems:
        found = fastlr.estimate(model, images, 16, **how)
    assert not found.notes
    assert {shape[0] for _, shape, *_ in problems.planned} == {8}, "no chunk has another size"
    assert {direction for direction, *_ in problems.planned} <= {"forward", "input"}
    assert len(problems.planned) == planned_problems
    assert len(problems.others) > 5 * planned_problems, "verification runs convolutions, too"
