"""Convolutions whose options are given in every way that torch takes.

They stand alone, and are folded with their batch norm.
"""

import torch
import torch.nn.functional as F
from exact import holds
from folding import randomise
from pytest import mark
from single_samples import Written
from torch import nn

from fastlr.ops.geometry import ConvGeometry

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
OPTIONS = {
    "valid": {"padding": "valid"},
    "valid, strided": {"padding": "valid", "stride": (2,)},
    "same": {"padding": "same"},
    "same, dilated": {"padding": "same", "dilation": 2},
    "one padding": {"padding": (1,)},
    "one stride": {"stride": [2]},
    "one dilation": {"dilation": (2,)},
    "one of each": {"padding": [1], "stride": (2,), "dilation": (1,)},
}
OF_TRANSPOSED = {
    "one padding": {"padding": (1,)},
    "one stride": {"stride": (2,)},
    "one of each": {"padding": [1], "stride": (2,), "output_padding": (1,)},
}


def convolving(call, weight, options, norm=None):
    """A functional convolution of four channels to six.

    With ``norm`` a batch norm and an activation follow.
    """

    def forward(m, x):
        y = call(x, m.weight, m.bias, **options)
        return (y if norm is None else m.norm(y).relu()).flatten(1)

    return Written(
        forward, norm=norm, weight=nn.Parameter(weight), bias=nn.Parameter(torch.randn(6))
    )


def images(axes):
    return torch.randn(4, 4, *[6] * axes, dtype=torch.float64)


@mark.parametrize("axes", [1, 2, 3])
@mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@mark.parametrize("folded", [False, True])
def test_convolutions_go_by_rule(axes, options, folded):
    weight = torch.randn(6, 4, *[3] * axes)
    model = convolving(CONVOLUTIONS[axes], weight, options, NORMS[axes](6) if folded else None)
    engine = holds(randomise(model), images(axes))
    assert set(engine.folding.blocks.folded) == ({"weight"} if folded else set())


@mark.parametrize("axes", [1, 2, 3])
@mark.parametrize("options", OF_TRANSPOSED.values(), ids=OF_TRANSPOSED)
def test_transposed_convolutions_go_by_rule(axes, options):
    weight = torch.randn(4, 6, *[3] * axes)
    holds(randomise(convolving(TRANSPOSED[axes], weight, options)), images(axes))


WHOLE = {  # call, options, shape of the weight, that of the input
    "point": (F.conv2d, {"stride": 2}, (6, 4, 1, 1), (4, 1, 1)),
    "window": (F.conv1d, {}, (6, 4, 3), (4, 3)),
    # The output's one place has met padding alone.
    "padded": (F.conv2d, {"padding": 1, "stride": 3}, (6, 4, 1, 1), (4, 1, 1)),
    "two places": (F.conv1d, {"stride": 2}, (6, 4, 1), (4, 2)),
    "groups": (F.conv1d, {"groups": 2}, (6, 2, 1), (4, 1)),
    "transposed": (F.conv_transpose1d, {}, (6, 6, 1), (6, 1)),
}


@mark.parametrize("case", WHOLE)
def test_windows_that_are_the_whole_input(case):
    call, options, weight, size = WHOLE[case]
    model = convolving(call, torch.randn(weight), options)
    holds(randomise(model), torch.randn(4, *size, dtype=torch.float64))


def test_uses_of_one_row_add_their_gradients():
    conv = nn.Conv2d(4, 4, 1)
    twice = Written(lambda m, x: m.conv(m.conv(x).tanh()).flatten(1), conv=conv)
    holds(randomise(twice), images(2)[:, :, :1, :1])
    several = Written(lambda m, x: m.conv(x.view(-1, 4, 1, 1)).view(len(x), -1), conv=conv)
    holds(randomise(several), images(1))


def test_padding_that_differs_between_the_sides_is_not_folded():
    model = nn.Sequential(nn.Conv2d(4, 6, 4, padding="same"), nn.BatchNorm2d(6), nn.Flatten())
    assert not holds(randomise(model), images(2)).folding.blocks.folded


@mark.parametrize(
    "options", [{"padding": (1, 1, 1)}, {"stride": (2, 2, 2)}, {"padding": "same", "stride": 2}]
)
def test_what_torch_refuses_has_no_geometry(options):
    given = {"stride": 1, "padding": 0, "dilation": 1} | options
    assert ConvGeometry.of((3, 3), **given) is None
