"""Deep copies on which few digits and zeros are checked (fastlr.ghost.trust.copies)."""

import copy
import gc
import threading
import warnings
import weakref
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F
from expected import refused
from pytest import mark, raises
from torch import nn

import fastlr
from fastlr.errors import HiddenParameterError, InteractionError, NonlinearBackwardError
from fastlr.ghost.api import engine_for
from fastlr.ghost.fusion.conv_bn import FoldedConv

norms = fastlr.per_sample_grad_sq_norms


def samples(shape, count=8):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


# -- models that hold themselves
# --------------------------------------------------------------------------------------------------


class Reading(nn.Module):
    """A model whose forward pass is a function of itself and what it holds."""

    def __init__(self, function, **held):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.head(self.function(self, torch.tanh(self.layer(x))))


def by_closure(make):
    """A model of which something else than its modules reads a parameter."""
    model = Reading(lambda module, h: h)
    make(model)
    return model.eval()


def closure(model):
    model.function = lambda _, h: h * model.layer.weight.mean()


def closure_of_data(model):
    model.function = lambda _, h: h + model.layer.bias.data


def closure_of_number(model):
    model.function = lambda _, h: h * model.layer.bias[0].item()


def closure_of_list(model):
    model.function = lambda _, h: h + sum(model.layer.bias.tolist())


def hook(model):
    model.layer.register_forward_hook(lambda module, args, result: result * model.head.bias.mean())


def patched(model):
    forward = model.head.forward
    model.head.forward = lambda h: forward(h) + model.layer.weight.sum()


def partly(model):
    model.head.forward = partial(
        lambda module, h: F.linear(h, module.weight, module.bias), model.head
    )


class ModuleHolder:
    """An object that is no module."""

    def __init__(self, module):
        self.module = module


def in_an_object(model):
    model.held = ModuleHolder(model.layer)
    model.function = lambda module, h: module.held.module(h)


def registered(model):
    places = {id(model): 2.0}
    model.function = lambda module, h: h * places.get(id(module), 1.0)


def in_a_thread(model):
    def elsewhere(module, h):
        results = []

        def work():
            with suppress(RuntimeError):
                results.append(model.layer(h))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return results[0]

    model.function = elsewhere


def bound(model):
    model.head.forward = nn.Linear.forward.__get__(model.head)


def listed(model):
    model.layers = [model.layer, {"head": (model.head,)}]
    model.function = lambda module, h: module.layers[0](h)


def own_hook(model):
    model.layer.register_forward_hook(lambda module, args, result: result * module.bias.mean())


READERS = [closure, hook, patched, partly, in_an_object, registered, in_a_thread]
READERS += [bound, listed, own_hook]


@mark.parametrize("zero_head", [False, True])
@mark.parametrize("make", READERS)
def test_what_reads_the_model_itself_is_right(make, zero_head):
    """With a head of zeros a copy is checked, which may read the model instead of itself."""
    torch.manual_seed(0)
    model, x, v = by_closure(make), samples((4,)), samples((3,))
    if zero_head:
        nn.init.zeros_(model.head.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = norms(model, x, v, per_parameter=True)
    for name, want in exact(model, x, v).items():
        assert torch.allclose(got[name], want, rtol=1e-4), name


@mark.parametrize("make", [closure_of_data, closure_of_number, closure_of_list])
def test_a_parameter_that_is_read_without_a_graph_is_seen_to_move_the_output(make):
    model = by_closure(make)
    # Its bias is read nowhere else.
    model.layer.forward = lambda x: F.linear(x, model.head.weight.new_ones(4, 4))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with refused(r"layer\.bias", HiddenParameterError):
        norms(model, samples((4,)), samples((3,)))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name


@mark.parametrize("gain", [1.0, 1e-3, 1e-4])
def test_a_faint_hidden_parameter_is_found(gain):
    model = Reading(lambda m, h: h + gain * m.hidden(h).detach(), hidden=nn.Linear(4, 4)).eval()
    with refused(r"hidden\.weight", HiddenParameterError):
        norms(model, samples((4,)), samples((3,)))


def test_scores_that_choose_alone_count_as_zero():
    """The largest two of the scores choose the rows of a table, for every sample."""

    def chosen(m, h):
        with torch.no_grad():
            best = m.scores(h).topk(2).indices
        return h + m.table[best].sum(1)

    torch.manual_seed(0)
    parts = {"scores": nn.Linear(4, 64), "table": nn.Parameter(torch.randn(64, 4))}
    for seed in range(8):
        model = Reading(chosen, **parts).eval()
        nn.init.normal_(parts["scores"].weight, generator=torch.Generator().manual_seed(seed))
        got = norms(model, samples((4,), 64), samples((3,), 64), per_parameter=True)
        assert not got["scores.weight"].any()
        assert got["table"].any()


# -- what copies show
# --------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A linear layer with an update of low rank, whose second factor is zero at first."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 5)
        self.first, self.second = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x):
        return self.base(x) + self.second(torch.tanh(self.first(x)))


