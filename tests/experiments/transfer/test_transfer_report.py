"""The report of transfer runs: means, paired differences, and what is left out."""

import json
import math

import numpy as np
from continual_runs import read_lines, write_lines
from expected import refused, warned
from pytest import approx, fixture
from transfer_cases import TINY

from fastlr.cli.main import main
from fastlr.experiments.transfer import experiment as transfer
from fastlr.experiments.transfer.options import BEFORE, STRATEGIES, TransferOptions
from fastlr.experiments.transfer.records import TransferRun, differences, losses, read_transfer_runs
from fastlr.experiments.transfer.report import write_transfer_report
from fastlr.experiments.transfer.tables import setting

# Seed -> epoch that each strategy picks, in the order of STRATEGIES.
PICKS = {0: (3, 2, 3, 1, 1, 0), 1: (2, 2, 3, 2, 1, 0), 2: (3, 3, 3, 2, 1, 0), 3: (2, 1, 3, 3, 1, 0)}


def final(seed, epoch, number):
    """The loss of a fine-tuning run, as the simulated records have it."""
    return 0.3 - 0.02 * epoch + 0.01 * seed + 0.001 * (seed - 1) * epoch + 0.0001 * number


def write_run(folder, seed, *, runs=2, until=None, **given):
    measures = {
        "weight_norm": {"value": 3.0},
        "dormant_ratio": {"value": 0.1},
        "linear_probe": {"value": 0.4},
    }
    redundancy = [
        {"value": 100.0 * (e + 1), "points": [{"step": 5 * e, "value": 100.0 * (e + 1)}]}
        for e in range(4)
    ]
    start = {
        "kind": "start",
        "parameters": 1234,
        "steps_per_epoch": 5,
        "finetune_steps_per_epoch": 4,
    }
    lines = [{**start, "validation_loss": 1.0, "measures": {"local_redundancy": redundancy[0]}}]
    for epoch in (1, 2, 3):
        found = {
            "train_loss": 1 - 0.1 * epoch,
            "validation_loss": 1 - 0.2 * epoch,
            "seconds": {"train": 30.0},
        }
        found["measures"] = {**measures, "local_redundancy": redundancy[epoch]}
        lines.append({"kind": "pretrain", "epoch": epoch, **found})
    picks = {}
    for name, epoch in zip(STRATEGIES, PICKS[seed]):
        by, rule, *_ = STRATEGIES[name]
        candidates = {str(e): float(abs(e - epoch)) for e in (1, 2, 3)} if by else {}
        picks[name] = {
            "epoch": epoch,
            "by": by or None,
            "rule": rule or None,
            "value": 0.0,
            "candidates": candidates,
        }
    lines.append({"kind": "selection", "picks": picks})
    for number in range(runs):
        for epoch in dict.fromkeys(PICKS[seed]):
            end = final(seed, epoch, number)
            curve = {
                "steps": [0, 4, 8],
                "validation": [end + 0.1, end + 0.05, end],
                "validation_loss": end,
            }
            lines.append(
                {
                    "kind": "finetune",
                    "epoch": epoch,
                    "run": number,
                    **curve,
                    "seconds": {"finetune": 6.0},
                }
            )
    folder.mkdir(parents=True)
    write_lines(folder, lines[:until])
    names = {"source": {"name": "a"}, "target": {"name": "b"}}
    as_in_the_paper = {key: getattr(TransferOptions(), key) for key in BEFORE}
    options = as_in_the_paper | {
        "seed": seed,
        "epochs": 3,
        "finetune_runs": 2,
        "finetune_epochs": 2,
        "redundancy_n": 8,
    }
    options |= given
    config = {
        "driver": "transfer",
        "preset": "small",
        "options": options,
        "data": {"digest": "d", **names},
    }
    (folder / "config.json").write_text(
        json.dumps({**config, "command": ["fastlr", "transfer"], "commit": "abc"})
    )
    return folder


@fixture
def study(tmp_path):
    for seed in PICKS:
        write_run(tmp_path / "study" / f"seed-{seed}", seed)
    return tmp_path / "study"


