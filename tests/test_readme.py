"""README.md and its pages: Python runs, commands exist, links lead somewhere, table is record."""

import csv
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from page import fenced

from bench import table
from fastlr.cli.main import app
from fastlr.experiments.continual.options import DIGITS, MEMORISED, PRESETS, SYNTHETIC

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TOLD = re.sub(r"```.*?```|^\|.*?$", "", README, flags=re.DOTALL | re.MULTILINE)
RESULTS = ROOT / "bench/results/cpu"
# The figures of README's prose, and what holds them.
HELD = {
    "50,000": "bench/results/cpu/causes/README.md",
    "0.9 for ten classes": "1 - sum p^2 of ten equal p",
    "in 11 of 12 seeds": "tests/test_reproduction.py",
    "27.1 % at most": "test_what_a_value_at_that_of_constant_outputs_says",
    "in 12 of 42 runs": "test_the_falls_on_inputs_like_the_data_are_the_records",
    "in all 12": "test_the_falls_on_inputs_like_the_data_are_the_records",
    "it took 1.37 plain passes": "test_a_whole_measurement_costs_what_is_said",
    "up to 3.8 times": "test_a_whole_measurement_costs_what_is_said",
    "0.09 to 0.37": "test_a_whole_measurement_costs_what_is_said",
    "200 tasks": "the preset demo",
    "Python 3.11": "the Makefile",
    "about 5 GB": "the Makefile",
    "on 2 cores": "the record of the peers, as what follows",
    "(16, float32": "the record of the peers",
    "up to 0.12": "test_two_runs_differ_by_as_much_as_is_said",
    "each under 100 lines": "test_the_examples_are_as_short_as_is_said",
    "takes 1.11 times": "test_the_times_on_a_gpu_are_the_records",
    "0.76 times": "test_the_times_on_a_gpu_are_the_records",
}


def blocks(language):
    return [text for name, text in fenced(ROOT / "README.md") if name == language]


def test_the_python_runs_as_printed():
    """README's blocks run one after the other, the second on fewer images, and print what it says.

    On another machine the last digits may differ.
    """
    first, plain = blocks("python")
    assert first in (ROOT / "docs/index.md").read_text()
    names = {}
    fewer = plain.replace("n, total = 1000", "n, total = 4")
    assert fewer != plain
    for text in (first, fewer):
        exec(compile(text, "README.md", "exec"), names)
    assert names["total"] > 0
    said, printed = (text.splitlines()[0] for text in (blocks("text")[0], str(names["lr"])))
    figure = r"\d+(?:\.\d+)?"
    assert re.sub(figure, "#", said) == re.sub(figure, "#", printed)
    found = [float(number) for number in re.findall(figure, printed)]
    assert [float(number) for number in re.findall(figure, said)] == pytest.approx(found, rel=1e-2)


def test_no_figure_of_the_prose_is_held_by_nothing():
    told = " ".join(
        re.sub(r"(?:torch|commit) \w[\w.]*|\]\(.*?\)|^\d\.", "", TOLD, flags=re.M).split()
    )
    for said in HELD:
        assert said in told
        told = told.replace(said, "")
    names = (
        r"\(0\.1\)|sm_\d+|O\(epsilon\^2\)|Theorem 3\.4|Seed 0|Apache-2\.0|float64|MobileNetV3|96x96"
        r"|H200|ResNet-50|ViT-B/16"
    )
    assert re.findall(r".{9}\d.*?\b", re.sub(names, "", told)) == []


def test_no_measure_warned_earlier_than_accuracy():
    assert "None of the nine measures we tested warned" in TOLD
    assert len(json.loads((RESULTS / "alarm/report.json").read_text())["measures"]) == 9
    assert "warns earlier" not in (RESULTS / "alarm/conclusion.csv").read_text()


def rows_of(path):
    """Return the cells of a table's rows by their first, as a list: a name may come twice."""
    with (RESULTS / path).open() as file:
        return {cells[0]: cells[1:] for cells in csv.reader(file)}


