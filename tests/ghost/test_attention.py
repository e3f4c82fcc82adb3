"""Self-attention of nn.MultiheadAttention runs without torch's copies and gives right norms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import seeded
from expected import refused
from folding import check
from single_samples import Written
from torch import Tensor, nn

import fastlr
from fastlr.ghost.fusion import mode as fuse

Call = Callable[[nn.MultiheadAttention, Tensor], Any]


def attending(call, width=8, **options):
    """One attention between two linear layers; how it is made and called is the test's."""

    def forward(m, x):
        out = call(m.attention, m.before(x).tanh())
        return m.after((out[0] if isinstance(out, tuple) else out).tanh()).flatten(1)

    return Written(
        forward,
        before=nn.Linear(6, width),
        after=nn.Linear(width, 3),
        attention=nn.MultiheadAttention(width, 2, **{"batch_first": True} | options),
    )


def itself(attention, h):
    return attention(h, h, h, need_weights=False)


def sequence_first(attention, h):
    return itself(attention, h.transpose(0, 1).contiguous())[0].transpose(0, 1)


def masked(attention, h):
    mask = torch.ones(h.shape[1], h.shape[1]).triu(1).bool()
    return attention(h, h, h, need_weights=False, attn_mask=mask)


def padded(attention, h):
    absent = torch.arange(h.shape[1]).expand(len(h), -1) > 3
    return attention(h, h, h, need_weights=False, key_padding_mask=absent)


def causal(attention, h):
    mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1], dtype=h.dtype)
    return attention(h, h, h, need_weights=False, attn_mask=mask, is_causal=True)


CALLS = {
    "itself": (itself, {}, 1),
    "no_bias": (itself, {"bias": False}, 1),
    "twice": (lambda m, h: itself(m, itself(m, h)[0].relu()), {}, 2),
    "result_changed_in_place": (lambda m, h: itself(m, h)[0].mul_(2), {}, 1),
    "dropout_in_eval_mode": (itself, {"dropout": 0.5}, 1),
    "sequence_first": (sequence_first, {"batch_first": False}, 0),
    "batch_first_by_hand": (
        lambda m, h: itself(m, h.transpose(0, 1))[0].transpose(0, 1),
        {"batch_first": False},
        1,
    ),
    "strided": (lambda m, h: itself(m, torch.stack([h, h], -1)[..., 0]), {}, 0),
    "weights_wanted": (lambda m, h: m(h, h, h), {}, 0),
    "masked": (masked, {}, 0),
    "padded": (padded, {}, 0),
    "causal": (causal, {}, 0),
    "other_keys": (lambda m, h: m(h, h.flip(1), h, need_weights=False), {}, 0),
    "other_values": (lambda m, h: m(h, h, h.flip(1), need_weights=False), {}, 0),
    "own_width_of_keys": (itself, {"kdim": 8, "vdim": 8}, 1),  # torch packs them again
    "key_biases": (itself, {"add_bias_kv": True}, 0),
    "zero_attention": (itself, {"add_zero_attn": True}, 0),
}


def inputs():
    return torch.randn(3, 5, 6, dtype=torch.float64, generator=seeded(1))


@pytest.mark.parametrize("name", CALLS)
def test_norms_are_those_of_the_model(name):
    call, options, replaced = CALLS[name]
    blocks = check(attending(call, **options), 0, inputs())
    assert blocks.replaced["attention"] == replaced


def test_projections_of_other_widths_are_left_to_torch():
    parts = {
        "attention": nn.MultiheadAttention(6, 2, kdim=4, vdim=6, batch_first=True),
        "after": nn.Linear(6, 3),
    }
    crossed = Written(
        lambda m, x: m.after(m.attention(x, x[..., :4], x, need_weights=False)[0]).flatten(1),
        **parts,
    )
    assert check(crossed, 0, inputs()).replaced["attention"] == 0


def test_frozen_and_partly_frozen_projections():
    for frozen in (["in_proj_weight"], ["in_proj_bias"], ["out_proj.weight", "in_proj_bias"]):
        model = attending(itself)
        for name in frozen:
            model.attention.get_parameter(name).requires_grad_(False)
        assert check(model, 0, inputs()).replaced["attention"] == 1


def test_an_encoder_runs_both_its_layers_so_and_says_it():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten())
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=seeded(1))
    assert check(model, 0, x).replaced["attention"] == 2
    assert "2 self-attentions run without torch's copies" in str(fastlr.support_report(model, x))


def test_errors_are_torchs_own():
    model = attending(lambda m, h: itself(m, h[..., :6]), width=8)
    with refused("embedding dimension"):
        fastlr.per_sample_grad_sq_norms(model, inputs().float(), torch.ones(3, 15))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_is_that_of_the_model(dtype):
    torch.manual_seed(0)
    model = attending(itself).eval()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        x = inputs().float()
        got = fuse.Folding().run(dict(model.named_parameters()), lambda: model(x))
        assert got.dtype == dtype
        assert torch.allclose(got, model(x), rtol=1e-5 if dtype == torch.float32 else 1e-2)