def test_losses_and_differences_are_those_of_the_records(study):
    runs = read_transfer_runs([study])
    assert [run.seed for run in runs] == [0, 1, 2, 3]
    assert all(run.complete for run in runs)
    by_seed = {
        name: [
            np.mean([final(seed, PICKS[seed][i], number) for number in (0, 1)]) for seed in PICKS
        ]
        for i, name in enumerate(STRATEGIES)
    }
    for name, mean in losses(runs).items():
        assert mean.value == approx(np.mean(by_seed[name]))
        assert mean.n == 4
        assert mean.stderr == approx(np.std(by_seed[name], ddof=1) / 2)
        assert mean.high - mean.value == approx(3.182 * mean.stderr, rel=2e-3)
    found = {(d.first, d.second): d for d in differences(runs)}
    assert len(found) == 15
    pair = found["local_redundancy", "validation_loss"]
    delta = np.array(by_seed["local_redundancy"]) - np.array(by_seed["validation_loss"])
    assert pair.mean.value == approx(delta.mean())
    assert pair.mean.stderr == approx(delta.std(ddof=1) / 2)
    assert (pair.same, pair.lower) == (1, 0)
    assert pair.mean.stderr < losses(runs)["validation_loss"].stderr, (
        "pairing takes out what seeds share"
    )
    assert found["linear_probe", "no_pretraining"].lower == 4
    assert runs[0].spent("train") == 90
    assert runs[0].spent() == 90 + 6 * len(runs[0].tunings)


def test_a_measurement_without_a_value_is_not_drawn(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    lines = read_lines(folder)
    lines[2]["measures"]["local_redundancy"]["points"][0]["value"] = None
    write_lines(folder, lines)
    epochs, values = TransferRun.read(folder).redundancy_points()
    assert (len(epochs), np.isnan(values).tolist()) == (4, [False, False, True, False])
    assert (write_transfer_report([folder]).folder / "pretraining.png").exists()


def test_the_report(study, cli):
    out = cli(f"report {study}").out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    runs = read_transfer_runs([study])
    best = losses(runs)["validation_loss"]
    assert f"lowest val. loss     {best.value:.4f} ± {best.stderr:.4f}" in out
    text = " ".join(out.split())
    changed = (
        "source a for ETTm1; target b for ETTh2; epochs 3 for 12; steps_per_epoch 5 for 54; "
        "redundancy_n 8 for 1024; finetune_runs 2 for 6; finetune_steps_per_epoch 4 for 14; 1,234 "
        "parameters for about 2.26 million; 4 seeds for 120."
    )
    listed = f"Differences from the paper: {changed}"
    folder = study / "report"
    names = {path.name for path in folder.iterdir()}
    assert {
        "index.html",
        "report.md",
        "strategies.csv",
        "differences.csv",
        "picks.csv",
        "pretraining.png",
    } <= names
    assert (folder / "index.html").read_text().count("data:image/png;base64") == 2
    markdown = (folder / "report.md").read_text()
    for form in (text, markdown, (folder / "index.html").read_text()):
        assert [form.count(part) for part in (listed, "source a for ETTm1")] == [1, 1]
    assert "| 2 | max local redundancy | 3 | greatest" in markdown
    numbers = json.loads((folder / "report.json").read_text())
    assert numbers["losses"]["validation_loss"]["value"] == best.value
    loss = np.mean([final(3, 1, i) for i in (0, 1)])
    assert numbers["losses_by_seed"]["3"]["local_redundancy"] == approx(loss)
    assert numbers["picks"]["1"]["dormant_ratio"]["epoch"] == 2
    assert len(numbers["differences"]) == 15
    assert "findings" not in numbers


def test_the_files_own_local_redundancy_stands_beside_that_of_the_epoch(tmp_path):
    run = write_run(tmp_path / "run", 0)
    lines = read_lines(run)
    lines[1]["measures"]["local_redundancy"]["points"][-1]["value"] = (
        999.0  # epoch 1: a mean of 200
    )
    write_lines(run, lines)
    by_slug = {sheet.slug: sheet for sheet in write_transfer_report([run], figures="none").sheets}
    columns = by_slug["pretraining"].columns
    assert tuple(columns[3:5]) == ("LR", "LR, file")
    assert by_slug["pretraining"].rows[1][3:5] == ("200", "999")
    picks = by_slug["picks"]
    assert picks.columns[-2:] == ["LR", "LR, file"]
    assert {row[1]: row[-2:] for row in picks.rows}["min dormant ratio"] == ("200", "999")
    assert "In 1 of 1 run they are greatest at different epochs." in " ".join(picks.notes)


def test_unfinished_runs_are_left_out_and_named(study):
    write_run(study / "late" / "seed-0", 0, until=2)  # one epoch
    (study / "seed-0").rename(study / "gone")
    (study / "gone" / "records.jsonl").unlink()
    (study / "late" / "seed-0").rename(study / "seed-0")
    with warned("left out what has no records yet .gone."):
        report = write_transfer_report([study], study / "out", figures="none")
    text = (report.folder / "report.md").read_text()
    assert "Left out, as they are not finished: study/seed-0." in text
    assert "3 seeds for 120" in text
    numbers = json.loads((report.folder / "report.json").read_text())
    assert list(numbers["losses_by_seed"]) == ["1", "2", "3"]
    assert report.figures == ()
    assert [row[0] for row in report.sheets[2].rows] == ["0", "1", "2", "3"], (
        "the curves are of the finished ones"
    )
    write_run(study / "almost", 0, until=-1)  # all but the last fine-tuning
    assert not TransferRun.read(study / "almost").complete


def test_what_there_is_of_a_run_is_shown(tmp_path, cli):
    run = write_run(tmp_path / "run", 1, until=3)
    out = cli(f"report {run}").out
    assert "No run has finished its fine-tuning yet." in out
    assert "Differences need two finished seeds." in out
    assert (run / "report" / "pretraining.png").exists()
    assert not (run / "report" / "finetuning.png").exists()
    one = write_transfer_report([write_run(tmp_path / "whole", 1)], figures="png")
    assert "One seed has no standard error" in one.sheets[0].markdown()
    assert len(one.figures) == 2
    assert one.sheets[2].notes[1] == "One seed."
    assert "±" not in "".join(row[1] for row in one.sheets[0].rows)


def test_an_earlier_run_is_set_against_the_paper_by_what_its_options_meant_then(tmp_path):
    run = write_run(tmp_path / "run", 0)
    config = json.loads((run / "config.json").read_text())
    for name in ("norm_batch", "redundancy_probe", "dormant_by"):
        del config["options"][name]
    (run / "config.json").write_text(json.dumps(config))
    text = " ".join(setting([TransferRun.read(run)]))
    assert "norm_batch 0 for 256; " in text
    assert "redundancy_probe rademacher for sampled; " in text
    assert "dormant_by absolute for mean; " in text


def test_runs_that_cannot_be_pooled_are_refused(tmp_path):
    runs = [write_run(tmp_path / "a", 0), write_run(tmp_path / "b", 1, epochs=4, device="cuda")]
    with refused("epochs=3: .*a; epochs=4: .*b"):
        read_transfer_runs(runs)
    with refused(r"have the same seed .0."):
        read_transfer_runs([runs[0], write_run(tmp_path / "c", 0)])
    other = write_run(tmp_path / "d", 2)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "data": {"digest": "e"}}))
    with refused("data=d: .*a; data=e: .*d"):
        read_transfer_runs([runs[0], other])
    (other / "config.json").write_text(json.dumps({**config, "driver": "continual"}))
    assert main(["report", str(runs[0]), str(other)]) == 2
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "records.jsonl").write_text('{"kind": "task", "task": 0}\n')
    with refused("no records of a transfer run"):
        TransferRun.read(tmp_path / "e")


