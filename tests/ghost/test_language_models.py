"""Hugging Face language models: each sequence alone in float64, padding, large vocabularies.

Padding is left out of the estimates.
"""

import math

import torch
from exact import redundancy, seeded
from expected import refused
from pytest import approx, importorskip, mark, param
from torch import nn
from torch.testing import assert_close
from zoo_registry import randomise

import fastlr
from bench.paired import peak_bytes, resident
from fastlr import ops
from fastlr.estimator.padding import padding_mask
from fastlr.estimator.predictive import Bernoulli, Categorical, Gaussian
from fastlr.ops import fisher as torch_predictive
from fastlr.ops import linear as torch_ops
from fastlr.ops.deferred_checks import gathered

V, N, T = 37, 5, 9
LENGTHS = [9, 6, 4, 9, 2]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ROTARY = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", ROTARY),
    "llama_tied": ("LlamaForCausalLM", {**ROTARY, "tie_word_embeddings": True}),
    "bert": ("BertForMaskedLM", {**SIZES, "max_position_embeddings": 16}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
    ),
}
MORE = {
    "roberta": ("RobertaForMaskedLM", {**SIZES, "max_position_embeddings": 20}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24},
    ),
    "modernbert": ("ModernBertForMaskedLM", {**SIZES, "cls_token_id": None, "sep_token_id": None}),
    "deberta": (
        "DebertaV2ForMaskedLM",
        {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "albert": ("AlbertForMaskedLM", {**SIZES, "embedding_size": 8}),
    "qwen2_tied": ("Qwen2ForCausalLM", {**ROTARY, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", {**ROTARY, "head_dim": 8}),
    "opt": (
        "OPTForCausalLM",
        {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "neox": ("GPTNeoXForCausalLM", SIZES),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 1, "n_head": 2}),
    "mamba": (
        "MambaForCausalLM",
        {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "time_step_rank": 4},
    ),
}
PARTS_IN_FLOAT32 = ("bloom", "gemma2", "mamba")  # whatever the model's dtype
NAMES = [*MODELS, *(param(name, marks=mark.long) for name in MORE)]


def build(name):
    transformers = importorskip("transformers")
    kind, options = (MODELS | MORE)[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    special = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }
    return randomise(cls(cls.config_class(vocab_size=V, **{**special, **options})).eval()).double()


def text(name, padded):
    """Token ids as a tokenizer gives them."""
    x = {"input_ids": torch.randint(3, V, (N, T), generator=seeded(1))}
    mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
    if padded:
        x["attention_mask"] = mask
    if name == "t5":
        x["decoder_input_ids"] = x["input_ids"].flip(1)
        if padded:
            x["decoder_attention_mask"] = mask
    return x


def measure(model, x, **options):
    options = {"predictive": Categorical()} | options
    return fastlr.estimate(model, fastlr.TensorInputs(x), N, **options)


@mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@mark.parametrize("name", NAMES)
@mark.filterwarnings("error::fastlr.FastlrWarning")  # nothing by a slow loop
def test_every_sequence_as_if_alone(name, padded):
    model, x = build(name), text(name, padded)
    got = measure(model, x, batch_size=N)
    with torch.no_grad():
        z = model(**x).logits
    counted = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    v = Categorical(mask=counted if padded else None).cotangent(z, "rademacher", range(N), 0)
    truth = []
    for i in range(N):
        length = LENGTHS[i] if padded else T
        alone = model(
            **{key: t[i : i + 1, :length] for key, t in x.items() if "mask" not in key}
        ).logits
        grads = torch.autograd.grad(
            (alone * v[i, :length]).sum(), list(model.parameters()), allow_unused=True
        )
        truth.append(sum(float(g.square().sum()) for g in grads if g is not None))
    close = 1e-7 if name in PARTS_IN_FLOAT32 else 1e-12
    assert_close(got.per_sample, torch.tensor(truth, dtype=torch.float64), rtol=close, atol=0)
    assert got.predictive == "Categorical(dim=-1)" + " without padding" * padded
    assert "loop" not in got.routes.values()


def test_what_stands_at_the_padding_does_not_matter():
    model, x = build("bert"), text("bert", True)
    other = {**x, "input_ids": torch.where(x["attention_mask"] == 1, x["input_ids"], 2)}
    a, b = (measure(model, each, batch_size=size) for each, size in ((x, 5), (other, 2)))
    assert_close(a.per_sample, b.per_sample, rtol=1e-12, atol=0)
    full = measure(model, {**x, "attention_mask": torch.ones_like(x["attention_mask"])})
    assert full.value > 1.1 * a.value
    small = Tokens()
    for probe in ("sampled", "exact", "batch"):
        ids = ({**each, "input_ids": each["input_ids"] % 11} for each in (x, other))
        c, d = (measure(small, each, probe=probe, batch_size=5) for each in ids)
        assert_close(c.per_sample, d.per_sample, rtol=1e-12, atol=0)


def test_exact_probe_is_the_label_expectation_over_the_counted_positions():
    model, x = Tokens(), text("gpt2", True)
    x["input_ids"] %= 11
    got = measure(model, x, probe="exact").per_sample
    for i in range(N):
        z = model(x["input_ids"][i : i + 1, : LENGTHS[i]])[0]
        total = float(sum(redundancy(model, logits) for logits in z))
        assert float(got[i]) == approx(total, rel=1e-10)


def test_masked_positions_of_a_masked_language_model():
    """A mask of one's own, as for [MASK] positions, goes together with the padding."""
    model, x = build("bert"), text("bert", True)
    chosen = torch.rand(N, T, generator=seeded(3)) < 0.5
    both = chosen & (x["attention_mask"] == 1)
    a = measure(model, x, predictive=Categorical(mask=chosen))
    b = measure(model, x, predictive=Categorical(mask=both))
    assert torch.equal(a.per_sample, b.per_sample)
    assert a.value < measure(model, x).value


class Tokens(nn.Module):
    """A small model of tokens with tied embeddings; ``extra`` positions more than tokens."""

    def __init__(self, vocabulary=11, width=4, extra=0):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocabulary, width).double()
        self.extra = extra

    def forward(self, input_ids, attention_mask=None):
        h = self.table(input_ids).cumsum(1)
        return torch.cat([h, h[:, : self.extra]], 1) @ self.table.weight.T


def test_padding_that_cannot_be_left_out_is_refused():
    x = text("gpt2", True)
    x["input_ids"] %= 11
    with refused(r"attention_mask \(5, 9\) has padding, but the output \(5, 11, 11\)"):
        measure(Tokens(extra=2), x)
    for predictive in (Bernoulli(), Gaussian()):
        with refused("padding"):
            measure(Tokens(), x, predictive=predictive)
    whole = {**x, "attention_mask": torch.ones(N, T, dtype=torch.long)}
    assert measure(Tokens(extra=2), whole).n == N
    assert measure(Tokens(), whole, predictive=Gaussian()).n == N
    with refused("x has padding"):
        fastlr.metrics.feature_rank(Tokens(), x)


@mark.parametrize("probe", ["rademacher", "sampled"])
@mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_change_no_bit(monkeypatch, probe, dtype):
    """Cotangents in blocks are bit for bit the whole ones, for samples of very different size.

    Blocks end between samples, between positions and in mid-word of the random signs.
    """
    z = (torch.randn(3, 7, 11, generator=seeded(0)) * 3).to(dtype)
    z[1] *= 30  # confident: a tiny cotangent
    z[2, 3:] = 0
    z[2, 3:, 0] = 200
    counted = torch.rand(3, 7, generator=seeded(1)) < 0.7
    options = {"index": range(5, 8), "seed": 9, "counted": counted}
    whole = Categorical().cotangent(z, probe, **options)
    v, exponent = Categorical().scaled_cotangent(z, probe, **options)
    monkeypatch.setitem(torch_predictive.BLOCK, "cpu", 30)  # two positions of a sample
    assert torch.equal(Categorical().cotangent(z, probe, **options), whole)
    again, same = Categorical().scaled_cotangent(z, probe, **options)
    assert torch.equal(v, again)
    assert torch.equal(exponent, same)
    assert v.dtype == dtype
    assert v.shape == z.shape
    assert (
        (0.5 <= v.double().abs().flatten(1).amax(1)) & (v.double().abs().flatten(1).amax(1) <= 1)
    ).all()
    back = torch.ldexp(v.double(), exponent.view(-1, 1, 1))
    close = {torch.float64: 0, torch.float32: 6e-8, torch.bfloat16: 4e-3}[dtype]
    # Below that float32 has nothing.
    assert_close(back, whole, rtol=close, atol=1e-38)
    zero, none = Categorical(mask=torch.zeros(7, dtype=torch.bool)).scaled_cotangent(
        z, probe, range(3), 0
    )
    assert not zero.any()
    assert not none.any()


def test_large_vocabulary_holds_little_more_than_the_logits():
    """The logits and their gradient, each 16 MB; float64 copies of them would be 32 MB each."""
    vocabulary, length, count = 20011, 50, 4
    meter = fastlr.LocalRedundancy(
        Tokens(vocabulary, 8).float(),
        fastlr.TokenInputs(vocabulary, length),
        count,
        predictive=Categorical(),
        batch_size=count,
    )
    first = meter.measure()
    results = []
    peak = peak_bytes(lambda: results.append(meter.measure()), torch.device("cpu"), resident())
    second = results[0]
    assert peak < 3.5 * vocabulary * length * count * 4
    assert torch.equal(first.per_sample, second.per_sample)
    assert math.isfinite(second.value)


def test_norms_under_autocast_are_not_rounded_by_it(monkeypatch):
    """Autocast chooses the precision of the model, not that of the norms' own products."""
    seen = []
    rule = torch_ops.linear_sq_norms

    def checked(a, g):
        got = rule(a, g)
        with torch.autocast("cpu", enabled=False):
            truth = (g.double().mT @ a.double()).square().sum((1, 2, 3))
        seen.extend((a.dtype, error) for error in ((got - truth).abs() / truth).tolist())
        return got

    monkeypatch.setattr(torch_ops, "linear_sq_norms", checked)
    ops.get.cache_clear()
    try:
        measure(build("gpt2").float(), text("gpt2", False), dtype=torch.bfloat16)
    finally:
        ops.get.cache_clear()
    low = [error for dtype, error in seen if dtype == torch.bfloat16]
    assert len(low) >= 8 * N
    assert max(low) < 2e-5


def test_padding_that_cannot_be_left_out_is_seen_while_a_graph_is_captured():
    """No check may wait then: it becomes a flag, and the chunk is done again with the error."""
    x = {"attention_mask": torch.tensor([[1, 1, 0]])}
    output = torch.zeros(1, 2, 5)
    with gathered() as flags:
        assert padding_mask(x, output, 0) is None
        Gaussian().cotangent(
            output, "rademacher", range(1), 0, counted=torch.tensor([[True, False]])
        )
    assert sum(bool(flag) for flag in flags) == 2
