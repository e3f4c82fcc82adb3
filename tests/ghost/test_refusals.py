"""What a model raises becomes an error that names inputs, reason and remedy.

The model's own exception is its cause.
"""

import pytest
import torch
from expected import failing, refused
from pytest import mark
from torch import nn
from torch.utils.data import Dataset

import fastlr
from fastlr.errors import ModelError
from fastlr.inputs import NoiseImages, ShapeImages, TensorInputs, TokenInputs


class Labelled(Dataset):
    """Items of (image, label)."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.randn(3, 8, 8), i % 3


class TakesX(nn.Module):
    """A linear layer whose input goes by another name than tokens do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x)


def folded():
    """A model that is measured with convolution and batch norm as one node."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    ).eval()


def made_in_inference_mode():
    with torch.inference_mode():
        return folded()


TOKENS = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(20, 3))
X = torch.zeros(8, 6)
CASES = {
    "size": (
        folded,
        ShapeImages((3, 9, 9)),
        r"input float32\[2, 3, 9, 9\].*cannot be multiplied.*size that it was built",
    ),
    "channels": (folded, NoiseImages((1, 8, 8)), r"float32\[2, 1, 8, 8\].*3 channels"),
    "too small": (folded, ShapeImages((3, 2, 2)), r"float32\[2, 3, 2, 2\].*Kernel size"),
    "bytes": (
        folded,
        TensorInputs(torch.zeros(8, 3, 8, 8).byte()),
        r"uint8\[2, .*are uint8, the model is float32.*255",
    ),
    "integers": (
        TakesX,
        TensorInputs(X.long()),
        r"int64\[2, 6\].*are int64, the model is float32: convert one",
    ),
    "complex": (
        TakesX,
        TensorInputs(X.cfloat()),
        r"complex64\[2, 6\].*are complex64, the model is float32: convert",
    ),
    "half": (lambda: TakesX().half(), TensorInputs((X.long(),)), "are int64, the model is float16"),
    "labels": (folded, TensorInputs(Labelled()), r"\(float32\[2, 3, 8, 8\], int64\[2\]\).*item=0"),
    "names": (TakesX, TokenInputs(10, 6), r"input_ids=int64\[2, 6\].*takes \(x\).*TensorInputs"),
    "images for tokens": (lambda: TOKENS, ShapeImages((3, 8, 8)), "takes integers.*TokenInputs"),
    "vocabulary": (
        lambda: TOKENS,
        TensorInputs(torch.full((8, 5), 10)),
        r"int64\[2, 5\].*\[10\].*vocab_size",
    ),
    "inference mode": (
        made_in_inference_mode,
        ShapeImages((3, 8, 8)),
        "outside of torch.inference_mode",
    ),
}


@mark.parametrize("options", [{}, {"batch_size": 2}, {"probe": "batch", "batch_size": 2}], ids=str)
@mark.parametrize("name", CASES)
def test_refusals(name, options):
    make, inputs, match = CASES[name]
    with refused(match) as caught:
        fastlr.estimate(make(), inputs, 8, **options)
    assert caught.value.__cause__ is not None
    assert not isinstance(caught.value.__cause__, fastlr.errors.FastlrError)


@mark.parametrize(
    "measure", [fastlr.support_report, lambda m, x: fastlr.per_sample_grad_sq_norms(m, x, X)]
)
def test_refusals_of_the_engine(measure):
    with refused(r"float32\[2, 3, 9, 9\].*cannot be multiplied"):
        measure(folded(), torch.randn(2, 3, 9, 9))


AXES = "='0' is no number of an axis: give an integer, such as 0"
FUNCTION = "must be a tensor of the output's shape, or a function of the output that returns one"


@mark.parametrize(
    ("measure", "words"),
    [
        (lambda m: fastlr.estimate(m, TensorInputs(X), 8, in_dim="0"), f"in_dim{AXES}"),
        (lambda m: fastlr.estimate(m, TensorInputs(X), 8, out_dim="0"), f"out_dim{AXES}"),
        (lambda m: fastlr.estimate(m, TensorInputs(X), 8, in_dim=None), "in_dim=None is no"),
        (lambda m: fastlr.support_report(m, X, in_dim="0"), f"in_dim{AXES}"),
        (lambda m: fastlr.per_sample_grad_sq_norms(m, X, 1.0), f"{FUNCTION}, not a float"),
        (lambda m: fastlr.per_sample_grad_sq_norms(m, X, [X]), f"{FUNCTION}, not a list"),
        (
            lambda m: fastlr.per_sample_grad_sq_norms(m, X, lambda z: None),
            f"{FUNCTION}: it returned None",
        ),
        (
            lambda m: fastlr.per_sample_grad_sq_norms(m, X, lambda z: [z, 1.0]),
            f"{FUNCTION}: it gave a float",
        ),
    ],
)
def test_arguments_of_a_wrong_type(measure, words):
    with refused(words):
        measure(TakesX())


@mark.parametrize("probe", ["rademacher", "batch"])
@mark.parametrize(
    ("change", "words"),
    [
        (lambda z: z.repeat(2, 1), "returned 16 rows for 8 inputs on axis 0: return one for each"),
        (lambda z: z.mean(0, keepdim=True), "returned 1 row for 8 inputs .* or pass out_dim="),
    ],
)
def test_a_model_that_returns_another_number_of_rows(change, words, probe):
    class Changed(TakesX):
        def forward(self, x):
            return change(super().forward(x))

    words = words.replace("16", "4").replace(" 8 ", " 2 ") if probe == "batch" else words
    with refused(words):
        fastlr.estimate(Changed(), TensorInputs(X), 8, probe=probe, batch_size=8)


@mark.parametrize("error", [torch.OutOfMemoryError("none left"), KeyboardInterrupt()], ids=str)
def test_what_is_no_refusal_stays(error):
    model = TakesX()
    model.linear.forward = failing(error)
    with pytest.raises(type(error)) as caught:
        fastlr.per_sample_grad_sq_norms(model, X, torch.ones(8, 3))
    assert caught.value is error


def test_what_fails_beside_the_model_stays():
    def fail(output):
        raise RuntimeError("a mistake of the caller's")

    with refused("of the caller's", RuntimeError):
        fastlr.per_sample_grad_sq_norms(TakesX(), X, fail)


def test_inputs_that_fail_after_others_went_well():
    """What an earlier call had replaced (here a recurrent layer) is no reason to try for ever."""

    calls = []  # not in the model, whose attributes are put back

    class Counted(nn.LSTM):
        def forward(self, x):
            calls.append(1)
            if len(calls) > 200:
                pytest.fail("called again and again")
            if x.shape[-1] != 3:
                raise ValueError("three features are wanted")
            return super().forward(x)[0]

    model = Counted(3, 2, batch_first=True)
    fastlr.per_sample_grad_sq_norms(model, torch.randn(3, 4, 3), torch.ones(3, 4, 2))
    model.eval()
    with refused("three features", ModelError):
        fastlr.per_sample_grad_sq_norms(model, torch.randn(3, 4, 5), torch.ones(3, 4, 2))


class NotUnderAutocast(nn.Linear):
    """Fails under autocast, as torch's LSTM does in bfloat16 on processors without AVX-512."""

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive\nfor the LSTM")
        return super().forward(x)


