"""Synthetic inputs: known answers, purity in (seed, index), distributions, and errors."""

import hashlib
import json
import math

import numpy as np
import torch
from expected import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx, mark
from torch.utils._pytree import tree_leaves

from fastlr.display.images import tiled
from fastlr.inputs import (
    IMAGENET,
    GaussianInputs,
    GaussianSeries,
    NoiseImages,
    ShapeImages,
    TensorInputs,
    TokenInputs,
)
from fastlr.ops import philox as counter

GENERATORS = {
    "shapes": ShapeImages((3, 12, 9)),
    "shapes-channels-last": ShapeImages((3, 12, 9), channels_last=True),
    "shapes-grey": ShapeImages((1, 5, 6), 2, 1, normalize=(0.5, 0.25)),
    "noise": NoiseImages((3, 5, 7)),
    "noise-normalised": NoiseImages((3, 4, 4), normalize="imagenet"),
    "series": GaussianSeries(33, 3),
    "fitted": GaussianInputs(torch.rand(7, 3, 4, 5)),
    "tokens": TokenInputs(1000, 13),
    "tokens-mask": TokenInputs(2**31 - 1, 5, attention_mask=True),
    "tensor": TensorInputs(torch.arange(60.0).view(20, 3)),
    "tuple": TensorInputs((torch.arange(40).view(2, 20), torch.rand(3, 20)), in_dim=1),
    "dict": TensorInputs(
        {"x": torch.rand(20, 2), "position": torch.arange(4)[None], "use_cache": False}
    ),
    "dataset": TensorInputs(torch.utils.data.TensorDataset(torch.rand(20, 2), torch.arange(20))),
}


def tensors(batch):
    return [leaf for leaf in tree_leaves(batch) if torch.is_tensor(leaf)]


# --- the generator
# --------------------------------------------------------------------------------------------------

# Random123's kat_vectors: philox4x32, 10 rounds: counter, key, answer.
KNOWN = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""


@mark.parametrize("line", KNOWN.split("\n")[1:4], ids=["zeros", "ones", "pi"])
@mark.parametrize("copies", [1, 37])
def test_philox_known_answers(line, copies):
    words = [int(word, 16) for word in line.split()]
    answer = counter.philox4x32(*(torch.full((copies,), word) for word in words[:4]), *words[4:6])
    assert torch.equal(torch.stack(answer, 1), torch.tensor(words[6:]).expand(copies, 4))


def test_words_lay_out_the_counter_as_documented():
    seed = 0x299F31D0A4093822
    index = 0x0370734413198A2E
    stream = 0x85A308D3
    # Block 0x243f6a88 of the third known answer, read from word 1 on.
    words = counter.random_words(seed, torch.tensor([index]), stream, 2, first=4 * 0x043F6A88 + 1)
    block = counter.philox4x32(
        *(torch.tensor(w) for w in (0x043F6A88, stream, 0x13198A2E, 0x03707344)),
        seed & counter.MASK,
        seed >> 32,
    )
    assert words.tolist() == [[int(block[1]), int(block[2])]]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**64 - 5),
    first=st.integers(0, 50),
    count=st.integers(0, 30),
)
def test_words_do_not_depend_on_what_else_is_drawn(seed, start, first, count):
    index = counter.indices(start, start + 4)
    whole = counter.random_words(seed, index, 3, first + count)
    assert torch.equal(whole[:, first:], counter.random_words(seed, index, 3, count, first=first))
    assert torch.equal(whole[2:3], counter.random_words(seed, index[2:3], 3, first + count))
    assert ((whole >= 0) & (whole < 2**32)).all()


@given(bound=st.integers(1, 2**31 - 1), word=st.integers(0, 2**32 - 1))
def test_uniform_integers_are_exact(bound, word):
    assert int(counter.uniform_integers(torch.tensor(word), bound)) == word * bound // 2**32


