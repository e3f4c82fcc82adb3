"""Many runs at once: the queue of processes, its end, seeds, resumption and the display.

The queue ends with its parent; a seed of many is a single run of that seed.
"""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from continual_cases import SMALL, as_arguments, assert_same, checkpoint, comparable, lines
from expected import refused, warned
from rich.console import Console
from runs_here import messages_here

from fastlr.cli.progress import RunBoard, progress
from fastlr.display.record import progress_bar
from fastlr.experiments.continual import experiment as continual
from fastlr.experiments.continual import read_runs
from fastlr.experiments.runs import processes
from fastlr.experiments.runs import queue as many
from fastlr.experiments.runs.experiment import Progress
from fastlr.experiments.runs.processes import Job, job_messages, run_jobs
from fastlr.experiments.runs.sweep import product
from fastlr.files import locked

# Without fastlr's imports.
ATTACH = f"import runpy; send = runpy.run_path({processes.__file__!r})['attach']()\n"


def job(folder, name, code):
    return Job(name, [sys.executable, "-c", ATTACH + code], folder / f"{name}.txt")


# -- the queue
# --------------------------------------------------------------------------------------------------


def test_jobs_are_heard_and_failures_are_named_while_others_go_on(tmp_path):
    heard = []
    work = (
        "import os, time; send({'n': 1, 'slot': os.environ['SLOT'], 'stdin': len(os.read(0, 9))}); "
        "print('hello')\n"
    )
    jobs = [
        job(tmp_path, "good", work),
        job(tmp_path, "says", work + "send({'error': 'no such thing'}); raise SystemExit(1)"),
        job(tmp_path, "dies", work + "os.kill(os.getpid(), 9)"),
        job(tmp_path, "mute", work + "1 / 0"),
        job(tmp_path, "last", work + "send({'n': 2})"),
    ]
    failed = run_jobs(
        jobs, [{"SLOT": "a"}, {"SLOT": "b"}], lambda name, message: heard.append((name, message))
    )
    assert failed == {
        "says": "no such thing",
        "dies": "ended by signal 9 (SIGKILL), often for lack of memory",
        "mute": "ZeroDivisionError: division by zero",
    }
    for name in ("good", "says", "dies", "mute", "last"):
        started, sent, *_, ended = [message for of_job, message in heard if of_job == name]
        assert started == {"event": "started"}
        assert ended == {"event": "ended", "error": failed.get(name)}
        assert sent["n"] == 1
        assert sent["stdin"] == 0
        assert sent["slot"] in "ab"
        log = (tmp_path / f"{name}.txt").read_text()
        assert "hello" in log
        assert log.startswith("--- ")
    assert [message["n"] for name, message in heard if name == "last" and "n" in message] == [1, 2]
    under_way = most = 0
    for _, message in heard:
        under_way += (message.get("event") == "started") - (message.get("event") == "ended")
        most = max(most, under_way)
    assert most == 2, "as many at a time as there are slots"


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_queue(tmp_path, how):
    """A job and a process that it has started; neither looks for the parent."""
    work = (
        "import os, subprocess, time; p = subprocess.Popen(['sleep', '600']); send({'pids': "
        "[os.getpid(), p.pid]}); "
    )
    code = f"""
import signal
from pathlib import Path
# It is ignored, and inherited so, where the tests run in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
from fastlr.experiments.runs.processes import Job, run_jobs
command = {[sys.executable, "-c", ATTACH + work + "time.sleep(600)"]!r}
job = Job("one", command, Path({str(tmp_path / "log")!r}))
def listen(name, message):
    if "pids" in message:
        print(*message["pids"], flush=True)
run_jobs([job], [{{}}], listen)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        parent.send_signal(how)
        parent.wait(30)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))


# -- seeds
# --------------------------------------------------------------------------------------------------


def without_progress(text):
    """What was said beside the lines that come each minute: on a slow machine there is one."""
    return re.sub(r"^\d+/\d+ runs ended.*\n", "", text, flags=re.MULTILINE)


def one_process(jobs, slots):
    """Run the first job in a process, the others here."""
    yield from job_messages(jobs[:1], slots)
    yield from messages_here(jobs[1:], slots)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (one_process, messages_here),
        pytest.param(*2 * [job_messages], marks=pytest.mark.long),
    ],
)
def test_seeds_are_what_single_runs_are(tmp_path, images, cli, monkeypatch, first, later):
    """One of the first two is a process, all are, those that go on ``later`` too, in long tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(processes, "job_messages", first)
    settings = {
        **SMALL,
        "data": images,
        "tasks": 2,
        "measures": ("weight_norm", "local_redundancy"),
    }
    given = as_arguments(settings)
    out = tmp_path / "out"
    captured = cli(f"continual paper --out {out} --seed 4 --seeds 2 --tensorboard", *given)
    assert captured.out.startswith(f"runs: {out} (2 finished)\nlog: {out} (tensorboard")
    assert not without_progress(captured.err)
    assert any((out / "seed-5/tensorboard").iterdir())
    for seed in (4, 5):
        continual.begin(tmp_path / f"{seed}", "paper", {**settings, "seed": seed, "threads": 1})
        assert comparable(out / f"seed-{seed}") == comparable(tmp_path / f"{seed}")
        assert_same(checkpoint(out / f"seed-{seed}"), checkpoint(tmp_path / f"{seed}"))
    config = json.loads((out / "seed-5/config.json").read_text())
    assert config["options"]["seed"] == 5
    assert config["options"]["threads"] == 1
    assert config["command"] == sys.argv
    (out / "seed-6").mkdir()
    (out / "seed-6/config.json").touch()
    with warned("no records yet .seed-6"):
        assert [run.path.name for run in read_runs([out])] == ["seed-4", "seed-5"], (
            "a report pools them"
        )
    (out / "seed-6/config.json").unlink()
    cli(
        f"continual paper --out {out} --seeds 2",
        *given,
        code=2,
        says="holds runs: --resume goes on with them",
    )

    # one more task and one more seed, which fails
    monkeypatch.setattr(processes, "job_messages", later)
    cli(
        f"continual --resume --out {out} --tasks 3 --seeds 3 --data nowhere", code=2, says="nowhere"
    )
    (out / "seed-6/mine.txt").write_text("not a run")
    captured = cli(f"continual --resume --out {out} --tasks 3 --seeds 3 --at-once 3", code=1)
    assert captured.out == f"runs: {out} (2 finished, 1 failed: --resume tries again)\n"
    assert without_progress(captured.err) == (
        f"seed-6 failed: {out}/seed-6 is not empty (mine.txt): choose a new folder (log: "
        f"{out}/logs/seed-6.txt)\n"
    )
    assert "Traceback" in (out / "logs/seed-6.txt").read_text()
    assert [line["kind"] for line in lines(out / "seed-4")] == [
        "start",
        "task",
        "task",
        "resume",
        "task",
    ]


