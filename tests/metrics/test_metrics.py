"""Every plasticity measure equals an independent plain computation and leaves models untouched.

That holds on any kind of model.
"""

import copy
import json
import math
import pickle

import torch
import torch.nn.functional as F
from expected import refused
from metrics_models import (
    GPT,
    MODELS,
    Encoder,
    PlainCNN,
    Residual,
    between,
    data,
    entropy_loss,
    labels,
    made,
    scores,
    share,
)
from pytest import approx, importorskip, mark
from single_samples import Written
from torch import nn
from untouched import untouched

import fastlr
from fastlr import metrics

# -- parameters alone
# --------------------------------------------------------------------------------------------------


@mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@mark.parametrize("kind", MODELS)
def test_weight_norm_and_distance(kind, dtype):
    model = made(kind, dtype)
    init = copy.deepcopy(model.state_dict())
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    torch.manual_seed(5)
    for p in model.parameters():
        p.data += torch.randn(p.shape).to(dtype)
    own = {
        name: p.detach().double().numpy() for name, p in model.named_parameters() if p.requires_grad
    }
    norm = math.sqrt(sum((p**2).sum() for p in own.values()))
    start = {name: init[name].double().numpy() for name in own}
    distance = math.sqrt(sum(((own[name] - start[name]) ** 2).sum() for name in own))
    assert metrics.weight_norm(model) == approx(norm, rel=1e-12)
    assert metrics.distance_from_init(model, init) == approx(distance, rel=1e-12)
    assert metrics.weight_norm(model).details["parameters"] == sum(p.size for p in own.values())


def test_distance_from_a_model_from_wrapped_states_and_from_the_start():
    model = made(Residual)
    start = copy.deepcopy(model)
    assert metrics.distance_from_init(model, start) == 0
    model.fc.weight.data += 2.0
    wanted = approx(2 * math.sqrt(32), rel=1e-6)
    assert metrics.distance_from_init(model, start) == wanted
    for prefix in ("module.", "_orig_mod."):
        assert (
            metrics.distance_from_init(
                model, {prefix + k: v for k, v in start.state_dict().items()}
            )
            == wanted
        )
    parameters_only = dict(start.named_parameters())
    assert metrics.distance_from_init(nn.DataParallel(model), parameters_only) == wanted


# -- dormant units
# --------------------------------------------------------------------------------------------------


@mark.parametrize("layout", ["plain", "channels_last", "bfloat16", "batches", "autocast"])
@mark.parametrize("kind", MODELS)
def test_dormant_ratio_equals_the_definition(kind, layout):
    dtype = torch.bfloat16 if layout == "bfloat16" else torch.float32
    model, x = made(kind, dtype), data(kind, dtype=dtype)
    if layout == "channels_last" and x.ndim == 4:
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=layout == "autocast"):
        wanted = scores(model, x)
        given = iter(x.split(7)) if layout == "batches" else x
        zero = metrics.dormant_ratio(model, given, units="all")
        threshold = between(wanted)
        some = metrics.dormant_ratio(
            model, iter(x.split(9)) if layout == "batches" else x, threshold=threshold
        )
    assert zero.details["units"] == sum(len(s) for s in wanted)
    assert zero == share(wanted, 0.0)
    assert some == approx(share(wanted, threshold), abs=0.5 / zero.details["units"])
    assert 0 < some < 0.6  # the threshold tells units apart
    assert list(some.layers.values()) == [approx(share([s], threshold)) for s in wanted]


def test_dead_units_made_on_purpose_are_found_where_they_are():
    dead = metrics.dormant_ratio(made(PlainCNN), data(PlainCNN))
    assert dead.details == {"units": 18, "dormant": 3}
    assert dead.layers == {
        "body.1": approx(1 / 6),
        "body.3": approx(1 / 5),
        "act": approx(1 / 7),
    }
    dead = metrics.dormant_ratio(made(Residual), data(Residual))
    assert list(dead.layers) == ["relu", "(model)", "relu#2", "relu#3"]
    assert dead.layers["relu"] == 3 / 8 and dead.layers["relu#3"] < 3 / 8
    assert metrics.dormant_ratio(made(Encoder), data(Encoder)).details == {
        "units": 12,
        "dormant": 1,
    }


