"""The benchmark's machinery: repairs change no gradient, wrong contenders are caught, clocks and memory measure."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace

import models_zoo as zoo
import pytest
import torch
from torch import nn
from zoo_registry import randomise

from bench import cases, peer_autograd, peer_repairs, peers, peers_figure, timing

MODELS = ["vit_thin", "patchtst", "resnet", "separable"]


def build(name: str) -> cases.Case:
    """Small relatives of the benchmark's models; ``separable`` has depthwise convolutions and in-place activations."""
    if name in zoo.ZOO:
        return zoo.make(name)
    torch.manual_seed(0)
    x = torch.randn(4, 3, 24, 24)
    if name == "resnet":
        from torchvision.models.resnet import BasicBlock, ResNet

        model: nn.Module = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)
    else:
        from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

        setting = [
            InvertedResidualConfig(8, 3, 16, 8, True, "HS", 1, 1, 1.0),
            InvertedResidualConfig(8, 3, 16, 8, False, "RE", 2, 1, 1.0),
        ]
        model = MobileNetV3(setting, last_channel=16, num_classes=2)
    randomise(model)
    return cases.Case(cases.calibrate(model, x).eval(), x, name=name)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("peer", ["loop", "vmap", "opacus", "opacus-ghost", "backpack"])
def test_contenders_agree_with_the_truth_after_repairs(peer: str, model: str) -> None:
    for package in ("opacus", "backpack"):
        if peer.startswith(package):
            pytest.importorskip(package)
    case = build(model)
    cotangent = cases.cotangent_for(case)
    truth = cases.loop_norms(cases.as_double(case), cotangent)
    before = [p.clone() for p in case.model.parameters()]
    contender = peers.PEERS[peer](case, cotangent)
    found = contender.run()
    verdict = peers.gate(found, {"samples": list(range(case.batch)), "norms": truth})
    if (peer, model) == ("backpack", "separable"):  # it takes a depthwise convolution for a dense one
        assert not verdict["correct"] and verdict["worst_parameter_ratio"] > 5
        assert verdict["worst_parameter"].endswith("block.1.0.weight") and peers.wrong(verdict).startswith("WRONG")
        return
    assert verdict["correct"] and verdict["deviation"] < 1e-4, verdict
    again = contender.run()
    assert cases.deviation(again, found | {n: t.double() for n, t in found.items()}) < 1e-6, "the second call differs"
    assert all(torch.equal(a, b) for a, b in zip(before, case.model.parameters()))
    assert all(p.grad is None for p in case.model.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_repairs_keep_the_function(model: str) -> None:
    case = cases.as_double(build(model))
    repaired = peer_repairs.prepare(case.model)
    notes = []
    for repair in (
        peer_repairs.out_of_place,
        peer_repairs.split_attention,
        peer_repairs.tables_as_embeddings,
        peer_repairs.layer_norm_as_batch_norm,
        peer_repairs.frozen_batch_norm,
        peer_repairs.unfold_channels,
    ):
        notes += repair(repaired)
    assert notes, "nothing was repaired: the test shows nothing"
    want, got = cases.forward(case.model, case.x), cases.forward(repaired, case.x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    owners = {name for _, name in peer_repairs.owned(repaired)}
    assert owners == set(cases.trainable(case.model)), "a parameter was lost"


def test_gate_catches_what_is_wrong() -> None:
    truth = {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor([3.0, 0.0]).double()}
    known = {"samples": [0, 2], "norms": truth}
    right = {"a": torch.tensor([1.0, 9.0, 2.0]), "b": torch.tensor([3.0, 9.0, 0.0])}
    assert peers.gate(right, known)["correct"]
    off = peers.gate({**right, "a": torch.tensor([1.0, 9.0, 2.2])}, known)
    assert not off["correct"] and off["worst_parameter"] == "a"
    assert off["total_ratio"] == pytest.approx(1.1) and off["worst_parameter_ratio"] == pytest.approx(1.1)
    assert "b" in peers.gate({"a": right["a"]}, known)["reason"]
    assert not peers.gate({**right, "b": torch.tensor([float("nan"), 9.0, 0.0])}, known)["correct"]


@pytest.mark.parametrize(
    ("batch", "count", "want"), [(16, 4, [0, 5, 10, 15]), (3, 4, [0, 1, 2]), (5, 1, [0]), (1, 3, [0])]
)
def test_checked_samples(batch: int, count: int, want: list[int]) -> None:
    assert peers.checked_samples(batch, count) == want


def test_interleaved_rotates_and_pairs() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    seconds = timing.interleaved(calls, 3, warmup=1)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert all(len(s) == 3 and min(s) > 0 for s in seconds.values())


def test_summary_takes_ratios_within_rounds() -> None:
    found = timing.summary([2.0, 20.0, 4.0], [1.0, 10.0, 1.0])
    assert found["ratio"] == 2.0 and found["seconds"] == 4.0
    assert found["ratio_p20"] == 2.0 and found["ratio_p80"] == pytest.approx(3.2)
    assert timing.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    with pytest.raises(ValueError, match="no values"):
        timing.quantile([], 0.5)


def test_environment_names_machine_and_versions() -> None:
    record = timing.environment(("opacus", "no-such-package"))
    assert (
        record["versions"]["torch"] == torch.__version__.split("+")[0] and record["versions"]["no-such-package"] is None
    )
    assert record["cpu"] and record["cores"] >= 1 and record["command"]
    json.dumps(record)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak can only be reset on Linux")
def test_peak_sees_what_is_freed_again_and_only_that() -> None:
    def work() -> int:
        return torch.ones(64 << 20, dtype=torch.uint8).numel()

    timing.trim()
    baseline = timing.resident()
    grown, seconds, result = timing.peak_above(work, baseline)
    assert result == 64 << 20 and seconds > 0
    assert 60 << 20 < grown < 110 << 20
    quiet, _, _ = timing.peak_above(lambda: None, timing.resident())
    assert quiet < 30 << 20


def test_a_contender_that_cannot_run_gives_its_reason(tmp_path) -> None:
    row = peers.in_child("loop", "patchtst", 2, 1, tmp_path / "absent.pt", 300)
    assert "absent.pt" in row["error"]
    table, line = peers.tables({"patchtst": {"loop": row}})
    assert table.row_count == 1 and "absent.pt" in line.plain and "cannot run" in line.plain


def test_end_to_end(tmp_path) -> None:
    out = tmp_path / "peers.json"
    command = [sys.executable, "-m", "bench.peers", "--models", "patchtst", "--peers", "loop", "--batch", "2"]
    command += ["--rounds", "2", "--threads", "1", "--check", "1", "--json", str(out)]
    run = subprocess.run(command, cwd=timing.ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    document = json.loads(out.read_text())
    rows = document["results"]["patchtst"]
    assert set(rows) == {"plain", "loop"} and rows["plain"]["ratio"] == 1.0 and rows["loop"]["correct"]
    assert len(rows["loop"]["round_seconds"]) == 2 and rows["loop"]["memory_ratio"] > 0
    assert document["environment"]["versions"]["torch"] and "bench.peers" in document["environment"]["command"]
    assert "loop over samples" in run.stdout and max(map(len, run.stdout.splitlines())) <= 100


def test_bad_arguments_are_refused(capsys) -> None:
    for wrong in (["--batch", "0"], ["--models", "no_such_model"], ["--rounds", "-1"]):
        with pytest.raises(SystemExit) as caught:
            peers.parse(wrong)
        assert caught.value.code == 2
    assert isinstance(peers.parse([]), Namespace)
    assert peers.parse(["--peers", "loop"]).peers == ["plain", "loop"]


def test_vmap_takes_tuples_and_inner_sample_axes() -> None:
    for name in ("multi_tensor_input", "time_first", "shared_input"):
        case = zoo.make(name, torch.float64)
        cotangent = cases.cotangent_for(case)
        truth = cases.loop_norms(case, cotangent)
        assert cases.deviation(peer_autograd.vmap(case, cotangent, chunk=3).run(), truth) < 1e-12, name


def test_the_picture_and_the_table_of_a_record(tmp_path):
    right = {"ratio": 2.0, "memory_ratio": 1.5}
    rows = {
        "plain": {"ratio": 1.0},
        "fastlr": {"ratio": 0.5, "memory_ratio": 0.7},
        "loop": right,
        "vmap": {**right, "ratio": 1.25},
        "opacus": {"error": "no"},
        "backpack": {"correct": False, "total_ratio": 3.5},
    }
    document = {"results": {"resnet18": rows, "own": rows}, "batch": 4, "environment": {"cpu": "a CPU"}}
    lines = peers_figure.table(document).splitlines()
    assert lines[2] == (
        "| ResNet-18, 224x224 | **0.50** | 0.70 | 1.25 (torch.func vmap) | 2.00 | Opacus: cannot run; "
        "BackPACK: wrong: 3.5 times the truth |"
    )
    assert lines[3].startswith("| own |")
    peers_figure.draw(document, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_a_model_measured_again_leaves_the_others(tmp_path, monkeypatch):
    """--add keeps what the record holds, says when each model was measured, and refuses another kind of record."""
    record = tmp_path / "peers.json"
    stamps = iter("abcd")
    machine = {"cpu": "a CPU", "versions": {"torch": "1"}}
    monkeypatch.setattr(peers.timing, "environment", lambda packages: {**machine, "date": next(stamps)})
    monkeypatch.setattr(peers, "measure_model", lambda model, args, say: {"plain": {"error": "not run"}})

    def run(*models, rounds="5", add=("--add",)):
        arguments = ["--models", *models, "--peers", "plain", "--rounds", rounds, "--json", str(record), *add]
        peers.main(arguments)
        return json.loads(record.read_text())

    with pytest.raises(SystemExit, match="no record to add to"):
        run("resnet18")
    run("resnet18", "patchtst", add=())
    found = run("mobilenet_v3_large", "patchtst")
    assert list(found["results"]) == ["mobilenet_v3_large", "resnet18", "patchtst"]
    dates = {model: environment["date"] for model, environment in found["measured"].items()}
    assert dates == {"mobilenet_v3_large": "c", "resnet18": "b", "patchtst": "c"}
    with pytest.raises(SystemExit, match="leave --add out"):
        run("resnet18", rounds="7")
    assert json.loads(record.read_text()) == found