def test_a_run_that_ended_early_keeps_its_last_loss(tmp_path):
    run = write_run(tmp_path / "run", 0)
    lines = read_lines(run)
    for line in lines:
        if line["kind"] == "finetune" and (line["epoch"], line["run"]) == (3, 1):
            line.update(steps=[0, 4], validation=[0.5, 0.25], validation_loss=0.25)
    write_lines(run, lines)
    steps, curve = TransferRun.read(run).curve("validation_loss")
    end = final(0, 3, 0)
    assert steps.tolist() == [0, 4, 8]
    np.testing.assert_allclose(
        curve, [(end + 0.1 + 0.5) / 2, (end + 0.05 + 0.25) / 2, (end + 0.25) / 2]
    )


def test_the_drivers_records_are_understood(tmp_path):
    for seed in (0, 1):
        transfer.begin(
            tmp_path / f"seed-{seed}", None, {**TINY, "seed": seed, "epochs": 2, "finetune_runs": 1}
        )
    report = write_transfer_report([tmp_path], figures="png")
    assert len(report.figures) == 2
    assert len(report.sheets[0].rows) == 6
    (run, _) = read_transfer_runs([tmp_path])
    x, y = run.redundancy_points()
    assert x.tolist() == [0, 0.5, 1, 1.5, 2]
    assert (y > 0).all()
    assert np.isfinite(run.measure("linear_probe")[1:]).all()
    assert math.isnan(run.measure("linear_probe")[0])
    assert 0 < run.spent("train") < run.spent()
    assert report.sheets[-1].rows[0][:4] == (run.name, "2/2", str(len(run.tunings)), "yes")
    assert "generated:1 for ETTm1" in (report.folder / "report.md").read_text()