def test_a_factor_without_a_gradient_is_checked_where_zeros_have_moved():
    torch.manual_seed(0)
    model, x, v = LowRank().eval(), samples((6,)), samples((5,))
    got = norms(model, x, v, per_parameter=True)
    assert not got["first.weight"].any()
    assert engine_for(model).audited_plans
    report = {p.name: p for p in fastlr.support_report(model, x).parameters}
    assert report["first.weight"].tested
    assert report["first.weight"].deviation < 1e-10
    assert not model.second.weight.any(), "the model is as it was"


def shared_step(h):
    """Quantised by a step that the largest of all samples sets."""
    step = h.detach().abs().amax() / 127
    return h + ((h / step).round() * step - h).detach()


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.second(shared_step(torch.tanh(self.first(x))))


@mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_that_samples_share_is_found_in_few_digits(dtype):
    """It is below a hundredth, which bfloat16's own tolerance hides."""
    torch.manual_seed(0)
    model, x = Quantised().to(dtype).eval(), samples((6,)).to(dtype)
    with raises(InteractionError):
        norms(model, x, samples((5,)))


def test_under_autocast_too():
    torch.manual_seed(0)
    model, x = Quantised().eval(), samples((6,))
    with torch.autocast("cpu", torch.bfloat16), raises(InteractionError):
        norms(model, x, samples((5,)))


def test_a_model_that_cannot_be_copied_is_measured_as_it_is():
    torch.manual_seed(0)
    model, x, v = LowRank().bfloat16().eval(), samples((6,)).bfloat16(), samples((5,))
    model.handle = threading.Lock()  # which cannot be copied
    got = norms(model, x, v)
    assert bool((got > 0).all())
    assert any("no deep copy" in note for note in fastlr.support_report(model, x).notes)


def exact(model, x, v):
    """Squared norms by one backward pass a sample, in float64.

    Each stands beside a copy whose cotangent is zero.
    """
    parameters = dict(model.named_parameters())
    rows = []
    for sample, cotangent in zip(x, v, strict=True):
        z = model(torch.stack([sample, sample]))
        grads = torch.autograd.grad(
            z[0], list(parameters.values()), cotangent, materialize_grads=True
        )
        rows.append(torch.stack([g.double().square().sum() for g in grads]))
    return dict(zip(parameters, torch.stack(rows, 1), strict=True))


# -- what an earlier call or pass has left
# --------------------------------------------------------------------------------------------------


class Clipping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g.clamp(-0.01, 0.01)


def clipping(model, h):
    return Clipping.apply(h)


def clipped_by_hook(model, h):
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda g: g * (0.01 / g.norm(dim=-1, keepdim=True).clamp(min=0.01)))
    return h


@mark.parametrize("scale", [1e-3, 1.0, 1e3])
@mark.parametrize("function", [clipping, clipped_by_hook])
@mark.filterwarnings("ignore::fastlr.FastlrWarning")
def test_clipped_gradients_are_refused_in_every_call(function, scale):
    """The share of the clipped parameters in the total is small."""
    torch.manual_seed(0)
    model, x, v = Reading(function).eval(), samples((4,)), scale * samples((3,))
    for _ in range(3):
        with raises(NonlinearBackwardError):
            norms(model, x, v, check=True)


@mark.filterwarnings("ignore::fastlr.FastlrWarning")
def test_what_a_copy_refutes_is_refused_in_every_call():
    torch.manual_seed(0)
    model, x = Quantised().bfloat16().eval(), samples((6,)).bfloat16()
    for _ in range(3):
        with raises(InteractionError):
            norms(model, x, samples((5,)))


