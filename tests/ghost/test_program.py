"""The fingerprint sees what a forward pass may branch on, equals for equal contents, is cheap."""

import argparse
import dataclasses
import functools
import gc
import sys
import time
import types
import weakref

import numpy as np
import torch
import torch.nn.functional as F
from pytest import fixture, importorskip, mark
from torch import nn
from trust_state import Mode, Slotted

from fastlr.ghost import program, tokens
from fastlr.ghost.first_pass import observed
from fastlr.ghost.program import fingerprint, function_key, inputs_token

ALPHA = 0.0
SETTINGS = types.SimpleNamespace(alpha=0.0)


@dataclasses.dataclass
class Options:
    alpha: float = 0.0
    inner: dict = dataclasses.field(default_factory=lambda: {"beta": [1.0, (2, {"gamma": 3})]})


class Space:
    alpha = 0.0


class Settings:
    alpha = 0.0


class Hyperparameters(dict):
    __module__ = "lightning.parsing"


class Everything(nn.Module):
    """A linear layer with every kind of thing that a forward pass may read."""

    factor = 1.0
    table = {}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("alpha", torch.zeros(()))
        self.register_buffer("large", torch.zeros(100))
        self.scale, self.wide = torch.tensor(0.5), torch.zeros(50)
        self.number = 1
        self.flag = False
        self.text = "a"
        self.none = None
        self.missing = float("nan")
        self.items = [1, [2, 3]]
        self.names = {"a", "b"}
        self.dims = {"d": 1, "deep": {"e": [Options()]}}
        self.config = Options()
        self.space = types.SimpleNamespace(a=0)
        self.slotted = Slotted()
        self.slotted.alpha = 0.0
        self.held = Space
        self.settings = globals()["Settings"]()
        self.args = argparse.Namespace(a=0)
        self.hparams = Hyperparameters(a=0)
        self.long = [0] * 300
        self.many = dict.fromkeys(range(300), 0)
        self.mode = Mode.OFF
        self.scalar = np.float32(0.5)
        self.array = np.arange(3.0)
        self.part = functools.partial(torch.add, alpha=1)
        self.blocks = [nn.Linear(2, 2), nn.Dropout(0.1)]
        self.act = lambda h, alpha=0.0: h * alpha
        self.loop = self.items
        self.weights = [self.layer.weight, self.frozen.weight]
        self.dims["self"] = self.dims
        self.eval()

    def forward(self, x):
        return self.layer(x) * ALPHA * SETTINGS.alpha


def hook(alpha):
    return lambda module, given, out: out * alpha


# Statements, each of which changes a model m of Everything, or what its forward pass reads.
CHANGES = """
m.alpha.fill_(1)
m.alpha.data.fill_(1.0)
m.large.add_(0)
m.large = m.large.clone()
m.scale.data.fill_(0.25)
m.wide.add_(1)
m.wide = torch.zeros(50)
m.number = 2
m.number = 1.0
m.flag = 0
m.config.alpha = -0.0
m.text = "b"
m.items[0] = 2
m.items[1].append(4)
m.names.add("c")
m.dims["d"] = 0
m.dims["deep"]["e"][0].alpha = 1.0
m.config.alpha = 1.0
m.config.inner["beta"][1][1]["gamma"] = 4
m.space.a = 1
m.args.a = 1
m.hparams.update(a=1)
m.long[-1] = 1
m.many[299] = 1
Settings.alpha = 1.0
m.slotted.alpha = 1.0
m.held.alpha = 1.0
m.mode = Mode.ON
m.scalar = np.float32(0.25)
m.scalar = np.float64(0.5)
m.array[0] = 5.0
m.part = functools.partial(torch.add, alpha=2)
m.act.__defaults__ = (1.0,)
Everything.factor = 2.0
Everything.table["a"] = 1
Everything.forward = lambda self, x: self.layer(x)
nn.Linear.forward = lambda self, x: F.linear(x, self.weight)
m.forward = lambda x: x
globals()["ALPHA"] = 1.0
SETTINGS.alpha = 1.0
m.frozen.weight.mul_(1)
m.weights[0] = nn.Parameter(m.weights[0].clone())
m.layer.weight.requires_grad_(False)
m.blocks[1].p = 0.2
m.blocks[0] = nn.Linear(2, 2)
m.norm = nn.LayerNorm(3)
m.norm.eps = 1.0
m.norm.train()
m.layer.register_forward_hook(hook(0))
m.layer.register_forward_pre_hook(lambda module, given: None)
m.layer.register_full_backward_hook(lambda *_: None)
m.layer.weight.register_hook(lambda g: 2 * g)
m.fresh = 0
"""


