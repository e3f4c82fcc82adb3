"""A run for a GPU keeps each result at once, resumes, and leaves no process behind; on a CPU."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from pytest import fixture, mark, raises

from bench import launch_times, test_estimate
from bench.gpu_run import __main__ as command_line
from bench.gpu_run import roofline, runner, steps
from bench.gpu_run.runner import GpuRun, whole_lines
from bench.gpu_run.steps import ROOT, Step
from bench.paired import Wrong
from fastlr import LocalRedundancy, ShapeImages, kernels
from fastlr.ghost.trust.ladder import Rung


@fixture
def run(tmp_path):
    """Run steps in the folder of a name, perhaps resuming another; return code and results."""

    def run_steps(name, rows, resume=None, seconds=60):
        work = tmp_path / f"work-{name}"
        work.mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHON": sys.executable}
        earlier = tmp_path / resume if resume else None
        made = GpuRun(rows, tmp_path / name, work, earlier, environment)
        code = made.run(seconds)
        lines = whole_lines(tmp_path / name / "results.jsonl")
        return code, [json.loads(line) for line in lines]

    return run_steps


def is_alive(pid):
    """A process that has ended may stay as a zombie where nobody waits for it."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_step_past_its_limit_ends_with_its_children(run, monkeypatch):
    """One child ignores SIGTERM."""
    monkeypatch.setattr(runner, "GRACE", 0.5)
    command = "echo $$; (trap '' TERM; sleep 60) & echo $!; sleep 60"
    begun = time.monotonic()
    code, (result,) = run("a", [Step("stuck", 0.5, 1, command)])
    assert time.monotonic() - begun < 20
    assert (code, result["code"], result["limit"]) == (1, None, 0.5)
    assert not any(is_alive(pid) for pid in result["printed"].split())


def test_what_a_step_leaves_running_ends_with_it(run):
    _, (result,) = run("a", [Step("leaves", 10, 1, "sleep 60 & echo $!")])
    assert result["code"] == 0
    wait_for(lambda: not is_alive(result["printed"].strip()))


def test_a_resumed_run_repeats_what_failed_up_to_its_attempts(run):
    rows = [
        Step("setup", 10, 1, "echo again", setup=True),
        Step("right", 10, 1, "echo yes"),
        Step("wrong", 10, 2, "echo no; exit 3"),
    ]
    code, results = run("a", rows)
    assert code == 0, "an attempt is left"
    assert [(each["step"], each["code"]) for each in results[1:]] == [("right", 0), ("wrong", 3)]
    assert results[2]["printed"] == "no\n"
    code, results = run("b", rows, resume="a")
    assert code == 1
    assert [each["step"] for each in results[3:]] == ["setup", "wrong"]
    code, results = run("b", rows, resume="b")
    assert code == 0
    assert [each["step"] for each in results[5:]] == ["setup"]


def test_no_step_runs_without_its_setup(run):
    rows = [Step("setup", 10, 1, "exit 1", setup=True), Step("right", 10, 1, "true")]
    code, results = run("a", rows)
    assert code == 1
    assert [each["step"] for each in results] == ["setup"]


def test_an_attempt_that_the_end_of_its_run_cut_short_does_not_count(run, tmp_path):
    """A line that was cut off while it was written is left out."""
    (tmp_path / "a").mkdir()
    whole = {"step": "slow", "code": None, "seconds": 9, "limit": 60, "printed": ""}
    short = {**whole, "step": "short", "limit": 9}
    lines = f'{json.dumps(whole)}\n{json.dumps(short)}\n{{"step": "sho'
    (tmp_path / "a/results.jsonl").write_text(lines)
    rows = [Step(name, 60, 1, "echo now") for name in ("slow", "short")]
    _, results = run("b", rows, resume="a")
    assert [(each["step"], each["code"]) for each in results[2:]] == [("short", 0)]


def test_a_step_that_would_not_fit_is_left(run, monkeypatch):
    monkeypatch.setattr(runner, "RESERVE", 0)
    code, results = run("a", [Step("a", 1, 1, "true"), Step("b", 30, 1, "true")], seconds=5)
    assert code == 0
    assert [each["step"] for each in results] == ["a"]


def test_archives_travel_unless_they_are_too_large(run, tmp_path, monkeypatch):
    """Steps that share Triton's cache find it in the next run."""
    write = 'mkdir -p "$TRITON_CACHE_DIR"; echo k > "$TRITON_CACHE_DIR/k"; echo r > "$RECORDS/r"'
    read = 'cat "$TRITON_CACHE_DIR/k" "$RECORDS/r"'
    rows = [Step("write", 10, 1, write), Step("read", 10, 1, read)]
    run("a", rows[:1])
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "results.jsonl",
        "report.txt",
        "records.tar.gz",
        "triton.tar.gz",
    }
    _, results = run("b", rows, resume="a")
    assert results[1]["printed"] == "k\nr\n"
    before = (tmp_path / "a/records.tar.gz").read_bytes()
    monkeypatch.setattr(runner, "LARGEST", 10)
    run("c", [*rows, Step("more", 10, 1, 'echo > "$RECORDS/more"')], resume="b")
    assert (tmp_path / "c/records.tar.gz").read_bytes() == before
    assert "records.tar.gz: not replaced" in (tmp_path / "c/report.txt").read_text()