def test_normal_table():
    table = counter.normal_quantiles()
    exact = table.double()
    assert table.shape == (65536,)
    assert table.dtype == torch.float32
    assert torch.equal(table, -table.flip(0))
    assert (table.diff() > 0).all()
    assert torch.equal((exact * 2**20).round(), exact * 2**20)
    assert abs(exact.square().mean() - 1) < 1e-8
    assert exact.pow(4).mean() == approx(2.9992, abs=1e-4)
    assert exact.max() == approx(4.325, abs=1e-3)
    uniform = (torch.arange(65536, dtype=torch.float64) + 0.5) / 65536
    assert (torch.special.ndtr(exact) - uniform).abs().max() < 5e-6
    digest = hashlib.sha256(
        bytes((exact * 2**20).to(torch.int32).view(torch.uint8).tolist())
    ).hexdigest()
    assert digest == "7e27fb847e5ea7612eaaa0e2dbfd3118a4da8fa3feadbe2ca7dd619cb93e3d36"


# --- all inputs
# --------------------------------------------------------------------------------------------------


@mark.parametrize("name", list(GENERATORS))
def test_chunks_equal_the_whole(name):
    inputs = GENERATORS[name]
    dim = getattr(inputs, "in_dim", 0)
    whole = inputs.batch(0, 11, seed=5)
    parts = [inputs.batch(a, b, seed=5) for a, b in ((0, 1), (1, 4), (4, 10), (10, 11))]
    for i, tensor in enumerate(tensors(whole)):
        if tensor.shape[dim] == 11:
            assert torch.equal(tensor, torch.cat([tensors(part)[i] for part in parts], dim))
        else:
            assert name == "dict"
            assert all(torch.equal(tensor, tensors(part)[i]) for part in parts)
    assert type(whole) is type(parts[0])


def test_a_number_in_a_nest_of_tensors_is_passed_on_whole():
    x, scale = torch.randn(8, 3), torch.tensor(2.0)
    batch = TensorInputs((x, {"scale": scale, "again": [x]})).batch(2, 5)
    assert torch.equal(batch[0], x[2:5]) and torch.equal(batch[1]["again"][0], x[2:5])
    assert torch.equal(batch[1]["scale"], scale)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([n for n, inputs in GENERATORS.items() if inputs.limit is None]),
    start=st.one_of(
        st.integers(0, 100),
        st.integers(2**32 - 6, 2**32),
        st.integers(2**63 - 6, 2**63),
        st.just(2**64 - 6),
    ),
    cut=st.integers(1, 5),
    seed=st.integers(0, 2**64 - 1),
)
def test_batches_are_pure(name, start, cut, seed):
    inputs = GENERATORS[name]
    state = torch.get_rng_state()
    whole = tensors(inputs.batch(start, start + 6, seed=seed))
    left = tensors(inputs.batch(start, start + cut, seed=seed))
    right = tensors(inputs.batch(start + cut, start + 6, seed=seed))
    for tensor, a, b in zip(whole, left, right, strict=True):
        assert torch.equal(tensor, torch.cat([a, b]))
    assert torch.equal(state, torch.get_rng_state())


def test_blocks_change_nothing(monkeypatch):
    series, tokens = GaussianSeries(16, 3), TokenInputs(99, 12)
    before = series.batch(0, 20, seed=1), tokens.batch(0, 20, seed=1)["input_ids"]
    monkeypatch.setattr(counter, "BLOCK", 100)
    monkeypatch.setattr("fastlr.inputs.synthetic.BLOCK", 100)
    assert torch.equal(before[0], series.batch(0, 20, seed=1))
    assert torch.equal(before[1], tokens.batch(0, 20, seed=1)["input_ids"])


@mark.parametrize("name", [n for n, inputs in GENERATORS.items() if inputs.limit is None])
def test_seeds_and_samples_differ(name):
    inputs = GENERATORS[name]
    a = tensors(inputs.batch(0, 4, seed=0))[0]
    b = tensors(inputs.batch(0, 4, seed=1))[0]
    assert not torch.equal(a, b)
    assert all(not torch.equal(a[i], a[j]) for i in range(4) for j in range(i))


