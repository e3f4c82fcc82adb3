"""Damage to a run's records and configuration is refused by name, by --resume and by reports."""

import re
import shutil
import warnings

import torch
from expected import refused, warned
from pytest import fixture, mark

from fastlr.errors import FastlrWarning
from fastlr.experiments.continual import read_run
from fastlr.experiments.runs.folder import Run
from fastlr.experiments.runs.integrity import without_digest


def record(task, seed):
    measures = {"weight_norm": {"value": task / 7, "stderr": None}}
    return {
        "kind": "task",
        "task": task,
        "accuracy": 0.5 + seed / 10,
        "kept": True,
        "measures": measures,
    }


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
    return begin(tmp_path_factory.mktemp("integrity") / "run")


@fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def flip(line, old, new):
    """Replace the first of a text in one line, counted from 1."""

    def changed(lines):
        assert old in lines[line - 1]
        lines[line - 1] = lines[line - 1].replace(old, new, 1)
        return lines

    return changed


def flip_digest(line):
    def changed(lines):
        digit = lines[line - 1][-3]
        lines[line - 1] = lines[line - 1][:-3] + ("0" if digit != "0" else "1") + '"}'
        return lines

    return changed


RECORDS = {  # changes of the ten lines, and which line is named
    "digit of the first line": (flip(1, '"seed": 0', '"seed": 1'), "line 1"),
    "digit of a value": (flip(4, "0.2857", "0.2858"), "line 4"),
    "last digit of a value": (flip(4, "285714285714", "285714285715"), "line 4"),
    "digit of the last line": (flip(10, "0.5", "0.6"), "line 10.*remove it"),
    "number of a task": (flip(5, '"task": 3', '"task": 4'), "line 5"),
    "sign": (flip(5, "0.5", "-0.5"), "line 5"),
    "exponent": (flip(5, "0.5", "0.5e1"), "line 5"),
    "kind": (flip(5, '"kind": "task"', '"kind": "tasl"'), "line 5"),
    "kind becomes resume": (flip(5, '"kind": "task"', '"kind": "resume"'), "line 5"),
    "name of a measure": (flip(6, "weight_norm", "weight_morn"), "line 6"),
    "true becomes false": (flip(6, "true", "false"), "line 6"),
    "null becomes a number": (flip(6, "null", "0.0"), "line 6"),
    "bracket": (flip(6, "}}", "}]"), "line 6"),
    "space more": (flip(6, ": 0.5", ":  0.5"), "line 6"),
    "space less": (flip(6, ": 0.5", ":0.5"), "line 6"),
    "null byte": (flip(6, "0.5", "\0.5"), "line 6"),
    "carriage return": (flip(6, "}}", "}}\r"), "line 6"),
    "digest of the first line": (flip_digest(1), "line 1"),
    "digest within": (flip_digest(5), "line 5"),
    "digest of the last line": (flip_digest(10), "line 10"),
    "name of the first digest": (flip(1, "digest", "dipest"), "line 1"),
    "name of a digest": (flip(5, "digest", "dipest"), "line 5"),
    "name of the last digest": (flip(10, "digest", "dipest"), "line 10"),
    "a line without digest": (lambda a: [*a[:4], without_digest(a[4]), *a[5:]], "line 5"),
    "all lines without digest": (lambda a: [without_digest(line) for line in a], "line 1"),
    "first removed": (lambda a: a[1:], "line 1"),
    "one removed": (lambda a: [*a[:4], *a[5:]], "line 5"),
    "resume removed": (lambda a: [*a[:6], *a[7:]], "line 7"),
    "two removed at the end": (lambda a: a[:-2], "was shortened: it holds 7 steps"),
    "all after the resume removed": (lambda a: a[:7], "was shortened: it holds 6 steps"),
    "all removed": (lambda a: [], "was shortened: it holds 0 steps"),
    "one repeated": (lambda a: [*a[:5], a[4], *a[5:]], "line 6"),
    "last repeated": (lambda a: [*a, a[-1]], "line 11"),
    "first repeated at the end": (lambda a: [*a, a[0]], "line 11"),
    "neighbours swapped": (lambda a: [*a[:3], a[4], a[3], *a[5:]], "line 4"),
    "ends swapped": (lambda a: [a[-1], *a[1:-1], a[0]], "line 1"),
    "in reverse": (lambda a: a[::-1], "line 1"),
    "blank line": (lambda a: [*a[:4], "", *a[4:]], "line 5"),
    "cut within": (lambda a: [*a[:4], a[4][:20], *a[5:]], "line 5"),
    "two joined": (lambda a: [*a[:4], a[4] + a[5], *a[6:]], "line 5"),
    "carriage returns": (lambda a: [line + "\r" for line in a], "line 1"),
}
CONFIGS = {  # a text and another
    "option": ('"tasks": 8', '"tasks": 9'),
    "seed": ('"seed": 0', '"seed": 1'),
    "data": ('"digest": "d"', '"digest": "e"'),
    "driver": ("continual", "continuam"),
    "name of an option": ("tasks", "taskt"),
    "option removed": (r',\s+"tasks": 8', ""),
    "digest": (r'"digest": "[0-9a-f]{4}', '"digest": "beef'),
    "name of the digest": (r'"digest": "(?=[0-9a-f]{32})', '"dipest": "'),
}


