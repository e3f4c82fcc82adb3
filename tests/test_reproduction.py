"""REPRODUCTION.md: every figure is that of a row which the page names, and its commands are there.

README's conclusions are held to the same records.
"""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest
import typer
from torchvision.models import mobilenet_v3_large

from fastlr.cli.main import app
from fastlr.experiments.continual.options import ContinualOptions, substitutions
from fastlr.models.patchtst import PatchTST

ROOT = Path(__file__).parents[1]
SMALL = ROOT / "bench/results/cpu/small"
PAGE = (ROOT / "REPRODUCTION.md").read_text()
README = " ".join((ROOT / "README.md").read_text().split())
HEAD = ["what", "the paper", "here", "what it says", "rows"]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## Small")[2].splitlines()
    if line.startswith("|") and not line.startswith("| :--")
]
# What a sentence says of the settings, or of the paper, not of the row.
SETTINGS = r"batches of \d+|\d+ (?:tasks|seeds)|500 images.*|(?:from|above) 0"

pytestmark = pytest.mark.skipif(not SMALL.exists(), reason="a source distribution has no results")


def decimals(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])[-+]?(?:\d[\d,]*)?\.?\d+(?![\w])", text)


def line(place: str) -> list[str]:
    """The cells of the row "folder/table: name", or the sentence that begins with the name."""
    table, _, name = place.partition(": ")
    if table.endswith("report"):
        text = (SMALL / f"{table}.md").read_text()
        return [found for found in text.splitlines() if found.startswith(name)]
    name, _, below = name.partition(" + ")
    lines = list(csv.reader((SMALL / f"{table}.csv").open()))
    (at,) = [i for i, cells in enumerate(lines) if cells[0] == name]
    return lines[at + int(below or 0)][1:]


def is_there(number: str, found: list[str]) -> bool:
    """Whether a number is one of these, rounded to as many digits, signs of zero aside."""
    digits = len(number.partition(".")[2])
    value = float(number.replace(",", ""))
    return any(round(float(other.replace(",", "")), digits) == value for other in found)


def test_the_table_has_rows():
    assert ROWS[0] == HEAD and len(ROWS) > 20


@pytest.mark.parametrize("cells", ROWS[1:], ids=[f"{row[0]}: {row[2]}" for row in ROWS[1:]])
def test_figures_are_those_of_the_rows_they_name(cells):
    _, _, here, says, places = cells
    lines = [line(place) for place in places.split("; ")]
    found = decimals(" ".join(" ".join(cells) for cells in lines))
    told = decimals(re.sub(SETTINGS, "", f"{here} {says}"))
    missing = [number for number in told if not is_there(number, found)]
    assert told and not missing
    interval = re.search(r"\[(\S+), (\S+)\]", " ".join(lines[0]))
    if interval and "strategies" not in places:
        low, high = map(float, interval.groups())
        assert (low <= 0 <= high) == ("cannot be told from 0" in says)


def test_the_commands_of_the_first_table_are_complete():
    commands = [
        shlex.split(text)[1:]
        for text in re.findall(r"`(fastlr [^`]*)`", PAGE.partition("## Small")[0])
    ]
    assert len(commands) > 12
    for words in commands:
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        context = command.make_context("fastlr", list(words))
        if command.name in ("continual", "transfer", "memorize"):
            assert context.params["out"] is not None, words
        if command.name == "continual":
            assert "--data" in words


def test_sizes_are_those_of_the_networks():
    sizes = [
        sum(p.numel() for p in mobilenet_v3_large(num_classes=n).parameters()) for n in (2, 1000)
    ]
    sizes.append(sum(p.numel() for p in PatchTST().parameters()))
    assert all(f"{size:,}" in PAGE for size in sizes), sizes
    named = substitutions(
        ContinualOptions(), {"classes": 1000, "size": 224, "resize": "squash"}, 3000
    )
    assert named == [
        f"{sizes[0]:,} parameters for 5.47 million "
        f"(the network's size with 1,000 classes is {sizes[1]:,})"
    ]


