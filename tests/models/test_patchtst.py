"""PatchTST: its size, equality with Hugging Face's, and right per-sample gradient norms."""

import torch
from exact import seeded
from expected import refused
from pytest import approx, mark
from single_samples import Written, truth
from torch.testing import assert_close
from transformers import PatchTSTConfig, PatchTSTForPrediction

import fastlr
from fastlr.models import load_model
from fastlr.models.patchtst import PatchTST, hugging_face

# Odd on purpose: context - patch is no multiple of stride, three channels, five windows.
SMALL = dict(
    channels=3, context=50, horizon=6, patch=8, stride=5, layers=2, width=12, heads=3, ffn=20
)


def randomised(model, seed=0, scale=0.3):
    """Move every parameter and running statistic off its initial value: no omission hides then."""
    generator = seeded(seed)
    for name, t in model.state_dict().items():
        if name.endswith("running_var"):
            t.uniform_(0.5, 2, generator=generator)
        elif t.is_floating_point() and "position" not in name:
            t.normal_(0.3 if "norm" in name else 0.0, scale, generator=generator)
    return model


def series(n, context=50, channels=3, dtype=torch.float64):
    return torch.randn(n, context, channels, generator=seeded(1), dtype=dtype).cumsum(1)


def size(model, frozen=True):
    """The number of parameters, frozen ones too unless told otherwise."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or frozen)


def test_the_parameters_are_those_of_the_docstring():
    model = PatchTST()
    counts = {name: size(part) for name, part in model.named_children()}
    assert counts == {"embedding": 4352, "dropout": 0, "layers": 4 * 527104, "head": 24672}
    assert sum(counts.values()) == 2137440
    assert model.position.shape == (63, 256)
    theirs = hugging_face()
    assert size(PatchTST(learned_positions=True)) == 2153568 == size(theirs)
    assert size(theirs, frozen=False) == 2137440


def counted(**settings):
    """Count Hugging Face's model of the paper's sizes: trainable parameters, all, with buffers."""
    config = {**hugging_face().config.to_dict(), **settings}
    with torch.device("meta"):
        model = PatchTSTForPrediction(PatchTSTConfig(**config))
    whole = size(model)
    return size(model, frozen=False), whole, whole + sum(b.numel() for b in model.buffers())


# Settings of Hugging Face's model, its trainable parameters, and those with the table of positions.
SIZES = [
    ({}, 2137440, 2153568),
    ({"positional_encoding_type": "random"}, 2153568, 2153568),
    ({"use_cls_token": True}, 2137696, 2154080),
    ({"norm_type": "layernorm"}, 2137440, 2153568),
    ({"bias": False}, 2134368, 2150496),
    ({"share_embedding": False}, 2163552, 2179680),
    ({"share_projection": False}, 2285472, 2301600),
    ({"share_embedding": False, "share_projection": False}, 2311584, 2327712),
    ({"loss": "nll", "distribution_output": "normal"}, 2162112, 2178240),
    ({"loss": "nll"}, 2186784, 2202912),
    ({"channel_attention": True}, 2139488, 2155616),
    ({"pooling_type": None}, 3661152, 3677280),  # the head of Nie et al.
]


@mark.parametrize("settings, trainable, whole", SIZES)
def test_no_setting_gives_the_papers_size(settings, trainable, whole):
    found = counted(**settings)
    assert found[:2] == (trainable, whole)
    assert all(round(size / 1e6, 2) != 2.26 for size in found)


HERE = {  # parts of names in Hugging Face's state dict: what they are here
    "model.encoder.": "",
    "positional_encoder.position_enc": "position",
    "embedder.input_embedding": "embedding",
    "head.projection": "head",
    "self_attn.out_proj": "mix",
    "norm_sublayer1.batchnorm": "norm1",
    "norm_sublayer3.batchnorm": "norm2",
    "ff.0": "expand",
    "ff.3": "contract",
}


def copied(theirs, **settings):
    """A PatchTST of the small sizes with the parameters and statistics of Hugging Face's."""
    ours, state = PatchTST(**SMALL, **settings), {}
    for name, value in theirs.state_dict().items():
        for there, here in HERE.items():
            name = name.replace(there, here)
        state[name] = value
    for name in {name for name in ours.state_dict() if "qkv" in name}:
        parts = [name.replace("qkv", f"self_attn.{part}_proj") for part in "qkv"]
        state[name] = torch.cat([state.pop(part) for part in parts])
    ours.load_state_dict(state)
    return ours.double().train(theirs.training)


