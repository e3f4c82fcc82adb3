"""Every example runs as printed, and says what it promises; each is short enough to be read."""

import re
import runpy
import sys
from pathlib import Path

from command_line import as_torchrun
from pytest import fixture, importorskip, mark, param

from fastlr.experiments.data import synthetic_store

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "training_loop": r"most plastic at step \d+: [\d.]+ \+- [\d.]+",
    "lightning_trainer": r"after 24 steps: [\d.]+ \+- [\d.]+\nmost plastic: [\d.]+",
    "huggingface_trainer": r"step 16: [\d.]+ \+- [\d.]+\nmost plastic: [\d.]+",
    "avalanche_strategy": r"after 3 tasks \(step 72\): [\d.]+ \+- [\d.]+, weight norm [\d.]+",
    "finetuned_on_tasks": r"task 16: accuracy [\d.]+, local redundancy .*\nthe alarm rang after",
    "actor_critic_loop": r"critic/local_redundancy: [\d.e+]+ at the start, [\d.e+]+ at the end",
    "permuted_cartpole": r"L2, critic/dormant_ratio: first quarter [\d.e-]+ \+- \S+, last quarter",
    "rank_checkpoints": r"(?s)step\d+ is above step\d+ by [\d.]+ \+- [\d.]+.*"
    r"step40.*step120|step120.*step40",
    "language_model": r"(?s)  40 .*local redundancy [\d.]+ \+- .*without padding",
    "warm_start": r"(?s)warm, test: [\d.]+ \+- .*cold or warm: [01] [01] [01] [01]\n",
    "sharded_language_model": r"(?s)step 20: .*step 40: loss [\d.]+, local redundancy [\d.]+ "
    r"\+- \S+\nLocal redundancy .* at 99 %",
}
NEEDS = {
    "finetuned_on_tasks": "transformers",
    "lightning_trainer": "lightning",
    "huggingface_trainer": "accelerate",
    "avalanche_strategy": "avalanche",
    "actor_critic_loop": "gymnasium",
    "permuted_cartpole": "stable_baselines3",
}
ARGUMENTS = {"permuted_cartpole": ["1", "2", "512"], "warm_start": ["store", "1", "0", "1"]}
BY_TORCHRUN = {"sharded_language_model"}
SLOW = {"finetuned_on_tasks", "warm_start"}


@fixture
def said_by(tmp_path, monkeypatch, capfd):
    """Return a function that runs an example in an empty folder, and returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name):
        importorskip(NEEDS.get(name, "torch"))
        monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            assert not end.code
        return capfd.readouterr().out

    return run


def test_all_are_here_and_short():
    files = {path.stem: path.read_text().splitlines() for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(SAYS)
    assert all(len(lines) < 100 for lines in files.values()), {
        name: len(lines) for name, lines in files.items()
    }


@mark.parametrize(
    "name",
    [param(name, marks=[mark.long] * (name in SLOW)) for name in SAYS if name not in BY_TORCHRUN],
)
@mark.filterwarnings("ignore")
def test_example(name, tmp_path, said_by):
    if name == "warm_start":
        synthetic_store(tmp_path / "store", size=8, train=4, test=2)
    said = said_by(name)
    assert re.search(SAYS[name], said), said


@mark.long
@mark.filterwarnings("ignore")
def test_warm_start_goes_on(tmp_path, said_by):
    """What is recorded is not run again; what was lost is, with the same result."""
    synthetic_store(tmp_path / "store", size=8, train=4, test=2)
    said = said_by("warm_start")
    record = tmp_path / "warm-start.jsonl"
    cold, warm, perturbed = record.read_text().splitlines(keepends=True)
    changed = cold.replace('"test": ', '"test": 1')
    record.write_text(changed + perturbed)
    assert said_by("warm_start") != said
    assert record.read_text() == changed + perturbed + warm
    assert (tmp_path / "warm-start.png").exists()


@mark.long
@mark.parametrize("name", BY_TORCHRUN)
def test_example_by_torchrun(name, tmp_path):
    (code, said, _), (other_code, nothing, _) = as_torchrun(
        2, tmp_path, [str(EXAMPLES / f"{name}.py")]
    )
    assert code == other_code == 0 and not nothing, "rank 0 prints"
    assert re.search(SAYS[name], said), said
