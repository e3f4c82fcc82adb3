"""The benchmark without a GPU: failures kept, modes held to what they say, records, comparisons, pictures, the command."""

from __future__ import annotations

import json
import math

import pytest
import torch
from PIL import Image
from speed_helpers import CPU, empty, text, tiny

from fastlr.cli import main
from fastlr.speed import (
    accuracy,
    bandwidth,
    cases,
    clock,
    compare,
    figures,
    kernels,
    networks,
    record,
    run,
    tables,
    whole,
)


@pytest.fixture
def tiny_networks(monkeypatch):
    monkeypatch.setattr(networks, "load_model", tiny)


@pytest.fixture
def few_cases(monkeypatch):
    few = [
        (op, cases.CASES[op][0])
        for op in ("linear_sq_norms", "channel_sums", "shape_images_from", "folded_conv_moments")
    ]
    monkeypatch.setattr(kernels, "chosen", lambda quick: few)


def test_sections_fail_alone_and_the_last_are_dropped():
    now, done = [0.0], []

    def takes(seconds, fail=False):
        def work():
            now[0] += seconds
            done.append(seconds)
            if fail:
                raise ValueError("no luck\nat all")

        return work

    found = empty()
    parts = [("a", 5, takes(10)), ("b", 5, takes(20, True)), ("c", 80, takes(1)), ("d", 5, takes(2))]
    record.run_sections(found, [record.Section(*p) for p in parts], 100, clock=lambda: now[0])
    assert [s["status"] for s in found.sections] == ["ok", "error", "dropped", "ok"] and done == [10, 20, 2]
    assert found.failures == ["b: ValueError: no luck"] and found.dropped == ["c"]
    assert found.sections[0]["seconds"] == 10 and run.exit_code(found) == 1


def test_checks_fail_and_targets_are_missed():
    found = empty()
    assert found.check("s", "fine", 1.0, 1.0) and not found.check("s", "nan", math.nan, 1.0)
    found.check("s", "aim", 2.0, 1.0, target=True)
    assert len(found.failures) == 1 and "nan" in found.failures[0]
    assert found.missed == ["s, aim: 2 is above 1"]
    again = record.Record.of(json.loads(json.dumps(found.document())))
    assert again.failures == found.failures and again.missed == found.missed


def test_whole_reports_a_mode_that_did_not_run_as_it_says(monkeypatch, tiny_networks):
    found = empty()
    network = networks.build("mobilenet_v3_large", CPU, size=24, calibration=4)
    graph = whole.Mode("with a graph", None, True, True)
    options = {"n": 6, "rounds": 3, "compiled": False, "folded_plain": True, "by_stage": True, "chunk": 3}
    whole.section(found, "net", network, modes=(*whole.CPU_MODES, graph), **options)
    rows = {row["name"]: row for row in found.rows}
    assert rows["estimate, with a graph"]["status"] == "error" and "graph" in rows["estimate, with a graph"]["error"]
    timed = {name: row for name, row in rows.items() if row["status"] == "ok"}
    assert set(timed) == {
        "estimate, folded (default)", "estimate, unfolded", "images", "images, forward",
        "images, forward, backward without norms", "plain, eager", "plain, folded by torch.fx, eager",
    }  # fmt: skip
    for row in timed.values():
        assert row["seconds"] > 0 and row["repeats"] >= 3 and row["against"] == "plain, eager" and row["n"] == 6
    assert timed["estimate, folded (default)"]["folded"] > 3 and timed["estimate, unfolded"]["folded"] == 0
    assert timed["estimate, folded (default)"]["floor_seconds"] > timed["images, forward"]["floor_seconds"] > 0
    assert timed["plain, eager"]["ratio"] == 1.0


def test_accuracy_finds_norms_that_are_off(monkeypatch, tiny_networks):
    network = networks.build("mobilenet_v3_large", CPU, size=24, calibration=8)
    found = empty()
    accuracy.section(found, "accuracy", network, n=4, loops=2, chunk=2, precisions=(None,))
    assert len(found.checks) >= 8 and not [c for c in found.checks if not c["ok"]], found.checks
    right = accuracy.norms_given
    monkeypatch.setattr(accuracy, "norms_given", lambda *a: right(*a) * 1.01)
    found = empty()
    accuracy.section(found, "accuracy", network, n=4, loops=2, chunk=2, precisions=(None,))
    assert any("rms" in failure for failure in found.failures)