@fixture
def restored():
    """Put back what the changes do outside the model."""
    forwards = (Everything.forward, nn.Linear.forward)
    own = (ALPHA, Space.alpha, Everything.factor, Settings.alpha)
    yield
    Everything.forward, nn.Linear.forward = forwards
    globals()["ALPHA"], Space.alpha, Everything.factor, Settings.alpha = own
    SETTINGS.alpha = 0.0
    Everything.table.clear()


@mark.parametrize("change", CHANGES.strip().splitlines())
@torch.no_grad()
def test_a_change_is_seen(change, restored):
    model = nn.Sequential(nn.Identity(), Everything())
    before = fingerprint(model)
    assert fingerprint(model) == before
    exec(change, globals(), {"m": model[1]})
    assert fingerprint(model) != before


@torch.no_grad()
def test_training_changes_nothing():
    model = nn.Sequential(
        Everything(), nn.LSTM(2, 2)
    )  # which lists its weights in an attribute, too
    before = fingerprint(model)
    block, rnn = model
    for weight in (block.layer.weight, rnn.weight_ih_l0, rnn.bias_hh_l0):
        weight.add_(1)
    block.layer.weight.data = torch.zeros(3, 3)
    block.train()
    block.norm(torch.randn(5, 3))
    block.eval()
    block.missing = float("nan")
    assert fingerprint(model) == before


@torch.no_grad()
def test_equal_contents_are_equal():
    model = nn.Sequential(Everything())
    before, block = fingerprint(model), model[0]
    block.items, block.loop = [1, [2, 3]], None
    block.loop = block.items
    block.config, block.space = Options(), types.SimpleNamespace(a=0)
    block.names, block.scale = {"b", "a"}, torch.tensor(0.5)
    block.array = np.arange(3.0)
    block.scalar = np.float32(0.5)
    block.missing = float("nan")
    block.alpha = torch.zeros(())
    assert fingerprint(model) == before


def test_hooks_put_on_anew_are_the_same():
    model = nn.Sequential(nn.Linear(2, 2))

    def put_on(alpha):
        handle = model[0].register_forward_hook(hook(alpha))
        found = fingerprint(model), program.hook_programs(model)
        handle.remove()
        return found

    zero, again, one = put_on(0.0), put_on(0.0), put_on(1.0)
    assert zero == again
    assert zero[0] != one[0]
    assert zero[1] == one[1]  # the same code


def test_hooks_of_all_modules_are_seen():
    model = nn.Linear(2, 2)
    before = fingerprint(model)
    handle = nn.modules.module.register_module_forward_hook(hook(1))
    assert fingerprint(model) != before
    handle.remove()
    assert fingerprint(model) == before


def test_shared_objects_are_read_at_their_least_depth():
    deep = {"alpha": 0}
    first, second = nn.Identity(), nn.Identity()
    first.held, second.held = [[[[[deep]]]]], deep
    model = nn.Sequential(first, second)
    before = fingerprint(model)
    deep["alpha"] = 1
    assert fingerprint(model) != before


def test_a_captured_graph_reads_tensors_where_they_are():
    model = nn.Linear(2, 2)
    model.table = torch.zeros(50)
    before = fingerprint(model, versions=False)
    model.table.add_(1)
    assert fingerprint(model, versions=False) == before
    model.table.data = torch.zeros(50)
    assert fingerprint(model, versions=False) != before