def test_classes_use_different_streams():
    assert len(set(counter.STREAMS.values())) == len(counter.STREAMS)
    noise = NoiseImages((7, 1, 512)).batch(0, 2, seed=3).flatten(1)
    series = GaussianSeries(512, 7).batch(0, 2, seed=3).flatten(1)
    assert abs((noise * series).mean()) < 4 / math.sqrt(noise.numel())


@mark.parametrize("name", list(GENERATORS))
@mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_casts_floating_tensors_only(name, dtype):
    inputs = GENERATORS[name]
    for plain, cast in zip(
        tensors(inputs.batch(0, 3)), tensors(inputs.batch(0, 3, dtype=dtype)), strict=True
    ):
        assert plain.dtype in (torch.float32, torch.int64)
        assert torch.equal(cast, plain.to(dtype) if plain.is_floating_point() else plain)


@mark.parametrize("name", list(GENERATORS))
@mark.parametrize(
    "change, words",
    [
        ({"stop": 0}, "empty"),
        ({"start": -1}, "leaves"),
        ({"start": 1.0}, "start must be an integer"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": None}, "seed"),
        ({"dtype": torch.int32}, "dtype"),
        ({"dtype": torch.complex64}, "dtype"),
    ],
    ids=str,
)
def test_bad_ranges_seeds_and_dtypes(name, change, words):
    arguments = {"start": 0, "stop": 2, "seed": 0} | change
    with refused(words):
        GENERATORS[name].batch(arguments.pop("start"), arguments.pop("stop"), **arguments)


@mark.parametrize("name", list(GENERATORS))
def test_records(name):
    inputs = GENERATORS[name]
    record = inputs.to_dict()
    assert json.loads(json.dumps(record)) == record
    assert record["inputs"] == type(inputs).__name__
    assert repr(inputs).startswith(type(inputs).__name__ + "(")
    if not isinstance(inputs, (TensorInputs, GaussianInputs)):
        assert eval(repr(inputs)) == inputs
        assert (
            type(inputs)(**{k: v for k, v in record.items() if k != "inputs"}).to_dict() == record
        )


# --- each kind
# --------------------------------------------------------------------------------------------------


def test_shape_images_normalise_bytes():
    raw = ShapeImages((3, 20, 20)).raw(2, 5, seed=1)
    assert raw.dtype == torch.uint8
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in IMAGENET)
    expected = (raw.double() / 255 - mean) / std
    assert (ShapeImages((3, 20, 20)).batch(2, 5, seed=1) - expected).abs().max() < 2e-7
    assert torch.equal(
        ShapeImages((3, 20, 20), normalize=None).batch(2, 5, seed=1), raw.float() / 255
    )
    one = ShapeImages((3, 20, 20), normalize=(0.5, 0.25)).batch(2, 5, seed=1)
    torch.testing.assert_close(one, (raw.float() / 255 - 0.5) / 0.25, atol=1e-6, rtol=1e-5)


@mark.parametrize("name", ["shapes", "shapes-channels-last", "shapes-grey"])
def test_shape_images_at_numbers(name):
    inputs = GENERATORS[name]
    index = torch.tensor([7, 2, 2, 9])
    for dtype in (None, torch.bfloat16):
        images = inputs.at(index, seed=5, dtype=dtype)
        whole = inputs.batch(0, 10, seed=5, dtype=dtype)
        assert images.dtype == whole.dtype
        assert images.is_contiguous(
            memory_format=torch.channels_last if inputs.channels_last else torch.contiguous_format
        )
        assert torch.equal(images, whole[index])


