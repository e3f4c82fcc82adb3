"""Memorization: random data by index, the bits of a loss, the driver against plain torch, kills."""

import json
import math

import torch
import torch.nn.functional as F
from continual_cases import as_arguments, checkpoint, comparable, lines, net
from exact import seeded
from expected import refused
from kills import check_kills
from pytest import approx, fixture, mark, param

import fastlr
from fastlr.errors import NonFiniteError
from fastlr.experiments.data.memorization import (
    GaussianPairs,
    LabelledShapes,
    digest,
    random_labels,
)
from fastlr.experiments.memorization import experiment as memorize
from fastlr.experiments.memorization.options import PRESETS, MemorizeOptions
from fastlr.experiments.runs.folder import seed_everything, stream_seed
from fastlr.experiments.runs.options import resolve
from fastlr.models.patchtst import PatchTST

COMMON = {
    "device": "cpu",
    "threads": 1,
    "dtype": "fp32",
    "batch_size": 12,
    "learning_rate": 1e-2,
    "epochs": 5,
    "evaluate_every": 2,
    "redundancy_n": 12,
    "redundancy_batch": 6,
}
VISION = {
    **COMMON,
    "model": "continual_cases:net",
    "n": 40,
    "classes": 5,
    "size": 8,
    "norm_batch": 6,
    "batch_norm_updates": "every-part",
}
NETWORK = {"patch": 8, "stride": 8, "layers": 1, "width": 8, "heads": 2, "ffn": 12}
SERIES = {
    **COMMON,
    "kind": "series",
    "model": "fastlr.models.patchtst:PatchTST",
    "model_kwargs": NETWORK,
    "n": 30,
    "context": 24,
    "horizon": 6,
    "channels": 2,
    "norm_batch": 0,
}


# -- the data
# --------------------------------------------------------------------------------------------------


def test_labels_are_a_function_of_seed_and_index():
    index = torch.tensor([5, 0, 1 << 40, 5])
    labels = random_labels(index, 1000, seed=3)
    assert labels[0] == labels[3]
    assert labels.dtype == torch.int64
    assert torch.equal(labels[1:3], random_labels(index[1:3], 1000, seed=3))
    many = torch.arange(20_000)
    counts = random_labels(many, 10).bincount(minlength=10).double()
    assert (
        (counts - 2000).square() / 2000
    ).sum() < 27.9  # chi-squared with 9 degrees of freedom: probability .001
    joint = (
        (10 * random_labels(many, 10) + random_labels(many, 10, seed=1))
        .bincount(minlength=100)
        .double()
    )
    assert ((joint - 200).square() / 200).sum() < 148.2  # 99 degrees of freedom
    with refused("index"):
        random_labels(torch.tensor([0.5]), 10)


def test_labelled_shapes_are_the_images_and_labels_of_their_indices():
    data = LabelledShapes(n=50, classes=7, size=12, seed=9)
    index = torch.tensor([30, 2, 49])
    x, y = data.batch(index, torch.bfloat16)
    images = fastlr.ShapeImages(size=(3, 12, 12)).batch(0, 50, seed=9, dtype=torch.bfloat16)
    assert torch.equal(x, images[index])
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, random_labels(index, 7, 9))


def test_gaussian_pairs_are_windows_and_independent_targets():
    data = GaussianPairs(n=400, context=24, horizon=24, features=2, seed=9)
    x, y = data.batch(torch.arange(400))
    assert torch.equal(x, fastlr.GaussianSeries(24, 2).batch(0, 400, seed=9))
    assert x.shape == y.shape == (400, 24, 2)
    assert y.dtype == torch.float32
    few = data.batch(torch.tensor([7, 3]))
    assert torch.equal(few[0], x[[7, 3]])
    assert torch.equal(few[1], y[[7, 3]])
    assert abs(y.mean()) < 4 / y.numel() ** 0.5
    assert abs(y.var() - 1) < 4 * (2 / y.numel()) ** 0.5
    assert abs((x * y).mean()) < 4 / y.numel() ** 0.5
    longer = GaussianPairs(n=401, context=24, horizon=24, features=2, seed=9)
    assert torch.equal(longer.batch(torch.arange(400))[1], y)


def test_digests_tell_data_apart():
    kinds = [
        LabelledShapes(9, 5, 8),
        LabelledShapes(9, 5, 8, seed=1),
        LabelledShapes(9, 6, 8),
        LabelledShapes(9, 5, 9),
    ]
    kinds += [
        LabelledShapes(10, 5, 8),
        GaussianPairs(9, 24, 6, 2),
        GaussianPairs(9, 24, 6, 2, seed=1),
    ]
    assert len({digest(data) for data in kinds}) == len(kinds)
    used = GaussianPairs(9, 24, 6, 2)
    used.batch(torch.tensor([1]))
    assert digest(used) == digest(GaussianPairs(9, 24, 6, 2))