def test_a_precision_that_torch_lacks_is_named():
    model, inputs = NotUnderAutocast(3, 2), fastlr.TensorInputs(torch.randn(6, 3))
    assert fastlr.estimate(model, inputs, n=6).value > 0
    wanted = r"not in bfloat16 on this device \(could not create a primitive\): leave dtype out"
    with pytest.raises(fastlr.InputError, match=wanted):
        fastlr.estimate(model, inputs, n=6, dtype="bf16")
    with pytest.raises(fastlr.InputError, match=wanted):
        fastlr.estimate(model, inputs, n=6, dtype="bf16", batch_size=3)
    with pytest.raises(fastlr.InputError, match=wanted), torch.autocast("cpu", torch.bfloat16):
        fastlr.per_sample_grad_sq_norms(model, torch.randn(6, 3), torch.randn(6, 2))


def test_the_hooks_of_opacus_are_named():
    opacus = pytest.importorskip("opacus")
    plain = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    model = opacus.GradSampleModule(plain)
    for held in (model, plain):
        with refused(r"Opacus' GradSampleModule .*: call its disable_hooks\(\) b", ModelError):
            fastlr.estimate(held, TensorInputs(X), 8)
    model.disable_hooks()
    x = TensorInputs(torch.randn(8, 6))
    within = fastlr.estimate(model, x)
    model.to_standard_module()
    assert within.value == pytest.approx(fastlr.estimate(plain, x).value, rel=1e-6)