def running_mean(model, h):
    """Less a running mean of all batches, as observations in reinforcement learning."""
    model.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h - model.mean


def test_state_that_passes_write_is_no_rounding():
    """A copy that is made after a pass has written would differ from it by more."""
    torch.manual_seed(0)
    model = Reading(running_mean, mean=nn.Buffer(torch.zeros(4))).eval()
    for _ in range(2):
        with raises(InteractionError):
            norms(model, 0.1 * samples((4,)), samples((3,)))


class Padded(nn.Module):
    """Runs batches that are padded to a multiple of eight samples, and cuts the output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(F.pad(x, (0, 0, 0, -len(x) % 8)))[: len(x)]


@mark.filterwarnings("ignore::fastlr.FastlrWarning")
def test_a_batch_that_is_padded_to_a_fixed_size_is_right():
    torch.manual_seed(0)
    model = Padded().eval()
    for count in (3, 8, 5):
        x, v = samples((4,), count), samples((3,), count)
        got = norms(model, x, v, per_parameter=True)
        for name, want in exact(model, x, v).items():
            assert torch.allclose(got[name], want, rtol=1e-4), name


class Features(nn.Module):
    """Reads what a hook, which holds the model, has kept of a layer's output."""

    def __init__(self, norm=None):
        super().__init__()
        self.layer, self.head, self.kept = nn.Linear(4, 5), nn.Linear(5, 3), {}
        self.norm = norm or nn.Identity()
        self.layer.register_forward_hook(lambda _, x, y: self.kept.__setitem__("layer", y))

    def forward(self, x):
        self.layer(x)
        return self.head(self.norm(self.kept["layer"]).tanh())


@mark.parametrize("before", [None, 6, 8])
def test_a_copy_whose_hooks_write_into_the_model_shows_no_rounding(before):
    """It reads what an earlier pass has left, which is as far off as any interaction."""
    torch.manual_seed(0)
    model = Features(nn.BatchNorm1d(5)).train()
    if before:
        with torch.no_grad():
            model(samples((4,), before))
    with raises(InteractionError):
        norms(model, samples((4,)), samples((3,)), check=True)


@mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_such_a_copy_refuses_no_sound_model(dtype):
    torch.manual_seed(0)
    model, x, v = Features().to(dtype).eval(), samples((4,)).to(dtype), samples((3,))
    model(x)
    got = norms(model, x, v)
    want = torch.stack(list(exact(model, x, v.to(dtype)).values())).sum(0)
    assert torch.allclose(got, want, rtol=0.1)
    assert fastlr.support_report(model, x).routes
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_large_gradients_of_float16_scale():
    """Eight times as large they would be infinite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(1, 2)).half().eval()
    x = samples((1, 96, 96), 3).half()
    got = norms(model, x, torch.ones(3, 192, 96))
    assert bool(got.isfinite().all())


def test_failed_checks_on_copies_use_up_nothing():
    class Faint(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, x):
            h = torch.relu(self.a(x))
            return self.b(h * (1 + 1e-4 * h.detach().float().mean()).to(h.dtype))

    torch.manual_seed(0)
    model = Faint().bfloat16()
    x, v = torch.randn(16, 16).bfloat16(), torch.randn(16, 4).bfloat16()
    for _ in range(10):
        with raises(fastlr.InteractionError):
            norms(model, x, v)


@mark.parametrize("error", [1.05, 1.15])
def test_folded_norms_that_only_a_copy_refutes_are_measured_unfolded(error, monkeypatch):
    """So small an error is within the tolerance of bfloat16."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(288, 4)).eval().bfloat16()
    x, v = torch.randn(6, 3, 6, 6).bfloat16(), torch.randn(6, 4).bfloat16()
    want = norms(model, x, v, per_parameter=True)["0.weight"]
    right = FoldedConv.sq_norms

    def wrong(ctx, *given):
        at_inputs, of_parameters = right(ctx, *given)
        return at_inputs, {k: t if t is None else error * t for k, t in of_parameters.items()}

    monkeypatch.setattr(FoldedConv, "sq_norms", staticmethod(wrong))
    again = copy.deepcopy(model)
    for _ in range(2):
        got = norms(again, x, v, per_parameter=True)["0.weight"]
        torch.testing.assert_close(got, want, rtol=0.03, atol=0)
    assert "0.weight" in engine_for(again).folding.blocks.refused
