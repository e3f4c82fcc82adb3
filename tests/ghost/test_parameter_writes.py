"""Forward passes that write parameters leave them as they were, once they are measured."""

import warnings

import torch
import torch.nn.functional as F
from expected import refused
from pytest import fixture, mark, raises
from single_samples import Written, truth
from torch import nn
from torch.testing import assert_close
from untouched import MEASURES, untouched

import fastlr
from fastlr.errors import RandomForwardError
from fastlr.ghost.writes import written_parameters

norms = fastlr.per_sample_grad_sq_norms


@fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def averaging(net, x):
    """A teacher that follows its student."""
    with torch.no_grad():
        net.teacher.weight.lerp_(net.student.weight, 0.01)
    return net.student(x) - net.teacher(x)


def shortening(net, x):
    """Rows of a length that is held by hand."""
    with torch.no_grad():
        net.layer.weight.copy_(torch.renorm(net.layer.weight, 2, 0, 0.1))
    return F.gelu(net.layer(x))


def shortening_unseen(net, x):
    net.layer.weight.data.mul_(0.1 / net.layer.weight.data.norm())
    return F.gelu(net.layer(x))


def shortening_elsewhere(net, x):
    weight = net.layer.weight
    weight.data = torch.renorm(weight.detach(), 2, 0, 0.1)
    return F.gelu(net.layer(x))


def failing(net, x):
    with torch.no_grad():
        net.layer.weight.mul_(2)
    raise KeyError


def two_layers():
    frozen = nn.Linear(5, 3).requires_grad_(False)
    return Written(averaging, student=nn.Linear(5, 3), teacher=frozen).eval()


def one_layer(function):
    return Written(function, layer=nn.Linear(5, 3)).eval()


SHORTENING = [shortening, shortening_unseen, shortening_elsewhere]


@mark.parametrize("function", SHORTENING)
@mark.parametrize("name", MEASURES)
def test_a_norm_held_by_hand(name, function):
    model, x = one_layer(function), torch.randn(4, 5)
    for _ in range(3):
        with untouched(model):
            MEASURES[name](model, x)


@mark.parametrize("function", SHORTENING)
def test_norms_are_of_the_model_as_its_pass_makes_it(function):
    model, x, v = one_layer(function), torch.randn(4, 5), torch.randn(4, 3)
    got = [norms(model, x, v) for _ in range(2)]
    want = truth(model, (x,), v)
    for one in got:
        assert_close(one, want, rtol=1e-4, atol=0)


def test_a_trained_model_is_written_at_every_call():
    """What was measured once may be as long as it may be, and written only later."""
    model, x = one_layer(shortening), torch.randn(4, 5)
    MEASURES["norms"](model, x)
    with torch.no_grad():
        model.layer.weight.mul_(7)
    with untouched(model):
        MEASURES["norms"](model, x)


def test_the_memory_of_a_parameter_stays():
    model, x = one_layer(shortening_elsewhere), torch.randn(4, 5)
    place = model.layer.weight.data_ptr()
    MEASURES["estimate"](model, x)
    assert model.layer.weight.data_ptr() == place


def test_a_loss_of_a_model_that_writes_has_its_gradient():
    model, x = one_layer(shortening), torch.randn(4, 5)
    fastlr.redundancy_loss(model, x, seed=0).backward()
    got = model.layer.weight.grad.clone()
    model.zero_grad()
    with torch.no_grad():
        shortening(model, x)
    model.function = lambda net, x: F.gelu(net.layer(x))
    fastlr.redundancy_loss(model, x, seed=0).backward()
    assert_close(got, model.layer.weight.grad)


@mark.parametrize("name", ["norms", "estimate"])
def test_passes_that_differ_by_what_they_write(name):
    model, x = two_layers(), torch.randn(4, 5)
    for _ in range(2):
        words = r"writes what the next one reads \(teacher.weight\)"
        with untouched(model), refused(words, RandomForwardError):
            MEASURES[name](model, x)


def test_passes_that_draw_and_write():
    def both(net, x):
        return averaging(net, x) + torch.rand(())

    model, x = two_layers(), torch.randn(4, 5)
    model.function = both
    with untouched(model), refused("at random", RandomForwardError):
        MEASURES["norms"](model, x)


def test_a_pass_that_fails():
    model, x = one_layer(failing), torch.randn(4, 5)
    with untouched(model), raises(fastlr.FastlrError):
        MEASURES["norms"](model, x)


def test_what_is_written_in_train_mode_alone():
    def only_in_training(net, x):
        return shortening(net, x) if net.training else F.gelu(net.layer(x))

    model, x = one_layer(only_in_training), torch.randn(4, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in (False, True, False, True):
            model.train(mode)
            with untouched(model):
                MEASURES["norms"](model, x)


def test_what_begins_to_be_written_late_is_refused_once():
    def late(net, x):
        return shortening(net, x) if net.late else F.gelu(net.layer(x))

    model, x = one_layer(late), torch.randn(4, 5)
    model.late = False
    MEASURES["norms"](model, x)
    model.late = True
    with refused("written to layer.weight", fastlr.ModelError):
        MEASURES["norms"](model, x)
    with torch.no_grad():
        model.layer.weight.mul_(7)
    with untouched(model):
        MEASURES["norms"](model, x)


def test_nothing_is_kept_of_parameters_that_nobody_writes():
    model, x = one_layer(lambda net, x: F.gelu(net.layer(x))), torch.randn(4, 5)
    for measure in MEASURES.values():
        measure(model, x)
    assert written_parameters(model) == []
    writes = one_layer(shortening)
    MEASURES["norms"](writes, x)
    assert [p is writes.layer.weight for p in written_parameters(writes)] == [True]


def routing_in_float32(net, x):
    """A router that its forward pass holds in float32, as those of some mixtures of experts."""
    net.router = net.router.to(torch.float32)
    return net.head(net.router(x.float()).to(x.dtype))


@mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_parameter_whose_dtype_a_pass_changes(dtype):
    """It stayed in float32, where its values were the same."""
    net = Written(routing_in_float32, router=nn.Linear(4, 3), head=nn.Linear(3, 2)).to(dtype)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    x, v = torch.randn(5, 4).to(dtype), torch.randn(5, 2)
    got = [norms(net, x, v.to(dtype)) for _ in range(2)]
    assert_close(dict(net.named_parameters()), before, rtol=0, atol=0)
    assert_close(
        got[0], truth(net, (x,), v), rtol=3e-2 if dtype == torch.bfloat16 else 1e-5, atol=0
    )
    assert_close(got[1], got[0])