def check_normal(z):
    """Hold moments within four standard errors of a standard normal's.

    The kurtosis is the table's own.
    """
    z, n = z.double(), z.numel()
    assert abs(z.mean()) < 4 / math.sqrt(n)
    assert abs(z.square().mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs(z.pow(3).mean()) < 4 * math.sqrt(15 / n)
    assert abs(z.pow(4).mean() - 2.9992) < 4 * math.sqrt(96 / n)


def test_noise_is_standard_normal():
    z = NoiseImages((3, 32, 32)).batch(0, 100, seed=7)
    check_normal(z)
    for shifted in (z.roll(1, 0), z.roll(1, 1), z.roll(1, 2), z.roll(1, 3)):
        assert abs((z * shifted).double().mean()) < 4 / math.sqrt(z.numel())


def test_normalised_noise_has_normal_pixels():
    z = NoiseImages((3, 8, 8)).batch(0, 4, seed=7).double()
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in IMAGENET)
    normalised = NoiseImages((3, 8, 8), normalize="imagenet").batch(0, 4, seed=7)
    assert torch.equal(normalised, ((z - mean) / std).float())


def test_series_are_standard_normal():
    x = GaussianSeries().batch(0, 60, seed=1)
    assert x.shape == (60, 512, 7)
    check_normal(x)
    covariance = torch.corrcoef(x.flatten(0, 1).double().T)
    assert (covariance - torch.eye(7)).abs().max() < 4.5 / math.sqrt(60 * 512)


def test_tokens_are_uniform():
    n, vocab = 100_000, 50
    batch = TokenInputs(vocab, 100, attention_mask=True).batch(0, n // 100, seed=4)
    counts = batch["input_ids"].flatten().bincount(minlength=vocab).double()
    assert len(counts) == vocab
    assert ((counts - n / vocab).square() / (n / vocab)).sum() < 49 + 4 * math.sqrt(98)
    assert batch["attention_mask"].dtype == torch.int64
    assert (batch["attention_mask"] == 1).all()
    assert (TokenInputs(1, 3).batch(0, 2)["input_ids"] == 0).all()
    alone, named = (TokenInputs(9, 3, name=name) for name in (None, "words"))
    assert torch.equal(alone.batch(0, 4), TokenInputs(9, 3).batch(0, 4)["input_ids"])
    assert torch.equal(alone.batch(0, 4), named.batch(0, 4)["words"])
    assert alone.identity(4, 0) == named.identity(4, 0)


@mark.parametrize(
    "make, words",
    [
        (lambda: ShapeImages((3, 8)), "size"),
        (lambda: ShapeImages((1, 8, 8)), "imagenet"),
        (lambda: ShapeImages(circles=-1), "circles"),
        (lambda: ShapeImages(normalize="cifar"), "normalize"),
        (lambda: ShapeImages(normalize=((0.5, 0.5), 1.0)), "mean must be"),
        (lambda: ShapeImages(normalize=(0.5, (1.0, 0.0, 1.0))), "positive"),
        (lambda: ShapeImages(normalize=(math.nan, 1.0)), "finite"),
        (lambda: NoiseImages((3, 8)), "size"),
        (lambda: NoiseImages((3, 0, 8)), "height"),
        (lambda: NoiseImages((4, 8, 8), normalize="imagenet"), "mean must be"),
        (lambda: GaussianSeries(0), "length"),
        (lambda: GaussianSeries(8, 1.5), "features"),
        (lambda: TokenInputs(0, 8), "vocab_size"),
        (lambda: TokenInputs(9, 8, True, name=None), "attention_mask=True needs the name"),
        (lambda: TokenInputs(8, True), "length"),
        (lambda: TensorInputs([torch.zeros(3)]), "torch.stack.* pictures .* loader.dataset"),
        (lambda: TensorInputs(3), "Dataset"),
        (lambda: TensorInputs(torch.zeros(3), in_dim=1), "no axis"),
        (lambda: TensorInputs(torch.zeros(0, 3)), "no samples"),
        (lambda: TensorInputs((torch.zeros(4, 3), torch.zeros(5))), "different numbers"),
        (lambda: TensorInputs({"use_cache": False}), "no tensor"),
        (lambda: TensorInputs({"x": torch.eye(3).to_sparse()}), "x= is sparse.*make it dense"),
        (
            lambda: TensorInputs(torch.nested.nested_tensor([torch.zeros(2)])),
            "x= is nested.*pad it",
        ),
        (lambda: TensorInputs(torch.zeros(3), in_dim="0"), "in_dim"),
        (lambda: TensorInputs(torch.zeros(3), item=0), "item="),
        (
            lambda: TensorInputs(torch.utils.data.TensorDataset(torch.ones(3)), item=1).batch(0, 2),
            "item=1 picks nothing.*IndexError.*the part that the model takes",
        ),
        (
            lambda: TensorInputs(torch.utils.data.TensorDataset(torch.ones(3)), item="x").batch(
                0, 2
            ),
            "item='x' picks nothing",
        ),
    ],
)
def test_bad_definitions_are_named(make, words):
    with refused(words):
        make()


def test_tensor_inputs_own_their_memory():
    x = torch.zeros(10, 2, requires_grad=True)
    batch = TensorInputs(x).batch(2, 5)
    assert not batch.requires_grad
    batch += 1
    assert (x == 0).all()


def test_tensor_inputs_slice_each_kind():
    x = torch.rand(2, 6)
    ids = torch.arange(6)
    position = torch.arange(4)[None]
    assert torch.equal(TensorInputs(x, in_dim=-1).batch(1, 3), x[:, 1:3])
    batch = TensorInputs({"ids": ids, "position": position, "flag": None}).batch(4, 6)
    assert torch.equal(batch["ids"], ids[4:])
    assert torch.equal(batch["position"], position)
    assert batch["flag"] is None


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, i):
        return torch.full((2, 3), float(i)), i