class Asked:
    """Stands in for `run_jobs`: keeps what it was asked to run."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(many, "run_jobs", self)

    def __call__(self, jobs, slots, listen):
        self.jobs, self.slots = list(jobs), slots
        self.work = {job.name: json.loads(job.command[-1]) for job in self.jobs}
        return {}


def test_resuming_does_what_is_left(tmp_path, images, monkeypatch):
    asked = Asked(monkeypatch)
    names = []
    settings = {**SMALL, "data": images, "tasks": 1, "measures": (), "threads": 1}
    runs = product(continual.DRIVER, "paper", settings, {}, 3)
    assert list(runs) == ["seed-0", "seed-1", "seed-2"]
    queue = many.Queue(continual.DRIVER, tmp_path / "out", None)
    queue.begin(runs, names.append)
    continual.begin(tmp_path / "out/seed-1", "paper", runs["seed-1"])
    again = queue.resume({}, names.append)
    assert names == [("seed-0", "seed-1", "seed-2"), ("seed-0", "seed-2")]
    assert asked.work["seed-2"]["settings"] == {**settings, "seed": 2, "measures": []}
    assert again.finished == ("seed-0", "seed-1", "seed-2")
    queue.resume({"tasks": 2}, names.append, count=4)
    assert names[-1] == ("seed-0", "seed-1", "seed-2", "seed-3")
    assert asked.work["seed-1"]["changed"] == {"tasks": 2}
    assert asked.work["seed-3"]["settings"]["tasks"] == 2
    queue.resume({"tasks": 1}, names.append)
    assert names[-1] == ("seed-0", "seed-2", "seed-3")
    for wrong, changed, count, message in (
        ({}, {"epochs": 3}, None, "epochs cannot change"),
        ({}, {}, 2, "has 4 runs already"),
        ({"preset": "tiny"}, {}, None, "begun with the preset paper"),
        ({"at_once": 0}, {}, None, "--at-once 0: give at least 1"),
    ):
        with refused(message):
            dataclasses.replace(queue, **wrong).resume(changed, print, count)
    with locked(tmp_path / "out"), refused("is being written by process"):
        queue.resume({}, print)


def test_what_is_wrong_for_all_is_said_before_any_begins(tmp_path, images, monkeypatch):
    asked = Asked(monkeypatch)
    runs = {"a": {**SMALL, "data": images}}
    for change, message in (
        ({"epochs": 0}, "epochs=0"),
        ({"data": str(tmp_path / "none")}, "none"),
    ):
        with refused(message):
            many.Queue(continual.DRIVER, tmp_path / "out", None).begin(
                {"a": {**runs["a"], **change}}, print
            )
    assert not (tmp_path / "out").exists()
    assert not hasattr(asked, "jobs")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with refused("is not empty"):
        many.Queue(continual.DRIVER, tmp_path / "full", None).begin(runs, print)
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["file"]


def test_the_command_says_what_does_not_go_together(tmp_path, images, cli):
    continual.begin(
        tmp_path / "run", "paper", {**SMALL, "data": images, "tasks": 1, "measures": ()}
    )
    for arguments, message in (
        (["--at-once", "2"], "--at-once goes with --seeds"),
        (["--resume", "--seeds", "2"], "does not hold runs of several seeds"),
    ):
        cli(f"continual paper --out {tmp_path / 'run'}", *arguments, code=2, says=message)


def test_places(tmp_path, images, monkeypatch):
    asked = Asked(monkeypatch)
    runs = {"a": {**SMALL, "data": images}}

    def places(at_once=None, **settings):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        many.Queue(continual.DRIVER, out, None, at_once).begin(
            {"a": {**runs["a"], **settings}}, lambda names: print
        )
        return asked.slots, asked.work["a"]["settings"]["threads"]

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert places() == ([{}] * 6, 1)
    assert places(threads=3) == ([{}] * 2, 3)
    assert places(at_once=5) == ([{}] * 5, 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert places() == ([{}] * 3, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    of = [{"CUDA_VISIBLE_DEVICES": name} for name in "01"]
    assert places(device="auto") == (of * 4, 0)
    assert places(3, device="cuda") == ([of[0], of[1], of[0]], 0)
    assert places(device="cuda:1") == ([{}] * 4, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-x")
    assert places(2, device="auto")[0] == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-x"},
    ]


# -- the display
# --------------------------------------------------------------------------------------------------


def test_a_line_for_each_run_under_way(tmp_path):
    board = RunBoard(continual.DRIVER, tmp_path)
    board.console = board.bar.live.console = Console(
        file=io.StringIO(), width=80, force_terminal=True, color_system=None
    )
    hear = board.begin(("seed-0", "seed-1", "seed-10"))

    def seen():
        with board.console.capture() as shown:
            board.console.print(board.bar.get_renderable())
        rows = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.get().splitlines()]
        assert all(len(line) <= 80 for line in rows)
        return rows

    shown = {
        "accuracy": "93.3 %",
        "LR": "1.234e+05",
        "a very long name of something": "with a very long value too",
    }
    for name in ("seed-0", "seed-10"):
        hear(name, {"event": "started"})
        hear(name, {"done": 1200, "total": 3000, "part": 0.5, "shown": shown})
    _, row, _ = rows = seen()
    assert [line.split()[0] for line in rows] == ["all", "seed-0", "seed-10"]
    assert "1200/3000" in row
    assert "accuracy 93.3 %, LR 1.234e+05" in row
    assert row.rstrip().endswith("…")
    hear("seed-0", {"done": 3000, "total": 3000, "part": 0.0, "shown": {"accuracy": "", "LR": ""}})
    hear("seed-0", {"event": "ended", "error": None})
    hear("seed-10", {"event": "ended", "error": "a reason"})
    assert (
        f"seed-10 failed: a reason (log: {tmp_path}/logs/seed-10.txt)"
        in board.console.file.getvalue()
    )
    assert len(seen()) == 1
    assert "2/3" in seen()[0]
    assert "1 failed" in seen()[0]


def test_without_a_terminal_a_line_a_minute(tmp_path, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with RunBoard(continual.DRIVER, tmp_path) as board:
        hear = board.begin(("seed-0", "seed-1"))
        hear("seed-0", {"event": "started"})
        hear("seed-0", {"done": 0, "total": 10, "part": 0.0, "shown": {}})
        assert capsys.readouterr().err == "", "short runs say nothing"
        now[0] = 200.0
        for done in (5, 6):
            hear(
                "seed-0", {"done": done, "total": 10, "part": 0.0, "shown": {"accuracy": "93.3 %"}}
            )
    assert capsys.readouterr().err == "0/2 runs ended, 25% done, 0:05:00 left\n"


def test_one_run_says_a_line_a_minute_too(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress(continual.DRIVER) as show:
        for done, seconds in ((0, 0), (1, 59), (2, 60), (3, 61), (4, 121)):
            now[0] = 100.0 + seconds
            show(Progress(done, 10, 0, 1, None))
    assert capsys.readouterr().err == "task 2/10  0:04:00 left\ntask 4/10  0:03:02 left\n"
    with progress_bar("local redundancy", 5000) as report:
        report(100, 5000, 1.0, 0.1)
        now[0] += 60
        report(200, 5000, 1.25, 0.125)
    assert capsys.readouterr().err.startswith("local redundancy 200/5000  1.25")