@mark.parametrize("function", ["pack", "restore"])
def test_a_kill_while_records_are_packed_or_unpacked_loses_none(
    function, run, tmp_path, monkeypatch
):
    """A step whose record may be lost runs again."""

    def killed(*_):
        raise KeyboardInterrupt

    write = [Step("write", 10, 1, 'echo > "$RECORDS/r"')]
    run("a", write)
    name, resume = ("b", None) if function == "pack" else ("c", "a")
    with monkeypatch.context() as patch:
        patch.setattr(runner.Archive, function, killed)
        with raises(KeyboardInterrupt):
            run(name, write, resume=resume)
    assert not (tmp_path / name / "results.jsonl").exists()
    _, results = run(name, write, resume=resume)
    assert [each["step"] for each in results] == ["write"]


def test_a_full_disk_keeps_the_result(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(runner.tarfile, "open", full)
    _, results = run("a", [Step("write", 10, 1, 'echo > "$RECORDS/r"')])
    assert results[0]["code"] == 0
    assert "not replaced (no space left)" in (tmp_path / "a/report.txt").read_text()


def test_a_run_that_is_killed_in_the_midst_of_a_step_resumes(tmp_path, monkeypatch):
    """The step's processes end with the run, and the next command reports the step's output."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    wait = f"(trap '' TERM; sleep 60) & echo $$ $! > \"{tmp_path}/pid\"; echo seen; sleep 60"
    hang = f'if [ ! -e "{tmp_path}/pid" ]; then {wait}; fi; echo done'
    rows = [
        {"name": "first", "seconds": 30, "attempts": 1, "command": "echo once"},
        {"name": "second", "seconds": 30, "attempts": 1, "command": hang},
    ]
    (tmp_path / "steps.json").write_text(json.dumps(rows))
    command = [sys.executable, "-m", "bench.gpu_run", "--commit", "c"]
    command += ["--steps", f"{tmp_path}/steps.json", "--out", f"{tmp_path}/out"]
    begun = subprocess.Popen(command, cwd=ROOT)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pids = (tmp_path / "pid").read_text().split()
    wait_for(lambda: (tmp_path / "out/step.log").read_text() == "second\nseen\n")
    begun.kill()
    begun.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
    assert subprocess.run(command, cwd=ROOT).returncode == 2, "results would be mixed"
    resumed = subprocess.run([*command, "--resume", f"{tmp_path}/out"], cwd=ROOT)
    assert resumed.returncode == 0
    lines = [json.loads(line) for line in whole_lines(tmp_path / "out/results.jsonl")]
    assert [(line["step"], line["printed"]) for line in lines] == [
        ("first", "once\n"),
        ("second", "done\n"),
    ]
    report = (tmp_path / "out/report.txt").read_text()
    assert "second: its run was killed; the end of its output:\nseen\n" in report
    assert not (tmp_path / "out/step.log").exists()


def test_the_time_of_a_run_counts_from_the_start_of_its_process(tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "process_start", lambda: time.time() - 90)
    row = {"name": "long", "seconds": 30, "attempts": 1, "command": "true"}
    (tmp_path / "steps.json").write_text(json.dumps([row]))
    files = ["--steps", f"{tmp_path}/steps.json", "--out", f"{tmp_path}/out", "--commit", "c"]
    assert command_line.main(["--seconds", "100", *files]) == 0
    assert "long: left for a command" in (tmp_path / "out/report.txt").read_text()
    assert not (tmp_path / "out/results.jsonl").exists()


def test_nothing_runs_without_a_gpu_or_with_faulty_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "find_gpu", lambda: None)
    assert command_line.main(["--out", str(tmp_path / "out")]) == 2
    assert "--steps" in capsys.readouterr().err
    (tmp_path / "steps.json").write_text('[{"name": "a", "secs": 1}]')
    assert command_line.main(["--steps", f"{tmp_path}/steps.json", "--out", f"{tmp_path}/out"]) == 2
    assert "--steps" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


TESTS = """
import time
import pytest

needs_gpu = pytest.mark.skipif(False, reason="needs a GPU")

@needs_gpu
@pytest.mark.timeout(9)
def test_right(): pass

@needs_gpu
def test_wrong(): assert 1 == 2, "seen"

@needs_gpu
def test_slow(): time.sleep(30)

def test_for_a_cpu(): pass
"""


def command_of_tests(folder, parallel):
    """Return the command that runs a folder's tests with the plugin."""
    plugins = "-p bench.gpu_run.plugin -p no:timeout -p no:cacheprovider"
    pytest = f'"$PYTHON" -m pytest -q --strict-markers {plugins} {parallel}'
    return (
        f"unset PYTEST_XDIST_WORKER; export PYTHONPATH={ROOT}; cd {folder}; "
        f"GPU_RUN_TEST_SECONDS=1 {pytest} --rootdir . -c /dev/null test_some.py"
    )


@mark.parametrize("parallel", ["", "-n 1"])
def test_tests_write_a_line_each_and_those_that_passed_are_left_out(parallel, run, tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    rows = [Step("tests", 30, 3, command_of_tests(tmp_path, parallel))]
    _, results = run("a", rows)
    assert results[0]["code"] == 1, results[0]["printed"]
    lines = [json.loads(line) for line in whole_lines(tmp_path / "a/tests.jsonl")]
    outcomes = {line["test"].rpartition(":")[2]: line for line in lines}
    assert len(outcomes) == 3
    kinds = Counter(line["outcome"] for line in lines)
    assert kinds == {"collected": 3, "started": 3, "passed": 1, "failed": 2}
    assert outcomes["test_right"]["outcome"] == "passed"
    assert "seen" in outcomes["test_wrong"]["failure"]
    assert outcomes["test_slow"]["outcome"] == "failed"
    text = TESTS.replace("1 == 2", "2").replace("sleep(30)", "sleep(0)")
    (tmp_path / "test_some.py").write_text(text)
    _, results = run("b", rows, resume="a")
    assert results[1]["code"] == 0
    again = [json.loads(line) for line in whole_lines(tmp_path / "b/tests.jsonl")][9:]
    assert {line["test"].rpartition(":")[2] for line in again} == {"test_wrong", "test_slow"}
    if not parallel:
        _, results = run("c", [rows[0]._replace(name="none_left")], resume="b")
        assert results[2]["code"] == 0


CRASH = """
import os
import pytest

pytestmark = pytest.mark.skipif(False, reason="needs a GPU")

def test_crash(): os._exit(1)

def test_wrong(): assert False

def test_right(): pass
"""


@mark.parametrize("parallel", ["", "-n 1"])
def test_a_test_that_crashes_keeps_no_other_from_running(parallel, run, tmp_path):
    """Without xdist the others run in the next command, and the crash comes last."""
    (tmp_path / "test_some.py").write_text(CRASH)
    rows = [Step("tests", 30, 3, command_of_tests(tmp_path, parallel))]
    _, results = run("a", rows)
    assert results[0]["code"] == 1
    summary = "tests: 1 passed, 2 failed, 0 crashed or cut short, 0 skipped, 0 not yet run"
    name = "a"
    if not parallel:
        first = "tests: 0 passed, 0 failed, 1 crashed or cut short, 0 skipped, 2 not yet run"
        assert whole_report(tmp_path / "a")[-1] == first
        run("b", rows, resume="a")
        summary = "tests: 1 passed, 1 failed, 1 crashed or cut short, 0 skipped, 0 not yet run"
        name = "b"
    assert whole_report(tmp_path / name)[-1] == summary
    lines = [json.loads(line) for line in whole_lines(tmp_path / name / "tests.jsonl")]
    last = [line for line in lines if line["test"].endswith("test_crash")][-1]
    assert "crashed" in last["failure"] if parallel else last["outcome"] == "started"


def whole_report(folder):
    """Return the lines of a run's report."""
    return (folder / "report.txt").read_text().splitlines()


def test_fastlr_is_installed_once_also_where_pip_refuses(run, tmp_path):
    """The stand-in for Python imports the kernels once pip has run."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(
        f'#!/bin/sh\necho "$2 $PIP_BREAK_SYSTEM_PACKAGES" >> {log}\n'
        f'if [ "$2" = pip ]; then touch {tmp_path}/done; else [ -e {tmp_path}/done ]; fi\n'
    )
    python.chmod(0o755)
    rows = [Step("install", 10, 1, f"PYTHON={python}; {steps.INSTALL}", setup=True)]
    code, _ = run("a", rows)
    assert code == 0
    check = f"{steps.VERSION}; {steps.KERNELS} "
    assert log.read_text().splitlines() == [check, "pip 1", check]
    run("b", rows, resume="a")
    assert log.read_text().splitlines()[3:] == [check]


def test_kernels_of_another_clone_do_not_count_as_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(kernels.__path__[0]).parent)
    exec(steps.KERNELS)
    (tmp_path / "kernels").mkdir()
    monkeypatch.chdir(tmp_path)
    with raises(AssertionError):
        exec(steps.KERNELS)


def test_a_cold_first_value_finds_no_compiled_kernel(run):
    (cold,) = [step for step in steps.STEPS if step.name == "first_value_cold"]
    fill = 'PYTHON=true; mkdir -p "$TRITON_CACHE_DIR"; touch "$TRITON_CACHE_DIR/k"'
    show = "cd $TRITON_CACHE_DIR/..; find . -type f"
    _, (result,) = run("a", [cold._replace(command=f"{fill}; {cold.command} && {show}")])
    assert (result["code"], result["printed"]) == (0, "")


def test_every_step_names_what_exists():
    """Names are unique; modules and files are there; the kernels' slow tests come first."""
    names = [step.name for step in steps.STEPS]
    assert len(set(names)) == len(names)
    assert set(steps.OWN_CACHE) <= set(names)
    for step in steps.STEPS:
        assert step.seconds > 0 and step.attempts > 0
        modules = re.findall(r"-m ([a-z_.]+)", step.command)
        assert modules or step.setup
        for module in modules:
            assert importlib.util.find_spec(module), module
        for path in re.findall(r"(?:tests|bench)/[\w/.]+", step.command):
            assert (ROOT / path).exists(), path
    assert steps.OPS_TESTS[0] == steps.FIRST_TESTS
    assert len(steps.OTHER_TESTS) > 3


def test_the_roofline_is_drawn(tmp_path):
    info = {"op": "a", "bytes_per_second": 1e9, "copy_bandwidth": 2e9, "operations": 0, "bytes": 8}
    rows = [{"extra_info": info}, {"extra_info": {}}]
    record = {"benchmarks": rows, "machine_info": {}}
    (tmp_path / "ops.json").write_text(json.dumps(record))
    roofline.draw(tmp_path / "ops.json", tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes()[:4] == b"\x89PNG"


# --------------------------------------------------------------------------------------------------
# launch times
def estimator():
    """Return an estimator of a convolution with a batch norm and one without."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 2)]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(50, 2)).eval()
    return LocalRedundancy(model, ShapeImages((3, 8, 8)), 4)


def test_batch_norms_that_are_not_folded_are_wrong_by_name():
    folds = estimator()
    test_estimate.check_mode(folds, test_estimate.MODES["default"])
    refuses = estimator()
    refuses.passes.engine.folding.blocks.refused["0.weight"] = "it rounds"
    with raises(Wrong, match="0.weight is not folded: it rounds"):
        test_estimate.check_mode(refuses, test_estimate.MODES["default"])
    test_estimate.check_mode(refuses, test_estimate.MODES["unfolded"])
    folds.passes.engine.ladder.step_down(Rung.UNFOLDED, "it varies")
    with raises(Wrong, match="it varies"):
        test_estimate.check_mode(folds, test_estimate.MODES["default"])


def test_a_network_that_is_wrong_fails_by_name_and_the_next_is_timed(tmp_path, monkeypatch, capsys):
    """The stand-in for a record has a note, which is printed and kept."""
    numbers = "n chunk seconds plain_seconds ratio seconds_of_the_first_estimate deviation_rms"
    numbers += " torch_deviation_rms milliseconds_of_kernels milliseconds_from_first_to_last"
    record = {**dict.fromkeys(numbers.split(), 1), "kernels": [], "launches": []}
    record |= {"network": "vit_b_16", "precision": "bfloat16", "notes": ["graph dropped"]}

    def measured(name, *_):
        if name == "resnet50":
            raise Wrong("conv1.weight is not folded")
        return record

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    for name in ("machine", "copy_bandwidth"):
        monkeypatch.setattr(launch_times, name, lambda device: {})
    monkeypatch.setattr(launch_times, "measured", measured)
    assert launch_times.main(["resnet50", "vit_b_16", "--record", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "resnet50: conv1.weight" in printed.err
    assert "graph dropped" in printed.out
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["notes"] == ["graph dropped"]


def test_notes_of_all_timed_estimates_are_kept(monkeypatch):
    notes = iter([[], ["a"], ["a", "b"], ["b"]])
    work = SimpleNamespace(
        plain=lambda: None,
        run=lambda: SimpleNamespace(notes=next(notes)),
        check=lambda: {"n": 1},
    )
    launch = launch_times.Launch("kernel", 0.0, 1.0)
    monkeypatch.setattr(launch_times, "estimate_pair", lambda *_, **__: work)
    monkeypatch.setattr(launch_times, "seconds_of", lambda function, device: function() or 1.0)
    monkeypatch.setattr(launch_times, "traced", lambda function: function() or [launch])
    record = launch_times.measured("vit_b_16", "bfloat16", 1, None, 2)
    assert record["notes"] == ["a", "b"]