def shaped(function):
    """Return layers whose results a function rearranges before the activation.

    There are 6 channels of a convolution and 9 outputs of a linear layer.
    """
    parts = {"conv": nn.Conv2d(2, 6, 3), "line": nn.Conv1d(2, 6, 3), "linear": nn.Linear(5, 9)}
    parts["heads"] = nn.Linear(5, 30)
    return Written(
        lambda m, x: function(m, x).relu(), **parts, weight=nn.Parameter(torch.randn(7, 2))
    )


UNITS = {  # name: (what is done to x of shape [4, 2, 8, 5], the number of units)
    "input as an image": (lambda m, x: x, 2),
    "input as a sequence": (lambda m, x: x[:, 0], 5),
    "convolution": (lambda m, x: m.conv(x), 6),
    "permuted": (lambda m, x: m.conv(x).permute(0, 2, 3, 1), 6),
    "permuted there and back": (
        lambda m, x: m.conv(x).movedim(1, -1).transpose(1, 3).swapaxes(0, 1),
        6,
    ),
    "positions flattened": (lambda m, x: m.conv(x).flatten(2), 6),
    "positions flattened, then first": (lambda m, x: m.conv(x).flatten(2).mT, 6),
    "positions unfolded": (lambda m, x: m.line(x.flatten(2)).view(4, 6, 2, 19), 6),
    "one sample": (lambda m, x: m.conv(x[:1]).squeeze(0).unsqueeze(0).flatten(2), 6),
    "pooled": (lambda m, x: F.adaptive_avg_pool2d(m.conv(x), 1).flatten(1), 6),
    "scaled and added": (lambda m, x: (0.5 * m.conv(x).flatten(2) + 1).sub(torch.ones(18)), 6),
    "half of the channels": (lambda m, x: m.conv(x).flatten(2).chunk(2, 1)[1], 3),
    "normalised": (
        lambda m, x: F.batch_norm(m.line(x.flatten(2)), torch.zeros(6), torch.ones(6)),
        6,
    ),
    "normalised input": (lambda m, x: F.group_norm(x.flatten(2), 2), 2),
    "linear on four axes": (lambda m, x: m.linear(x), 9),
    "linear, moved to channels": (lambda m, x: m.linear(x).permute(0, 3, 1, 2).flatten(2), 9),
    "linear, rows flattened": (lambda m, x: m.linear(x).view(-1, 9), 9),
    "linear, layer norm": (lambda m, x: F.layer_norm(m.linear(x), (9,)), 9),
    "linear, as a map": (
        lambda m, x: m.linear(x[:, 0, 0])[:, :, None, None].view(1, 4, 9, 1, 1)[0].flatten(2),
        9,
    ),
    "linear, in heads": (lambda m, x: m.linear(x[:, 0]).view(4, 8, 3, 3), 9),
    "linear, heads first": (lambda m, x: m.linear(x[:, 0]).view(4, 8, 3, 3).transpose(1, 2), 9),
    "linear, queries of heads": (
        lambda m, x: m.heads(x[:, 0]).unflatten(-1, (3, 2, 5)).permute(2, 0, 3, 1, 4)[0],
        10,
    ),
    "convolution, in heads": (lambda m, x: m.conv(x).reshape(4, 2, 3, -1).mT, 6),
    "channels shuffled": (
        lambda m, x: m.line(x.flatten(2)).view(4, 2, 3, -1).transpose(1, 2).reshape(4, 6, -1),
        6,
    ),
    "mean over rows": (lambda m, x: m.conv(x).mean(2), 6),
    "largest of columns": (lambda m, x: m.conv(x).max(3).values, 6),
    "one row": (lambda m, x: m.conv(x)[:, :, 0], 6),
    "linear layers stacked": (lambda m, x: torch.stack([m.linear(x[:, 0])] * 2, 1), 9),
    "linear, pairs of positions": (
        lambda m, x: m.linear(x[:, 0])[:, torch.tensor([[0, 1, 2], [1, 2, 3]])],
        9,
    ),
    "einsum to heads": (
        lambda m, x: torch.einsum("btd,dhk->bhtk", x[:, 0, :, :2], m.weight.T.view(2, 7, 1)),
        7,
    ),
    "scores of heads": (lambda m, x: m.conv(x).view(4, 2, 3, -1).mT @ torch.ones(3, 9), 2),
    "product from the right": (lambda m, x: x.movedim(1, -1) @ m.weight.T, 7),
    "product from the left": (lambda m, x: m.weight @ x.flatten(2), 7),
}