def test_datasets():
    whole = TensorInputs(Pairs()).batch(2, 4)
    assert whole[0].shape == (2, 2, 3)
    assert whole[1].tolist() == [2, 3]
    image = TensorInputs(Pairs(), item=0).batch(2, 4, dtype=torch.float64)
    assert image.dtype == torch.float64
    assert image[:, 0, 0].tolist() == [2, 3]
    assert TensorInputs(Pairs(), in_dim=1, item=0).batch(0, 7).shape == (2, 7, 3)
    picked = TensorInputs(
        Pairs(), item=lambda pair: {"x": pair[0], "i": torch.tensor(pair[1])}
    ).batch(5, 7)
    assert picked["i"].tolist() == [5, 6]
    with refused("7 samples"):
        TensorInputs(Pairs()).batch(0, 8)


def test_ragged_datasets_are_refused():
    class Ragged(Pairs):
        def __getitem__(self, i):
            return torch.zeros(i + 1)

    with refused("samples 0..2 of Ragged"):
        TensorInputs(Ragged()).batch(0, 3)


# --- contact sheets
# --------------------------------------------------------------------------------------------------


@mark.parametrize("channels", [1, 3])
def test_contact_sheet(channels):
    images = torch.randint(0, 256, (5, channels, 6, 4), dtype=torch.uint8)
    picture = tiled(images, columns=3, gap=2)
    assert picture.mode == {1: "L", 3: "RGB"}[channels]
    sheet = torch.from_numpy(np.array(picture)).reshape(2 * 8 + 2, 3 * 6 + 2, channels)
    assert torch.equal(sheet[2:8, 2:6], images[0].permute(1, 2, 0))
    assert torch.equal(sheet[10:16, 8:12], images[4].permute(1, 2, 0))
    assert (sheet[:2] == 255).all()
    assert (sheet[10:, 14:] == 255).all()
    assert tiled(images.float() / 255, columns=3, gap=2) == picture


@mark.parametrize(
    "images, words",
    [
        (torch.zeros(3, 4, 4), "must be"),
        (torch.zeros(1, 2, 4, 4), "C = 1 or 3"),
        (torch.zeros(0, 3, 4, 4), "n >= 1"),
        (torch.full((1, 3, 4, 4), 1.5), "raw images"),
        (torch.full((1, 3, 4, 4), math.nan), "raw images"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.int64), "uint8"),
    ],
)
def test_contact_sheet_refuses(images, words):
    with refused(words):
        tiled(images)