# -- the bits
# --------------------------------------------------------------------------------------------------


def test_bits_of_classification():
    data = LabelledShapes(n=64, classes=8, size=8)
    _, y = data.batch(torch.arange(64))
    certain = 60.0 * F.one_hot(y, 8)
    assert data.ceiling == 64 * 3
    assert data.bits(data.losses(certain, y).mean().item()) == approx(64 * 3)
    assert data.bits(data.losses(torch.zeros(64, 8), y).mean().item()) == approx(0, abs=1e-4)
    one_of_two = torch.stack([y, (y + 1) % 8], 1)  # one bit is missing
    half = torch.full((64, 8), -60.0).scatter_(1, one_of_two, 0.0)
    assert data.bits(data.losses(half, y).mean().item()) == approx(64 * 2)
    assert data.right(certain, y).all()
    assert not data.right(-certain, y).any()
    with refused("as many outputs as there are classes"):
        data.losses(torch.zeros(64, 9), y)


def test_bits_of_regression():
    data = GaussianPairs(n=2000, context=8, horizon=6, features=2)
    _, y = data.batch(torch.arange(2000))
    m = 12
    assert abs(data.bits(data.losses(torch.zeros_like(y), y).mean().item())) < 4 * (
        2000 * m / 2
    ) ** 0.5 / math.log(2)
    noise = torch.randn(y.shape, generator=seeded(0))
    # The channel of rate one bit an element: D = 1/4.
    known = data.losses(0.75 * y + 0.75**0.5 * 0.5 * noise, y)
    assert known.shape == (2000,)
    assert data.bits(known.mean().item()) == approx(2000 * m, rel=0.02)
    assert data.ceiling is None
    assert data.right(y, y) is None
    with refused("the targets are"):
        data.losses(y[:, :3], y)


# -- the driver
# --------------------------------------------------------------------------------------------------


def settings_of(kind):
    return VISION if kind == "vision" else SERIES


def network(kind):
    return net(5) if kind == "vision" else PatchTST(channels=2, context=24, horizon=6, **NETWORK)


@fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of each kind, with local redundancy."""
    folder = tmp_path_factory.mktemp("memorize")
    for kind in ("vision", "series"):
        memorize.begin(folder / kind, None, {**settings_of(kind), "seed": 3, "measure_every": 4})
    return folder


@mark.parametrize("kind", ["vision", "series"])
def test_epochs_are_those_of_plain_torch(kind, runs):
    options = {**settings_of(kind), "seed": 3}
    data, _ = memorize.DRIVER.open_data(MemorizeOptions(**options))
    seed_everything(stream_seed(3, "model"))
    model = network(kind)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for epoch in range(1, 6):
        torch.manual_seed(stream_seed(3, "epoch", epoch))  # dropout
        order = torch.randperm(data.n, generator=seeded(stream_seed(3, "order", epoch)))
        assert order.bincount().tolist() == [1] * data.n
        total = 0.0
        for rows in order.split(12):
            optimiser.zero_grad()
            for part in rows.split(6 if kind == "vision" and len(rows) > 6 else len(rows)):
                x, y = data.batch(part)
                z = model.train()(x)
                loss = F.cross_entropy(z, y) if kind == "vision" else F.mse_loss(z, y)
                (loss * len(part) / len(rows)).backward()
                total += loss.item() * len(part)
            optimiser.step()
        losses.append(total / data.n)
    records = [line for line in lines(runs / kind) if line["kind"] == "epoch"]
    assert [record["epoch"] for record in records] == [2, 4, 5]
    assert sum((record["train_losses"] for record in records), []) == approx(losses, rel=1e-4)
    assert [record["train_loss"] for record in records] == [
        record["train_losses"][-1] for record in records
    ]
    torch.testing.assert_close(
        dict(model.state_dict()), dict(checkpoint(runs / kind)["model"]), rtol=1e-3, atol=1e-5
    )


@mark.parametrize("kind", ["vision", "series"])
def test_records_say_what_the_checkpoint_holds(kind, runs):
    data, _ = memorize.DRIVER.open_data(MemorizeOptions(**{**settings_of(kind), "seed": 3}))
    start, *_, last = lines(runs / kind)
    model = network(kind)
    model.load_state_dict(checkpoint(runs / kind)["model"])
    model = model.double().eval()
    with torch.no_grad():
        # One sample at a time, float64.
        samples = [data.batch(torch.tensor([i])) for i in range(data.n)]
        outputs = [(model(x.double()), y) for x, y in samples]
    if kind == "vision":
        loss = sum(F.cross_entropy(z, y).item() for z, y in outputs) / 40
        assert last["accuracy"] == sum(int(z.argmax() == y) for z, y in outputs) / 40
        bits = 40 * math.log2(5) - 40 * loss / math.log(2)
        assert last["share_of_ceiling"] == approx(bits / (40 * math.log2(5)), rel=1e-4)
    else:
        loss = sum(F.mse_loss(z, y.double()).item() for z, y in outputs) / 30
        assert last["accuracy"] is None
        assert last["share_of_ceiling"] is None
        bits = 30 * 12 / 2 * math.log2(1 / loss)
    assert last["loss"] == approx(loss, rel=1e-5)
    assert last["bits"] == approx(bits, rel=1e-4)
    parameters = sum(p.numel() for p in model.parameters())
    assert start["parameters"] == parameters
    assert last["bits_per_parameter"] == approx(bits / parameters, rel=1e-4)
    assert start["epoch"] == 0
    assert start["loss"] != last["loss"]
    assert {"train", "evaluate"} == set(last["seconds"])


@mark.parametrize("kind", ["vision", "series"])
def test_local_redundancy_is_that_of_unseen_inputs(kind, runs, tmp_path):
    measured = {line["epoch"]: line["measures"] for line in lines(runs / kind)}
    assert [epoch for epoch, measures in measured.items() if measures] == [0, 4]
    memorize.begin(tmp_path / "run", None, {**settings_of(kind), "seed": 3, "epochs": 4})
    state = checkpoint(tmp_path / "run")
    model = network(kind)
    model.load_state_dict(state["model"])
    inputs = (
        fastlr.ShapeImages(size=(3, 8, 8)) if kind == "vision" else fastlr.GaussianSeries(24, 2)
    )
    predictive = fastlr.Categorical() if kind == "vision" else fastlr.Gaussian()
    wanted = fastlr.estimate(
        model,
        inputs,
        n=12,
        predictive=predictive,
        seed=stream_seed(3, "redundancy"),
        probe="sampled",
    )
    assert measured[4]["local_redundancy"]["value"] == approx(wanted.value, rel=1e-4)
    assert measured[4]["local_redundancy"]["stderr"] == approx(wanted.stderr, rel=1e-3)
    # measuring changes nothing
    assert [line["loss"] for line in lines(tmp_path / "run")] == [
        line["loss"] for line in lines(runs / kind)
    ][:3]


def test_no_sample_is_written(runs):
    for kind in ("vision", "series"):
        files = {
            str(path.relative_to(runs / kind))
            for path in (runs / kind).rglob("*")
            if path.is_file()
        }
        assert files == {"config.json", "records.jsonl", "run.lock", "checkpoints/last.pt"}
        assert set(checkpoint(runs / kind)) == {"position", "model", "optimiser", "chunk"}


# -- killed and resumed
# ------------------------------------------------------------------------------------------------


@mark.parametrize(
    ("kind", "kills", "epochs", "every"),
    [
        ("series", 1, 21, 4),
        param("vision", 20, 60, 3, marks=mark.long),
        param("series", 20, 60, 3, marks=mark.long),
    ],
)
def test_killed_it_ends_as_the_uninterrupted_run(kind, kills, epochs, every, tmp_path):
    settings = {
        **settings_of(kind),
        "epochs": epochs,
        "evaluate_every": every,
        "measure_every": 2 * every,
    }
    records = check_kills(tmp_path, memorize.__name__, settings, kills, seed=kills)
    assert [line["epoch"] for line in records] == [*range(0, epochs, every), epochs]


def test_a_run_can_be_made_longer(tmp_path, runs):
    settings = {**VISION, "seed": 3, "measure_every": 4}
    memorize.begin(tmp_path / "short", None, {**settings, "epochs": 2})
    torch.rand(7)  # what happens in between does not matter
    memorize.resume(tmp_path / "short", {"epochs": 5})
    assert comparable(tmp_path / "short") == comparable(runs / "vision")


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    with refused("not finite in .*: lower learning_rate", NonFiniteError):
        memorize.begin(tmp_path / "run", None, {**SERIES, "learning_rate": 1e30})
    assert lines(tmp_path / "run")[0]["kind"] == "start"


# -- options and the command
# -------------------------------------------------------------------------------------------


def test_presets_are_the_papers():
    vision = resolve(MemorizeOptions, PRESETS, "vision", {})
    wanted = {
        "n": 819_200,
        "classes": 1000,
        "epochs": 1000,
        "learning_rate": 1e-3,
        "batch_size": 1024,
        "norm_batch": 256,
        "dtype": "bf16",
    }
    assert vars(vision).items() >= wanted.items()
    data, config = memorize.DRIVER.open_data(vision)
    # Bits a parameter of MobileNetV3-Large.
    assert config["ceiling_bits"] / 5_483_032 == approx(1.489, abs=1e-3)
    series = resolve(MemorizeOptions, PRESETS, "series", {})
    assert series.n * series.horizon * series.channels == 1_376_256
    assert memorize._arguments(series)["kwargs"] == {"channels": 7, "context": 512, "horizon": 96}
    assert memorize.DRIVER.preset == "vision"
    for preset in PRESETS:
        resolve(MemorizeOptions, PRESETS, preset, {})


@mark.parametrize(
    ("change", "words"),
    [
        ({"n": 1}, "n=1: give at least 2"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: give a positive number"),
        ({"measure_every": 3}, "measure_every=3: give a multiple of evaluate_every=2"),
        (
            {"model": "continual_cases:plain", "classes": 5, "size": 8, "kind": "series"},
            "the call failed",
        ),
        ({"model": "memorize_nets:none"}, "importing memorize_nets failed"),
        ({"model": "continual_cases:no_classes"}, "no such function"),
    ],
    ids=str,
)
def test_bad_options_are_named(tmp_path, change, words):
    with refused(words):
        memorize.begin(tmp_path / "run", None, {**VISION, **change})


def wrong(num_classes):
    return net(num_classes + 1)


def test_a_model_of_another_output_is_refused(tmp_path):
    with refused(r"the model gives \(12, 6\) for 12 images of 5 classes"):
        memorize.begin(tmp_path / "run", None, {**VISION, "model": "test_memorize:wrong"})


def test_the_command(tmp_path, cli):
    out, given = tmp_path / "run", as_arguments(SERIES)
    cli("memorize series --options", says="n=2048\n")
    twice = f"memorize series --out {out} --seed 2 --epochs 3"
    cli(twice, *given, code=2, says="--epochs and --set epochs= are both given")
    assert cli(f"memorize series --out {out} --seed 2", *given).out == f"run: {out}\n"
    cli(f"memorize --out {out} --resume --epochs 6")
    assert [line.get("epoch") for line in comparable(out)] == [0, 2, 4, 5, 6]
    config = json.loads((out / "config.json").read_text())
    assert config["driver"] == "memorize"
    assert config["data"]["samples"] == 30
    assert config["options"]["epochs"] == 6
    cli(
        f"continual --out {out} --resume",
        code=2,
        says="is a run of fastlr memorize, not of fastlr continual",
    )


def test_the_command_prints_the_capacity_of_a_model_of_ones_own(cli):
    small = as_arguments({"n": 8, "size": 8, "epochs": 60, "classes": 2, "learning_rate": 0.01})
    both = "memorize continual_cases:net --inputs noise --inputs shapes"
    lines = cli(both, *small).out.splitlines()
    for first, _, third in (lines[:3], lines[3:]):
        assert " bits a parameter: 8 bits, " in first
        assert "% of the labels'" in first
        assert third.endswith("n was too small for this network to show what it can hold; raise n")
    assert "8 noise, seed 0" in lines[1]
    assert "8 shapes, seed 0" in lines[4]
    assert lines[:3] == cli("memorize continual_cases:net --inputs noise", *small).out.splitlines()
    few = as_arguments({"n": 3, "size": 8, "epochs": 2, "classes": 2})
    all_labels = cli("memorize continual_cases:net --inputs noise --enumerated", *few).out
    torch.manual_seed(0)
    found = fastlr.memorization_capacity(
        net(), fastlr.NoiseImages((3, 8, 8)), 3, steps=2, enumerated=True
    )
    assert f"ceiling {found.details['ceiling']:.1f} bits" in all_labels
    assert "raise n" not in all_labels
    for arguments, words in (
        ("--inputs noise", "--inputs wants a model"),
        ("continual_cases:net --enumerated", "--enumerated goes with --inputs"),
        ("continual_cases:net --inputs fog", "choose shapes, noise, series"),
        ("continual_cases:net --inputs noise --set dtype=bf16", "does not go with dtype"),
        ("continual_cases:net --inputs noise --out x", "prints the result"),
    ):
        cli(f"memorize {arguments}", code=2, says=words)