def test_what_a_value_at_that_of_constant_outputs_says():
    """Of the study of alarms; two classes, whose guess is 50 %, are told apart."""
    rows = rows_of("alarm/at-constant.csv")
    highest = [
        float(cells[3])
        for name, cells in rows.items()
        if name.startswith("images of the next task") and cells[3] not in ("–", "highest %")
        if not name.endswith(("class-pairs", "all problems"))
    ]
    assert f"accuracy on new tasks was {max(highest)} % at most" in " ".join(TOLD.split())
    assert float(rows["images of the next task class-pairs"][3]) == 50.0
    assert float(rows["images just learned fresh-digits"][2]) > 95
    assert rows["images of the next task fresh-digits"][1] == "0"


def test_the_falls_on_inputs_like_the_data_are_the_records():
    rows = rows_of("inputs/below-half.csv")
    runs, fallen, accuracy_fell, missed = map(int, rows["gaussian all problems"])
    told = " ".join(TOLD.split())
    assert (
        f"in {fallen} of {runs} runs of a study: in all {accuracy_fell} accuracy had fallen" in told
    )
    assert "two losses of plasticity were missed, five on shapes" in told
    assert (missed, rows["shapes all problems"][3]) == (2, "5")


def test_a_whole_measurement_costs_what_is_said():
    (whole,) = [
        run["extra_info"]["ratio"]
        for run in json.loads((RESULTS / "fastlr.json").read_text())["benchmarks"]
        if run["name"] == "test_estimate[mobilenet_v3_large-float32-default]"
    ]
    assert f"took {whole:.2f} plain passes" in " ".join(TOLD.split())
    loops = [
        run["extra_info"]["memory_ratio"]
        for run in json.loads((RESULTS / "peers.json").read_text())["benchmarks"]
        if "loop" in run["name"] and run["extra_info"].get("memory_ratio")
    ]
    assert f"{min(loops):.2f} to {max(loops):.2f}" in TOLD
    total, *_ = rows_of("alarm/tables/costs.csv")["local redundancy"]
    training, *_ = rows_of("alarm/tables/costs.csv")["training"]
    settings = json.loads((RESULTS / "alarm/tables/config.json").read_text())["options"]
    measured = settings["redundancy_n"]
    trained = 400 * settings["epochs"]  # images of two classes, as README of the study says
    assert f"up to {float(total) / measured / (float(training) / trained):.1f} times" in TOLD


def test_the_times_on_a_gpu_are_the_records():
    told = " ".join(TOLD.split())
    speed = " ".join((ROOT / "docs/speed.md").read_text().split())
    folder = ROOT / "bench/results/h200"
    page = (folder / "README.md").read_text()
    for network, name in (("resnet50", "ResNet-50"), ("vit_b_16", "ViT-B/16")):
        record = json.loads((folder / f"{network}-bfloat16.json").read_text())
        ratio = f"{record['ratio']:.2f}"
        assert re.search(rf"{name} (?:takes )?{ratio} times", told), name
        assert ratio in speed
        cells = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        ours = sum(
            took
            for kernel, _, took in record["launches"]
            if record["kernels"][kernel].endswith("_kernel")
        )
        seconds = record["seconds_until_timed"]
        shown = [1e3 * record["seconds"], 1e3 * record["plain_seconds"], ours / 1e3, seconds]
        for value in shown:
            assert f"| {value:.0f} |" in cells, (name, value)
        assert f"| {ratio} ({record['ratio_p20']:.2f} to {record['ratio_p80']:.2f}) |" in cells


def test_two_runs_differ_by_as_much_as_is_said():
    ratios = []
    for name in ("peers", "fastlr"):
        record = json.loads((RESULTS / f"{name}.json").read_text())
        assert record["machine_info"]["cpu"] == "AMD EPYC"
        assert record["machine_info"]["cores"] == 2
        ratios.append(
            {
                run["name"]: run["extra_info"]["ratio"]
                for run in record["benchmarks"]
                if run["name"].endswith("-fastlr]")
            }
        )
    both = ratios[0].keys() & ratios[1].keys()
    assert len(both) > 4
    assert f"{max(abs(ratios[0][name] - ratios[1][name]) for name in both):.2f}" == "0.12"
    speed = " ".join((ROOT / "docs/speed.md").read_text().split())
    assert "by up to 0.12" in speed
    assert all(f"{ratios[1][name]:.2f} for" in speed for name in both)


