"""The mean of squeeze-and-excitation, and convolutions of single pixels."""

import torch
import torch.nn.functional as F
from folding import check
from pytest import mark
from single_samples import Written
from torch import nn
from torchvision.models import mobilenet_v3_small

import fastlr
from fastlr.ghost.fusion.squeeze_excitation import ChannelMeans


def excited(excite):
    """Squeeze and excitation between two convolutions; ``excite`` takes the model and features."""
    return Written(
        lambda m, x: m.after(excite(m, m.before(x).tanh())).tanh().flatten(1),
        before=nn.Conv2d(4, 6, 3),
        squeeze=nn.Conv2d(6, 3, 1),
        excite=nn.Conv2d(3, 6, 1),
        after=nn.Conv2d(6, 5, 1),
    )


MEANS = {
    "pool": (lambda x: F.adaptive_avg_pool2d(x, 1), 1),
    "pool_of_pair": (lambda x: F.adaptive_avg_pool2d(x, (1, 1)), 1),
    "module": (nn.AdaptiveAvgPool2d(1), 1),
    "method": (lambda x: x.mean((2, 3), keepdim=True), 1),
    "function": (lambda x: torch.mean(x, [-1, -2])[..., None, None], 1),
    "of_one_axis": (
        lambda x: x.mean((2,)).mean(2)[..., None, None],
        0,
    ),  # the second is one of [B, C, W]: little
    "of_channels_too": (lambda x: x.mean((1, 2, 3), keepdim=True).expand(-1, x.shape[1], 1, 1), 0),
    "larger_pool": (lambda x: F.adaptive_avg_pool2d(x, 2).amax((2, 3), keepdim=True), 0),
    "dtype": (lambda x: x.mean((2, 3), keepdim=True, dtype=x.dtype), 0),
    "of_flattened": (lambda x: x.flatten(2).mean(2)[..., None, None], 0),
}


@mark.parametrize("name", MEANS)
def test_norms_through_a_mean_are_those_of_the_model(name):
    mean, squeezes = MEANS[name]

    model = excited(lambda m, x: x * m.excite(m.squeeze(mean(x))))
    assert check(model, 0, why="no batch norm follows").replaced["squeeze"] == squeezes


@mark.parametrize("shape", [(2, 3, 4, 5), (3, 4, 7), (2, 3, 2, 3, 2)])
def test_the_means_gradients_are_right(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    axes = list(range(2, len(shape)))
    for keep in (False, True):
        torch.autograd.gradcheck(
            lambda t, keep=keep: ChannelMeans.apply(t, lambda s: s.mean(axes, keepdim=keep)), (x,)
        )


def test_mobilenet_runs_its_means():
    model = mobilenet_v3_small(num_classes=2, width_mult=0.25).eval()
    report = fastlr.support_report(model, torch.randn(2, 3, 64, 64))
    assert report.replaced["squeeze"] == 10
    assert "10 means over all positions" in str(report)


PIXELS = {
    "one": (nn.Conv2d(4, 5, 1), (1, 1), 1),
    "without_bias": (nn.Conv2d(4, 5, 1, bias=False), (1, 1), 1),
    "of_a_series": (nn.Conv1d(4, 5, 1), (1,), 1),
    "of_a_volume": (nn.Conv3d(4, 5, 1), (1, 1, 1), 1),
    "strided": (nn.Conv2d(4, 5, 1, stride=2), (1, 1), 1),
    "two_pixels": (nn.Conv2d(4, 5, 1), (1, 2), 0),
    "padded": (nn.Conv2d(4, 5, 1, padding=1), (1, 1), 0),
    "wide_kernel": (nn.Conv2d(4, 5, 3, padding=1), (1, 1), 0),
    "grouped": (nn.Conv2d(4, 6, 1, groups=2), (1, 1), 0),
}


@mark.parametrize("then", [torch.tanh, F.relu_], ids=["tanh", "in_place"])
@mark.parametrize("name", PIXELS)
def test_convolutions_of_single_pixels_run_as_linear_layers(name, then):
    conv, size, pixels = PIXELS[name]
    before = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(size)](3, 4, 1)

    def forward(m, x):
        x = m.before(x).tanh().mean(list(range(2, x.ndim)), keepdim=True).expand(-1, -1, *size)
        return then(m.conv(x)).flatten(1)

    x = torch.randn(3, 3, *[4] * len(size), dtype=torch.float64)
    model = Written(forward, before=before, conv=conv)
    assert check(model, 0, x, why="no batch norm follows").replaced["pixel"] == pixels


def test_a_pixel_used_twice_runs_as_the_model_says():
    parts = {"conv": nn.Conv2d(4, 4, 1)}
    model = Written(lambda m, x: m.conv(m.conv(x[:, :, :1, :1]).tanh()).flatten(1), **parts)
    assert check(model, 0, why="more than once").replaced["pixel"] == 0


def test_a_folded_pixel_is_no_linear_layer():
    parts = {"conv": nn.Conv2d(4, 5, 1), "norm": nn.BatchNorm2d(5)}
    model = Written(lambda m, x: m.norm(m.conv(x[:, :, :1, :1])).flatten(1), **parts).eval()
    assert check(model, 1).replaced["pixel"] == 0
