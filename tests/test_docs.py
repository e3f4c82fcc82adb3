"""The documentation builds without a warning, is complete, and its guides' code runs as printed."""

import json
import os
import re
import shlex
import subprocess
import zlib
from pathlib import Path

import run_contributions
import typer
from page import fenced, markdown_pages
from pytest import importorskip, mark, param
from ranks import good, run_ranks

import fastlr
from fastlr.cli.main import app, main
from fastlr.ghost.norms.rules import DESCRIPTIONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RUN_ELSEWHERE = ("docs/extending", "README")  # test_contributions_run_as_shown, test_readme.py


def blocks(page):
    return fenced(ROOT / f"{page}.md")


def pages():
    """Return the pages whose code runs here, without suffix."""
    names = [str(path.relative_to(ROOT).with_suffix("")) for path in markdown_pages()]
    return [name for name in names if name not in RUN_ELSEWHERE]


def has_code(page):
    return any(language in ("python", "bash") for language, _ in blocks(page))


FEWER = {
    "docs/guides/capacity": {"steps=300": "steps=3", "steps=30,": "steps=3,"},
    "docs/guides/checkpoints": {"resnet18": "squeezenet1_1", "256": "16"},
    "docs/guides/cost": {"resnet18": "squeezenet1_1", "128": "8", "64": "32"},
    "docs/guides/measure": {
        "resnet18": "squeezenet1_1",
        "=256": "=32",
        "64": "16",
        "--tasks 45": "--tasks 2 --set epochs=2",
        "report run": "report run --figures none",
    },
    "REPRODUCTION": {"epochs=2": "epochs=1 --set finetune_epochs=1 --set finetune_runs=1"},
}
NEEDS = {"language-models": "transformers", "reinforcement-learning": "stable_baselines3"}
# What torchrun sets for a single process.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
EXCERPT = re.compile(r"# (examples/\w+\.py)\n")


@mark.filterwarnings("ignore")
def test_builds_without_a_warning_and_is_complete(tmp_path):
    build = importorskip("sphinx.cmd.build")
    assert (
        build.build_main(["-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]) == 0
    )
    found = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    names = {line.split()[0] for line in zlib.decompress(found).decode().splitlines()}
    modules = {"fastlr.estimator.predictive", "fastlr.inputs", "fastlr.errors", "fastlr.metrics"}
    wanted = {name for name in fastlr.__all__ if name not in ("errors", "metrics")}
    missing = {
        name for name in wanted if not {f"{place}.{name}" for place in ("fastlr", *modules)} & names
    }
    assert not missing
    assert {f"fastlr.metrics.{name}" for name in fastlr.metrics.__all__} <= names
    assert {
        "fastlr.Monitor",
        "fastlr.integrations.lightning.LocalRedundancyMonitor",
        "fastlr.integrations.stable_baselines3.LocalRedundancyCallback",
    } <= names
    operations = re.sub(r"<[^>]*>", "", (tmp_path / "operations.html").read_text())
    for kind, about in DESCRIPTIONS.items():
        assert re.sub(r"Backward\d*$", "", kind) in operations
        assert about.split(",")[0] in operations
    page = (tmp_path / "commands.html").read_text()
    for command in ("rank", "data prepare", "continual"):
        assert f"Usage: fastlr {command} " in page
        assert f'id="fastlr-{command.replace(" ", "-")}"' in page


@mark.parametrize(
    "page, fewer",
    [
        *FEWER.items(),
        *(
            param(page, {}, marks=[mark.long] * (page in FEWER))
            for page in pages()
            if has_code(page)
        ),
    ],
)
@mark.filterwarnings("ignore")
def test_what_a_page_shows_runs(page, fewer, tmp_path, monkeypatch, capsys):
    """Python blocks one after another, and fastlr's commands of ``bash`` blocks between them.

    Some take fewer inputs and steps than the page shows. Excerpts of examples run in
    test_examples.py.
    """
    for guide, library in NEEDS.items():
        if page.endswith(guide):
            importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path))
    if page.endswith("several-gpus"):
        for name, value in ALONE.items():
            monkeypatch.setenv(name, value)
    names = {}
    ran = 0
    for language, text in blocks(page):
        for shown, less in fewer.items():
            text = text.replace(shown, less)
        if language == "python" and not EXCERPT.match(text):
            exec(compile(text, f"{page}.md", "exec"), names)
            ran += 1
        elif language == "bash":
            for line in text.splitlines():
                command, *arguments = shlex.split(line, comments=True)
                if command in ("pip", "git"):
                    continue
                assert command == "fastlr" and main(arguments) == 0, line
                ran += 1
    assert ran >= 1
    assert not re.search(r"\bnan\b", capsys.readouterr().out)