def test_predicted_times_follow_from_the_papers():
    """500 tasks of 100 epochs of two classes' 2,600 images take 81 minutes in its Table 5."""
    a_task = 81 * 60 / 500
    for tasks, hours in ((200, 0.6), (3000, 8.7), (500, 1.5), (90, 0.3)):
        assert f"{hours} h" in PAGE
        assert tasks * a_task / 3600 == pytest.approx(hours, abs=0.1 + 0.1 * hours), tasks
    assert 2600 * 100 * 500 / (81 * 60) == pytest.approx(27_000, rel=0.02)


def test_what_three_standard_errors_need_follows_from_our_own():
    """N independent tasks have an error of 1 / sqrt(N); ours are larger by a factor."""
    factors = []
    for table in ("future-accuracy", "forgetting"):
        _, value, _, naive, *_ = line(f"continual/{table}-semi-partial-raw: local redundancy")
        factors.append(float(decimals(value)[1]) / float(naive))
    assert [round(factor, 1) for factor in factors] == [1.6, 1.3]

    def needed(correlation: float, factor: float) -> float:
        return (3 * factor / correlation) ** 2

    assert needed(0.089, factors[0]) == pytest.approx(2800, rel=0.02)
    both = 2 * needed(0.089 - 0.073, factors[0])
    assert both == pytest.approx(170_000, rel=0.03) and round(both / 3000) == 58
    assert needed(0.130, factors[1]) == pytest.approx(900, rel=0.02)
    assert needed(0.235, factors[1]) == pytest.approx(280, rel=0.02)
    assert 0.004**-2 == pytest.approx(62_500) == pytest.approx(21 * 3000, rel=0.02)
    assert 0.045**-2 == pytest.approx(500, rel=0.02)
    for said in ("2,800 tasks", "170,000 tasks, 58 seeds", "900 tasks", ".235: 280", "62,500"):
        assert said in PAGE
    assert 819_200 * 1000 / 27_000 / 3600 == pytest.approx(8.5, rel=0.02)  # memorize vision, hours
    assert 5.6e9 * 2048 * 1000 / 100e12 / 60 == pytest.approx(2, rel=0.1)  # series, minutes


def test_readmes_conclusions_are_those_of_the_records():
    """Of the floor and of permuted digits, test_interpreting holds the figures."""
    _, lower, same = line("transfer/differences: max LR - val. loss")[-3:]
    assert (lower, same) == ("0/4", "1/4")
    assert "in 3 of 4 seeds and the same in 1" in README
    *_, lower, same = line("../transfer/differences: max LR - val. loss")
    assert (lower, same) == ("0/12", "2/12")
    assert "in an older record in 10 and 2 of 12" in README

    def last(problem: str, name: str, table: str = "course") -> tuple[float, float]:
        cells = line(f"../causes/{problem}/{table}: {name}")
        return float(cells[1]), float(cells[4].replace(",", ""))

    for problem in ("random-labels", "class-pairs"):  # 1: on own inputs nothing, and lost
        accuracy, value = last(problem, "none", "course_next_task")
        assert value < 5 and accuracy < 60
    assert (
        last("values", "as-it-is")[1] > 400 > 1 > last("values", "as-it-is", "course_next_task")[1]
    )
    first, late = (float(x) for x in line("../causes/permuted-digits/course: none")[:2])
    assert first > late + 5  # 2: accuracy falls, the value rises
    assert last("permuted-digits", "none")[1] > float(
        line("../causes/permuted-digits/course: none")[3]
    )
    for problem in ("random-labels", "class-pairs", "transformer"):  # forced up, none the better
        assert last(problem, "redundancy-floor")[0] < last(problem, "none")[0] + 0.5


def test_both_readings_of_the_paper_are_the_records():
    page = (ROOT / "docs/guides/batch-or-sample.md").read_text()
    with (SMALL.parent / "readings/readings.csv").open() as file:
        lines = [f"| {' | '.join(cells)} |" for cells in csv.reader(file)]
    assert len(lines) == 6 and all(line in page for line in lines)
    last = {tuple(line.split(" | ")[:2]): line.split(" | ")[-2:] for line in lines}
    (samples, _), (batch, agreement) = (
        last["| training gradient norm", kind] for kind in ("samples", "one batch")
    )
    assert f"({samples} and {batch})" in page
    assert f"({agreement.removesuffix(' |')})" in page