def test_functions_written_anew_have_the_same_key():
    def make(alpha):
        return lambda result: result["logits"] * alpha

    assert function_key(make(1)) == function_key(make(1)) != function_key(make(2))
    assert function_key(make(1)) != function_key(lambda result: result["logits"])


def test_a_fingerprint_holds_nothing():
    model = nn.Sequential(Everything())
    fingerprint(model)
    gone = weakref.ref(model[0].config), weakref.ref(model[0].large)
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_numbers_are_not_given_twice():
    given = {tokens.number(torch.zeros(100)) for _ in range(50)}
    assert len(given) == 50


@mark.parametrize(
    "a, b",
    [
        (0, 1),
        (1, 1.0),
        (Mode.OFF, Mode.ON),
        (np.int64(0), np.int64(1)),
        (torch.tensor(0), torch.tensor(1)),
        (torch.arange(4), torch.arange(4).flip(0)),
        (Options(), Options(1.0)),
        ({"d": 1}, {"e": 1}),
        ("a", "b"),
        (torch.zeros(50).bfloat16(), torch.ones(50).bfloat16()),
        (torch.eye(40) > 0, torch.eye(40) < 1),
    ],
)
def test_inputs_that_a_forward_pass_may_branch_on(a, b):
    x = torch.randn(8, 3)
    assert inputs_token((x, a), [0]) == inputs_token((x + 1, a), [0]) != inputs_token((x, b), [0])


def test_inputs_that_carry_samples_are_left_out():
    x = torch.randn(2, 3)
    assert (
        inputs_token((x, 1), batched=[0])
        == inputs_token((x + 1, 1), batched=[0])
        != inputs_token((x, 2), batched=[0])
    )
    assert inputs_token((x,)) != inputs_token((x + 1,))


# -- batch norm's statistics
# -------------------------------------------------------------------------------------------


class OwnNorm(nn.BatchNorm2d):
    """Like timm's: a forward pass of its own that ends in F.batch_norm."""

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(
            x, mean, var, self.weight, self.bias, self.training, 0.1, self.eps
        ).relu()


def test_buffers_that_are_only_statistics():
    model = nn.Sequential(nn.BatchNorm2d(3), OwnNorm(3)).eval()
    free, _ = observed(model, lambda: model(torch.randn(2, 3, 4, 4)))
    assert free == {id(b) for b in model.buffers()}
    before, seen = fingerprint(model, free), fingerprint(model)
    model[1].running_mean.add_(1)
    assert fingerprint(model, free) == before
    assert fingerprint(model) != seen


def test_statistics_that_enter_something_else():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.idle = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.register_buffer("alpha", torch.zeros(()))

        def forward(self, x):
            h = self.norm(x)
            return h - self.alpha * h.mean(0) * self.norm.running_var[:, None, None]

    model = Reads().eval()
    free, _ = observed(model, lambda: model(torch.randn(2, 3, 4, 4)))
    counters = {id(model.norm.num_batches_tracked), id(model.idle.num_batches_tracked)}
    assert free == {id(model.norm.running_mean)} | counters
    model.train()
    assert observed(model, lambda: model(torch.randn(2, 3, 4, 4)))[0] <= counters


@mark.long
def test_batch_norms_of_timm():
    timm = importorskip("timm")
    model = timm.create_model("mobilenetv3_small_050", num_classes=3).eval()
    free, _ = observed(model, lambda: model(torch.randn(1, 3, 32, 32)))
    assert free == {id(b) for b in model.buffers()}


# -- cost
# --------------------------------------------------------------------------------------------------


def test_it_is_cheap():
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Hardswish()) for _ in range(50))
    )
    shared = Options()
    for block in model:
        block.config = shared

    def calls():
        made = 0

        def count(frame, event, _):
            nonlocal made
            made += event == "call"

        sys.setprofile(count)
        fingerprint(model)
        sys.setprofile(None)
        return made

    fingerprint(model)
    assert calls() < 12 * len(list(model.modules()))  # Python functions entered
    start = time.perf_counter()
    fingerprint(model)
    assert time.perf_counter() - start < 0.1
