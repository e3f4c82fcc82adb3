"""``--tensorboard``: the log has the numbers of the records, each step once."""

import sys

from continual_cases import SMALL, as_arguments, lines
from pytest import approx, fixture, importorskip

from fastlr.cli.main import main


def read_log(folder):
    """{name: [(step, value), ...]} as TensorBoard shows it, earlier files purged."""
    accumulator = importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


@fixture
def absent(monkeypatch):
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_tensorboard_the_remedy_is_named_and_no_run_begins(tmp_path, absent, cli):
    for seeds in ("", " --seeds 2"):
        error = cli(
            f"continual demo --out {tmp_path / 'run'} --tensorboard{seeds}",
            code=2,
            says="tensorboard is not installed",
        ).err
        assert "pip install --no-build-isolation '.[logging]'" in error
        assert not (tmp_path / "run").exists()


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
    shown = read_log(folder / "tensorboard")
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
    from torch.utils.tensorboard import SummaryWriter

    steps = []

    def fail(self, name, value, step):
        steps.append(step)
        if step == 1:
            raise OSError("no space left")

    monkeypatch.setattr(SummaryWriter, "add_scalar", fail)
    run(images, tmp_path / "run", "--tasks 3 --tensorboard")
    warning = "warning: the run continues without its log: no space left"
    assert capsys.readouterr().err.count(warning) == 1
    assert steps.count(1) == 1
    assert max(steps) == 1
    assert len(lines(tmp_path / "run")) == 4
