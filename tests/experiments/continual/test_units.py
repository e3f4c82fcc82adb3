"""Replaceable units are found in networks of every kind and held to the definition one by one."""

import pytest
import torch
import torch.nn.functional as F
from folding import randomise
from single_samples import Written
from torch import nn

from fastlr.experiments.continual.interventions.find_units import find_units


def squeeze(m, x):
    """An inverted residual with squeeze-and-excitation, by hand."""
    h = F.hardswish(m.n1(m.a(x)))
    h = F.hardswish(m.n2(m.depthwise(h)))
    h = F.hardsigmoid(m.up(F.relu(m.down(h.mean((2, 3), keepdim=True))))) * h
    return m.head(m.n3(m.b(h)).add(x).flatten(1))


def depthwise_branch(m, x):
    h = m.a(x)
    return m.head((h + m.c(F.relu(m.d(h)))).mean((2, 3)))


def leaky(m, x):
    h = F.relu(m.a(x))
    return m.head(h) + sum(map(sum, h.tolist()))


def written_out(m, x):
    h = m.a(x)
    h = m.b(torch.maximum(h * (h > 0), torch.zeros_like(h)))
    return m.head(torch.where(h < 0, 0, h))


def twice(m, x):
    return m.head(F.relu(m.a(F.relu(m.a(x)))))


def tied():
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    b.weight = a.weight
    return Written(lambda m, x: m.head(F.relu(m.b(F.relu(m.a(x))))), a=a, b=b, head=nn.Linear(6, 2))


def norm_twice(m, x):
    return m.head(F.relu(m.n(m.b(F.relu(m.n(m.a(x)))))).mean((2, 3)))


