"""Run folders have one writer; records and checkpoints survive a crash at any moment.

Full disks and random states are tested too.
"""

import errno
import json
import random
import shutil
import time
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import run_writers
import torch
from expected import refused, warned

from fastlr.errors import FastlrError, FastlrWarning
from fastlr.experiments.runs import folder as runs
from fastlr.experiments.runs.folder import Run, random_states, set_random_states, stream_seed


class Step:
    """Something that torch pickles by name."""


def step(run, t):
    run.commit(
        {"kind": "task", "task": t, "value": t / 3},
        {"position": t + 1, "weight": torch.full((3,), float(t))},
    )


def begin(path, steps=3):
    with Run.create(path, {"name": "x"}) as run:
        for t in range(steps):
            step(run, t)
    return (path / "records.jsonl").read_bytes()


def test_what_was_committed_is_there_again(tmp_path):
    begin(tmp_path / "run")
    with Run.resume(tmp_path / "run") as run:
        assert run.config == {"name": "x"}
        assert [r["task"] for r in run.records] == [0, 1, 2]
        assert run.state["position"] == 3
        assert run.state["weight"].tolist() == [2.0] * 3
        run.append({"kind": "resume", "task": 3})
        step(run, 3)
    lines = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["task"] * 3 + ["resume", "task"]


def test_every_cut_of_the_last_line_is_mended(tmp_path):
    whole = begin(tmp_path / "run")
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in (1, 2, last // 2, last - 1, last):
        copy = tmp_path / f"cut{cut}"
        shutil.copytree(tmp_path / "run", copy)
        (copy / "records.jsonl").write_bytes(whole[:-cut])
        with warned("incomplete last line") if cut < last else nullcontext():
            Run.resume(copy).close()
        assert (copy / "records.jsonl").read_bytes() == whole


def test_a_resume_line_that_was_cut_is_dropped(tmp_path):
    whole = begin(tmp_path / "run")
    with open(tmp_path / "run/records.jsonl", "ab") as file:
        file.write(b'{"kind": "resu')
    with pytest.warns(FastlrWarning), Run.resume(tmp_path / "run") as run:
        assert len(run.records) == 3
    assert (tmp_path / "run/records.jsonl").read_bytes() == whole


def test_damage_elsewhere_is_named(tmp_path):
    whole = begin(tmp_path / "run")
    records = tmp_path / "run/records.jsonl"
    records.write_bytes(whole.replace(b'"task", "task": 1', b'"task", "task": '))
    with refused("line 2"):
        Run.resume(tmp_path / "run")
    records.write_bytes(whole[: whole.index(b"\n") + 1])  # two committed records are gone
    with refused("is of step 3 and does not belong to the 1 steps"):
        Run.resume(tmp_path / "run")
    records.write_bytes(whole)
    checkpoint = tmp_path / "run/checkpoints/last.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with refused("last.pt is damaged"):
        Run.resume(tmp_path / "run")
    torch.save({"steps": 3, "state": Step()}, checkpoint)  # code that a file must not run
    with refused(
        "last.pt is damaged .it is no file of plain tensors, numbers and texts.: begin"
    ) as told:
        Run.resume(tmp_path / "run")
    assert "weights_only" not in str(told.value)
    assert "can still be loaded" not in str(told.value)


def test_folders_that_are_refused(tmp_path):
    begin(tmp_path / "run")
    with refused("--resume goes on with it"):
        Run.create(tmp_path / "run", {})
    with refused("holds no run"):
        Run.resume(tmp_path / "none")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    with refused("not empty .*thesis.tex"):
        Run.create(tmp_path / "full", {})
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["thesis.tex"]
    Run.resume(tmp_path / "run").close()  # refusals leave no lock behind


@pytest.mark.parametrize(
    "left",
    [["run.lock"], ["run.lock", "checkpoints/"], ["run.lock", "checkpoints/", "config.json.part"]],
)
def test_killed_before_there_was_a_configuration_it_can_begin_again(tmp_path, left):
    path = tmp_path / "run"
    path.mkdir()
    for name in left:
        (path / name).mkdir() if name.endswith("/") else (path / name).touch()
    begin(path)
    with Run.resume(path) as run:
        assert run.state["position"] == 3


def test_a_second_process_is_refused_by_name(tmp_path):
    Run.create(tmp_path / "run", {}).close()
    process, sent = run_writers.start(run_writers.write_on, tmp_path / "run")
    try:
        assert sent.recv() == "ready"
        for attempt in (Run.resume, lambda path: Run.create(path, {})):
            with refused(f"is being written by process {process.pid} on .* since"):
                attempt(tmp_path / "run")
    finally:
        process.kill()
        process.join()
    Run.resume(tmp_path / "run").close()  # the lock ends with the process, whatever its end


def test_a_full_disk_leaves_everything_before_intact(tmp_path):
    """A limit on the size of files fails like a full disk, in the middle of a write."""
    process, sent = run_writers.start(run_writers.fill, tmp_path)
    told = "File too large; what was written before is intact: make room, then go on with --resume"
    assert told in sent.recv()
    assert told in sent.recv()
    process.join(100)
    assert process.exitcode == 0
    for where in ("checkpoint", "records"):
        path = tmp_path / where
        assert [p.name for p in (path / "checkpoints").iterdir()] == ["last.pt"]
        with Run.resume(path) as run:
            assert [r["task"] for r in run.records] == [0]
            assert run.state["x"].tolist() == [0.0] * 10


def test_no_space_left_says_what_to_do(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Run.create(tmp_path / "run", {}) as run:
        step(run, 0)
        monkeypatch.setattr(runs.os, "fsync", full)
        with refused("No space left on device; .*--resume", FastlrError):
            step(run, 1)
        monkeypatch.undo()
    with Run.resume(tmp_path / "run") as run:
        assert run.state["position"] == 1


def test_killed_at_random_moments_between_two_bytes(tmp_path):
    """A writer killed again and again keeps position and records in agreement, no record twice."""
    Run.create(tmp_path / "run", {}).close()
    generator = random.Random(0)
    for _ in range(3):
        process, sent = run_writers.start(run_writers.write_on, tmp_path / "run")
        assert sent.recv() == "ready"
        time.sleep(generator.uniform(0.0, 0.1))
        process.kill()
        process.join()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FastlrWarning)
            with Run.resume(tmp_path / "run") as run:
                done = run.state["position"] if run.state else 0
                assert [r["task"] for r in run.records] == list(range(done))


def test_random_states_go_through_a_checkpoint(tmp_path):
    def draws():
        of_numpy = np.random.rand(2).tolist(), np.random.randn()
        return torch.rand(2).tolist(), of_numpy, random.random(), random.gauss(0, 1)

    np.random.randn(), random.gauss(0, 1)  # leave half a pair of normal numbers over
    with Run.create(tmp_path / "run", {}) as run:
        run.commit({"kind": "task"}, {"random": random_states()})
    wanted = draws()
    draws()
    with Run.resume(tmp_path / "run") as run:
        set_random_states(run.state["random"])
    assert draws() == wanted


def test_streams_of_seeds_do_not_meet():
    seeds = {
        stream_seed(seed, use, task)
        for seed in range(3)
        for use in ("model", "task")
        for task in range(50)
    }
    assert len(seeds) == 300
    assert all(0 <= seed < 1 << 63 for seed in seeds)
