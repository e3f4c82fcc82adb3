"""Loggers: what they write is read back, and resumption leaves no step twice.

The driver's TensorBoard is compared with its records.
"""

import csv
import json
import math
import sys

from continual_cases import SMALL, as_arguments, lines
from expected import refused
from pytest import approx, fixture, importorskip, mark

from fastlr.cli.main import main
from fastlr.errors import InputError
from fastlr.experiments.runs import tensorboard
from fastlr.integrations.loggers import (
    CallbackLogger,
    CsvLogger,
    JsonLinesLogger,
    Logger,
    TensorBoardLogger,
)


def read_csv(path):
    return list(csv.DictReader(path.open()))


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_tensorboard(folder):
    """{name: [(step, value), ...]} as TensorBoard shows it, earlier files purged."""
    accumulator = importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


READ = {CsvLogger: read_csv, JsonLinesLogger: read_jsonl}


@mark.parametrize("kind", READ)
def test_values_come_back_and_a_new_name_is_no_loss(tmp_path, kind):
    file = tmp_path / "new" / "log"
    with kind(file) as logger:
        assert isinstance(logger, Logger)
        logger.log({"a": 0.1 + 0.2}, 1)
        logger.log({"a": 2.0, "b, c": 1e-300}, 2)
        logger.log({"b, c": math.nan}, 5)
    rows = READ[kind](file)
    assert [int(row["step"]) for row in rows] == [1, 2, 5]
    assert float(rows[0]["a"]) == 0.1 + 0.2
    assert float(rows[1]["b, c"]) == 1e-300
    assert not rows[0].get("b, c")
    assert not rows[2].get("a")
    assert rows[2]["b, c"] == ("nan" if kind is CsvLogger else None)


@mark.parametrize("kind", READ)
def test_going_on_drops_later_steps_and_a_line_cut_short(tmp_path, kind):
    file = tmp_path / "log"
    with kind(file, purge_step=0) as logger:  # nothing there yet
        for step in range(4):
            logger.log({"a": step / 7}, step)
    before = file.read_text()
    file.write_text(before[:-3])
    with kind(file, purge_step=3) as logger:
        logger.log({"b": 9.0}, 3)
    rows = READ[kind](file)
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert [float(row["a"]) for row in rows[:3]] == [0.0, 1 / 7, 2 / 7]
    assert float(rows[3]["b"]) == 9


@mark.parametrize("kind", READ)
def test_wrong_files_and_names_are_refused(tmp_path, kind):
    file = tmp_path / "log"
    file.write_text("step\nthree\nfour\n")
    with refused("there already"):
        kind(file)
    with refused(r"log, line [12]: not written by"):
        kind(file, purge_step=4)
    assert file.read_text() == "step\nthree\nfour\n"
    with refused("cannot write"):
        kind(file / "below")
    with refused("is called step"):
        kind(tmp_path / "other").log({"step": 1.0}, 1)


def test_a_function_gets_a_dict():
    seen = []
    with CallbackLogger(lambda *arguments: seen.append(arguments)) as logger:
        logger.log({"a": 1.0}, 7)
    assert seen == [({"a": 1.0}, 7)]
    assert isinstance(logger, Logger)
    with refused("wants a function"):
        CallbackLogger("wandb")


def test_tensorboard_shows_each_step_once(tmp_path):
    with TensorBoardLogger(tmp_path) as logger:
        for step in range(5):
            logger.log({"a": float(step)}, step)
        assert read_tensorboard(tmp_path)["a"][-1] == (4, 4.0)  # on the disk before it is closed
    with TensorBoardLogger(tmp_path, purge_step=3) as logger:
        logger.log({"a": 30.0, "b/c": 1.0}, 3)
    assert read_tensorboard(tmp_path) == {"a": [(0, 0), (1, 1), (2, 2), (3, 30)], "b/c": [(3, 1)]}
    with refused("closed"):
        logger.log({"a": 1.0}, 4)


