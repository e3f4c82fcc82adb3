"""Every plasticity measure equals an independent plain computation, on any kind of model, and touches nothing."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlr
from fastlr import metrics
from fastlr.errors import InputError, ModelError, NonFiniteError

# -- models: each makes its parts and tells, by hand, its activations (units last) and its features ----------------------


class PlainCNN(nn.Module):
    """Convolutions and linear layers, ReLU modules in place; two channels and one unit are dead."""

    size = (3, 9, 9)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 5, 3, stride=2), nn.ReLU(inplace=True)
        )
        self.hidden, self.act, self.head = nn.Linear(45, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)
        for layer, unit in ((self.body[0], 1), (self.body[2], 4), (self.hidden, 2)):
            layer.bias.data[unit] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.hidden(self.body(x).flatten(1))))

    def by_hand(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        a = self.body[0](x).clamp(min=0)
        b = self.body[2](a).clamp(min=0)
        c = self.hidden(b.reshape(len(x), -1)).clamp(min=0)
        return [a.movedim(1, -1), b.movedim(1, -1), c], c


class Residual(nn.Module):
    """Batch norm, functional and in-place relu, one activation module used three times, a residual addition."""

    size = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, 4)
        for norm in (self.norm1, self.norm2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
        self.norm1.bias.data[:3] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.first(x)))
        y = F.relu(self.norm2(self.second(x)), inplace=True)
        y = self.relu(self.relu(y - 0.5) + x)
        return F.log_softmax(self.fc(F.adaptive_avg_pool2d(y, 1).flatten(1)), 1)

    def by_hand(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        a = self.norm1(self.first(x)).clamp(min=0)
        b = self.norm2(self.second(a)).clamp(min=0)
        c = (b - 0.5).clamp(min=0)
        d = (c + a).clamp(min=0)
        return [t.movedim(1, -1) for t in (a, b, c, d)], d.mean((2, 3))


class NewGELU(nn.Module):
    """A formula, as in GPT-2: the tanh inside is no activation of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


