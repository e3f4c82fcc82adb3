"""Norms of folded convolutions by Gram matrices, as a GPU takes them for few positions."""

import torch
import torch.nn.functional as F
from agreement import assert_near
from definitions import definition
from expected import needs_gpu, needs_triton
from kernel_calls import moved
from pytest import fixture, mark
from single_samples import Written
from torch import nn
from torchvision.models.resnet import Bottleneck

import fastlr
from bench import cases, tune
from bench.convolution_cases import case, draw, geometry, laid_out
from fastlr import ops
from fastlr.ops import gram, tuning
from fastlr.ops.activations import ACTIVATIONS
from fastlr.ops.block import Block, changed

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 8e-3, FP16: 1e-3}  # of a squared norm: two units in the last place


@fixture(autouse=True)
def _fewer_weights_suffice(monkeypatch):
    """Keep the layers of tests small."""
    monkeypatch.setattr(gram, "LEAST_WEIGHTS", 1 << 16)


def call(
    inputs=24,
    outputs=40,
    size=(7, 6),
    *,
    dtype=BF16,
    gamma=1.0,
    zeros=0,
    blank=None,
    layout="last",
    zero_sums=False,
    **options,
):
    """Return the arguments (x, g, block) of a call for norms.

    ``gamma`` scales the block's scales, of which the first ``zeros`` are zero. A ``blank`` image
    has this number everywhere but for the noise that is added.
    """
    kernel = options.pop("kernel", 1)
    how = geometry(2, **options)
    x = draw(3, inputs, *size)
    if blank is not None:
        x = torch.full_like(x, 1.0) + blank * x
    x = laid_out(x.to(dtype), layout)
    weight = draw(outputs, inputs, kernel, kernel)
    statistics = draw(3, outputs, seed=2, scale=2)
    statistics[0] = gamma * (statistics[0].abs() + 0.1)
    statistics[0, :zeros] = 0
    positions = how.output_size(size, (kernel, kernel))
    g = draw(3, outputs, *positions, seed=4)
    if zero_sums:
        g = g - g.mean((2, 3), keepdim=True)
    folded = (weight * statistics[0][:, None, None, None]).to(dtype)
    channels = torch.cat([draw(1, outputs, seed=5), statistics])
    return x, laid_out(g.to(dtype), layout), Block(weight, folded, channels, "none", how)


CALLS = {
    "pointwise": {},
    "pointwise-stride": {"stride": 2},
    "pointwise-stride-uneven": {"stride": (3, 2), "size": (8, 7)},
    "pointwise-padded": {"padding": 1},
    "3x3": {"kernel": 3, "padding": 1},
    "3x3-stride": {"kernel": 3, "padding": 1, "stride": 2, "size": (9, 12)},
    "3x3-no-padding": {"kernel": 3},
    "3x3-dilation": {"kernel": 3, "padding": (2, 1), "dilation": (2, 1)},
    "5x5": {"kernel": 5, "padding": (2, 0), "stride": (1, 2)},
    "one-position": {"size": (1, 1)},
    "planes": {"kernel": 3, "padding": 1, "layout": "planes"},
    "sliced": {"kernel": 3, "padding": 1, "layout": "sliced"},
    "many-positions": {"size": (15, 16)},
    "few-channels": {"inputs": 3, "outputs": 9, "kernel": 3, "padding": 1},
    "gamma-zero": {"gamma": 0.0},
    "some-gamma-zero": {"kernel": 3, "padding": 1, "zeros": 7},
    "gamma-small": {"gamma": 1e-5},
    "gamma-large": {"gamma": 1e5},
    "blank": {"blank": 0.0},
    "blank-padded": {"blank": 0.0, "kernel": 3, "padding": 1},
    "nearly-blank": {"blank": 0.02},
    "nearly-blank-zero-sums": {"blank": 0.02, "zero_sums": True},
    "nearly-blank-3x3": {"blank": 0.02, "kernel": 3, "zero_sums": True},
}


