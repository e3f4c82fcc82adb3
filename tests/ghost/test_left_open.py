"""What a block leaves to those who load its result, held to one backward pass a sample.

Plain torch serves as the kernels.
"""

import torch
import torch.nn.functional as F
from folding import check, randomise
from pytest import fixture, mark
from torch import Tensor, nn
from torchvision.models.mobilenetv3 import InvertedResidual, InvertedResidualConfig
from torchvision.models.resnet import Bottleneck

from fastlr import ops
from fastlr.ghost.api import engine_for
from fastlr.ghost.fusion.mode import Folding
from fastlr.ghost.fusion.pending import Activated, Pending, Product
from fastlr.ghost.graph.walk import walk
from fastlr.ops.activations import ACTIVATIONS


@fixture(autouse=True)
def _as_on_a_gpu():
    with ops.noting_launches():
        yield


def conv(inputs, outputs, kernel=1, act=nn.Hardswish, **options):
    """A convolution that kernels serve, batch norm and perhaps an activation."""
    parts = [
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*parts, *([] if act is None else [act()]))


class Wired(nn.Module):
    """Two blocks that may take in what is before them, and what the test does in between."""

    def __init__(self, between):
        super().__init__()
        self.first = conv(4, 6)
        self.second = conv(6, 6, 3, groups=6)
        self.third = conv(6, 5, act=None)
        self.squeeze = nn.Conv2d(6, 3, 1)
        self.excite = nn.Conv2d(3, 6, 1)
        self.plain = nn.Conv2d(6, 6, 1)
        self.dense, self.other = conv(6, 6, 3), conv(6, 6)
        self.between = between

    def gate(self, x):
        return F.hardsigmoid(self.excite(self.squeeze(F.adaptive_avg_pool2d(x, 1)).relu()))

    def forward(self, x):
        return self.third(self.between(self, self.first(x))).flatten(1)


def changed(x):
    """Changed in place after a block has taken it."""
    x += 1.0
    return x


def before_and_after(m, x):
    y = m.second(x)
    return y + changed(x)


def in_place_later(m, x):
    y = m.second(x)
    return y + F.relu_(x)


BETWEEN = {
    "block": (lambda m, x: m.second(x), 3),
    "residual": (lambda m, x: m.other(m.second(x)) + x, 4),
    "residual_last": (lambda m, x: x + m.second(x), 3),
    "added_before_taken": (
        lambda m, x: m.other(x.tanh() + m.second[:2](m.dense(x))) + m.second[2](x),
        5,
    ),
    "several": (lambda m, x: m.other(x) + m.second(x) + x, 4),
    "twice_residual": (lambda m, x: m.dense(m.second[:2](x) + x) + x, 4),
    "mean": (lambda m, x: m.second(x) * x.mean((2, 3), keepdim=True), 3),
    "gated": (lambda m, x: (lambda y: y * m.gate(y))(m.second(x)), 3),
    "gated_reversed": (lambda m, x: (lambda y: m.gate(y) * y)(m.second(x)), 3),
    "gated_of_pointwise": (lambda m, x: m.second(x * m.gate(x)), 3),
    "gated_and_used": (lambda m, x: (lambda y: y * m.gate(y) + y)(m.second(x)), 3),
    "gated_residual": (lambda m, x: (lambda y: m.other[:2](y * m.gate(y)) + y)(m.second(x)), 4),
    "product_twice": (lambda m, x: (lambda y: m.other(y) + y.exp())(m.second(x).mul(m.gate(x))), 4),
    "gate_of_a_gated": (
        lambda m, x: (lambda y: y * m.gate(y) * y.mean((2, 3), keepdim=True))(m.second(x)),
        3,
    ),
    "unknown": (lambda m, x: m.second(x) + x.tanh(), 3),
    "unknown_first": (lambda m, x: x.tanh() + m.second(x), 3),
    "plain_convolution": (lambda m, x: m.plain(x) + m.second(x), 3),
    "dense": (lambda m, x: m.dense(x) + m.second(x), 4),
    "mean_without_activation": (
        lambda m, x: m.second[:2](x).mean((2, 3), keepdim=True).expand(-1, -1, 4, 4),
        3,
    ),
    "mean_flat": (
        lambda m, x: (
            x * F.linear(m.second(x).mean([2, 3]), m.plain.weight[:, :, 0, 0])[:, :, None, None]
        ),
        3,
    ),
}


@mark.parametrize("name", BETWEEN)
def test_norms_are_those_of_the_model(name):
    between, folded = BETWEEN[name]
    check(Wired(between), folded)


def test_no_attribute_of_a_pending_result_hides_one_of_tensors():
    """A model asks them of it: they must be the tensor's."""
    own = {name for kind in (Pending, Product) for name in kind.__annotations__ | vars(kind)}
    assert {name for name in own if hasattr(Tensor, name) and not name.startswith("__")} == set()


@mark.parametrize("between", [before_and_after, in_place_later])
def test_what_is_changed_in_place_is_noticed(between):
    """The forward pass is the model's; the backward pass is none, as torch says."""
    model = randomise(Wired(between))
    folding = Folding()
    x = torch.randn(3, 4, 7, 6, dtype=torch.float64)
    got = folding.run(dict(model.named_parameters()), lambda: model(x))
    torch.testing.assert_close(got, model(x))


@mark.parametrize("stride", [1, 2])
@mark.parametrize("act", ["RE", "HS"])
def test_blocks_of_mobilenet(stride, act):
    options = InvertedResidualConfig(8, 3, 16, 8, True, act, stride, 1, 1.0)
    first = InvertedResidual(options, nn.BatchNorm2d)
    model = nn.Sequential(first, InvertedResidual(options, nn.BatchNorm2d), nn.Flatten())
    x = torch.randn(3, 8, 7, 6, dtype=torch.float64)
    assert check(model, 6, x).replaced == {"squeeze": 2, "gate": 2, "pixel": 4}


def kinds(model, x):
    """The nodes of the folded model's graph, without parameters'."""
    parameters, folding = dict(model.named_parameters()), engine_for(model).folding
    return [
        n
        for n in walk(folding.run(parameters, lambda: model(x)), parameters).names
        if "Accumulate" not in n
    ]


def test_blocks_of_resnet_have_no_other_nodes():
    """ResNet's blocks leave no addition and no activation as nodes of their own.

    The gradient of what is added comes to the block that has passed it on.
    """
    model = nn.Sequential(
        conv(4, 8, act=nn.ReLU), *(Bottleneck(8, 2) for _ in range(3)), nn.Flatten()
    )
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    check(model, 10, x)
    found = kinds(model, x)
    assert sorted(found) == ["FoldedConvBackward"] * 10 + ["ViewBackward0"]


@mark.parametrize("act", ACTIVATIONS)
def test_an_activation_that_was_left_open(act):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda t: Activated.apply(t, act, False), (x,))
    g = torch.rand_like(x)
    (unchanged,) = torch.autograd.grad(Activated.apply(x, act, True), x, g)
    assert torch.equal(unchanged, g)
    assert torch.equal(Activated.apply(x, act, True), ACTIVATIONS[act](x))