@mark.parametrize("training", [False, True])
@mark.parametrize("positions", ["sincos", "random"])
def test_it_is_hugging_faces_function(training, positions):
    theirs = hugging_face(**SMALL, dropout=0.0)
    if positions == "random":
        theirs = type(theirs)(
            type(theirs.config)(**{**theirs.config.to_dict(), "positional_encoding_type": "random"})
        )
    theirs = randomised(theirs).double().train(training)
    ours = copied(theirs, dropout=0.0, learned_positions=positions == "random")
    x = series(5)
    assert_close(ours(x), theirs(past_values=x).prediction_outputs, rtol=1e-12, atol=1e-12)
    for mine, their in (
        ("norm1", "norm_sublayer1"),
        ("norm2", "norm_sublayer3"),
    ):  # after a step in training
        for i, layer in enumerate(theirs.model.encoder.layers):
            statistics = getattr(layer, their).batchnorm
            assert_close(getattr(ours.layers[i], mine).running_var, statistics.running_var)


def test_both_draw_their_weights_alike():
    torch.manual_seed(0)
    for model in (PatchTST(), hugging_face()):
        weights = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
        assert all(0.019 < float(p.detach().std()) < 0.021 for p in weights)
        assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert_close(
        PatchTST().position, hugging_face().model.encoder.positional_encoder.position_enc.detach()
    )


@mark.parametrize("make", [PatchTST, hugging_face])
def test_local_redundancy_is_that_of_one_window_at_a_time(make):
    """Channels folded into the batch, seven sequences a window, do not count as seven samples."""
    model = randomised(make(**SMALL)).eval()
    n, sigma = 6, 0.5
    inputs = fastlr.GaussianSeries(length=50, features=3)
    predictive = fastlr.Gaussian(sigma=sigma)
    found = fastlr.estimate(model, inputs, n=n, predictive=predictive, seed=4)

    def forecast(m, x):
        out = m.model(x)
        return out if make is PatchTST else out.prediction_outputs

    double = Written(forecast, model=randomised(make(**SMALL))).eval().double()
    x = inputs.batch(0, n, seed=4, dtype=torch.float64, device="cpu")
    exact = truth(double, (x,), predictive.cotangent(double(x), "rademacher", range(n), 4))
    assert_close(found.per_sample, exact, rtol=1e-4, atol=0)
    assert "fallback" not in found.routes.values()
    low = fastlr.estimate(model, inputs, n=n, predictive=predictive, seed=4, dtype=torch.bfloat16)
    assert low.value == approx(found.value, rel=2e-2)


def test_dormant_units_are_those_of_the_feed_forward_parts():
    model = PatchTST(**SMALL)
    with torch.no_grad():
        model.layers[1].expand.weight[:4] = 0
        model.layers[1].expand.bias[:4] = -9.0
    ratio = fastlr.metrics.dormant_ratio(model, series(8, dtype=torch.float32), threshold=0.0)
    assert ratio.details["units"] == 2 * SMALL["ffn"]
    ratio = fastlr.metrics.dormant_ratio(
        model, series(8, dtype=torch.float32), threshold=1e-9, normalize=False
    )
    assert ratio.details["dormant"] == 4


@mark.parametrize(
    ("change", "message"),
    [
        ({"width": 12, "heads": 5}, "width=12: give an even multiple of heads=5"),
        ({"context": 8}, "no longer than a patch"),
        ({"layers": 0}, "layers=0"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    with refused(message):
        PatchTST(**{**SMALL, **change})


def test_what_it_cannot_take():
    with refused("is made for .B, 50, 3."):
        PatchTST(**SMALL)(torch.zeros(2, 3, 50))
    with refused("has no depth: choose from channels, "):
        hugging_face(depth=3)
    made = load_model("fastlr.models.patchtst:PatchTST", kwargs=SMALL)
    assert isinstance(made, PatchTST)
    assert made.horizon == 6