def test_weights_and_images_are_rounded_before_they_are_compared(tiny_networks):
    network = networks.build("mobilenet_v3_large", CPU, size=24, calibration=4)
    low = accuracy.rounded(network.model, torch.bfloat16)
    for t in (*low.parameters(), *low.buffers()):
        assert torch.equal(t, t.to(torch.bfloat16).to(t.dtype))
    assert any(not torch.equal(a, b) for a, b in zip(low.parameters(), network.model.parameters(), strict=True))
    x = accuracy.Rounded(network.images, torch.bfloat16).batch(0, 2, seed=0, device=CPU, dtype=torch.float64)
    assert x.dtype == torch.float64 and torch.equal(x, x.to(torch.bfloat16).double())


def test_ceilings_are_plausible():
    copy = bandwidth.copy_bandwidth(CPU, clock.HostTimer(), size=1 << 20, repeats=3)
    product = bandwidth.matmul_rate(CPU, clock.HostTimer(), torch.float32, size=64, repeats=3)
    assert copy["bytes"] == 2 << 20 and 1e8 < copy["bytes_per_second"] < 1e13 and copy["repeats"] == 3
    assert 1e6 < product["operations_per_second"] < 1e15


# ------------------------------------------------------------------------------------------------------- the command line
def test_the_command_end_to_end(tmp_path, monkeypatch, capsys, tiny_networks, few_cases):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(run.Bench, "accuracy", lambda self: self.record.check("accuracy", "stand-in", 0.0, 1.0))
    file, figure = tmp_path / "a.json", tmp_path / "figure.png"
    assert main(["bench", "--device", "cpu", "--quick", "--json", str(file), "--figure", str(figure)]) == 0
    out = capsys.readouterr().out
    assert "CPU run" in out and "No kernel ran" in out and "estimate, folded" in out and "nothing failed" in out
    tabled = [line for line in out.splitlines() if "tmp" not in line and "figure" not in line and "json" not in line]
    assert max(map(len, tabled)) <= 80
    document = json.loads(file.read_text())
    assert document["format"] == record.FORMAT and document["failures"] == []
    assert {s["name"] for s in document["sections"]} == {"ceilings", "accuracy", "mobilenet_v3_large", "kernels"}
    assert document["environment"]["cpu"] and document["environment"]["sources"] and document["units"]["seconds"]
    again = record.load(file)
    assert again.document() == document
    for path in figures.pictures(figure):
        picture = Image.open(path).convert("RGB")
        assert picture.width > 600 and len(picture.getcolors(1 << 20)) > 50

    assert main(["bench", "--compare", str(file), str(file)]) == 0
    out = capsys.readouterr().out
    assert "0 slower, 0 faster" in out and "1.00" in out


def test_a_failure_gives_exit_code_1_and_stays_in_the_record(tmp_path, monkeypatch, capsys, tiny_networks, few_cases):
    def broken(self):
        raise RuntimeError("nothing works")

    monkeypatch.setattr(run.Bench, "accuracy", broken)
    monkeypatch.setattr(run.Bench, "main", lambda self: None)
    assert main(["bench", "--device", "cpu", "--quick", "--json", str(tmp_path / "a.json")]) == 1
    assert "nothing works" in capsys.readouterr().out
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["failures"] == ["accuracy: RuntimeError: nothing works"]
    assert "broken" in document["sections"][1]["traceback"]


def row(name: str, seconds: float, spread: float = 0.01) -> dict:
    times = {"seconds": seconds, "seconds_p20": seconds * (1 - spread), "seconds_p80": seconds * (1 + spread)}
    return {"section": "s", "name": name, "status": "ok", **times}