def test_excerpts_are_lines_of_the_examples():
    """A Python block that begins with ``# examples/FILE`` repeats lines of that file.

    White space may differ.
    """
    excerpts = [text for page in pages() for _, text in blocks(page) if EXCERPT.match(text)]
    assert len(excerpts) == 5
    for text in excerpts:
        example = (ROOT / EXCERPT.match(text)[1]).read_text()
        lines = EXCERPT.sub("", text, count=1)
        assert "".join(lines.split()) in "".join(example.split()), text


def shown_commands():
    """Yield the fastlr commands of ``console`` blocks and of blocks without a language."""
    for page in [*pages(), "README"]:
        for kind, text in blocks(page):
            lines = text.splitlines() if kind in ("console", "") else []
            yield from (line for line in lines if re.match("fastlr |torchrun .*-m fastlr ", line))


@mark.parametrize("line", list(shown_commands()))
def test_commands_that_are_not_run_exist_with_their_options(line):
    line = re.sub(r"\.\.\.$", "MODEL", line.split("fastlr ", 1)[1])
    words = shlex.split(line, comments=True)
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words:
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context("fastlr", words)
    assert context.params or not words


def test_the_array_job_begins_a_seed_and_goes_on_with_it(tmp_path, monkeypatch):
    """Slurm starts the guide's script, and its last command, noted, then runs in this process."""
    script = next(
        text
        for kind, text in blocks("docs/guides/several-gpus")
        if kind == "sh" and "SLURM_ARRAY_TASK_ID" in text
    )
    (tmp_path / "seeds.sh").write_text(script)
    (tmp_path / "fastlr").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "fastlr").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    slurm = {
        "SLURM_ARRAY_TASK_ID": "7",
        "SLURM_CPUS_PER_TASK": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    for tasks, kinds in (("1", ["start", "task"]), ("2", ["start", "task", "resume", "task"])):
        command = ["bash", "seeds.sh", "demo", "--set", "epochs=1", "--tasks", tasks]
        done = subprocess.run(
            command, env={**os.environ, **slurm}, capture_output=True, text=True, check=True
        )
        assert not done.stderr
        assert main(done.stdout.splitlines()) == 0
        records = (tmp_path / "runs/seed-7/records.jsonl").read_text().splitlines()
        assert [json.loads(line)["kind"] for line in records] == kinds
    assert json.loads((tmp_path / "runs/seed-7/config.json").read_text())["options"]["seed"] == 7


def test_contributions_run_as_shown(tmp_path):
    """The examples of extending.md run in a process of their own."""
    importorskip("triton")
    good(run_ranks(1, run_contributions.main, DOCS / "extending.md", tmp_path, backend=None))


def test_what_the_architecture_names_is_there():
    """Folders of the tree, and functions in the files that the page names for them."""
    text = (DOCS / "architecture.md").read_text()
    tree = blocks("docs/architecture")[0][1]
    folders = re.findall(r"^  (?:  )?(\w+)/", tree, re.MULTILINE)
    assert {
        path.name for path in (ROOT / "fastlr").iterdir() if (path / "__init__.py").exists()
    } - {"speed", "kernels"} <= {*folders}
    named = re.findall(r"`(\w+)`\s+(?:in|\()\s*`((?:fastlr|kernels)/[\w/.]+\.py)`", text)
    assert len(named) > 10
    for name, file in named:
        assert re.search(
            rf"^(?:(?:def|class) )?{name}\b", (ROOT / file).read_text(), re.MULTILINE
        ), f"{name} is not in {file}"
