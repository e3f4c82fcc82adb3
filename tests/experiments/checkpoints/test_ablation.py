"""fastlr ablate on checkpoints gives fastlr.estimate's numbers; few checkpoints claim nothing."""

import csv
import json
import math

import numpy as np
import torch
from expected import refused
from PIL import Image
from pytest import approx, fixture, mark
from scipy import stats
from single_samples import Written
from torch import nn

import fastlr
from fastlr.errors import NonFiniteError
from fastlr.experiments.checkpoints.ablation import (
    REAL,
    as_run,
    measure_checkpoints,
    real_inputs,
    synthetic_inputs,
)
from fastlr.experiments.checkpoints.ablation_tables import few_checkpoints
from fastlr.experiments.continual import agreement
from fastlr.experiments.data import normalise, synthetic_store
from fastlr.experiments.data.tensors import read_tensor

LENGTH, FEATURES = 12, 3
MODEL, DATA = "--model test_ablation:conv_net", "--real real.pt"
THREE = "z.pt y.pt x.pt"  # what `save` makes


def conv_net(num_classes=3, width=4):
    layers = [
        nn.Conv2d(3, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(4 * width, num_classes))


def forecast():
    """A linear layer over time."""
    return Written(
        lambda m, x: m.linear(x.transpose(1, 2)).transpose(1, 2), linear=nn.Linear(LENGTH, 4)
    )


def save(folder, make, count=4):
    """Checkpoints of random networks of growing scale, so that local redundancy varies."""
    paths = []
    for i in range(count):
        torch.manual_seed(i)
        model = make()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + i)
        paths.append(folder / f"{'zyxwvut'[i]}.pt")  # the order given is not that of the names
        torch.save({"state_dict": model.state_dict()} if i % 2 else model.state_dict(), paths[-1])
    return paths


def loaded(model, checkpoint):
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state.get("state_dict", state))
    return model


@fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "store"
    return path, synthetic_store(path, classes=3, size=8, train=4, test=5)


def test_the_command_gives_the_estimates_and_their_correlation(tmp_path, store, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path, _ = store
    checkpoints = save(tmp_path, lambda: conv_net(width=5))
    arguments = [*checkpoints, "--model-kwargs", '{"width": 5}']
    files = f"--csv {tmp_path}/t.csv --json {tmp_path}/t.json --figure {tmp_path}/t.png"
    line = f"ablate --model test_ablation:conv_net --real {path} --n 10 --seed 3 --device cpu"
    out = cli(f"{line} {files}", *arguments).out
    record = json.loads((tmp_path / "t.json").read_text())
    assert [entry["checkpoint"] for entry in record["checkpoints"]] == list(map(str, checkpoints))
    assert record["real"]["count"] == 10
    assert "10 test images of store" in out

    series = {"local_redundancy": [], "local_redundancy_noise": [], REAL: []}
    inputs = [
        fastlr.ShapeImages((3, 8, 8)),
        fastlr.NoiseImages((3, 8, 8)),
        real_inputs(path, 10, seed=3).inputs,
    ]
    for checkpoint, estimates in zip(checkpoints, record["checkpoints"]):
        model = loaded(conv_net(width=5), checkpoint)
        for name, source in zip(series, inputs):
            expected = fastlr.estimate(model, source, n=10, seed=3)
            assert estimates[name]["value"] == approx(expected.value, rel=1e-5)
            assert estimates[name]["stderr"] == approx(expected.stderr, rel=1e-4)
            series[name].append(estimates[name]["value"])
    found = {(a["measure"], a["transform"]): a for a in record["agreement"]}
    assert len(found) == 4
    for name in ("local_redundancy", "local_redundancy_noise"):
        r = stats.pearsonr(series[name], series[REAL])[0]
        assert found[name, "raw"]["r"] == approx(r)
        assert found[name, "raw"]["stderr"] is None
        assert found[name, "log"]["r"] == approx(
            stats.pearsonr(np.log(series[name]), np.log(series[REAL]))[0]
        )
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["inputs"] for row in rows] == ["shapes", "", "Gaussian noise", ""]
    assert float(rows[0]["Pearson r"]) == approx(found["local_redundancy", "raw"]["r"], abs=6e-4)
    assert "With 4 checkpoints r has no standard error" in " ".join(out.split())
    assert "±" not in rows[0]["Pearson r"]
    assert Image.open(tmp_path / "t.png").size[0] > 300
    tables = out[: out.index("csv: ")].splitlines()
    assert max(map(len, (line for line in tables if str(tmp_path) not in line))) <= 80