@mark.parametrize("name", UNITS)
def test_units_are_channels_or_the_last_axis_wherever_they_move(name):
    function, units = UNITS[name]
    assert (
        metrics.dormant_ratio(shaped(function), torch.randn(4, 2, 8, 5)).details["units"] == units
    )


def test_dormant_by_the_mean_activation_with_its_sign():
    """GELU units with a mean below 0.05 are dormant, mostly negative ones among them.

    This is the definition of the appendix on time series.
    """
    model = nn.Sequential(nn.Linear(4, 50), nn.GELU()).double()
    x = torch.randn(64, 4, dtype=torch.float64)
    a = model(x)
    how = {"units": "all", "normalize": False, "threshold": 0.05}
    below = (a.mean(0) < 0.05).sum()
    absolute = (a.abs().mean(0) <= 0.05).sum()
    signed = metrics.dormant_ratio(model, iter(x.split(9)), signed=True, **how)
    assert (
        signed.details["dormant"]
        == below
        > absolute
        == metrics.dormant_ratio(model, x, **how).details["dormant"]
    )
    assert "mean a below 0.05" in signed.definition


def test_a_unit_is_dormant_only_if_it_is_so_over_all_batches():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    model[0].weight.data = torch.eye(2)
    first = torch.tensor([[1.0, -1.0]])
    second = torch.tensor([[-1.0, 1.0]])
    assert metrics.dormant_ratio(model, first) == metrics.dormant_ratio(model, second) == 0.5
    assert metrics.dormant_ratio(model, iter([first, second])) == 0
    # Each unit's mean is 1 in one batch, 1/2 over both.
    half = {"threshold": 0.6, "normalize": False}
    assert metrics.dormant_ratio(model, iter([first, second]), **half) == 1
    assert metrics.dormant_ratio(model, first, **half) < 1
    assert (
        metrics.dormant_ratio(model, torch.utils.data.DataLoader(torch.cat([first, second]))) == 0
    )