def check_refused(run, says):
    for read in (Run.resume, read_run):
        with refused(says):
            read(run)


@mark.parametrize("kind", RECORDS)
def test_damaged_records(run, kind):
    change, says = RECORDS[kind]
    file = run / "records.jsonl"
    lines = change(file.read_text().splitlines())
    file.write_text("".join(f"{line}\n" for line in lines), newline="")
    check_refused(run, f"records.jsonl.*{says}.*restore the file from a copy")


@mark.parametrize("kind", CONFIGS)
def test_damaged_configurations(run, kind):
    file = run / "config.json"
    text = re.sub(*CONFIGS[kind], file.read_text(), count=1)
    file.write_text(text)
    check_refused(run, "config.json (carries no digest|is not as it was written).*from a copy")


def test_a_broken_configuration(run):
    (run / "config.json").write_text("{")
    with refused(r"cannot read .*config\.json"):
        Run.resume(run)
    with warned("cannot read"), refused("config.json carries no digest"):
        read_run(run)


def test_the_records_of_another_run(run, tmp_path):
    shutil.copy(begin(tmp_path / "other", seed=1) / "records.jsonl", run)
    check_refused(run, "records.jsonl holds another record of step 9 than checkpoints/last.pt")


def test_digests_that_were_taken_from_all_files(run):
    for name in ("config.json", "records.jsonl"):
        lines = (run / name).read_text().split("}\n")
        (run / name).write_text("\n".join(without_digest(line + "}") for line in lines if line))
    with refused("version 2, 9 steps. does not belong"):
        Run.resume(run)


@mark.parametrize("tail", ["", '{"kind": "ta', "\0\0"])
def test_a_last_line_that_is_in_the_checkpoint_is_taken_from_there(run, tail):
    file = run / "records.jsonl"
    whole = file.read_bytes()
    shortened = b"".join(whole.splitlines(keepends=True)[:-1])
    file.write_bytes(shortened + tail.encode())
    with warned("lacks the last record, which checkpoints/last.pt"):
        assert len(read_run(run)) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastlrWarning)
        Run.resume(run).close()
    assert file.read_bytes() == whole


def test_a_damaged_checkpoint_does_not_keep_from_a_report(run):
    (run / "checkpoints/last.pt").write_bytes(b"no checkpoint")
    with warned("whether records.jsonl was shortened is not known"):
        assert len(read_run(run)) == 8


def test_records_alone_are_held_to_their_digests(run):
    (run / "config.json").unlink()
    assert read_run(run).verified
    file = run / "records.jsonl"
    file.write_text(file.read_text().replace("0.2857", "0.2858"))
    with refused("line 4"):
        read_run(run)