CONV, FLAT = (2, 4, 6, 6), (2, 6)
CASES = {
    "plain": (
        Written(lambda m, x: m.head(F.relu(m.a(x))), a=nn.Linear(6, 5), head=nn.Linear(5, 2)),
        FLAT,
        {"a": ["a"]},
    ),
    "written out": (
        Written(written_out, a=nn.Linear(6, 5), b=nn.Linear(5, 4), head=nn.Linear(4, 2)),
        FLAT,
        {"a": ["a"], "b": ["b"]},
    ),
    "in place and pooled": (
        nn.Sequential(
            nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
            nn.BatchNorm2d(3),
            nn.SiLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(),
            nn.Flatten(),
            nn.Linear(27, 2),
        ),
        CONV,
        {"0": ["0"]},
    ),
    "squeeze": (
        Written(
            squeeze,
            a=nn.Conv2d(4, 6, 1, bias=False),
            n1=nn.BatchNorm2d(6),
            depthwise=nn.Conv2d(6, 6, 3, padding=1, groups=6),
            n2=nn.BatchNorm2d(6),
            down=nn.Conv2d(6, 3, 1),
            up=nn.Conv2d(3, 6, 1),
            b=nn.Conv2d(6, 4, 1),
            n3=nn.BatchNorm2d(4),
            head=nn.Linear(144, 2),
        ),
        CONV,
        {"a": ["a", "up", "depthwise"], "down": ["down"]},
    ),
    "residual": (
        Written(
            lambda m, x: m.head((m.a(x) + m.c(F.relu(m.b(x)))).mean((2, 3))),
            a=nn.Conv2d(4, 3, 1),
            b=nn.Conv2d(4, 5, 1),
            c=nn.Conv2d(5, 3, 1),
            head=nn.Linear(3, 2),
        ),
        CONV,
        {"b": ["b"]},
    ),
    "grouped": (
        nn.Sequential(
            nn.Conv2d(4, 6, 1),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3, groups=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
        CONV,
        {"0": ["0"], "2": ["2"]},
    ),
    "a depthwise convolution of what is read elsewhere": (
        Written(
            depthwise_branch,
            a=nn.Conv2d(4, 3, 1),
            d=nn.Conv2d(3, 3, 3, padding=1, groups=3),
            c=nn.Conv2d(3, 3, 1),
            head=nn.Linear(3, 2),
        ),
        CONV,
        {"d": ["d"]},
    ),
    "several filters a channel": (
        nn.Sequential(
            nn.Conv2d(4, 3, 1),
            nn.Conv2d(3, 6, 3, groups=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(96, 2),
        ),
        CONV,
        {"1": ["1"]},
    ),
    "tokens": (
        Written(
            lambda m, x: m.head((m.b(F.gelu(m.a(x))) + x).mean(1)),
            a=nn.Linear(6, 5),
            b=nn.Linear(5, 6),
            head=nn.Linear(6, 2),
        ),
        (2, 3, 6),
        {"a": ["a"]},
    ),
    "gated": (
        Written(
            lambda m, x: m.head(F.silu(m.a(x)) * m.b(x)),
            a=nn.Linear(6, 5),
            b=nn.Linear(6, 5),
            head=nn.Linear(5, 2),
        ),
        FLAT,
        {"a": ["a", "b"]},
    ),
    "a norm over channels": (
        nn.Sequential(
            nn.Conv2d(4, 3, 1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2)
        ),
        CONV,
        {},
    ),
    "concatenated": (
        Written(
            lambda m, x: m.head(torch.cat([m.a(x), m.b(x)], 1)),
            a=nn.Linear(6, 3),
            b=nn.Linear(6, 3),
            head=nn.Linear(6, 2),
        ),
        FLAT,
        {},
    ),
    "one layer twice": (Written(twice, a=nn.Linear(6, 6), head=nn.Linear(6, 2)), FLAT, {}),
    "one weight in two layers": (tied(), FLAT, {}),
    "one norm twice": (
        Written(
            norm_twice,
            a=nn.Conv2d(4, 3, 1),
            b=nn.Conv2d(3, 3, 1),
            n=nn.BatchNorm2d(3),
            head=nn.Linear(3, 2),
        ),
        CONV,
        {},
    ),
    "leaky": (Written(leaky, a=nn.Linear(6, 5), head=nn.Linear(5, 2)), FLAT, {}),
    "frozen": (
        Written(
            lambda m, x: m.head(F.relu(m.a(x))),
            a=nn.Linear(6, 5).requires_grad_(False),
            head=nn.Linear(5, 2),
        ),
        FLAT,
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_units_are_those_of_the_definition(name):
    """A unit has influence through its outgoing weights alone, and every such unit is found."""
    model, shape, wanted = CASES[name]
    model = randomise(model, 3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found, left = find_units(model, x)
    assert {units.name: list(units.layers) for units in found} == wanted
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    layers = {name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert set(left) | {layer for units in found for layer in units.layers} == layers
    assert all(left.values())
    for units in found:
        moved = 0.0
        for i in range(units.count):
            for cut in (True, False):
                model.load_state_dict(before)
                for reader in units.readers if cut else ():
                    view, index = reader.outgoing_columns(
                        reader.layer.weight.data, reader.features(torch.tensor([i]))
                    )
                    view[index] = 0
                at = model(x)
                for module in (*units.layers.values(), *units.norms.values()):
                    for t in (*module.parameters(), *module.buffers()):
                        if t.ndim:
                            t.data[i] = t.data[i] * 1.7 + 0.3
                change = (model(x) - at).abs().max().item()
                assert change == 0 or not cut, (
                    f"unit {i} of {units.name} has influence without outgoing weights"
                )
                moved = max(moved, change)
        assert moved > 1e-3
    model.load_state_dict(before)


@pytest.mark.parametrize(
    ("name", "layer", "why"),
    [
        ("residual", "a", "is a channel of a residual sum"),
        ("residual", "head", "makes the model's output"),
        ("a norm over channels", "0", "goes through group_norm"),
        ("concatenated", "b", "goes through cat"),
        ("one layer twice", "a", "has weights of a, which is used more than once"),
        ("one weight in two layers", "b", "has weights of b, which is used more than once"),
        ("leaky", "a", "has an influence beside its outgoing weights"),
        ("frozen", "a", "is frozen"),
        (
            "several filters a channel",
            "0",
            "a depthwise convolution with several filters a channel",
        ),
        ("a depthwise convolution of what is read elsewhere", "a", "residual sum"),
    ],
)
def test_what_is_left_alone_is_named_with_a_reason(name, layer, why):
    model, shape, _ = CASES[name]
    assert why in find_units(randomise(model, 3), torch.randn(shape).double())[1][layer]