class GPT(nn.Module):
    """Tokens, causal attention, written-out GELU module, tied head."""

    size = (5,)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Parameter(torch.randn(1, 5, 8))
        self.norm1, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm2, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 20), NewGELU(), nn.Linear(20, 8)
        self.norm3, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.up.bias.data[:4] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.by_hand(x)[1])

    def by_hand(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        h = self.embed(x) + self.place
        q, k, v = (t.view(*x.shape, 2, 4).transpose(1, 2) for t in self.qkv(self.norm1(h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape))
        a = self.act(self.up(self.norm2(h)))
        return [a], self.norm3(h + self.down(a))


class Mixed(nn.Module):
    """Hardswish on channels, then on the last axis of a channels-last block (ConvNeXt), SiLU and GELU functions, 1-D too."""

    size = (2, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.inner = nn.Conv2d(2, 6, 3), nn.LayerNorm(6), nn.Linear(6, 10)
        self.line, self.head = nn.Conv1d(10, 5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.conv(x)).permute(0, 2, 3, 1)
        x = F.gelu(self.inner(self.norm(x))).permute(0, 3, 1, 2)
        x = F.silu(self.line(x.flatten(2)), inplace=True)
        return self.head(x.mean(2))

    def by_hand(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        a = self.conv(x)
        a = (a * (a + 3).clamp(0, 6) / 6).movedim(1, -1)
        b = self.inner(self.norm(a))
        b = b * torch.special.ndtr(b)
        c = self.line(b.movedim(-1, 1).flatten(2))
        c = c / (1 + (-c).exp())
        return [a, b, c.movedim(1, -1)], c.mean(2)


class Encoder(nn.Module):
    """torch's own transformer layer, which would take a fused path in eval mode, time first."""

    size = (7, 8)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), nn.Linear(8, 3)
        self.layer.linear1.bias.data[5] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[:, 0])

    def by_hand(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        layer = self.layer
        h = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
        a = layer.linear1(h).clamp(min=0)
        return [a], layer.norm2(h + layer.linear2(a))[:, 0]


MODELS = [PlainCNN, Residual, GPT, Mixed, Encoder]
VISION = [PlainCNN, Residual]


def made(kind: type, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    return kind().eval().to(dtype)


def data(kind: type, n: int = 24, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    if kind is GPT:
        return torch.randint(0, 11, (n, *kind.size), generator=generator)
    return torch.randn(n, *kind.size, generator=generator).to(dtype)


@torch.no_grad()
def scores(model: Any, x: Tensor) -> list[Tensor]:
    """Sokar's score of each unit of each activation, in float64."""
    found = []
    for a in model.by_hand(x)[0]:
        mean = a.double().abs().reshape(-1, a.shape[-1]).mean(0)
        found.append(mean / mean.mean())
    return found


def share(found: list[Tensor], threshold: float) -> float:
    return float((torch.cat(found) <= threshold).double().mean())


def between(found: list[Tensor]) -> float:
    """A threshold in the widest gap between low scores, so that rounding cannot move a unit across it."""
    values = torch.cat(found).sort().values
    values = values[values > 1e-3][: len(values) // 3]
    at = int(values.diff().argmax())
    return float(values[at : at + 2].mean())


# -- parameters alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", MODELS)
def test_weight_norm_and_distance(kind: type, dtype: torch.dtype) -> None:
    model = made(kind, dtype)
    init = copy.deepcopy(model.state_dict())
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    torch.manual_seed(5)
    for p in model.parameters():
        p.data += torch.randn(p.shape).to(dtype)
    own = {name: p.detach().double().numpy() for name, p in model.named_parameters() if p.requires_grad}
    norm = math.sqrt(sum((p**2).sum() for p in own.values()))
    start = {name: init[name].double().numpy() for name in own}
    distance = math.sqrt(sum(((own[name] - start[name]) ** 2).sum() for name in own))
    assert metrics.weight_norm(model) == pytest.approx(norm, rel=1e-12)
    assert metrics.distance_from_init(model, init) == pytest.approx(distance, rel=1e-12)
    assert metrics.weight_norm(model).details["parameters"] == sum(p.size for p in own.values())


def test_distance_from_a_model_from_wrapped_states_and_from_the_start() -> None:
    model = made(Residual)
    start = copy.deepcopy(model)
    assert metrics.distance_from_init(model, start) == 0
    model.fc.weight.data += 2.0
    wanted = pytest.approx(2 * math.sqrt(32), rel=1e-6)
    assert metrics.distance_from_init(model, start) == wanted
    for prefix in ("module.", "_orig_mod."):
        assert metrics.distance_from_init(model, {prefix + k: v for k, v in start.state_dict().items()}) == wanted
    parameters_only = dict(start.named_parameters())
    assert metrics.distance_from_init(nn.DataParallel(model), parameters_only) == wanted


def test_distance_refuses_other_states() -> None:
    model = made(Residual)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="not a copy"):
        metrics.distance_from_init(model, model.state_dict())
    with pytest.raises(InputError, match=r"lacks fc\.weight"):
        metrics.distance_from_init(model, {k: v for k, v in state.items() if k != "fc.weight"})
    with pytest.raises(InputError, match=r"has head\.weight, unknown"):
        metrics.distance_from_init(model, state | {"head.weight": torch.zeros(3)})
    with pytest.raises(InputError, match=r"fc\.bias.*shape \(7,\), the parameter \(4,\)"):
        metrics.distance_from_init(model, state | {"fc.bias": torch.zeros(7)})
    with pytest.raises(InputError, match="state dict or a model"):
        metrics.distance_from_init(model, 3)  # type: ignore[arg-type]


def test_diverged_and_frozen_weights_are_refused() -> None:
    model = made(PlainCNN)
    state = copy.deepcopy(model.state_dict())
    model.head.weight.data[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"head\.weight"):
        metrics.weight_norm(model)
    with pytest.raises(NonFiniteError, match=r"head\.weight"):
        metrics.distance_from_init(model, state)
    with pytest.raises(ModelError, match="no trainable"):
        metrics.weight_norm(model.requires_grad_(False))


# -- dormant units ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "channels_last", "bfloat16", "batches", "autocast"])
@pytest.mark.parametrize("kind", MODELS)
def test_dormant_ratio_equals_the_definition(kind: type, layout: str) -> None:
    dtype = torch.bfloat16 if layout == "bfloat16" else torch.float32
    model, x = made(kind, dtype), data(kind, dtype=dtype)
    if layout == "channels_last" and x.ndim == 4:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=layout == "autocast"):
        wanted = scores(model, x)
        given = (part for part in x.split(7)) if layout == "batches" else x
        zero = metrics.dormant_ratio(model, given, units="all")
        threshold = between(wanted)
        some = metrics.dormant_ratio(model, iter(x.split(9)) if layout == "batches" else x, threshold=threshold)
    assert zero.details["units"] == sum(len(s) for s in wanted)
    assert zero == share(wanted, 0.0)
    assert some == pytest.approx(share(wanted, threshold), abs=0.5 / zero.details["units"])
    assert 0 < some < 0.6  # the threshold tells units apart
    assert list(some.layers.values()) == [pytest.approx(share([s], threshold)) for s in wanted]


def test_dead_units_made_on_purpose_are_found_where_they_are() -> None:
    dead = metrics.dormant_ratio(made(PlainCNN), data(PlainCNN))
    assert dead.details == {"units": 18, "dormant": 3}
    assert dead.layers == {"body.1": pytest.approx(1 / 6), "body.3": pytest.approx(1 / 5), "act": pytest.approx(1 / 7)}
    dead = metrics.dormant_ratio(made(Residual), data(Residual))
    assert list(dead.layers) == ["relu", "(model)", "relu#2", "relu#3"]
    assert dead.layers["relu"] == 3 / 8 and dead.layers["relu#3"] < 3 / 8
    assert metrics.dormant_ratio(made(Encoder), data(Encoder)).details == {"units": 12, "dormant": 1}


class Shaped(nn.Module):
    """Layers whose results a function rearranges before the activation: 6 channels of a convolution, 9 outputs of a linear."""

    def __init__(self, function: Callable[[Shaped, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.line, self.linear = nn.Conv2d(2, 6, 3), nn.Conv1d(2, 6, 3), nn.Linear(5, 9)
        self.weight = nn.Parameter(torch.randn(7, 2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x).relu()


UNITS = {  # name: (what is done to x of shape [4, 2, 8, 5], the number of units)
    "input as an image": (lambda m, x: x, 2),
    "input as a sequence": (lambda m, x: x[:, 0], 5),
    "convolution": (lambda m, x: m.conv(x), 6),
    "permuted": (lambda m, x: m.conv(x).permute(0, 2, 3, 1), 6),
    "permuted there and back": (lambda m, x: m.conv(x).movedim(1, -1).transpose(1, 3).swapaxes(0, 1), 6),
    "positions flattened": (lambda m, x: m.conv(x).flatten(2), 6),
    "positions flattened, then first": (lambda m, x: m.conv(x).flatten(2).mT, 6),
    "positions unfolded": (lambda m, x: m.line(x.flatten(2)).view(4, 6, 2, 19), 6),
    "one sample": (lambda m, x: m.conv(x[:1]).squeeze(0).unsqueeze(0).flatten(2), 6),
    "pooled": (lambda m, x: F.adaptive_avg_pool2d(m.conv(x), 1).flatten(1), 6),
    "scaled and added": (lambda m, x: (0.5 * m.conv(x).flatten(2) + 1).sub(torch.ones(18)), 6),
    "half of the channels": (lambda m, x: m.conv(x).flatten(2).chunk(2, 1)[1], 3),
    "normalised": (lambda m, x: F.batch_norm(m.line(x.flatten(2)), torch.zeros(6), torch.ones(6)), 6),
    "normalised input": (lambda m, x: F.group_norm(x.flatten(2), 2), 2),
    "linear on four axes": (lambda m, x: m.linear(x), 9),
    "linear, moved to channels": (lambda m, x: m.linear(x).permute(0, 3, 1, 2).flatten(2), 9),
    "linear, rows flattened": (lambda m, x: m.linear(x).view(-1, 9), 9),
    "linear, layer norm": (lambda m, x: F.layer_norm(m.linear(x), (9,)), 9),
    "linear, as a map": (lambda m, x: m.linear(x[:, 0, 0])[:, :, None, None].view(1, 4, 9, 1, 1)[0].flatten(2), 9),
    "product from the right": (lambda m, x: x.movedim(1, -1) @ m.weight.T, 7),
    "product from the left": (lambda m, x: m.weight @ x.flatten(2), 7),
}


@pytest.mark.parametrize("name", UNITS)
def test_units_are_channels_or_the_last_axis_wherever_they_move(name: str) -> None:
    function, units = UNITS[name]
    assert metrics.dormant_ratio(Shaped(function), torch.randn(4, 2, 8, 5)).details["units"] == units


def test_a_unit_is_dormant_only_if_it_is_so_over_all_batches() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    model[0].weight.data = torch.eye(2)
    first, second = torch.tensor([[1.0, -1.0]]), torch.tensor([[-1.0, 1.0]])
    assert metrics.dormant_ratio(model, first) == metrics.dormant_ratio(model, second) == 0.5
    assert metrics.dormant_ratio(model, iter([first, second])) == 0
    half = {"threshold": 0.6, "normalize": False}  # each unit's mean is 1 in one batch, 1/2 over both
    assert (
        metrics.dormant_ratio(model, iter([first, second]), **half) == 1
        and metrics.dormant_ratio(model, first, **half) < 1
    )
    assert metrics.dormant_ratio(model, torch.utils.data.DataLoader(torch.cat([first, second]))) == 0


class Gated(nn.Module):
    """ReLU units, two of four dead, beside Hardswish units, one of three dead, and a gate that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.swish = nn.Linear(2, 4), nn.Linear(2, 3), nn.Hardswish()
        self.a.bias.data[:2] = -100.0
        self.a.bias.data[2:] = 100.0
        self.b.bias.data = torch.tensor([-100.0, 100.0, 50.0])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x).relu_(), self.swish(self.b(x)), torch.tanh(x), F.hardsigmoid(x)], 1)


def test_which_units_count() -> None:
    model, x = Gated(), torch.rand(5, 2)
    paper = metrics.dormant_ratio(model, x)
    assert paper.details == {"units": 4, "dormant": 2} and "ReLU units" in paper.definition
    assert metrics.dormant_ratio(model, x, units="all").details == {"units": 7, "dormant": 3}
    sokar = metrics.dormant_ratio(model, x, threshold=0.1)
    assert sokar.details == {"units": 7, "dormant": 3} and "tau-dormant" in sokar.definition
    assert metrics.dormant_ratio(model, x, threshold=1.01).details["dormant"] == 3 + 1  # 50 is under the mean, 50.0
    raw = metrics.dormant_ratio(model, x, threshold=60.0, normalize=False)
    assert raw.details["dormant"] == 4
    more = metrics.dormant_ratio(model, x, units="all", also=(torch.tanh, F.hardsigmoid))
    assert more.details == {"units": 11, "dormant": 3}
    assert list(more.layers) == ["(model):relu", "swish", "(model):tanh", "(model):hardsigmoid"]


def test_a_silent_layer_is_dormant_at_every_threshold() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.GELU())
    model[0].bias.data.fill_(-100.0)
    assert metrics.dormant_ratio(model, torch.rand(6, 3)) == 1.0
    assert metrics.dormant_ratio(model, torch.rand(6, 3), threshold=1e-9) == 0.5


def test_no_activations_is_an_error_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
    with pytest.raises(ModelError, match="no activations.*also="):
        metrics.dormant_ratio(model, torch.ones(2, 2))
    assert metrics.dormant_ratio(model, torch.ones(2, 2), also=(nn.Sigmoid,)).details["units"] == 2
    with pytest.raises(ModelError, match="no ReLU units; its activations are gelu: pass units='all'"):
        metrics.dormant_ratio(nn.Sequential(nn.Linear(2, 2), nn.GELU()), torch.ones(2, 2), units="relu")


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_large"])
def test_torchvision_models_by_hooks_of_ours(name: str) -> None:
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=3).eval()
    x = torch.randn(3, 3, 48, 48)
    seen: list[tuple[bool, Tensor]] = []

    def hook(module: nn.Module, args: Any, result: Tensor) -> None:
        mean = result.double().abs().mean([d for d in range(result.ndim) if d != 1])
        seen.append((isinstance(module, nn.ReLU), mean / mean.mean()))

    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, (nn.ReLU, nn.Hardswish))]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    found = metrics.activation_measures(model, x, tau=0.2)
    assert found["dormant_ratio"] == share([s for relu, s in seen if relu], 0.0)
    everything = [s for _, s in seen]
    assert found["dormant_ratio_tau"].details["units"] == sum(len(s) for s in everything)
    assert found["dormant_ratio_tau"] == pytest.approx(share(everything, 0.2), abs=1e-3)


def test_hugging_face_and_timm_models() -> None:
    transformers, timm = pytest.importorskip("transformers"), pytest.importorskip("timm")
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


# -- ranks --------------------------------------------------------------------------------------------------------------


def plain_ranks(features: Tensor, delta: float = 0.01, epsilon: float = 0.01) -> dict[str, float]:
    phi = features.double().reshape(-1, features.shape[-1]).numpy()
    s = np.linalg.svd(phi, compute_uv=False)
    k = next(k for k in range(1, len(s) + 1) if s[:k].sum() >= (1 - delta) * s.sum() * (1 - 1e-13))
    p = s[s > 1e-14 * s[0]] / s.sum()
    return {
        "effective_rank": k,
        "effective_rank_entropy": math.exp(-(p * np.log(p)).sum()),
        "feature_rank": int((s / math.sqrt(len(phi)) > epsilon).sum()),
    }


@pytest.mark.parametrize("layout", ["plain", "bfloat16", "batches", "one sample"])
@pytest.mark.parametrize("kind", MODELS)
def test_ranks_equal_numpy(kind: type, layout: str) -> None:
    dtype = torch.bfloat16 if layout == "bfloat16" else torch.float32
    model, x = made(kind, dtype), data(kind, 1 if layout == "one sample" else 40, dtype)
    with torch.no_grad():
        wanted = plain_ranks(model.by_hand(x)[1], delta=0.05, epsilon=0.1)
    given = (part for part in x.split(9)) if layout == "batches" else x
    found = metrics.activation_measures(model, given, delta=0.05, epsilon=0.1, measures=list(wanted))
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        wanted, rel=5e-3 if layout == "bfloat16" else 1e-5
    )
    if layout == "plain":
        assert metrics.effective_rank(model, x, delta=0.05) == wanted["effective_rank"]
        assert metrics.effective_rank(model, x, kind="entropy") == pytest.approx(wanted["effective_rank_entropy"])
        assert metrics.feature_rank(model, x, epsilon=0.1) == wanted["feature_rank"]


@pytest.mark.parametrize("rows", [3, 30, 700])
def test_ranks_of_known_spectra(rows: int) -> None:
    """Rank-deficient features, in pieces of any size: singular values 4, 2, 1 and zeros."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(rows, 3, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(6, 3, generator=generator, dtype=torch.float64)).Q
    x = left @ torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)) @ right.T
    model = nn.Linear(6, 2).double()
    for given in (lambda: x, lambda: iter(x.split(1)), lambda: iter(x.split(97))):
        assert metrics.effective_rank(model, given()) == 3
        assert metrics.effective_rank(model, given(), delta=0.2) == 2  # 6/7 = 0.857
        entropy = -sum(p * math.log(p) for p in (4 / 7, 2 / 7, 1 / 7))
        assert metrics.effective_rank(model, given(), kind="entropy") == pytest.approx(math.exp(entropy), rel=1e-9)
        assert metrics.feature_rank(model, given(), epsilon=1.5 / math.sqrt(rows)) == 2
    tie = torch.eye(6, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0, 0, 0, 0])
    assert metrics.effective_rank(model, tie, delta=0.25) == 1  # at least 1 - delta, not more
    assert metrics.effective_rank(model, torch.zeros(4, 6).double()) == 0
    assert metrics.effective_rank(model, torch.zeros(4, 6).double(), kind="entropy") == 0


class Headed(nn.Module):
    """A backbone and a head that is a function."""

    def __init__(self, head: Callable[[Headed, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 5)
        self.w, self.rnn = nn.Parameter(torch.randn(5, 3)), nn.LSTM(5, 3, batch_first=True)
        self.last = nn.Conv2d(5, 3, 1)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self, self.a(x).relu())


FOUND = {
    "matmul": lambda m, h: h @ m.w,
    "matmul of a view": lambda m, h: torch.matmul(h[:, None], m.w.view(5, 3))[:, 0],
    "linear, then elementwise": lambda m, h: 30 * torch.tanh(F.linear(h, m.w.T) / 30).log_softmax(-1),
    "linear, then rearranged": lambda m, h: torch.stack(F.linear(h, m.w.T).unbind(1), 1)[:, None].squeeze(1),
    "addmm": lambda m, h: torch.addmm(torch.zeros(3), h, m.w),
}
REFUSED = {
    "sum of two layers": (lambda m, h: h + m.b(torch.ones(4)), "comes from a and b"),
    "convolution": (lambda m, h: m.last(h[..., None, None]).flatten(1), r"comes from last \(conv2d\)"),
    "lstm": (lambda m, h: m.rnn(h[:, None])[0], r"comes from rnn \(lstm\)"),
    "attention": (lambda m, h: h @ h.T, "matmul"),
    "no layer": (lambda m, h: torch.ones(len(h), 3), "no layer was found"),
    "features changed": (lambda m, h: (F.linear(h, m.w.T), h.zero_())[0], "changed in place"),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_last_linear_layer_is_found(name: str) -> None:
    model, x = Headed(FOUND[name]), torch.randn(9, 4)
    with torch.no_grad():
        wanted = plain_ranks(model.a(x).relu())["effective_rank_entropy"]
    assert metrics.effective_rank(model, x, kind="entropy") == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_without_a_last_linear_layer_the_error_says_what_there_is(name: str) -> None:
    head, message = REFUSED[name]
    model, x = Headed(head), torch.randn(9, 4)
    with pytest.raises(ModelError, match=f"{message}.*pass layer="):
        metrics.effective_rank(model, x)
    with torch.no_grad():
        wanted = plain_ranks(x)["effective_rank_entropy"]
    assert metrics.effective_rank(model, x, layer="a", kind="entropy") == pytest.approx(wanted, rel=1e-5)
    metrics.dormant_ratio(model, x)  # which needs no last layer


def test_layer_by_name() -> None:
    model, x = made(Residual), data(Residual)
    with torch.no_grad():
        wanted = plain_ranks(model.norm1(model.first(x)).relu().movedim(1, -1))
    found = metrics.effective_rank(model, x, layer="second", kind="entropy")
    assert found == pytest.approx(wanted["effective_rank_entropy"], rel=1e-5)
    assert found.details == {"n": 24 * 64, "d": 8, "layer": "second"}
    plain, x2 = made(PlainCNN), data(PlainCNN)
    with torch.no_grad():
        wanted = plain_ranks(plain.hidden(plain.body(x2).flatten(1)))
    before_the_change = metrics.effective_rank(plain, x2, layer="act", kind="entropy")  # which works in place
    assert before_the_change == pytest.approx(wanted["effective_rank_entropy"], rel=1e-5)
    with pytest.raises(InputError, match="no module of the model; its linear layers: fc"):
        metrics.feature_rank(model, x, layer="classifier")
    model.spare = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="'spare' was not called"):
        metrics.feature_rank(model, x, layer="spare")


# -- training gradient --------------------------------------------------------------------------------------------------


def labels(kind: type, n: int) -> Tensor:
    shape = (n, 5) if kind is GPT else (n,)
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(6))


def entropy_loss(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.movedim(-1, 1), y, reduction="none")


def plain_gradients(model: nn.Module, x: Tensor, y: Tensor, loss: Callable) -> tuple[list[float], float]:
    """One backward pass a sample, and one for the mean over samples."""
    own = [p for p in model.parameters() if p.requires_grad]

    def flat(total: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(total, own, materialize_grads=True)])

    grads = [flat(loss(model(x[i : i + 1]), y[i : i + 1]).sum()) for i in range(len(x))]
    return [float(g.square().sum()) for g in grads], float(flat(loss(model(x), y).sum() / len(x)).square().sum())


@pytest.mark.parametrize("kind", MODELS)
def test_training_gradient_norms_equal_plain_loops(kind: type) -> None:
    model, x, y = made(kind, torch.float64), data(kind, 7, torch.float64), labels(kind, 7)
    samples, batch = plain_gradients(model, x, y, entropy_loss)
    model.train()  # measured in eval mode all the same
    for size in (None, 3):
        found = metrics.gradient_measures(model, x, y, entropy_loss, batch_size=size)
        assert found["train_grad_norm"] == pytest.approx(np.mean(samples), rel=1e-9)
        assert found["train_grad_norm"].details["stderr"] == pytest.approx(np.std(samples, ddof=1) / 7**0.5, rel=1e-9)
        assert found["train_grad_norm_batch"] == pytest.approx(batch, rel=1e-9)
        assert {m.details["n"] for m in found.values()} == {7}
    assert metrics.train_grad_norm(model, x, y, entropy_loss) == pytest.approx(np.mean(samples), rel=1e-9)


def test_losses_of_torch_are_taken_unreduced() -> None:
    model, x, y = made(PlainCNN, torch.float64), data(PlainCNN, 5, torch.float64), labels(PlainCNN, 5)
    wanted = pytest.approx(np.mean(plain_gradients(model, x, y, entropy_loss)[0]), rel=1e-9)
    module = nn.CrossEntropyLoss()
    for loss in (F.cross_entropy, module, lambda z, t: F.nll_loss(z.log_softmax(1), t, reduction="none")):
        assert metrics.train_grad_norm(model, x, y, loss) == wanted
    assert module.reduction == "mean"
    target = torch.randn(5, 3, dtype=torch.float64)
    squares = plain_gradients(model, x, target, lambda z, t: (z - t).square())
    found = metrics.gradient_measures(model, x, target, nn.MSELoss())
    assert found["train_grad_norm"] == pytest.approx(np.mean(squares[0]), rel=1e-9)
    assert found["train_grad_norm_batch"] == pytest.approx(squares[1], rel=1e-9)


def test_training_gradient_norm_in_half_precision() -> None:
    exact, x, y = made(PlainCNN), data(PlainCNN, 6), labels(PlainCNN, 6)
    wanted = metrics.gradient_measures(exact, x, y, F.cross_entropy)
    found = metrics.gradient_measures(exact.bfloat16(), x.bfloat16(), y, F.cross_entropy)
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], rel=0.1)
    metrics.train_grad_norm(exact, x.bfloat16(), torch.ones(6, 3, dtype=torch.bfloat16), F.mse_loss)
    # a loss so confident that its gradient squared is below the smallest bfloat16
    exact.head.bias.data[:] = torch.tensor([100.0, 0.0, 0.0])
    tiny = metrics.gradient_measures(exact, x.bfloat16(), torch.zeros(6, dtype=torch.long), F.cross_entropy)
    assert 0 < tiny["train_grad_norm_batch"] <= tiny["train_grad_norm"] < 1e-60


def test_training_gradient_errors() -> None:
    model, x, y = made(PlainCNN), data(PlainCNN, 5), labels(PlainCNN, 5)
    with pytest.raises(InputError, match="one number for 5 samples.*reduction='none'"):
        metrics.train_grad_norm(model, x, y, lambda z, t: F.cross_entropy(z, t))
    with pytest.raises(InputError, match="does not depend on the output"):
        metrics.train_grad_norm(model, x, y, lambda z, t: z.detach().sum(1))
    with pytest.raises(NonFiniteError, match="a loss is not finite"):
        metrics.train_grad_norm(model, x, y, lambda z, t: z.sum(1) * math.inf)
    with pytest.raises(InputError, match="loss must be a function"):
        metrics.train_grad_norm(model, x, y, "mse")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch_size must be"):
        metrics.train_grad_norm(model, x, y, F.cross_entropy, batch_size=0)
    with pytest.raises(InputError, match="unknown measures"):
        metrics.gradient_measures(model, x, y, F.cross_entropy, measures=["gradient"])


# -- promises of all of them --------------------------------------------------------------------------------------------


def everything(model: nn.Module, kind: type) -> dict[str, metrics.Measure]:
    x = data(kind, 6)
    return {
        **metrics.activation_measures(model, x),
        **metrics.gradient_measures(model, x, labels(kind, 6), entropy_loss),
        "weight_norm": metrics.weight_norm(model),
    }


@pytest.mark.parametrize("kind", [Residual, GPT])
def test_the_model_comes_back_as_it_was(kind: type) -> None:
    model = made(kind).train()
    next(model.children()).eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    handle = model.register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    flags, rng = [m.training for m in model.modules()], torch.get_rng_state()
    ids = [id(t) for t in (*model.parameters(), *model.buffers())]
    first, second = everything(model, kind), everything(model, kind)
    assert first == second  # to the bit
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), rng)
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == ids
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(bool((p.grad == 0.5).all()) and p.requires_grad for p in model.parameters())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert hooks == [1] + [0] * (len(hooks) - 1)
    handle.remove()


