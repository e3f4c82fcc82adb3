"""Where a forward pass must run as the model says, with nothing folded.

These are checkpointing, hooks that change gradients, and results changed in place.
"""

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from exact import assert_norms, holds, seeded
from expected import refused
from folding import randomise
from pytest import mark
from single_samples import Written
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastlr
from bench import cases
from fastlr.errors import FastlrWarning, NonlinearBackwardError
from fastlr.ghost.api import engine_for


def exact(model, *shape):
    """Hold the norms of each sample to one backward pass of the model itself; what was folded."""
    case = cases.Case(model, torch.randn(shape, dtype=torch.float64, generator=seeded(1)))
    v = cases.cotangent_for(case)
    truth = cases.loop_norms(case, v)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastlrWarning)  # by the loop, which is right
        warnings.filterwarnings("ignore", message="Use of masked_fill_ on expanded")
        got = fastlr.per_sample_grad_sq_norms(model, case.x, v, per_parameter=True)
    assert_norms(got, truth, 1e-9, 0)
    return engine_for(model).folding.blocks


class Windows(nn.Module):
    """Attention within three windows of a sample.

    What autograd saves has one shape in torch's order and in ours.
    """

    def __init__(self, checkpointed, bias):
        super().__init__()
        self.before, self.after = nn.Linear(6, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=bias)
        self.checkpointed = checkpointed

    def attend(self, h):
        w = h.unflatten(1, (3, -1)).flatten(0, 1)
        return self.attention(w, w, w, need_weights=False)[0].unflatten(0, (-1, 3)).flatten(1, 2)

    def forward(self, x):
        h = self.before(x).tanh()
        h = h + (
            checkpoint(self.attend, h, use_reentrant=False) if self.checkpointed else self.attend(h)
        )
        return self.after(h.tanh()).flatten(1)


@mark.parametrize("bias", [False, True])
@mark.parametrize("counts", [(1, 4, 1), (4, 1)])
def test_checkpointed_attention_runs_as_it_is(bias, counts):
    model = randomise(Windows(True, bias))
    for count in counts:
        assert not exact(model, count, 12, 6).replaced
    model = randomise(Windows(False, bias))
    for count in counts:
        exact(model, count, 12, 6)
    model.checkpointed = True  # after the first calls
    for count in counts:
        assert not exact(model, count, 12, 6).replaced


def test_a_checkpointed_norm_runs_as_it_is():
    def forward(m, x):
        return m.b(checkpoint(lambda h: m.n(m.a(h)), x, use_reentrant=False).tanh())

    model = randomise(Written(forward, a=nn.Linear(6, 8), n=nn.BatchNorm1d(8), b=nn.Linear(8, 3)))
    for count in (1, 4, 1):
        assert not exact(model, count, 6).fixed