@mark.parametrize("dtype", TOLERANCE, ids=str)
@mark.parametrize("name", CALLS)
def test_norms_are_those_of_the_definition(name, dtype):
    x, g, block = call(**CALLS[name], dtype=dtype)
    got = gram.gram_sq_norms(x, g, block)
    want = definition("folded_conv_sq_norms")(x, g, block)
    assert all(t.dtype == torch.float64 for t in got)
    check(got, want, x, g, block)


def check(got, want, x, g, block):
    """Hold norms to the definition, those of gamma up to the rounding of the convolution."""
    (weight, bias, gamma, beta), (of_weight, of_bias, of_gamma, of_beta) = got, want
    assert_near(
        (weight, bias, beta), (of_weight, of_bias, of_beta), TOLERANCE[x.dtype], of="element"
    )
    y = torch.ops.aten.convolution(x.double(), block.weight.double(), None, *block.geometry)
    terms = (g.double() * y).abs().sum((2, 3)) * block.statistics[1].double()
    rounding = 2 * torch.finfo(x.dtype).eps * terms.square().sum(1).sqrt()
    assert bool(((gamma.sqrt() - of_gamma.sqrt()).abs() <= rounding).all())


def test_what_meets_only_padding_has_no_gradient():
    x, g, block = call(size=(9, 1), kernel=2, stride=2, padding=1, dilation=2)
    assert gram.gram_sq_norms(x, g, block)[0].count_nonzero() == 0


def test_a_zero_norm_is_zero():
    """Gradients that sum to zero over a blank image: no digits are left but rounding."""
    x, g, block = call(blank=0.0)
    g = torch.cat([g, -g], 2)
    x = torch.cat([x, x], 2)
    got, *_ = gram.gram_sq_norms(x, g, block)
    sizes = x.double().square().sum((1, 2, 3)) * g.double().square().sum((1, 2, 3))
    assert bool((got >= 0).all()) and bool((got <= 1e-6 * sizes).all())


@mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_large_scale_without_a_gradient_costs_no_digits(dtype):
    """As of a channel whose running variance is zero, behind a closed ReLU."""
    x, g, block = call(64, 64, dtype=dtype)
    g = g * 1e-4
    g[:, 0] = 0
    channels = block.channels.clone()
    channels[1] = 0.1
    channels[1, 0] = 1e5
    block = block._replace(channels=channels)
    got = gram.gram_sq_norms(x, g, block)
    check(got, definition("folded_conv_sq_norms")(x, g, block), x, g, block)


@needs_triton
def test_patches_of_many_pixels_are_left_to_kernels():
    """Sixty-four positions of 16 x 16 pixels each: products of pixels would be 16,384 squared."""
    patches = call(3, 768, (128, 128), kernel=16, stride=16)
    with tune.noting() as asked:
        assert launches("folded_conv_sq_norms", *patches)
    assert not [key for key in asked if "norms_form" in key], "nor may the table choose otherwise"


