"""Number of checks in the first call: two at most where it refutes folded blocks."""

import torch
from exact import truth
from folding import randomise
from pytest import importorskip, mark
from single_samples import Written
from torch import nn

from fastlr.ghost.engine import Engine


def block(channels, after):
    """A folded convolution on windows of its input, several a sample."""

    def forward(m, x):
        windows = x.unflatten(2, (-1, 2)).transpose(1, 2).flatten(0, 1)
        return x + after(torch.relu(m.bn(m.conv(windows))).reshape(x.shape))

    return Written(forward, conv=nn.Conv2d(channels, channels, 1), bn=nn.BatchNorm2d(channels))


class Unlisted(torch.autograd.Function):
    """The identity as a custom function, by which the graph does not tell the rows below it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g.clone()


def four_blocks(after):
    """Four blocks between a folded convolution of whole images and a linear layer."""
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return randomise(nn.Sequential(stem, *[block(4, after) for _ in range(4)], head))


def first_call(model, x, v, want):
    """The engine and the routes of a first call, whose norms are held to ``want``."""
    engine = Engine(model)
    got = engine.run(x, v.to(x.dtype))
    total = torch.stack(list(want.values())).sum(0)
    close = 1e-8 if x.dtype == torch.float64 else 1e-3
    for name, value in want.items():
        assert bool(
            ((got.per_parameter[name] - value).abs() <= close * (value + 1e-4 * total)).all()
        ), name
    return engine, got.routes


@mark.parametrize(("after", "checks"), [(torch.neg, 2), (Unlisted.apply, 2)])
def test_all_folds_are_refuted_at_once(after, checks):
    torch.manual_seed(0)
    model = four_blocks(after)
    x = torch.randn(5, 3, 4, 4).double()
    v = torch.randn(5, 3).double()
    engine, routes = first_call(model, x, v, truth(model, (x,), v).norms)
    assert engine.independence.comparisons == checks
    assert set(routes.values()) == {"rule"}
    assert set(engine.folding.blocks.refused) == {f"{i}.conv.weight" for i in range(1, 5)}
    assert set(engine.folding.blocks.folded) == {"0.0.weight"}


MODELS = {
    "levit_128s": {
        "img_size": 128,
        "embed_dim": (32, 48, 64),
        "num_heads": (2, 3, 4),
        "depth": (1, 1, 1),
    },
    "efficientformer_l1": {"embed_dims": (8, 16, 32, 64), "depths": (1, 1, 1, 3)},
    "efficientvit_m0": {
        "img_size": 128,
        "embed_dim": (16, 32, 48),
        "num_heads": (2, 2, 3),
        "depth": (1, 1, 1),
    },
}


@mark.long
@mark.parametrize("dtype", [torch.float64, torch.float32])
@mark.parametrize("name", MODELS)
@mark.parametrize("validated", [False, True])
def test_image_models_take_two_checks_at_most(name, dtype, validated):
    timm = importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **MODELS[name]).eval().to(dtype)
    with torch.no_grad():  # norms that are zero at first would hide the attention
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    x = torch.randn(3, 3, *[MODELS[name].get("img_size", 224)] * 2, dtype=dtype)
    v = torch.randn(3, 7, dtype=torch.float64)
    want = truth(model, (x,), v).norms
    if validated:  # what its attention biases give is kept in the model
        with torch.no_grad():
            model(x)
    engine, routes = first_call(model, x, v, want)
    assert engine.independence.comparisons <= 2
    assert set(routes.values()) == {"rule"}
    biases = [key for key in want if key.endswith("attention_biases")]
    assert biases
    assert all(bool((want[key] > 0).all()) for key in biases)
