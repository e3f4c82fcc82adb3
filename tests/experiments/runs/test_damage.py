"""Damage to a run's records, and a last line that is taken from the checkpoint."""

import shutil
import warnings

import torch
from expected import refused
from pytest import fixture, mark

from fastlr.errors import FastlrWarning
from fastlr.experiments.continual import read_run
from fastlr.experiments.runs.folder import Run


def record(task, seed):
    measures = {"weight_norm": {"value": task / 7, "stderr": None}}
    return {"kind": "task", "task": task, "accuracy": 0.5 + seed / 10, "measures": measures}


def begin(path, seed=0):
    """A run of eight tasks, resumed before the sixth: ten lines."""
    config = {"driver": "continual", "options": {"seed": seed, "tasks": 8}, "data": {"digest": "d"}}
    with Run.create(path, config) as run:
        run.commit({"kind": "start", "seed": seed}, {"position": 0})
        for task in range(5):
            run.commit(record(task, seed), {"position": task + 1, "x": torch.zeros(9)})
    with Run.resume(path) as run:
        run.append({"kind": "resume", "task": 5})
        for task in range(5, 8):
            run.commit(record(task, seed), {"position": task + 1, "x": torch.zeros(9)})
    return path


@fixture(scope="module")
def whole(tmp_path_factory):
    return begin(tmp_path_factory.mktemp("damage") / "run")


@fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


DAMAGE = {  # changes of the ten lines, and what is said
    "two removed at the end": (lambda a: a[:-2], "is of step 9 .* the 7 steps"),
    "all removed": (lambda a: [], "is of step 9 .* the 0 steps"),
    "one repeated": (lambda a: [*a, a[4]], "is of step 9 .* the 10 steps"),
    "last changed": (lambda a: [*a[:-1], a[-1].replace("0.5", "0.6")], "is of step 9"),
    "cut within": (lambda a: [*a[:4], a[4][:20], *a[5:]], "line 5"),
    "two joined": (lambda a: [*a[:4], a[4] + a[5], *a[6:]], "line 5"),
}


@mark.parametrize("kind", DAMAGE)
def test_damaged_records(run, kind):
    change, says = DAMAGE[kind]
    file = run / "records.jsonl"
    lines = change(file.read_text().splitlines())
    file.write_text("".join(f"{line}\n" for line in lines))
    with refused(f"records.jsonl.*{says}|{says}.*records.jsonl"):
        Run.resume(run)


def test_a_broken_configuration(run):
    (run / "config.json").write_text("{")
    with refused(r"cannot read .*config\.json"):
        Run.resume(run)


def test_the_records_of_another_run(run, tmp_path):
    shutil.copy(begin(tmp_path / "other", seed=1) / "records.jsonl", run)
    with refused("checkpoints/last.pt is of step 9 and does not belong"):
        Run.resume(run)


@mark.parametrize("tail", ["", '{"kind": "ta', "\0\0"])
def test_a_last_line_that_is_in_the_checkpoint_is_taken_from_there(run, tail):
    file = run / "records.jsonl"
    whole = file.read_bytes()
    shortened = b"".join(whole.splitlines(keepends=True)[:-1])
    file.write_bytes(shortened + tail.encode())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastlrWarning)
        Run.resume(run).close()
    assert file.read_bytes() == whole


def test_a_damaged_checkpoint_does_not_keep_from_a_report(run):
    (run / "checkpoints/last.pt").write_bytes(b"no checkpoint")
    assert len(read_run(run)) == 8


def test_lines_with_the_digests_of_earlier_versions(run):
    file = run / "records.jsonl"
    lines = [line[:-1] + ', "digest": "0"}\n' for line in file.read_text().splitlines()]
    file.write_text("".join(lines))
    with Run.resume(run) as resumed:
        assert not any("digest" in record for record in resumed.records)