def test_comparison_flags_what_is_beyond_the_spread():
    a, b = empty(), empty()
    a.rows = [row("slower", 1.0), row("noisy", 1.0, 0.3), row("faster", 1.0), row("gone", 1.0), row("now wrong", 1.0)]
    b.rows = [row("slower", 1.1), row("noisy", 1.1, 0.3), row("faster", 0.5), row("new", 1.0)]
    b.add("s", "now wrong", "wrong", error="off")
    b.settings = b.settings | {"n": 7}
    found = {pair.name: pair for pair in compare.compare(a, b)}
    assert {name: pair.verdict for name, pair in found.items()} == {
        "slower": "slower", "noisy": "same", "faster": "faster", "gone": "only in A", "now wrong": "wrong", "new": "only in B",
    }  # fmt: skip
    assert found["slower"].ratio == pytest.approx(1.1)
    shown = text(tables.comparison(a, b))
    assert "n: 4 and 7" in shown and "1 slower, 1 faster, 1 within" in shown and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "tpu"], "choose cpu"),
        (["--budget", "-1"], "positive number"),
        (["--json", "no/such/folder/a.json"], "there is no folder"),
        (["--figure", "no/such/folder/a.png"], "there is no folder"),
        (["--compare", "absent.json", "absent.json"], "No such file"),
        (["--compare", __file__, __file__], "is no JSON"),
        (["--compare", "a", "b", "--json", "c"], "only compares"),
    ],
)
def test_errors_are_one_line(arguments, says, capsys):
    assert main(["bench", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_json_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(record.InputError, match="no record of this version"):
        record.load(tmp_path / "x.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_benchmark_says_what_to_do_without_one(capsys):
    from bench import gpu

    assert gpu.main([]) == 2
    assert "fastlr bench" in capsys.readouterr().err
    assert main(["bench", "--device", "cuda"]) == 2


def test_kernels_are_compiled_ahead_within_a_limit():
    from bench import gpu

    options = ("--size", "32", "--device", "cpu")
    assert 0 < gpu.compile_ahead(["squeezenet1_1"], options) < 150
    assert gpu.compile_ahead(["squeezenet1_1"], options, limit=0.1) < 5


def test_other_tools_are_held_to_the_truth_beside_fastlr(monkeypatch, tiny_networks):
    from bench import gpu, peers

    pick = {name: peers.PEERS[name] for name in ("plain", "fastlr", "vmap", "loop")}
    wrong = lambda case, v: type("C", (), {"notes": [], "run": lambda: peers.PEERS["loop"](case, 1.2 * v).run()})  # noqa: E731
    monkeypatch.setattr(gpu, "contenders", lambda: {**pick, "loop": wrong})
    network = networks.build("mobilenet_v3_large", CPU, size=24, calibration=4)
    found = empty()
    gpu.other_tools(found, network, batches=(4,), rounds=3)
    rows = {r["name"]: r for r in found.rows}
    assert rows[peers.TITLES["loop"]]["status"] == "not right" and "WRONG" in rows[peers.TITLES["loop"]]["error"]
    assert all(rows[peers.TITLES[name]]["seconds"] > 0 for name in ("plain", "fastlr", "vmap"))
    assert not found.failures and peers.TITLES["vmap"] in text(tables.report(found))


def test_quantiles_divisors_and_timers():
    assert clock.spread([3.0, 1.0, 2.0])["seconds"] == 2.0
    assert [networks.largest_divisor(5000, most) for most in (5000, 4999, 208, 1)] == [5000, 2500, 200, 1]
    calls: list[int] = []
    found = clock.HostTimer().seconds([lambda: calls.append(0), lambda: calls.append(1)], 3)
    assert len(found) == 3 and calls == [0, 1] * 4


def test_training_steps_are_held_to_launched_ones_and_timed(tmp_path, monkeypatch, capsys):
    from bench import training

    small = training.Case("demo", 32, 24, 1, 1.0, {"batch_size": 8})
    monkeypatch.setattr(training, "SMALL", (small,))
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert training.main(["--device", "cpu", "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines()) and "training steps: demo: 24 images 32x32" in printed
    found = record.load(tmp_path / "training.json")
    assert [(row["name"], row["mode"]) for row in found.rows] == [("eager", "eager"), ("compile", "compile")]
    for row in found.rows:
        assert row["images_per_second"] == 24 / row["seconds"] and row["repeats"] == 2
    monkeypatch.setattr(torch, "compile", lambda model, **how: lambda x: model(x) + torch.tensor([9.0, -9.0]))
    assert training.main(["--device", "cpu", "--rounds", "1"]) == 1
    assert "compile: loss" in capsys.readouterr().out
    for wrong in (["--rounds", "0"], ["--modes", "graph"], ["--device", "tpu"]):
        with pytest.raises(SystemExit):
            training.main(["--device", "cpu", *wrong])