def test_series_are_gaussian_with_the_given_sigma(tmp_path, cli):
    checkpoints = save(tmp_path, forecast)
    torch.manual_seed(5)
    real = torch.randn(9, LENGTH, FEATURES)
    np.save(tmp_path / "real.npy", real.numpy())
    options = (
        f"--real {tmp_path / 'real.npy'} --sigma 0.5 --n 20 --json {tmp_path / 't.json'} --device "
        "cpu"
    )
    out = cli(f"ablate --model test_ablation:forecast {options}", *checkpoints).out
    assert "Gaussian series (n = 20)" in out
    assert "real inputs (n = 9)" in out
    assert "sigma=0.5" in out
    inputs = {
        REAL: fastlr.TensorInputs(real),
        "local_redundancy_series": fastlr.GaussianSeries(LENGTH, FEATURES),
    }
    for checkpoint, estimates in zip(
        checkpoints, json.loads((tmp_path / "t.json").read_text())["checkpoints"]
    ):
        model = loaded(forecast(), checkpoint)
        for (name, source), n in zip(inputs.items(), (9, 20)):
            expected = fastlr.estimate(model, source, n=n, predictive=fastlr.Gaussian(sigma=0.5))
            assert estimates[name]["value"] == approx(expected.value, rel=1e-5)
            # one linear layer over time: for each output and feature |x|^2 + 1, over sigma^2
            exact = (
                4
                / 0.5**2
                * (source.batch(0, n, device="cpu").square().sum(1) + 1).sum(1).mean().item()
            )
            assert abs(estimates[name]["value"] - exact) < 5 * estimates[name]["stderr"]


def test_the_same_value_everywhere_gives_no_correlation(tmp_path, cli):
    """A linear forecast's local redundancy does not depend on its weights."""
    checkpoints = save(tmp_path, forecast, 3)
    torch.save(torch.randn(6, LENGTH, FEATURES), tmp_path / "real.pt")
    line = f"ablate --n 8 --model test_ablation:forecast --real {tmp_path}/real.pt"
    out = cli(f"{line} --predictive gaussian", *checkpoints).out
    assert "the same at all checkpoints" in " ".join(out.split())
    assert "Pearson" not in out