def test_the_monitor_costs_what_the_guide_says():
    record = json.loads((RESULTS / "fastlr.json").read_text())
    (run,) = [run["extra_info"] for run in record["benchmarks"] if run["name"] == "test_monitor"]
    guide = (ROOT / "docs/guides/training.md").read_text()
    assert f"{100 * run['share']:.2f} % of the training" in guide
    assert f"{1e6 * run['idle_step_seconds']:.1f} microseconds" in guide


@pytest.mark.parametrize(
    "page", ["README", "REPRODUCTION", "docs/interpreting", "docs/speed", "docs/gpu"]
)
def test_the_targets_and_modules_that_a_page_names_exist(page):
    text = (ROOT / f"{page}.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE)} <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }
    for module in re.findall(r"python -m (bench[\w.]*)", text):
        assert importlib.util.find_spec(module), module


def test_the_plain_loop_is_the_same_quantity():
    """The printed loop gives fastlr's value over all labels, weighted by their probabilities."""
    text = blocks("python")[1].replace("n, total = 1000", "n, total = 3")
    text = text.replace("y = torch.multinomial(log_p.exp(), 1).item()", "y = label")
    assert "y = label" in text
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    )
    import fastlr

    images, want = fastlr.ShapeImages((3, 8, 8)), 0.0
    for i in range(3):
        for label in range(2):
            names = {
                "torch": torch,
                "model": model,
                "images": images,
                "label": label,
                "print": lambda value: None,
            }
            exec(text.replace("range(n)", f"range({i}, {i + 1})"), names)
            want += names["total"] / 3 * names["log_p"][label].exp().item()
    assert fastlr.estimate(model, images, n=3, probe="exact").value == pytest.approx(want, rel=1e-5)


def test_the_links_lead_somewhere():
    headings = {
        re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target[1:] in headings if target.startswith("#") else (ROOT / target).exists(), (
            target
        )


def test_the_table_is_that_of_the_record():
    assert table.markdown(table.read(ROOT / "bench/results/cpu/peers.json")) in README


def test_the_presets_and_the_data_of_continual_runs_are_all_named(capsys):
    with pytest.raises(SystemExit):
        app(["continual", "--help"])
    told = capsys.readouterr().out
    page = (ROOT / "docs/commands.md").read_text()
    for name in [*PRESETS, SYNTHETIC, *MEMORISED, *DIGITS]:
        assert name in re.sub(r"[\s│]+", "", told), name
        assert f"`{name}`" in page or f"continual {name} " in page, name


def test_the_guide_on_ray_says_what_was_measured():
    record = json.loads((RESULTS / "ray/ray.json").read_text())
    on_ray, local, runs = record["on Ray"], record["local queue"], record["runs"]
    seconds = on_ray["processor seconds"]
    own = sum(value for kind, value in seconds.items() if kind not in ("runs", "command"))
    assert runs["other records"] == runs["incomplete"] == [] and runs["resumed"] == {"seed-8": 1}
    more = seconds["command"] - local["processor seconds"]["command"]
    guide = " ".join((ROOT / "docs/guides/scale.md").read_text().split())
    for said in (
        f"It took {on_ray['wall seconds']} s, the local queue {local['wall seconds']} s",
        f"took {seconds['runs']:.1f} s of processor time",
        f"for {local['processor seconds']['runs']:.1f} s. Ray's own processes took {own:.0f} s",
        f"its workers had {seconds['workers']:.1f} s",
        f"It took {more:.1f} s more than for the local queue, {1000 * more / 640:.0f} ms a task",
    ):
        assert said in guide


@pytest.mark.parametrize(
    ("guide", "record"),
    [("reinforcement-learning", "rl"), ("checkpoints", "warm-start")],
)
def test_guides_say_of_examples_what_they_printed(guide, record):
    """Of the paragraph "What it showed" every number; 480 may stand for 4.8e+02."""
    text = (ROOT / f"docs/guides/{guide}.md").read_text().partition("**What it showed**")[2]
    text = re.sub(r"\(`bench.*?\)", "", text.partition("![")[0], flags=re.DOTALL)
    number = r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]\d+)?"
    printed = (RESULTS / record / "output.txt").read_text()
    known = {float(found) for found in re.findall(number, printed)}
    assert len(told := {float(found) for found in re.findall(number, text)}) > 5
    assert told <= known