class Gated(nn.Module):
    """ReLU units, two of four dead; Hardswish units, one of three dead; and a gate that is none."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 4)
        self.b = nn.Linear(2, 3)
        self.swish = nn.Hardswish()
        self.a.bias.data[:2] = -100.0
        self.a.bias.data[2:] = 100.0
        self.b.bias.data = torch.tensor([-100.0, 100.0, 50.0])

    def forward(self, x):
        return torch.cat(
            [self.a(x).relu_(), self.swish(self.b(x)), torch.tanh(x), F.hardsigmoid(x)], 1
        )


def test_which_units_count():
    torch.manual_seed(0)
    model, x = Gated(), torch.rand(5, 2)
    paper = metrics.dormant_ratio(model, x)
    assert paper.details == {"units": 4, "dormant": 2}
    assert "ReLU units" in paper.definition
    assert metrics.dormant_ratio(model, x, units="all").details == {"units": 7, "dormant": 3}
    sokar = metrics.dormant_ratio(model, x, threshold=0.1)
    assert sokar.details == {"units": 7, "dormant": 3}
    assert "tau-dormant" in sokar.definition
    # 50 is under the mean, 50.0.
    assert metrics.dormant_ratio(model, x, threshold=1.01).details["dormant"] == 3 + 1
    raw = metrics.dormant_ratio(model, x, threshold=60.0, normalize=False)
    assert raw.details["dormant"] == 4
    more = metrics.dormant_ratio(model, x, units="all", also=(torch.tanh, F.hardsigmoid))
    assert more.details == {"units": 11, "dormant": 3}
    assert list(more.layers) == ["(model):relu", "swish", "(model):tanh", "(model):hardsigmoid"]


class NamedReLU(nn.Module):
    def forward(self, h):
        return torch.where(0 < h, h, 0)


WRITTEN_RELUS = """
h.clamp(min=0) | torch.clamp(h, ZERO, SIX) | h.clamp_(0, 6) | torch.clip(h, 0, None)
torch.clamp_min(h, 0) | h.clamp_min_(0) | torch.maximum(torch.zeros_like(h), h)
torch.max(h / 3, torch.zeros(h.shape)) | torch.fmax(h, ZERO)
-torch.minimum(-h, ZERO) | torch.where(h < 0, 0, h) | h * (h > 0) | (h >= 0).to(h.dtype) * h
h.mul_(~h.lt(0)) | h.masked_fill(h < 0, 0.0) | h.__setitem__(h < 0, 0) or h | (h + h.abs()) / 2
torch.heaviside(h, ZERO) * h | nn.Threshold(0, 0)(h) | F.threshold_(h, 0, 0) | F.hardtanh(h, 0, 6)
NamedReLU
"""
OTHERS = """
h.clamp(min=1e-6) | torch.maximum(h, 0.1 * h) | (h > 0).float() | h * (SIX > 3)
torch.maximum(h, h @ torch.eye(16)) | h.abs().clamp(min=0) | (h > 0) * h.add_(1).sin_()
(h > 0) * 2.0 + 1
"""


def forms(text):
    return text.strip().replace("\n", " | ").split(" | ")


@mark.parametrize("form", forms(WRITTEN_RELUS) + forms(OTHERS))
def test_a_relu_that_is_written_out_counts_as_one(form):
    """With dead, live and always active units, in one batch or several; what is none does not."""
    torch.manual_seed(0)
    a, b = nn.Linear(8, 16), nn.Linear(16, 16)
    b.bias.data += torch.tensor([-100.0, 0.0, 0.0, 100.0]).repeat(4)
    names = {**globals(), "ZERO": torch.tensor(0.0), "SIX": torch.full((16,), 6.0)}
    activation = Written(lambda _, h: eval(form, names | {"h": h}))
    model = nn.Sequential(a, nn.ReLU(), b, NamedReLU() if form == "NamedReLU" else activation)
    x = torch.randn(32, 8)
    expected = metrics.dormant_ratio(nn.Sequential(a, nn.ReLU(), b, nn.ReLU()), x).details
    assert 4 <= expected["dormant"] < 12
    for given in (x, iter(x.split(4))):
        counts = metrics.dormant_ratio(model, given).details
        assert (counts == expected) == (form in forms(WRITTEN_RELUS))


def test_a_silent_layer_is_dormant_at_every_threshold():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.GELU())
    model[0].bias.data.fill_(-100.0)
    assert metrics.dormant_ratio(model, torch.rand(6, 3)) == 1.0
    assert metrics.dormant_ratio(model, torch.rand(6, 3), threshold=1e-9) == 0.5


def test_hugging_face_and_timm_models():
    transformers = importorskip("transformers")
    timm = importorskip("timm")
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    gpt = transformers.GPT2LMHeadModel(config).eval()
    gpt.transformer.h[1].mlp.c_fc.bias.data[:4] = -100.0
    found = metrics.activation_measures(gpt, {"input_ids": torch.randint(0, 13, (4, 6))})
    assert found["dormant_ratio"].details == {"units": 64, "dormant": 4}
    assert found["feature_rank"].details == {"n": 24, "d": 8, "layer": "lm_head"}
    model = timm.create_model("mobilenetv3_small_050", num_classes=3).eval()
    relu_and_hardswish = [m for m in model.modules() if isinstance(m, (nn.ReLU, nn.Hardswish))]
    ratio = metrics.dormant_ratio(model, torch.randn(2, 3, 32, 32), units="all")
    assert len(ratio.layers) == len(relu_and_hardswish)


# -- promises of all of them
# --------------------------------------------------------------------------------------------


def everything(model, kind):
    x = data(kind, 6)
    return {
        **metrics.activation_measures(model, x),
        **metrics.gradient_measures(model, x, labels(kind, 6), entropy_loss),
        "weight_norm": metrics.weight_norm(model),
    }


@mark.parametrize("kind", [Residual, GPT])
def test_the_model_comes_back_unchanged(kind):
    model = made(kind).train()
    next(model.children()).eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    model.register_forward_hook(lambda *_: None)
    with untouched(model):
        first, second = everything(model, kind), everything(model, kind)
    assert first == second  # to the bit


def test_a_failure_leaves_no_hooks_and_eval_flags():
    model = made(PlainCNN).train()
    for call in (metrics.dormant_ratio, metrics.effective_rank):
        x = torch.randn(2, 3, 30, 30)
        with untouched(model), refused("Give inputs"):
            call(model, x)


@mark.parametrize("kind", [PlainCNN, GPT])
def test_the_batch_gradient_goes_back_over_the_pass_of_the_activations(kind):
    model, x, y = made(kind), data(kind, 6), labels(kind, 6)
    names = ["train_grad_norm_batch", *metrics.activations.MEASURES]
    apart = everything(model, kind)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    found = metrics.measures(model, names, x=x, y=y, loss=entropy_loss)
    assert passes == [True]
    assert list(found) == names
    for name in names:
        assert found[name].to_dict() == apart[name].to_dict()  # to the bit
    assert not any(p.grad is not None for p in model.parameters())


BY_NAME = {
    "activations": lambda model, x, y: list(metrics.activation_measures(model, x).values()),
    "gradients": lambda model, x, y: list(
        metrics.gradient_measures(model, x, y, F.cross_entropy).values()
    ),
    "noise scale": lambda model, x, y: fastlr.gradient_noise_scale(
        model, x, y, F.cross_entropy
    ).details["trace"],
    "kernel": lambda model, x, y: metrics.ntk_rank(model, x).details["trace"],
    "curvature": lambda model, x, y: metrics.curvature_rank(model, x).details["trace"],
    "trainability": lambda model, x, y: metrics.trainability(model, x, steps=3, repeats=2),
    "capacity": lambda model, x, y: fastlr.memorization_capacity(model, x, steps=3, repeats=2),
    "loss": lambda model, x, y: fastlr.redundancy_loss(model, x, seed=0).item(),
}


@mark.parametrize("name", BY_NAME)
def test_a_model_that_writes_to_its_inputs_leaves_the_users_tensor(name):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    writes = Written(lambda m, x: m.layers(x.mul_(2).sub_(1)), layers=layers)
    x, y = torch.randn(16, 5), torch.randint(3, (16,))
    given = x.clone()
    wanted = BY_NAME[name](layers, 2 * x - 1, y)
    assert BY_NAME[name](writes, given, y) == approx(wanted, rel=1e-5)
    assert torch.equal(given, x)


def test_one_forward_pass_serves_all():
    model, x = made(PlainCNN), data(PlainCNN)
    single = {
        "dormant_ratio": metrics.dormant_ratio(model, x),
        "dormant_ratio_tau": metrics.dormant_ratio(model, x, threshold=0.3, units="all"),
        "effective_rank": metrics.effective_rank(model, x, delta=0.02),
        "effective_rank_entropy": metrics.effective_rank(model, x, kind="entropy"),
        "feature_rank": metrics.feature_rank(model, x, epsilon=0.2),
    }
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    found = metrics.activation_measures(model, x, tau=0.3, delta=0.02, epsilon=0.2)
    assert len(passes) == 1
    assert list(found) == list(metrics.activations.MEASURES)
    assert found == single
    assert {n: m.definition for n, m in found.items()} == {
        n: m.definition for n, m in single.items()
    }
    with refused("unknown measures"):
        metrics.activation_measures(model, x, measures=["rank"])


def test_measures_that_try_the_model_out_are_those_by_themselves():
    model, x, y = made(PlainCNN), data(PlainCNN, 16), labels(PlainCNN, 16)
    apart = {
        "trainability": metrics.trainability(model, x, repeats=1),
        "gradient_noise_scale": fastlr.gradient_noise_scale(model, x, y, entropy_loss),
        "curvature_rank": metrics.curvature_rank(model, x),
        "ntk_rank": metrics.ntk_rank(model, x),
    }
    with untouched(model):
        found = metrics.measures(model, list(apart), x=x, y=y, loss=entropy_loss, repeats=1)
    assert list(found) == list(apart)
    for name, measure in apart.items():
        assert found[name].to_dict() == measure.to_dict()  # to the bit


@mark.parametrize("name", ["trainability", "curvature_rank", "ntk_rank"])
def test_measures_of_samples_along_axis_0_refuse_other_axes(name):
    with refused(f"{name} takes samples along axis 0 only"):
        metrics.measures(made(PlainCNN), [name], x=data(PlainCNN), in_dim=1)


def test_records_name_their_definition():
    found = everything(made(Residual), Residual)
    assert len({m.definition for m in found.values()}) == len(found)
    for measure in found.values():
        record = json.loads(json.dumps(measure.to_dict(layers=True), allow_nan=False))
        assert record["value"] == float(measure)
        assert record["definition"] == measure.definition
        for again in (pickle.loads(pickle.dumps(measure)), copy.deepcopy(measure)):
            assert again == measure
            assert again.to_dict(layers=True) == measure.to_dict(layers=True)
    assert fastlr.metrics is metrics