def test_images_of_a_store_are_test_images_each_at_most_once(store):
    path, opened = store
    spans = [opened.range(i, "test") for i in range(3)]
    tests = [opened.images[row].tobytes() for start, stop in spans for row in range(start, stop)]
    for n, seed in ((10, 0), (10, 1), (40, 0)):
        real = real_inputs(path, n, seed=seed)
        found = [image.permute(1, 2, 0).numpy().tobytes() for image in real.inputs.images]
        assert real.count == len(found) == len(set(found)) == min(n, 15)
        assert set(found) <= set(tests)
    draws = [real_inputs(path, 10, seed=seed).inputs.images for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    x = real_inputs(path, 15).inputs.batch(0, 15, device="cpu")
    torch.testing.assert_close(
        x, normalise(torch.cat([opened.load([i], "test")[0] for i in range(3)]))
    )


def write_csv(path, rows):
    walk = np.random.default_rng(0).standard_normal((rows, 2)).cumsum(0)
    lines = [
        f"2020-01-{1 + i // 24:02d} {i % 24:02d}:00:00,{a},{b}" for i, (a, b) in enumerate(walk)
    ]
    path.write_text("\n".join(["date,a,b", *lines]) + "\n")
    return walk


def test_windows_of_a_csv_file_are_of_its_last_fifth(tmp_path):
    walk = write_csv(tmp_path / "walk.csv", 200)
    real = real_inputs(tmp_path / "walk.csv", 5, context=8)
    mean, std = walk[:160].mean(0), walk[:160].std(0)
    found = real.inputs.batch(0, 5, device="cpu").double().numpy()
    for window, start in zip(found, (160, 168, 176, 183, 191)):
        # 32 windows, the last before the end.
        np.testing.assert_allclose(
            window, (walk[start : start + 8] - mean) / std, rtol=1e-5, atol=1e-5
        )
    assert real.shape == (8, 2)
    assert real.series
    assert "overlap" in real.notes[0]
    apart = real_inputs(tmp_path / "walk.csv", 4, context=8)
    assert apart.count == 4
    assert apart.notes == ()
    assert list(synthetic_inputs(real)) == ["local_redundancy_series"]


def test_bytes_and_floats_of_the_same_images_are_the_same_inputs(tmp_path):
    images = torch.randint(0, 256, (7, 3, 8, 8), dtype=torch.uint8)
    torch.save(images, tmp_path / "bytes.pt")
    torch.save({"x": normalise(images)}, tmp_path / "floats.pt")
    a, b = (real_inputs(tmp_path / name, 5, seed=2) for name in ("bytes.pt", "floats.pt"))
    assert a.count == b.count == 5
    torch.testing.assert_close(
        a.inputs.batch(1, 4, device="cpu"), b.inputs.batch(1, 4, device="cpu")
    )
    torch.save(torch.rand(4, 1, 8, 8), tmp_path / "grey.pt")
    assert list(synthetic_inputs(real_inputs(tmp_path / "grey.pt", 4))) == [
        "local_redundancy_noise"
    ]


def test_what_is_no_input_is_named(tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros((4, 3), np.float32))
    np.save(tmp_path / "whole.npy", np.zeros((4, 3, 8, 8), np.int64))
    np.save(tmp_path / "none.npy", np.zeros((0, 3, 8, 8), np.float32))
    np.save(tmp_path / "last.npy", np.zeros((4, 8, 8, 3), np.uint8))
    bad = np.zeros((4, 3, 8), np.float32)
    bad[2, 1, 1] = math.nan
    np.save(tmp_path / "nan.npy", bad)
    torch.save({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "two.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "code.pt")
    (tmp_path / "text.pt").write_text("text")
    (tmp_path / "photo.jpg").write_text("text")
    for name, message in (
        ("flat.npy", r"float32 \[4, 3\]: inputs are images"),
        ("whole.npy", "int64"),
        ("none.npy", "no samples"),
        ("last.npy", r"must be \[N, 3, H, W\]"),
        ("nan.npy", "sample 2 has values that are infinite or not numbers"),
        ("two.pt", r"2 tensors \(a, b\)"),
        ("list.pt", "list, not a tensor"),
        ("code.pt", "not readable as a plain tensor"),
        ("text.pt", "not readable as a plain tensor"),
        ("absent.pt", "does not exist"),
        ("photo.jpg", "tensors are read from"),
    ):
        with refused(message):
            real_inputs(tmp_path / name, 4)


def test_safetensors(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.arange(6.0).view(2, 3)}, tmp_path / "x.safetensors")
    assert torch.equal(read_tensor(tmp_path / "x.safetensors"), torch.arange(6.0).view(2, 3))


def test_a_checkpoint_without_numbers_is_named(tmp_path):
    checkpoints = save(tmp_path, conv_net, 3)
    state = conv_net().state_dict()
    state["0.weight"][:] = math.nan
    torch.save(state, checkpoints[1])
    torch.save(torch.rand(4, 3, 8, 8), tmp_path / "real.pt")
    with refused(rf"{checkpoints[1].name}, shapes: ", NonFiniteError):
        measure_checkpoints(conv_net(), checkpoints, real_inputs(tmp_path / "real.pt", 4), 4)


def test_what_few_checkpoints_are_worth():
    """The threshold for |r| is that of a test of no correlation; errors are given from 91 on."""
    assert "|r| of 0.71 " in few_checkpoints(8)[0]
    assert stats.pearsonr(*_pair(8, 0.7067))[1] == approx(0.05, abs=2e-4)
    assert few_checkpoints(91) == []
    assert few_checkpoints(90)
    rng = np.random.default_rng(0)
    for n, known in ((90, False), (91, True)):
        y = np.exp(rng.standard_normal(n))
        measured = [
            {REAL: _at(v), "local_redundancy": _at(v * w)}
            for v, w in zip(y, np.exp(rng.standard_normal(n)))
        ]
        assert math.isfinite(agreement([as_run(measured)], REAL, resamples=50)[0].stderr) == known


def _pair(n, r):
    """Two series with a given correlation."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, n))
    a = (a - a.mean()) / a.std()
    b = b - b.mean()
    b -= a * (a @ b) / n
    return a, r * a + math.sqrt(1 - r * r) * b / b.std()


def _at(value):
    return fastlr.Estimate(value, 0.1, 10, {}, None, {}, 0.0)


@mark.parametrize(
    ("line", "says"),
    [
        ("z.pt y.pt", "no run folder; a checkpoint is measured by --model"),
        ("z.pt --real real.pt", "--real goes with --model"),
        (f"{THREE} {MODEL}", "--model wants --real DATA"),
        (f"z.pt y.pt {MODEL} {DATA}", "2 checkpoints: a correlation needs at least 3"),
        (f"z.pt y.pt z.pt {MODEL} {DATA}", "given twice"),
        (f"{THREE} {MODEL} --real nowhere", "nowhere does not exist"),
        (f"{THREE} {MODEL} {DATA} --classes 2", "does not fit"),
        (f"{THREE} {MODEL} {DATA} --sigma 2", "--sigma goes with"),
        (f"{THREE} {MODEL} {DATA} --csv no/x.csv", "there is no folder"),
        (f"{THREE} {MODEL} {DATA} --model-kwargs 3", "a JSON object"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(line, says, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, conv_net, 3)
    torch.save(torch.rand(4, 3, 8, 8), tmp_path / "real.pt")
    assert cli(f"ablate {line}", code=2, says=says).err.count("\n") == 1
