"""Every example runs as printed, and says what it promises; each is short enough to be read."""

import re
import sys
from pathlib import Path

from command_line import as_torchrun
from pytest import importorskip, mark, param

from fastlr.experiments.data import synthetic_store

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "training_loop": r"last minus first, on the same images: -?[\d.]+ \+- [\d.]+\nfigure: .*png",
    "lightning_trainer": r"after 24 steps: [\d.]+ \+- [\d.]+\nfigure: .*png",
    "huggingface_trainer": r"step 16: [\d.]+ \+- [\d.]+",
    "avalanche_strategy": r"after 3 tasks \(step 72\): [\d.]+ \+- [\d.]+, weight norm [\d.]+",
    "finetuned_on_tasks": r"task 24: accuracy [\d.]+, local redundancy .*\nLocal redundancy ",
    "actor_critic_loop": r"critic/local_redundancy: [\d.e+]+ at the start, [\d.e+]+ at the end",
    "permuted_cartpole": r"L2, critic/dormant_ratio: first quarter [\d.e-]+ \+- \S+, last quarter",
    "rank_checkpoints": r"(?s)step\d+ is above step\d+ by [\d.]+ \+- [\d.]+.*"
    r"step40.*step120|step120.*step40",
    "language_model": r"(?s)  40 .*local redundancy [\d.]+ \+- .*without padding",
    "warm_start": r"(?s)warm, test: [\d.]+ \+- .*cold or warm: [01] [01] [01] [01]\n",
    "sharded_language_model": r"(?s)step 20: .*step 40: loss [\d.]+, local redundancy [\d.]+ "
    r"\+- \S+\nLocal redundancy .*99 % interval",
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
FEWER = {"actor_critic_loop": ("GAMMA = 40, 64", "GAMMA = 12, 16")}  # updates and their steps
CASES = [
    param(name, FEWER.get(name, ("", "")), marks=[mark.long] * (name in SLOW))
    for name in SAYS
    if name not in BY_TORCHRUN
]
CASES += [param(name, ("", ""), id=f"{name} as printed", marks=mark.long) for name in FEWER]


def test_all_are_here_and_short():
    lines = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(lines) == set(SAYS)
    assert max(lines.values()) < 100, lines


@mark.parametrize(("name", "fewer"), CASES)
@mark.filterwarnings("ignore")
def test_example(name, fewer, tmp_path, monkeypatch, capfd):
    importorskip(NEEDS.get(name, "torch"))
    monkeypatch.chdir(tmp_path)
    if not Path("store").exists():
        synthetic_store("store", size=8, train=4, test=2)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    text = (EXAMPLES / f"{name}.py").read_text().replace(*fewer)
    try:
        exec(compile(text, name, "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        assert not end.code
    said = capfd.readouterr().out
    assert re.search(SAYS[name], said), said


@mark.long
@mark.filterwarnings("ignore")
def test_warm_start_goes_on(tmp_path, monkeypatch, capfd):
    """What is recorded is not run again; what was lost is, with the same result."""
    example = "warm_start", ("", ""), tmp_path, monkeypatch, capfd
    test_example(*example)
    record = Path("warm-start.jsonl")
    runs = record.read_text()
    record.write_text(runs[: runs.index("\n") + 1])
    test_example(*example)
    assert record.read_text() == runs


@mark.long
@mark.parametrize("name", BY_TORCHRUN)
def test_example_by_torchrun(name, tmp_path):
    (code, said, _), (other_code, nothing, _) = as_torchrun(
        2, tmp_path, [str(EXAMPLES / f"{name}.py")]
    )
    assert code == other_code == 0 and not nothing, "rank 0 prints"
    assert re.search(SAYS[name], said), said
