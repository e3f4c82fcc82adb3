"""Models whose forward passes write their parameters are refused by name, and left as they were."""

import warnings
from copy import deepcopy

import torch
import torch.nn.functional as F
from expected import refused
from pytest import fixture, mark, raises
from single_samples import Written, truth
from torch import nn
from torch.testing import assert_close
from untouched import MEASURES, untouched

import fastlr
from fastlr.ghost.model.writes import ModelState

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


def written(name):
    return refused(rf"writes parameters of the model \({name}\)", fastlr.ModelError)


@mark.parametrize("function", SHORTENING)
@mark.parametrize("name", MEASURES)
def test_a_norm_held_by_hand(name, function):
    model, x = one_layer(function), torch.randn(4, 5)
    place = model.layer.weight.data_ptr()
    for _ in range(2):
        with untouched(model), written("layer.weight"):
            MEASURES[name](model, x)
    assert model.layer.weight.data_ptr() == place


@mark.parametrize("train", [False, True])
def test_a_teacher_that_follows_its_student(train):
    """So do MoCo and BYOL, where the teacher is frozen."""
    model, x = two_layers().train(train), torch.randn(4, 5)
    with untouched(model), written("teacher.weight"):
        MEASURES["norms"](model, x)


def test_a_model_that_is_written_only_once_it_was_trained():
    """What was measured once may be as long as it may be, and written only later."""
    model, x = one_layer(shortening), torch.randn(4, 5)
    model(x)
    MEASURES["norms"](model, x)
    with torch.no_grad():
        model.layer.weight.mul_(7)
    for _ in range(2):
        with untouched(model), written("layer.weight"):
            MEASURES["norms"](model, x)


def test_a_pass_that_fails():
    model, x = one_layer(failing), torch.randn(4, 5)
    with untouched(model), raises(fastlr.FastlrError):
        MEASURES["norms"](model, x)


def test_a_pass_that_fails_before_it_writes():
    """A pass that did not end has not shown what the next one writes."""

    def failing_at_first(net, x):
        z = net.layer(x)
        net.layer.weight.data.mul_(2)
        return z

    model = one_layer(failing_at_first)
    with raises(fastlr.FastlrError):
        MEASURES["norms"](model, torch.randn(4, 7))
    x = torch.randn(4, 5)
    with untouched(model), written("layer.weight"):
        MEASURES["norms"](model, x)


def test_what_is_written_in_train_mode_alone():
    def only_in_training(net, x):
        return shortening(net, x) if net.training else F.gelu(net.layer(x))

    model, x = one_layer(only_in_training), torch.randn(4, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with untouched(model.train()), written("layer.weight"):
                MEASURES["norms"](model, x)
            with untouched(model.eval()):
                MEASURES["norms"](model, x)


def test_what_begins_to_be_written_late():
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
    with untouched(model), written("layer.weight"):
        MEASURES["norms"](model, x)


def built(net, x):
    if not hasattr(net, "head"):
        net.head = nn.Linear(5, 3)
    return net.head(x)


def exchanged(net, x):
    net.head.weight = nn.Parameter(torch.ones(3, 5))
    return net.head(x)


@mark.parametrize(("function", "parts"), [(built, {}), (exchanged, {"head": nn.Linear(5, 3)})])
def test_parameters_that_a_pass_builds(function, parts):
    net, x = Written(function, layer=nn.Linear(5, 3), **parts).eval(), torch.randn(4, 5)
    with untouched(net), written("head.weight.*"):
        MEASURES["norms"](net, x)


def test_nothing_is_kept_of_parameters_that_nobody_writes():
    model, x = one_layer(lambda net, x: F.gelu(net.layer(x))), torch.randn(4, 5)
    for measure in MEASURES.values():
        measure(model, x)
    assert ModelState(model).kept == []


def test_parameters_that_are_no_numbers_are_not_taken_for_written():
    model = one_layer(lambda net, x: F.gelu(net.layer(x)))
    with torch.no_grad():
        model.layer.weight[0, 0] = float("nan")
    with refused("not a number", fastlr.errors.NonFiniteError):
        MEASURES["norms"](model, torch.randn(4, 5))


# -- embeddings, whose forward pass limits the norm of the rows that it reads
# --------------------------------------------------------------------------------------------------


def tied(net, ids):
    return F.linear(net.table(ids).tanh(), net.table.weight)


def in_a_bag(net, ids):
    return net.head(net.table(ids[:, None].expand(-1, 2)).tanh())


def limited(function):
    """A table of rows that are too long, and a head."""
    kind = nn.EmbeddingBag if function is in_a_bag else nn.Embedding
    return Written(function, table=kind(6, 5, max_norm=0.5), head=nn.Linear(5, 6)).eval()


@mark.parametrize("function", [lambda net, ids: net.head(net.table(ids).tanh()), in_a_bag])
def test_rows_of_limited_norm(function):
    net, ids, v = limited(function), torch.tensor([0, 3, 4]), torch.randn(3, 6)
    for _ in range(2):
        with untouched(net):
            got = norms(net, ids, v)
        assert_close(got, truth(deepcopy(net), (ids,), v), rtol=1e-5, atol=0)


def test_rows_of_limited_norm_that_are_the_head_too():
    """A sample alone leaves the rows of the others long, and has another output."""
    net, ids, v = limited(tied), torch.tensor([0, 3, 4]), torch.randn(3, 6)
    with untouched(net), refused("another output|interact", fastlr.InteractionError):
        norms(net, ids, v)
    ids = torch.full((3,), 2)
    with untouched(net):
        got = norms(net, ids, v)
    assert_close(got, truth(deepcopy(net), (ids,), v), rtol=1e-5, atol=0)


def test_a_loss_of_rows_of_limited_norm_has_its_gradient():
    net, ids = limited(tied), torch.full((3,), 2)
    with untouched(net):
        loss = fastlr.redundancy_loss(net, ids, seed=0)
    loss.backward()
    short = deepcopy(net)
    short.zero_grad()
    short(ids)
    short.table.max_norm = None
    fastlr.redundancy_loss(short, ids, seed=0).backward()
    assert_close(net.table.weight.grad, short.table.weight.grad)


# -- parameters in another dtype
# --------------------------------------------------------------------------------------------------


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