def test_a_failure_leaves_no_hooks_and_eval_flags() -> None:
    model = made(PlainCNN).train()
    for call in (metrics.dormant_ratio, metrics.effective_rank):
        with pytest.raises(RuntimeError):
            call(model, torch.randn(2, 3, 30, 30))
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_one_forward_pass_serves_all() -> None:
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
    assert {n: m.definition for n, m in found.items()} == {n: m.definition for n, m in single.items()}
    with pytest.raises(InputError, match="unknown measures"):
        metrics.activation_measures(model, x, measures=["rank"])


def test_inputs_that_cannot_be_measured() -> None:
    model = made(PlainCNN)
    for call in (metrics.dormant_ratio, metrics.effective_rank, metrics.feature_rank):
        with pytest.raises(InputError, match="empty"):
            call(model, torch.empty(0, 3, 9, 9))
        with pytest.raises(InputError, match="no batches"):
            call(model, iter([]))
        with pytest.raises(InputError, match="x must be"):
            call(model, 3)
        with pytest.raises(ModelError, match="no parameters"):
            call(nn.ReLU(), torch.ones(2))
    diverged = made(PlainCNN)
    diverged.hidden.bias.data[0] = math.inf
    with pytest.raises(NonFiniteError, match=r"act \(relu\) are not finite"):
        metrics.dormant_ratio(diverged, data(PlainCNN))
    with pytest.raises(NonFiniteError, match="go into head"):
        metrics.effective_rank(diverged, data(PlainCNN))
    for options in ({"threshold": -1.0}, {"threshold": math.nan}, {"units": "tanh"}):
        with pytest.raises(InputError, match=next(iter(options))):
            metrics.dormant_ratio(model, data(PlainCNN), **options)
    with pytest.raises(InputError, match=r"delta must be a finite number in \(0, 1\)"):
        metrics.effective_rank(model, data(PlainCNN), delta=1.0)
    with pytest.raises(InputError, match="epsilon must be a finite number positive"):
        metrics.feature_rank(model, data(PlainCNN), epsilon=0.0)
    with pytest.raises(InputError, match="kind must be"):
        metrics.effective_rank(model, data(PlainCNN), kind="stable")


def test_records_name_their_definition() -> None:
    found = everything(made(Residual), Residual)
    assert len({m.definition for m in found.values()}) == len(found)
    for measure in found.values():
        record = json.loads(json.dumps(measure.to_dict(layers=True), allow_nan=False))
        assert record["value"] == float(measure) and record["definition"] == measure.definition
        for again in (pickle.loads(pickle.dumps(measure)), copy.deepcopy(measure)):
            assert again == measure and again.to_dict(layers=True) == measure.to_dict(layers=True)
    assert fastlr.metrics is metrics