def test_samples_are_taken_a_few_at_a_time(monkeypatch):
    x, g, block = call(kernel=3, padding=1)
    whole = gram.gram_sq_norms(x, g, block)
    monkeypatch.setattr(gram, "HELD", 1)
    for a, b in zip(whole, gram.gram_sq_norms(x, g, block), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


# -- the backward pass of a block, of which the parts run apart
# --------------------------------------------------------------------------------------------------
MANY = 260, 256, (5, 4)  # enough weights that kernels decline
BLOCKS = {
    **{act: case(2, *MANY, act) for act in ACTIVATIONS},
    **{f"before-{act}": case(2, *MANY, "none", before=act) for act in ACTIVATIONS},
    "gate": case(2, *MANY, "hardswish", before="hardswish", gate=True, more="last"),
    "gate-at-output": case(2, *MANY, before="relu6", gate=True, gradient_at_output=True),
    "stride": case(2, *MANY, "silu", stride=2, before="relu"),
    "stride-uneven": case(2, 260, 256, (7, 4), "relu", stride=3),
    "planes": case(2, *MANY, "hardswish", "planes"),
    "norms-only": case(2, *MANY, "gelu", want=False),
    "3x3": case(2, 90, 96, (5, 4), "hardswish", kernel=3, padding=1),
    "3x3-stride": case(2, 90, 96, (5, 4), "relu", kernel=3, padding=1, stride=2),
}


def backward(name, device):
    """Return the arguments of a backward pass in bfloat16, and the same values in float32."""
    given = moved("folded_conv_backward", BLOCKS[name]["folded_conv_backward"], device, BF16)
    return given, changed(lambda a, _: a.cpu().float() if torch.is_tensor(a) else a, given)


@mark.parametrize("name", BLOCKS)
def test_the_backward_pass_is_that_of_the_definition(name, monkeypatch):
    given, wide = backward(name, torch.device("cpu"))
    used = []
    of_norms = gram.gram_sq_norms
    monkeypatch.setattr(gram, "gram_sq_norms", lambda *a: used.append(a) or of_norms(*a))
    with ops.noting_launches():
        got = ops.run("folded_conv_backward", *given)
    assert len(used) == 1
    want = definition("folded_conv_backward")(*wide)
    assert_near(got[1:5], want[1:5], 2e-2, of="element")
    assert_near((got[0], *got[5:]), (want[0], *want[5:]), 2e-2)
    x = given[0].tensor
    if got[0] is not None:
        assert got[0].shape == x.shape and got[0].dtype == x.dtype


@needs_gpu
@mark.parametrize("form", [True, False])
@mark.parametrize("name", BLOCKS)
def test_gpu_takes_either_form(name, form, monkeypatch):
    monkeypatch.setattr(gram, "_few_positions_of_many_weights", lambda *_: form)
    given, wide = backward(name, torch.device("cuda"))
    got = ops.run("folded_conv_backward", *given)
    want = definition("folded_conv_backward")(*wide)
    assert_near(got[1:5], want[1:5], 2e-2, of="element")
    assert_near((got[0], *got[5:]), (want[0], *want[5:]), 2e-2)


@needs_gpu
@mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gpu_gives_the_norms_of_the_definition(dtype):
    for name, options in CALLS.items():
        args = call(**options, dtype=dtype)
        given = changed(lambda a, _: a.cuda() if torch.is_tensor(a) else a, args)
        got = tuple(t.cpu() for t in gram.gram_sq_norms(*given))
        want = definition("folded_conv_sq_norms")(*args)
        try:
            check(got, want, *args)
        except AssertionError as error:
            raise AssertionError(name) from error


# -- which form serves
# --------------------------------------------------------------------------------------------------
def launches(op, *args):
    """Return the kernels that a call launches; None where the kernel declines."""
    from fastlr.kernels import launching

    found = []
    with launching.noting(lambda kernel, *_: found.append(kernel.fn.__name__)):
        declined = ops.get(op, "triton")(*args) is NotImplemented
    return None if declined else found


@needs_triton
def test_kernels_decline_few_positions_of_many_weights():
    few, many = call(256, 256), call(256, 256, (14, 14))
    assert launches("folded_conv_sq_norms", *few) is None
    assert launches("folded_conv_sq_norms", *many)
    assert launches("folded_conv_sq_norms", *call(32, 32))
    wide = changed(lambda a, _: a.float() if torch.is_tensor(a) else a, few)
    assert launches("folded_conv_sq_norms", *wide), "float32 has no products of 16-bit numbers"
    given, _ = backward("relu", torch.device("cpu"))
    assert launches("folded_conv_backward", *given) is None
    small = moved(
        "folded_conv_backward", case(2, 8, 8, (5, 4))["folded_conv_backward"], "cpu", BF16
    )
    assert launches("folded_conv_backward", *small)


@needs_triton
def test_the_tuning_table_chooses(monkeypatch):
    few, many = call(256, 256), call(512, 600, (14, 14))
    given, _ = backward("relu", torch.device("cpu"))
    with tune.noting() as asked:
        launches("folded_conv_sq_norms", *few)
        launches("folded_conv_sq_norms", *many)
        launches("folded_conv_backward", *given)
    of_few, of_many, of_backward = asked
    entries = {of_few: {"gram": False}, of_many: {"gram": True}, of_backward: {"apart": False}}
    monkeypatch.setattr(tuning, "table", lambda: {"9.0": entries})
    monkeypatch.setattr(tuning, "architecture", lambda: "9.0")
    assert launches("folded_conv_sq_norms", *few)
    assert launches("folded_conv_sq_norms", *many) is None
    assert launches("folded_conv_backward", *given)


# -- in networks
# --------------------------------------------------------------------------------------------------
class Excited(nn.Module):
    """A pointwise block whose input has an activation and a gate that it applies on loading."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(64, 256, 1), nn.BatchNorm2d(256), nn.Hardswish())
        self.depth = nn.Sequential(
            nn.Conv2d(256, 256, 3, padding=1, groups=256), nn.BatchNorm2d(256), nn.Hardswish()
        )
        self.excite = nn.Conv2d(256, 256, 1)
        self.narrow = nn.Sequential(nn.Conv2d(256, 256, 1), nn.BatchNorm2d(256))
        self.again = nn.Sequential(nn.Conv2d(256, 256, 1), nn.BatchNorm2d(256), nn.ReLU())

    def forward(self, x):
        x = self.depth(self.wide(x))
        gated = x * F.hardsigmoid(self.excite(F.adaptive_avg_pool2d(x, 1)))
        return self.again(self.narrow(gated) + x)


def network(name):
    """Return a network with few positions and many weights, and images of its size."""
    torch.manual_seed(0)
    blocks = {
        "excited": (Excited(), 64, 256),
        "bottleneck": (Bottleneck(512, 128), 512, 512),
        "stride": (
            Bottleneck(
                256,
                128,
                stride=2,
                downsample=nn.Sequential(nn.Conv2d(256, 512, 1, 2), nn.BatchNorm2d(512)),
            ),
            256,
            512,
        ),
    }
    block, inputs, outputs = blocks[name]
    end = nn.Linear(outputs, 3)
    model = Written(
        lambda m, x: m.end(m.block(m.stem(x)).mean((2, 3))),
        stem=nn.Sequential(nn.Conv2d(3, inputs, 3, padding=1), nn.BatchNorm2d(inputs), nn.ReLU()),
        block=block,
        end=end,
    )
    x = draw(6, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight, 0.8, 0.2)
            nn.init.normal_(norm.bias, 0.0, 0.3)
            nn.init.zeros_(norm.weight[:5])
    return cases.calibrate(model.to(memory_format=torch.channels_last), x), x


@mark.parametrize("name", ["excited", "bottleneck", "stride"])
def test_norms_of_networks_are_those_of_single_samples(name, monkeypatch):
    model, x = network(name)
    one = cases.Case(model, x)
    v = cases.cotangent_for(one)
    truth = cases.loop_norms(cases.as_double(one), v.double())
    rounded = cases.loop_norms(one, v, under=lambda: torch.autocast("cpu", BF16))
    used, found = [], {}
    of_norms = gram.gram_sq_norms
    monkeypatch.setattr(gram, "gram_sq_norms", lambda *a: used.append(a) or of_norms(*a))
    for form in (True, False):
        monkeypatch.setattr(gram, "_few_positions_of_many_weights", lambda *_, form=form: form)
        with ops.noting_launches(), torch.autocast("cpu", BF16):
            found[form] = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
        assert bool(used) is form
        used.clear()
    total = sum(truth.values())
    for parameter, exact in truth.items():
        error = (found[True][parameter] - exact).abs() / total
        of_torch = (rounded[parameter] - exact).abs() / total
        assert bool((error <= 3 * of_torch.max() + 1e-2).all()), parameter
        of_forms = (found[True][parameter] - found[False][parameter]).abs() / total
        assert bool((of_forms <= 2e-3).all()), parameter