@mark.parametrize("norm", [nn.Identity(), nn.BatchNorm2d(4)], ids=["conv", "conv_norm"])
@mark.parametrize("read_again", [False, True])
def test_a_convolution_before_a_checkpoint_is_no_part_of_it(norm, read_again):
    def forward(m, x):
        h = m.before(x)
        h = checkpoint(lambda t: m.norm(m.conv(t)).relu(), h, use_reentrant=False) + read_again * h
        return h.mean((2, 3))

    parts = {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": nn.BatchNorm2d(4)}
    model = randomise(Written(forward, before=nn.Sequential(nn.Conv2d(2, 4, 1), norm), **parts))
    for count in (4, 1, 4):
        exact(model, count, 2, 5, 5)


def test_a_checkpointed_lstm_runs_as_it_is():
    """In float32 on a CPU it is another program as it is than step by step."""

    def forward(m, x):
        return m.last(checkpoint(lambda t: m.layer(t)[0], m.first(x), use_reentrant=False).sum(1))

    layer = nn.LSTM(5, 4, batch_first=True)
    parts = {"first": nn.Linear(5, 5), "layer": layer, "last": nn.Linear(4, 2)}
    holds(Written(forward, **parts).eval(), torch.randn(4, 3, 5), rtol=1e-3, route=None)


def block(rest, conv=None, norm=None):
    """Convolution, batch norm and what the test does with the result."""
    parts = {
        "conv": conv or nn.Conv2d(4, 6, 3),
        "norm": norm or nn.BatchNorm2d(6),
        "last": nn.Linear(6, 3),
    }
    return randomise(Written(lambda m, x: m.last(rest(m.norm(m.conv(x)))), **parts))


def corner(g):
    g[..., 0, 0] = 0
    return g


HOOKS = {
    "corner": corner,
    "masked": lambda g: g.masked_fill_(torch.eye(*g.shape[2:]).bool(), 0),
    "scaled": lambda g: g * 0.5,
}


@mark.parametrize("name", HOOKS)
def test_hooks_that_change_the_gradient_of_a_mean(name):
    def hooked(h):
        h = h.tanh()
        if h.requires_grad:
            h.register_hook(HOOKS[name])
        return h.mean((2, 3))

    model = block(hooked)
    for count in (1, 4, 1):
        exact(model, count, 4, 6, 7)


@mark.parametrize(
    "hook", [lambda g: g.clamp(-0.01, 0.01), lambda g: g.clamp(-100, 100), lambda g: g + 1e-3]
)
def test_hooks_that_are_not_linear_are_refused(hook):
    def hooked(h):
        h = h.tanh()
        if h.requires_grad:
            h.register_hook(hook)
        return h.mean((2, 3))

    model = block(hooked)
    for count in (1, 4):
        with refused("a hook that clips", NonlinearBackwardError):
            exact(model, count, 4, 6, 7)


def test_a_pooled_result_may_be_changed_in_place():
    def rest(h):
        return F.adaptive_avg_pool1d(h.relu(), 1).mul_(2).flatten(1)

    model = block(rest, nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6))
    blocks = exact(model, 3, 4, 7)
    assert blocks.folded
    assert blocks.replaced["squeeze"] == 1


def test_a_mean_by_numbers_of_other_kinds_is_left_alone():
    model = block(
        lambda h: h.relu().mean((np.int64(1), 2, 3), keepdim=True).flatten(1).expand(-1, 6)
    )
    blocks = exact(model, 3, 4, 6, 7)
    assert blocks.folded
    assert not blocks.replaced


def test_where_a_replaced_call_does_not_do_nothing_is_folded():
    def made(last):
        def forward(m, x):
            # Lies as [B, S, E].
            h = m.norm(m.conv(x)).relu().flatten(2).mT.contiguous().transpose(0, 1)
            return last(m, m.attention(h, h, h, need_weights=False)[0])

        parts = {"conv": nn.Conv2d(4, 6, 3), "norm": nn.BatchNorm2d(6), "last": nn.Linear(6, 3)}
        return randomise(Written(forward, **parts, attention=nn.MultiheadAttention(6, 2)))

    viewing = made(lambda m, h: m.last(h.view(len(h), -1, 6).mean(0)) if h.shape[1] else h.view(-1))
    assert exact(viewing, 3, 4, 6, 7).folded
    # Torch's result is contiguous.
    model = made(lambda m, h: m.last(h.view(-1, 6).unflatten(0, h.shape[:2]).mean(0)))
    blocks = exact(model, 3, 4, 6, 7)
    assert not blocks.folded
    assert not blocks.replaced
    assert "measured unfolded: RuntimeError" in str(
        fastlr.support_report(model, torch.randn(3, 4, 6, 7).double())
    )


def test_an_error_of_the_models_own_changes_nothing():
    model = block(lambda h: h.relu().mean((2, 3)))
    model.last = nn.Linear(5, 3).double()
    with refused("shapes cannot be multiplied"):
        fastlr.per_sample_grad_sq_norms(model, torch.randn(3, 4, 6, 7).double(), torch.ones(3, 3))
    model.last = nn.Linear(6, 3).double()
    assert exact(model, 3, 4, 6, 7).replaced["squeeze"] == 1
