"""The demo of one network: its data, its training and the record it leaves; at full size in the long tests."""

from __future__ import annotations

import io
import json
import os
import time
import zipfile

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import fastlr
from fastlr import demo_network as demo
from fastlr.cli import main
from fastlr.errors import InputError

pytest.importorskip("sklearn")


def write_zip(path, classes=("a", "b"), each=3, size=64):
    with zipfile.ZipFile(path, "w") as archive:
        for split, count in (("train", each), ("val", 1)):
            for label, name in enumerate(classes):
                for i in range(count):
                    data = io.BytesIO()
                    Image.new("RGB", (size, size), (80 * label + 10 * i, 0, 255)).save(data, "JPEG")
                    archive.writestr(f"{split}/{name}/{name}_{i}.JPEG", data.getvalue())


def test_digits():
    data = demo.load_digits_pair(3, 8, seed=1)
    assert data.train_x.shape == (256, 3, 8, 8)
    assert len(data.train_y) == 256 and len(data.test_y) > 90
    assert set(data.train_y.tolist()) == set(data.test_y.tolist()) == {0, 1}
    assert 0 <= data.train_x.min() and data.train_x.max() == 1
    assert torch.equal(data.train_x, demo.load_digits_pair(3, 8, seed=1).train_x)
    assert not torch.equal(data.train_x, demo.load_digits_pair(3, 8, seed=2).train_x)


def test_tiny_imagenet_zip(tmp_path):
    write_zip(tmp_path / "t.zip", classes=("c", "a", "b"))
    data = demo.load_tiny_imagenet_pair(tmp_path / "t.zip")
    assert data.train_x.shape == (6, 3, 64, 64) and data.test_x.shape == (2, 3, 64, 64)
    assert data.train_y.tolist() == [0, 0, 0, 1, 1, 1]
    assert "a and b" in data.name  # the first two by name
    assert (
        data.train_x[:, 0].amax((1, 2)).mul(255).round().sub(torch.tensor([80, 90, 100, 160, 170, 180])).abs().max() < 6
    )


def test_bad_zips(tmp_path):
    (tmp_path / "text.zip").write_text("no zip")
    write_zip(tmp_path / "one.zip", classes=("a",))
    zipfile.ZipFile(tmp_path / "none.zip", "w").close()
    for name in ("text.zip", "one.zip", "none.zip", "absent.zip"):
        with pytest.raises(InputError, match=name):
            demo.load_tiny_imagenet_pair(tmp_path / name)


def test_real_tiny_imagenet(fastlr_data):
    if not (fastlr_data / demo.ZIP).is_file():
        pytest.skip(f"no {demo.ZIP} in FASTLR_DATA")
    data = demo.load_tiny_imagenet_pair(fastlr_data / demo.ZIP)
    assert len(data.train_y) == 400 and len(data.test_y) == 100
    assert data.train_y.float().mean() == 0.5


def test_training_learns_and_leaves_settled_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.01), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)
    )
    data = demo.load_digits_pair()
    before = demo.accuracy(net.eval(), data.test_x, data.test_y, 8)
    losses = [loss for _, loss in demo.train(net, data, size=8, steps=40, batch=16, lr=0.05, seed=0)]
    assert not net.training and net[1].momentum == 0.01
    assert sum(losses[-8:]) < 0.5 * sum(losses[:8])
    assert demo.accuracy(net, data.test_x, data.test_y, 8) > max(0.85, before)
    with torch.no_grad():
        z = net[0](demo.as_input(data.train_x, 8))
    assert (net[1].running_mean - z.mean((0, 2, 3))).abs().max() < 0.2 * z.std()


def test_small_run_leaves_a_consistent_record(tmp_path, monkeypatch):
    monkeypatch.delenv("FASTLR_DATA", raising=False)
    console = Console(file=io.StringIO(), width=80)
    options = {"size": 40, "steps": 2, "batch": 4, "min_n": 8, "max_n": 16}
    record = demo.run(tmp_path / "new" / "out", seed=1, console=console, **options)
    text = console.file.getvalue()
    folder = tmp_path / "new" / "out"
    assert record["training"]["data"].startswith("scikit-learn")
    for name in ("per-layer.png", "images.png"):
        assert name in text
        assert min(Image.open(folder / name).size) > 100
    saved = json.loads((folder / "demo.json").read_text())
    assert saved["initial"]["value"] == record["initial"]["value"] > 0
    torch.manual_seed(1)
    model = demo.load_model(demo.MODEL, num_classes=2)
    again = fastlr.estimate(model, fastlr.ShapeImages(size=(3, 40, 40)), n=saved["initial"]["n"], seed=1)
    assert saved["initial"]["value"] == pytest.approx(again.value, rel=1e-4)
    if saved["initial"]["n"] == saved["trained"]["n"]:
        gap = saved["trained"]["value"] - saved["initial"]["value"]
        assert saved["paired_difference"]["value"] == pytest.approx(gap, rel=1e-6)


def test_cutting_an_estimate_keeps_the_first_images():
    images = fastlr.ShapeImages(size=(3, 8, 8))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    long, short = fastlr.estimate(net, images, n=12), fastlr.estimate(net, images, n=5)
    cut = demo._first(long, 5)
    assert cut.value == pytest.approx(short.value, rel=1e-6)
    assert cut.stderr == pytest.approx(short.stderr, rel=1e-5)


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "network", "--output", str(tmp_path / "file" / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.long
def test_full_size_takes_at_most_three_minutes(tmp_path, monkeypatch):
    monkeypatch.delenv("FASTLR_DATA", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    begin = time.perf_counter()
    try:
        record = demo.run(tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert time.perf_counter() - begin < 180
    assert record["training"]["test_accuracy"] > 0.8
    assert record["initial"]["n"] >= 512 and record["trained"]["n"] >= 512
