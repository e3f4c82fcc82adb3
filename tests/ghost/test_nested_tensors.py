"""Nested tensors inside a model: samples of several sizes, without padding."""

import torch
from exact import assert_norms, seeded, truth
from expected import refused, warned
from pytest import mark
from single_samples import Written
from torch import nn

from fastlr.errors import HiddenParameterError, InteractionError
from fastlr.ghost.engine import Engine

SIZES = torch.tensor([2, 3, 1, 4, 2])
LAYOUTS = [torch.strided, torch.jagged]
pytestmark = mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def summed(m, x, sizes, layout):
    """Return a sum over the rows that each sample has."""
    rows = [sample[:size] for sample, size in zip(x, sizes.tolist(), strict=True)]
    nested = torch.nested.as_nested_tensor(rows, layout=layout)
    return m.inside(nested).to_padded_tensor(0.0).sum(1)


def with_nested(layout, finish, first=nn.Identity):
    """Return a model with nested tensors of a layout between two layers."""

    def forward(m, x, sizes):
        return finish(m, summed(m, m.first(x), sizes, layout))

    parts = {"first": first(), "inside": nn.Linear(5, 3), "last": nn.Linear(3, 3)}
    return Written(forward, **parts).eval()


def inputs(count, dtype=torch.float64):
    return torch.randn(count, 4, 5, dtype=dtype, generator=seeded(1)), SIZES[:count]


@mark.parametrize("layout", LAYOUTS)
@mark.parametrize("first", [nn.Identity, lambda: nn.Linear(5, 5)], ids=["data", "computed"])
@mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_they_go_by_the_loop(layout, first, dtype, close):
    model = with_nested(layout, lambda m, z: m.last(z.tanh()), first).to(dtype)
    engine = Engine(model)
    with warned("loop over samples, which is slow: nested tensors inside the model"):
        engine.run(inputs(5, dtype), torch.ones(5, 3, dtype=dtype))
    for count in (5, 1, 4):
        xs = inputs(count, dtype)
        v = torch.randn(count, 3, dtype=dtype, generator=seeded(2))
        got = engine.run(xs, v)
        assert_norms(got.per_parameter, truth(model, xs, v).norms, close, close)


@mark.parametrize("layout", LAYOUTS)
def test_below_what_is_trained_they_are_data(layout):
    model = with_nested(layout, lambda m, z: m.last(z)).double()
    model.inside.requires_grad_(False)
    xs, v = inputs(5), torch.ones(5, 3, dtype=torch.float64)
    got = Engine(model).run(xs, v)
    assert set(got.routes.values()) == {"rule"}
    assert_norms(got.per_parameter, truth(model, xs, v).norms, 1e-10, 1e-10)


FAULTS = {
    "samples interact": (lambda m, z: m.last(z) + z.mean(0), InteractionError),
    "parameter last.weight": (lambda m, z: z + m.last(z).detach(), HiddenParameterError),
}


@mark.parametrize("layout", LAYOUTS)
@mark.parametrize("name", FAULTS)
def test_faults_beside_them_are_named(layout, name):
    finish, error = FAULTS[name]
    model = with_nested(layout, finish)
    with refused(name, error):
        Engine(model).run(inputs(5, torch.float32), torch.ones(5, 3))


@mark.parametrize("layout", LAYOUTS)
def test_an_output_that_is_nested_is_refused(layout):
    def forward(m, x):
        return m.a(torch.nested.as_nested_tensor(list(x), layout=layout))

    model, x = Written(forward, a=nn.Linear(5, 3)), torch.randn(5, 4, 5)
    with refused("output is a nested tensor; pass output=, .*padded"):
        Engine(model).run(x, torch.ones(5))