class Bag(nn.Module):
    """Words of a sample are a part of all ids, from its offset on."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 6, padding_idx=0)
        self.head = nn.Linear(6, 3)

    def forward(self, ids, offsets=None):
        return self.head(self.bag(ids, offsets))


def test_flat_ids_of_bags_are_named():
    ids, offsets = torch.randint(1, 20, (40,)), torch.arange(0, 40, 5)
    remedy = r"flat ids with offsets .*: give ids \[B, L\], padded with its padding_idx"
    with refused(f"different numbers of samples .*{remedy}"):
        TensorInputs((ids, offsets))
    with refused(f"fails on parts of the 8 samples .*{remedy}"):
        fastlr.per_sample_grad_sq_norms(Bag(), (ids, offsets), torch.randn(8, 3))
    padded = TensorInputs(nn.functional.pad(ids.view(8, 5), (0, 2)))
    assert fastlr.estimate(Bag(), padded).n == 8


def test_batch_norm_without_running_statistics_is_named():
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)
    model, x = nn.Sequential(*layers), TensorInputs(torch.randn(8, 6))
    remedy = "no running statistics: train it with track_running_stats=True, or use nn.GroupNorm"
    with refused(rf"module 1 \(BatchNorm1d\), which has {remedy}", fastlr.InteractionError):
        fastlr.estimate(model, x)
    with refused(f"more than 1 value per channel .*{remedy}"):
        fastlr.estimate(model, x, batch_size=1)


@mark.parametrize(
    "layer", [nn.LSTM(6, 3), nn.MultiheadAttention(6, 2), nn.TransformerEncoderLayer(6, 2, 8)]
)
def test_layers_that_take_time_first_are_named(layer):
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = layer.eval(), nn.LazyLinear(3)
            self(torch.randn(2, 4, 6))

        def forward(self, x):
            z = self.layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else self.layer(x)
            return self.head((z if isinstance(z, torch.Tensor) else z[0]).mean(1))

    with refused(r"module layer.* has batch_first=False", fastlr.InteractionError):
        fastlr.estimate(TimeFirst(), TensorInputs(torch.randn(8, 4, 6)))


class HalfCentred(TakesX):
    def forward(self, x):
        z = super().forward(x)
        return z - 0.5 * z.mean(0)


def test_a_model_that_mixes_samples_by_nature_is_measured_on_single_ones():
    model, x = HalfCentred(), TensorInputs(torch.randn(8, 6))
    with refused(r"samples interact.*one sample at a time.*batch_size=1", fastlr.InteractionError):
        fastlr.estimate(model, x)
    halved = TakesX()  # as the model is for a single sample, its own mean
    halved.linear.load_state_dict({k: v / 2 for k, v in model.linear.state_dict().items()})
    alone, truth = (fastlr.estimate(m, x, batch_size=1).value for m in (model, halved))
    assert alone == pytest.approx(truth / 4, rel=1e-5)


def test_packed_sequences_are_named():
    x, lengths = torch.randn(4, 5, 6), torch.tensor([5, 4, 2, 1])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    remedy = "padded sequences and their lengths .* pack them in the model's forward"
    for inputs in (packed, (packed, lengths), {"x": packed}):
        with refused(remedy):
            TensorInputs(inputs)
        with refused(remedy):
            fastlr.per_sample_grad_sq_norms(TakesX(), inputs, torch.randn(4, 3))


def test_adapter_names_are_named():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **sizes)
    model = transformers.BertForSequenceClassification(config)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
    batch = {"input_ids": torch.randint(9, (4, 5)), "adapter_names": ["default"] * 4}
    remedy = r"measure the samples of each adapter apart, after model.set_adapter\(name\)"
    with refused(remedy):
        fastlr.estimate(model, TensorInputs(batch))
    with refused(remedy):
        fastlr.per_sample_grad_sq_norms(model, batch, torch.randn(4, 2))


def of_tensors(seed):
    return TensorInputs(X, seed=seed)


@mark.parametrize("make", [ShapeImages, of_tensors, lambda seed: TokenInputs(5, 3, seed=seed)])
def test_inputs_have_no_seed(make):
    with refused("has no seed, .*: pass seed= to fastlr.estimate"):
        make(seed=1)


@mark.parametrize(
    ("spoil", "where"),
    [
        (lambda m: m[2].weight.data[0].fill_(torch.nan), r"2 \(Linear\), whose weight is not"),
        (lambda m: m[2].weight.data.fill_(3e38), r"2 \(Linear\)$"),
        (lambda m: m[0][0].bias.data.fill_(torch.inf), r"0.0 \(Linear\), whose bias is not"),
        (lambda m: m[0][0].weight.data.fill_(-torch.inf), r"0.0 \(Linear\)"),
    ],
)
def test_the_first_module_that_is_not_finite_is_named(spoil, where):
    layers = nn.Sequential(nn.Linear(6, 4), nn.Identity()), nn.Softplus(), nn.Linear(4, 3)
    model = nn.Sequential(*layers)
    spoil(model)
    for _ in range(2):
        with refused(f"not a number, first in module {where}", fastlr.NonFiniteError):
            fastlr.estimate(model, TensorInputs(torch.randn(8, 6)))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_parameter_that_is_not_finite_is_named_beside_a_gradient():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Flatten(), nn.Linear(24, 3)).eval()
    x = torch.randn(4, 4, 6)
    layer.self_attn.in_proj_weight.data[0, 0] = torch.nan
    with refused(r"self_attn\.in_proj_weight is not finite", fastlr.NonFiniteError):
        fastlr.per_sample_grad_sq_norms(model, x, torch.randn(4, 3))
