"""The report of memorization runs: what its tables and numbers say of the records."""

import json
import math

import numpy as np
from expected import refused, warned
from pytest import approx

from fastlr.display.tables import pm
from fastlr.experiments.memorization.records import MemorizationRun, alike, read_memorization_runs
from fastlr.experiments.memorization.report import (
    bits_sheet,
    training_sheet,
    write_memorization_report,
)

PARAMETERS, N, CLASSES = 500, 100, 16


def bits_of(epoch, seed):
    """What the simulated runs have memorised: 400 bits less what is left."""
    return (400 - seed) * (1 - math.exp(-epoch / 10))


def write_run(folder, seed=0, kind="vision", epochs=40, lr=True):
    lines = []
    for epoch in range(0, epochs + 1, 2):
        bits = bits_of(epoch, seed)
        record = {
            "epoch": epoch,
            "bits": bits,
            "bits_per_parameter": bits / PARAMETERS,
            "seconds": {"evaluate": 0.5},
        }
        if kind == "vision":
            loss = (math.log2(CLASSES) - bits / N) * math.log(2)
            record |= {
                "loss": loss,
                "accuracy": epoch / 100,
                "share_of_ceiling": bits / (N * math.log2(CLASSES)),
            }
        else:
            record |= {
                "loss": 2.0 ** (-2 * bits / 1200),
                "accuracy": None,
                "share_of_ceiling": None,
            }
        if epoch:
            record |= {"kind": "epoch", "train_losses": [3.0 - epoch / 50, 2.9 - epoch / 50]}
            record["train_loss"] = record["train_losses"][-1]
            record["seconds"]["train"] = 4.0
        else:
            record |= {
                "kind": "start",
                "parameters": PARAMETERS,
                "substitutions": ["n 100 for 819200"],
            }
        found = {"value": 10.0 + epoch, "stderr": 0.5, "definition": "what it is"}
        record["measures"] = {"local_redundancy": found} if lr and epoch % 8 == 0 else {}
        lines.append(json.dumps(record) + "\n")
        if epoch == 10:
            lines.append(
                json.dumps({"kind": "resume", "epoch": 10, "date": "2026-11-21T00:00:00Z"}) + "\n"
            )
    folder.mkdir(parents=True)
    (folder / "records.jsonl").write_text("".join(lines))
    ceiling = N * math.log2(CLASSES) if kind == "vision" else None
    config = {
        "driver": "memorize",
        "preset": "vision-small",
        "data": {"ceiling_bits": ceiling},
        "device": "cpu",
        "options": {"kind": kind, "n": N, "seed": seed, "epochs": epochs, "model": "small"},
        "commit": "abc",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_numbers_of_a_run(tmp_path):
    run = MemorizationRun.read(write_run(tmp_path / "run"))
    assert (run.kind, run.parameters, run.samples) == ("vision", PARAMETERS, N)
    assert run.ceiling == approx(N * 4 / PARAMETERS)
    assert run.epochs == list(range(0, 41, 2))
    assert run.series("bits") == approx([bits_of(e, 0) for e in range(0, 41, 2)])
    assert run.late_gain() == approx((bits_of(40, 0) - bits_of(36, 0)) / PARAMETERS)
    epochs, losses = run.train_losses()
    assert len(epochs) == len(losses) == 40
    assert epochs[-1] == 40
    epochs, values, errors = run.redundancy()
    assert epochs.tolist() == [0, 8, 16, 24, 32, 40]
    assert values.tolist() == [10, 18, 26, 34, 42, 50]
    assert (errors == 0.5).all()
    assert (run.spent("train"), run.spent("evaluate"), run.spent("local_redundancy")) == (
        80.0,
        10.5,
        0.0,
    )
    series = MemorizationRun.read(write_run(tmp_path / "series", kind="series", lr=False))
    assert math.isnan(series.ceiling)
    assert len(series.redundancy()[0]) == 0
    assert np.isnan(series.series("accuracy")).all()
    short = MemorizationRun.read(write_run(tmp_path / "short", epochs=2))
    assert math.isnan(short.late_gain())


def test_the_table_over_epochs_has_those_that_were_measured(tmp_path):
    rows = training_sheet(MemorizationRun.read(write_run(tmp_path / "run")), "t").rows
    assert [row[0] for row in rows] == ["0", "8", "16", "24", "32", "40"]
    assert rows[-1][1:] == (
        "2.1",
        f"{4 * math.log(2) - bits_of(40, 0) / N * math.log(2):.4g}",
        "40.0 %",
        f"{bits_of(40, 0):,.0f}",
        f"{bits_of(40, 0) / PARAMETERS:.4f}",
        f"{bits_of(40, 0) / 4:.1f} %",
        "50.00 ± 0.50",
    )
    rows = training_sheet(MemorizationRun.read(write_run(tmp_path / "none", lr=False)), "t").rows
    assert len(rows) == 13
    assert rows[0][0] == "0"
    assert rows[-1][0] == "40"
    assert {row[-1] for row in rows} == {"–"}


def test_seeds_are_averaged_and_other_runs_are_not(tmp_path):
    for seed in range(3):
        write_run(tmp_path / "seeds" / f"seed-{seed}", seed=seed)
    write_run(tmp_path / "longer", epochs=60)
    runs = read_memorization_runs([tmp_path / "seeds", tmp_path / "longer"])
    assert [len(group) for group in alike(runs)] == [3, 1]
    rows = bits_sheet(runs).rows
    assert [row[0] for row in rows][3:] == ["seeds/seed-0: mean of 3 seeds", "longer"]
    each = np.array([bits_of(40, seed) / PARAMETERS for seed in range(3)])
    assert rows[3][5] == pm(each.mean(), each.std(ddof=1) / 3**0.5)
    notes = [note for note in bits_sheet(runs).notes if "the paper has 1.0 bits" in note]
    assert [note.partition(":")[0] for note in notes] == ["seeds/seed-0", "longer"]
    report = write_memorization_report([tmp_path / "seeds", tmp_path / "longer"], tmp_path / "out")
    listed = (
        "Differences from the paper: n 100 for 819200. In seeds/seed-0, seeds/seed-1, "
        "seeds/seed-2: epochs 40 for 1000. In longer: epochs 60 for 1000."
    )
    for file in ("index.html", "report.md"):
        text = (report.folder / file).read_text()
        assert [text.count(part) for part in (listed, "n 100 for 819200")] == [1, 1]
    write_run(tmp_path / "again", seed=1)
    with refused(r"again and .*seed-1 have the same seed \(1\) .* no further evidence"):
        read_memorization_runs([tmp_path / "again", tmp_path / "seeds"])


def test_more_than_a_tenth_of_the_epochs_is_not_called_one(tmp_path):
    run = MemorizationRun.read(write_run(tmp_path / "run", epochs=10))
    gain = (bits_of(10, 0) - bits_of(8, 0)) / PARAMETERS
    assert (run.late_gain(), run.late_epochs) == (approx(gain), 2)
    assert any("(run: last 2 of 10 epochs)" in note for note in bits_sheet([run]).notes)


def test_the_report_on_the_command_line(tmp_path, cli):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", kind="series")
    out = cli(f"report {tmp_path / 'runs'}").out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert "Bits memorised" in out
    assert "Over training: b" in out
    assert out.count("Differences from the paper: ") == 1
    folder = tmp_path / "runs" / "report"
    names = {path.name for path in folder.iterdir()}
    assert {
        "index.html",
        "report.md",
        "report.json",
        "bits.csv",
        "bits.png",
        "losses.png",
        "redundancy.png",
    } <= names
    numbers = json.loads((folder / "report.json").read_text())
    assert list(numbers) == ["runs"]
    assert [run["kind"] for run in numbers["runs"]] == ["series", "vision"]
    assert numbers["runs"][1]["records"][-1]["bits"] == approx(bits_of(40, 0))
    cli(f"report {tmp_path / 'runs'} --out {tmp_path / 'plain'} --figures none")
    assert not list((tmp_path / "plain").glob("*.png"))
    (tmp_path / "runs" / "a" / "config.json").write_text('{"driver": "continual"}')
    cli(f"report {tmp_path / 'runs'}", code=2, says="report on them apart")


def test_a_run_that_has_just_begun(tmp_path):
    write_run(tmp_path / "run", epochs=0, lr=False)
    report = write_memorization_report([tmp_path / "run"])
    assert not report.figures
    assert report.sheets[0].rows[0][1] == "0"
    report.show()


def test_what_is_no_run_is_named(tmp_path):
    folder = write_run(tmp_path / "run")
    text = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(text[1:]))
    with refused("holds no records of a memorization run"):
        MemorizationRun.read(folder)
    (folder / "records.jsonl").write_text("".join([*text, text[-1][:30]]))
    with warned("the last line is incomplete"):
        assert MemorizationRun.read(folder).epochs[-1] == 40
    for odd in (
        '{"kind": "epoch", "epoch": 42}\n',
        text[-1].replace('"accuracy": 0.4', '"accuracy": NaN'),
        text[-1].replace('"accuracy": 0.4', '"accuracy": "0.4"'),
    ):
        (folder / "records.jsonl").write_text("".join([*text, odd]))
        with refused(f"record {len(text) + 1} is damaged"):
            MemorizationRun.read(folder)
