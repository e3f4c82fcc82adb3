"""The demo's two runs, sentences and page agree with the records.

The long tests run it at full size, and its runs in processes of their own.
"""

import io
import re
import resource
import shutil

import numpy as np
import pytest
from expected import refused
from PIL import Image
from rich.console import Console
from runs_here import messages_here

from fastlr.cli import demo
from fastlr.errors import FastlrError
from fastlr.experiments.continual import read_run
from fastlr.experiments.runs import processes

SMALL = {
    "tasks": 6,
    "epochs": 1,
    "random_images": 64,
    "redundancy_n": 16,
    "measures": ("local_redundancy",),
}


def carry_out(folder, **settings):
    """A demo, and what it printed."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "job_messages", messages_here)
        report = demo.run(folder, seed=1, settings={**SMALL, **settings}, console=console)
    return report, console.file.getvalue()


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A small demo: (its folder, its report, what it printed)."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "out"
    return folder, *carry_out(folder)


def test_it_prints_its_findings_and_where_the_page_and_the_chart_are(shown):
    folder, report, text = shown
    for name in ("report/index.html", "report/redundancy-accuracy.png"):
        assert f"   {folder / name}" in text
        assert (folder / name).exists()
    assert len(report.findings) == 3
    assert all(" ".join(s.split()) in " ".join(text.split()) for s in report.findings)
    picture = Image.open(folder / "report" / "redundancy-accuracy.png").convert("L")
    assert min(picture.size) > 100
    assert picture.getextrema()[1] - picture.getextrema()[0] > 50
    page = (folder / "report/index.html").read_text()
    assert page.count("Differences from the paper: ") == 1
    assert "In shrink-and-perturb: shrink 0.8 for 1.0; perturb 0.03 for 0.0." in page
    lines = [line for line in text.splitlines() if str(folder) not in line]
    assert max(map(len, lines)) <= 80, max(lines, key=len)


def test_what_it_shows_is_in_the_records(shown):
    folder, report, _ = shown
    plain, helped = (read_run(folder / "runs" / name) for name in demo.RUNS)
    for run in (plain, helped):
        assert len(run) == 6
        assert run.config["preset"] == "demo"
        assert run.options["seed"] == 1
    assert (plain.options["shrink"], helped.options["shrink"], helped.options["perturb"]) == (
        1.0,
        0.8,
        0.03,
    )
    assert not np.array_equal(plain.accuracy, helped.accuracy)
    assert plain.accuracy[0] == helped.accuracy[0]
    first, _, kept = report.findings
    assert re.search(
        rf"learns {100 * plain.accuracy[0]:.1f} % of .* and "
        rf"{100 * plain.accuracy[-1]:.1f} % in the last",
        first,
    )
    assert "guessing: 10.0 %" in first
    assert f"{100 * helped.accuracy[-1]:.1f} %" in kept


def test_what_the_sentences_say_follows_the_numbers(shown):
    folder, *_ = shown
    plain, helped = (read_run(folder / "runs" / name) for name in demo.RUNS)
    for accuracy, says in ((0.1, "has lost its plasticity"), (0.9, "do not show a loss")):
        plain.tasks[0]["accuracy"] = 0.9
        plain.tasks[5]["accuracy"] = accuracy
        assert says in demo.findings(plain, helped)[0]


def test_a_demo_resumes(shown, tmp_path):
    shutil.copytree(shown[0], tmp_path, dirs_exist_ok=True)
    _, text = carry_out(tmp_path, tasks=7)
    assert "Resuming" in text
    assert len(read_run(tmp_path / "runs" / "as-it-is")) == 7
    with refused("epochs cannot change"):
        carry_out(tmp_path, epochs=2)


def test_a_run_that_fails_is_an_error_that_names_it(tmp_path):
    with refused("as-it-is: .*not finite.*log: .*as-it-is.txt", FastlrError):
        carry_out(tmp_path, learning_rate=1e30)


def test_the_command(tmp_path, cli, monkeypatch):
    (tmp_path / "file").write_text("")
    assert cli(f"demo --output {tmp_path / 'file' / 'out'}", code=2).err.count("\n") == 1
    called = []
    monkeypatch.setattr(demo, "run", lambda output, seed: called.append((str(output), seed)))
    cli("demo --seed 4")
    cli("demo --out a")
    assert called == [("demo-output", 4), ("a", 0)]


@pytest.mark.long
def test_full_size_takes_at_most_two_minutes_of_two_cores_and_shows_the_effect(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = demo.run(tmp_path, console=Console(file=io.StringIO(), width=80))
    # Not by the clock: the other core has other tests to run.
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime < 2 * 120
    plain, helped = (read_run(tmp_path / "runs" / name) for name in demo.RUNS)
    assert plain.accuracy[:5].mean() > 0.95
    assert plain.accuracy[-40:].mean() < 0.2 < 0.9 < helped.accuracy[-40:].mean()
    redundancy = [np.median(run.measure("local_redundancy")[-40:]) for run in (plain, helped)]
    assert redundancy[1] > 20 * redundancy[0]
    assert "has lost its plasticity" in report.findings[0]
