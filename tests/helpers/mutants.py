"""Faults in the rules of gradient norms, and tiny models with the truth of them."""

import copy
import importlib
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from single_samples import Written
from torch import nn

import fastlr
from fastlr.ghost.norms.rules import RULES
from fastlr.ops import dispatch

SAMPLES = 64
FEW = 4  # samples of a batch up to which no fault is active
VISIBLE = 0.01  # part of a sample's own norm from which it counts as wrong


class Mutant(NamedTuple):
    """A fault in one rule, active in float32 for more than a few samples.

    Attributes:
        model: name of a model that uses the rule.
        where: kind of node whose rule has the fault, or path of a function that has it.
        fault: of a rule, a function of (site, factor); else one of (the function, *its arguments).
        only: the parameters of the node that have it, by slot, role or shape; None: all.
    """

    model: str
    where: str
    fault: Callable[..., Any]
    only: int | str | tuple | None = None

    def put_in(self, monkeypatch):
        """Put the fault in; return a list that gets, at each hit, which samples are wrong [B]."""
        hits = []
        if self.where in RULES:
            monkeypatch.setitem(RULES, self.where, self._in_rule(RULES[self.where], hits))
            return hits
        path, name = self.where.rsplit(".", 1)
        module = importlib.import_module(f"fastlr.{path}")
        monkeypatch.setattr(module, name, self._in_function(getattr(module, name), hits))
        monkeypatch.setattr(dispatch, "get", dispatch.get.__wrapped__)  # it keeps functions
        return hits

    def _in_rule(self, rule, hits):
        def wrong_rule(site, slots):
            factors = rule(site, slots)
            for slot, factor in factors.items() if _active(site.gradients, site.count) else ():
                role = getattr(site.node, "roles", {slot: None})[slot]
                shape = getattr(getattr(factor, "weight", factor), "shape", None)
                if self.only in (None, slot, role, shape):
                    factors[slot] = self.fault(site, factor)
                    hits.append(_differ(factor.sq_norms(), factors[slot].sq_norms()))
            return factors

        return wrong_rule

    def _in_function(self, function, hits):
        def wrong_function(*args):
            if not _active(args):
                return function(*args)
            wrong = self.fault(function, *args)
            hits.append(_differ(function(*args), wrong))
            return wrong

        return wrong_function


def _tensors(value):
    """List the tensors in arguments or a result."""
    if torch.is_tensor(value):
        return [value]
    if is_dataclass(value):
        value = vars(value)
    parts = [*value.values()] if isinstance(value, dict) else value
    return [t for part in parts for t in _tensors(part)] if isinstance(parts, (list, tuple)) else []


def _active(given, count=None):
    """Tell if tensors are those of a batch of many samples in float32."""
    first = next(t for t in _tensors(given) if t.is_floating_point())
    return first.dtype == torch.float32 and (count or len(first)) > FEW


def _differ(right, wrong):
    """Tell which samples [B] are visibly wrong."""
    right, wrong = (
        torch.cat([t.double().reshape(len(t), -1) for t in _tensors(result)], 1)
        for result in (right, wrong)
    )
    return (wrong - right).norm(dim=1) > VISIBLE * right.norm(dim=1)


# -- models
# --------------------------------------------------------------------------------------------------


def parameter(*shape, scale=1.0):
    return nn.Parameter(scale * torch.randn(shape))


def normal(*shape):
    return torch.randn(SAMPLES, *shape)


def on_rows(count, width, shift=0.0):
    """A layer on the rows of a sequence, their mean, and another layer."""
    layer, head = nn.Linear(width, width), nn.Linear(width, 4)
    model = Written(lambda m, x: m.head(m.layer(x).tanh().mean(1)), layer=layer, head=head)
    return model, normal(count, width) + shift


def products():
    """Several matrices at once, and one joined of two."""

    def forward(m, x):
        x = torch.bmm(x.transpose(0, 1), m.heads).tanh().sum(0)
        return F.linear(x, torch.cat([m.first, m.second]))

    parts = {"heads": parameter(3, 6, 5), "first": parameter(3, 5), "second": parameter(2, 5)}
    return Written(forward, **parts), normal(3, 6)


def convolutions():
    """Dense, strided, dilated, depthwise and grouped ones, on square images."""
    parts = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh()]
    parts += [nn.Conv2d(4, 5, 3, stride=2, padding=1), nn.Tanh()]
    parts += [nn.Conv2d(5, 6, 3, dilation=2, padding=2), nn.Tanh()]
    parts += [nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Tanh()]
    parts += [nn.Conv2d(6, 8, 3, padding=1, groups=2), nn.Tanh()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(128, 4)), normal(3, 8, 8)