@fixture
def absent(monkeypatch):
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_tensorboard_the_remedy_is_named_and_no_run_begins(tmp_path, absent, cli):
    with refused(r"pip install --no-build-isolation '.\[logging\]'"):
        TensorBoardLogger(tmp_path / "log")
    cli(
        f"continual demo --out {tmp_path / 'run'} --tensorboard",
        code=2,
        says="tensorboard is not installed",
    )
    assert not (tmp_path / "run").exists()


# -- the driver
# --------------------------------------------------------------------------------------------------


def run(images, path, line):
    settings = {
        **SMALL,
        "measures": "weight_norm,local_redundancy",
        "measure_every": 2,
        "epochs": 1,
    }
    del settings["tasks"]
    command = f"continual paper --data {images} --out {path} {line}"
    assert main([*command.split(), *as_arguments(settings)]) == 0


def assert_shows(folder):
    """What TensorBoard shows of a run is what its records say, each step once."""
    shown = read_tensorboard(folder / "tensorboard")
    records = [record for record in lines(folder) if record["kind"] != "resume"]

    def series(pick):
        found = [(step, pick(record)) for step, record in enumerate(records)]
        return [(step, approx(value, rel=1e-6)) for step, value in found if value is not None]

    tasks = range(1, len(records))
    assert shown["accuracy"] == series(lambda record: record.get("accuracy"))
    assert shown["train_loss"] == series(lambda record: record.get("train_loss"))
    lost = [
        (t + 1, records[t]["accuracy"] - records[t + 1]["previous_accuracy"]) for t in tasks[:-1]
    ]
    assert shown["forgetting"] == [(t, approx(value, abs=1e-6)) for t, value in lost]
    for key, end in (("value", ""), ("stderr", "_stderr")):
        name = f"measures/local_redundancy{end}"
        assert shown[name] == series(
            lambda r, key=key: r["measures"].get("local_redundancy", {}).get(key)
        )
    assert shown["measures/weight_norm"][0][0] == 0
    assert shown["measures/weight_norm"][1][0] == 2
    assert shown["seconds/train"] == series(lambda record: record["seconds"].get("train"))
    assert not [name for name in shown if name.endswith(("task", "epochs", "per_parameter"))]


def test_tensorboard_shows_the_records_also_of_resumed_runs(tmp_path, images, capsys):
    importorskip("tensorboard")
    whole = tmp_path / "whole"
    run(images, whole, "--tasks 3 --tensorboard")
    assert f"log: {whole / 'tensorboard'}" in capsys.readouterr().out
    assert_shows(whole)
    assert main(f"continual --resume --out {whole} --tasks 4 --tensorboard".split()) == 0
    assert_shows(whole)
    later = tmp_path / "later"  # asked for when the run was over
    run(images, later, "--tasks 3")
    assert not (later / "tensorboard").exists()
    assert main(f"continual --resume --out {later} --tensorboard".split()) == 0
    assert_shows(later)


def test_a_refused_run_leaves_the_log_of_the_run_in_its_folder_alone(tmp_path, images, cli):
    importorskip("tensorboard")
    run(images, tmp_path / "run", "--tasks 1")
    cli(f"continual demo --out {tmp_path / 'run'} --tensorboard", code=2, says="holds a run")
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_log_that_fails_does_not_end_the_run(tmp_path, images, monkeypatch, capsys):
    importorskip("tensorboard")
    calls = []

    class Failing(CallbackLogger):
        def log(self, values, step):
            calls.append(step)
            if step == 1:
                raise InputError("cannot write the log: no space left")

    monkeypatch.setattr(tensorboard, "TensorBoardLogger", lambda *_, **__: Failing(print))
    run(images, tmp_path / "run", "--tasks 3 --tensorboard")
    assert (
        capsys.readouterr().err.count(
            "warning: the run goes on without its log: cannot write the log"
        )
        == 1
    )
    assert calls == [0, 1]
    assert len(lines(tmp_path / "run")) == 4