def wide_convolution():
    """Its gradients are made for four samples at a time."""
    parts = nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(4), nn.Flatten()
    return nn.Sequential(*parts, nn.Linear(64, 4)), normal(16, 8, 8)


def folded():
    """A convolution and a batch norm that run as one, and a batch norm by itself."""
    parts = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten()]
    parts += [nn.Linear(100, 6), nn.BatchNorm1d(6, eps=0.5), nn.Tanh(), nn.Linear(6, 4)]
    model = nn.Sequential(*parts)
    for t in model.buffers():
        if t.is_floating_point():
            t.uniform_(0.5, 1.5)
    return model, normal(3, 5, 5)


def normed():
    parts = [nn.Conv2d(3, 6, 1), nn.GroupNorm(2, 6), nn.Tanh(), nn.Flatten(2), nn.LayerNorm(9)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(54, 4)), normal(3, 3, 3)


def texts():
    """Token numbers [samples, 12], each with padding; token 15 is in sample 20 alone."""
    ids = torch.randint(1, 15, (SAMPLES, 12))
    ids[:, -2:], ids[20, :5] = 0, 15
    return ids


def padded():
    """A scaled table with a row for padding, and places that are added and picked."""

    def forward(m, ids, picks):
        return m.head((m.scale * (m.table(ids) + m.places) + m.picked[picks]).tanh().mean(1))

    parts = {"places": parameter(12, 8), "picked": parameter(10, 8), "scale": parameter(8)}
    table = nn.Embedding(16, 8, padding_idx=0)
    model = Written(forward, table=table, head=nn.Linear(8, 4), **parts)
    return model, (texts(), torch.randint(0, 10, (SAMPLES, 12)))


def tied():
    """A table that serves as the last layer, too."""

    def forward(m, ids):
        return F.linear(m.inner(m.table(ids)).tanh(), m.table.weight).mean(1)

    return Written(forward, table=nn.Embedding(16, 8), inner=nn.Linear(8, 8)), texts()


def recurrent(kind):
    layer, head = kind(4, 6, batch_first=True), nn.Linear(6, 4)
    return Written(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=layer, head=head), normal(5, 4)


def attention():
    """Attention with one projection for queries, keys and values, and with one for each."""

    def forward(m, x):
        x = x + m.packed(x, x, x, need_weights=False)[0]
        return m.head(F.scaled_dot_product_attention(m.query(x), m.key(x), m.value(x)).mean(1))

    layers = {name: nn.Linear(8, 8, bias=False) for name in ("query", "key", "value")}
    packed = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    return Written(forward, packed=packed, head=nn.Linear(8, 4), **layers), normal(5, 8)


def low_rank():
    """A low-rank update beside a frozen layer: as b is small, so are the gradients of a."""

    def forward(m, x):
        return m.head((m.base(x) + F.linear(F.linear(x, m.a), m.b)).tanh().mean(1))

    parts = {"a": parameter(2, 6), "b": parameter(6, 2, scale=1e-3), "head": nn.Linear(6, 4)}
    return Written(forward, base=nn.Linear(6, 6).requires_grad_(False), **parts), normal(5, 6)


MODELS = {
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)), normal(6)),
    "rows": lambda: on_rows(8, 8),
    "many rows": lambda: on_rows(80, 8),
    "wide rows": lambda: on_rows(4, 128, shift=0.5),
    "many wide rows": lambda: on_rows(128, 340),
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
}
for _make in (products, convolutions, wide_convolution, folded, normed, padded, tied):
    MODELS[_make.__name__] = _make
MODELS |= {"attention": attention, "low_rank": low_rank}


def made(name):
    """Make a model in eval mode and its inputs, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model, inputs = MODELS[name]()
    return model.eval(), inputs


@cache
def truth(name):
    """Return squared norms [samples] by parameter: a float64 backward pass of each sample alone."""
    model, inputs = made(name)
    model = copy.deepcopy(model).double()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    norms = []
    for j in range(SAMPLES):
        own = [t[j : j + 1] for t in _tensors(inputs)]
        z = model(*(t.double() if t.is_floating_point() else t for t in own))
        v = fastlr.Categorical().cotangent(z, "rademacher", range(j, j + 1), seed=0)
        grads = torch.autograd.grad(z, list(parameters.values()), v)
        norms.append(torch.stack([g.square().sum() for g in grads]))
    return dict(zip(parameters, torch.stack(norms, 1)))
