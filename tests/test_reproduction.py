"""REPRODUCTION.md: every figure is that of a row which the page names, and its commands are there.

README's conclusions are held to the same records.
"""

import csv
import re
import shlex
from pathlib import Path

import typer
from pytest import approx, mark
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

pytestmark = mark.skipif(not SMALL.exists(), reason="a source distribution has no results")


def decimals(text):
    return re.findall(r"(?<![\w.])[-+]?(?:\d[\d,]*)?\.?\d+(?![\w])", text)


def line(place):
    """The cells of the row "folder/table: name", or the sentence that begins with the name.

    Of correlations, which the record has as fractions, they are given times 100.
    """
    table, _, name = place.partition(": ")
    if table.endswith("report"):
        text = (SMALL / f"{table}.md").read_text()
        return [found for found in text.splitlines() if found.startswith(name)]
    name, _, below = name.partition(" + ")
    lines = list(csv.reader((SMALL / f"{table}.csv").open()))
    if table.endswith("correlations"):
        (cells,) = [cells for cells in lines if cells[:5] == name.split(",")]
        return [str(100 * float(cell)) for cell in (*cells[5:9], *cells[-2:])]
    (at,) = [i for i, cells in enumerate(lines) if cells[0] == name]
    return lines[at + int(below or 0)][1:]


def is_there(number, found):
    """Whether a number is one of these, rounded to as many digits, signs of zero aside."""
    digits = len(number.partition(".")[2])
    value = float(number.replace(",", ""))
    return any(round(float(other.replace(",", "")), digits) == value for other in found)


def test_the_table_has_rows():
    assert ROWS[0] == HEAD and len(ROWS) > 20


@mark.parametrize("cells", ROWS[1:], ids=[f"{row[0]}: {row[2]}" for row in ROWS[1:]])
def test_figures_are_those_of_the_rows_they_name(cells):
    _, paper, here, says, places = cells
    lines = [line(place) for place in places.split("; ")]
    found = decimals(" ".join(" ".join(cells) for cells in lines))
    told = decimals(re.sub(SETTINGS, "", f"{here} {says}"))
    missing = [number for number in told if not is_there(number, found)]
    assert told and not missing
    interval = re.search(r"\[(\S+), (\S+)\]", " ".join(lines[0]))
    if interval and "strategies" not in places:
        low, high = map(float, interval.groups())
        assert (low < 0 < high) == ("cannot be told from 0" in says)
        value = re.match(r"-?[\d.]+(?= ±|$)", paper)
        outside = value is not None and not low <= float(value[0]) <= high
        assert outside == ("not the paper's" in says)


def commands(text):
    """The words of a page's commands of fastlr, without its name."""
    return [shlex.split(found)[1:] for found in re.findall(r"`(fastlr [^`]*)`", text)]


def test_the_commands_exist_and_those_of_the_first_table_are_complete():
    first, _, second = PAGE.partition("## Small")
    assert len(commands(first)) > 12
    for words in [*commands(first), *commands(second)]:
        is_complete = words in commands(first)
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        context = command.make_context("fastlr", list(words))
        if is_complete and command.name in ("continual", "transfer", "memorize"):
            assert context.params["out"] is not None, words
        if is_complete and command.name == "continual":
            assert "--data" in words


def test_sizes_are_those_of_the_networks():
    models = [mobilenet_v3_large(num_classes=2), mobilenet_v3_large(), PatchTST()]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
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
    for tasks, hours in ((200, 0.6), (3000, 8.7), (500, 1.5), (900, 2.6), (110, 0.3)):
        assert f"{hours} h" in PAGE
        assert tasks * a_task / 3600 == approx(hours, abs=0.1 + 0.1 * hours), tasks
    assert 2600 * 100 * 500 / (81 * 60) == approx(27_000, rel=0.02)


def test_what_three_standard_errors_need_follows_from_our_own():
    """N independent tasks have an error of 1 / sqrt(N); ours are larger by a factor."""
    factors = []
    for table in ("future-accuracy", "forgetting"):
        _, value, _, naive, *_ = line(f"continual/{table}-semi-partial-raw: local redundancy")
        factors.append(float(decimals(value)[1]) / float(naive))
    assert [round(factor, 1) for factor in factors] == [1.6, 1.3]

    def needed(correlation, factor):
        return (3 * factor / correlation) ** 2

    assert needed(0.089, factors[0]) == approx(2800, rel=0.02)
    both = 2 * needed(0.089 - 0.073, factors[0])
    assert both == approx(170_000, rel=0.03) and round(both / 3000) == 58
    assert needed(0.130, factors[1]) == approx(900, rel=0.02)
    assert needed(0.235, factors[1]) == approx(280, rel=0.02)
    pretraining, tuning = 12 * 54 * 1024, 6 * 6 * 2 * 14 * 1024  # windows of a seed's transfer
    assert round((pretraining + tuning) * 5.6e9 / 100e12 / 60) == 2  # minutes
    error = (0.0005**2 + 0.0006**2) ** 0.5  # of the paper's difference, unpaired
    assert 120 * (3 * error / 0.0015) ** 2 == approx(290, rel=0.01)
    assert 0.004**-2 == approx(62_500) == approx(21 * 3000, rel=0.02)
    assert 0.045**-2 == approx(500, rel=0.02)
    needs = ("2,800 tasks", "170,000 tasks, 58 seeds", "900 tasks", ".235: 280", "290 seeds")
    for said in (*needs, "62,500"):
        assert said in PAGE
    assert 819_200 * 1000 / 27_000 / 3600 == approx(8.5, rel=0.02)  # memorize vision, hours
    assert 5.6e9 * 2048 * 1000 / 100e12 / 60 == approx(2, rel=0.1)  # series, minutes


def test_what_the_agreement_of_inputs_needs_follows_from_our_own():
    """An error of r over N independent tasks is (1 - r^2) / sqrt(N); ours are larger."""
    factors = []
    for inputs in ("shapes", "Gaussian noise"):
        _, r, square, *_, tasks = line(f"continual/ablation: {inputs}")
        factors.append(float(decimals(r)[1]) / ((1 - float(square)) / float(tasks) ** 0.5))
    assert [round(factor, 1) for factor in factors] == [1.5, 1.4]
    assert "for shapes and noise in Table 4 it is 1.5 and 1.4 times" in PAGE
    squared = sum((f * (1 - r**2)) ** 2 for f, r in zip(factors, (0.964, 0.847), strict=True))
    assert 9 * squared / (0.964 - 0.847) ** 2 == approx(110, rel=0.02)
    assert "| 110 tasks |" in PAGE


def test_pairing_is_worth_what_the_page_says():
    """Of local redundancy against distance from init, and of picks against the lowest loss."""
    errors = [
        decimals(line(f"continual/future-accuracy-semi-partial-raw: {name}")[1])[1]
        for name in ("local redundancy", "distance from init")
    ]
    paired = decimals(line("continual/future-accuracy-lead: distance from init")[0])[1]
    assert f"they are {errors[0]} and {errors[1]}, and that of the difference {paired}" in PAGE
    picks = [
        float(decimals(line(f"transfer/strategies: {name}")[0])[1])
        for name in ("max local redundancy", "lowest val. loss")
    ]
    difference = decimals(line("transfer/differences: max LR - val. loss")[0])[1]
    assert float(difference) < (picks[0] ** 2 + picks[1] ** 2) ** 0.5


def test_readmes_conclusions_are_those_of_the_records():
    """The sign of each conclusion, by the tables of the studies."""
    *_, lower, same = line("../transfer/differences: max LR - val. loss")
    assert (lower, same) == ("1/12", "0/12")
    assert "in 11 of 12 seeds" in README
    mean, interval, *_ = line("../transfer-plateau/differences: max LR - val. loss")
    low, high = map(float, re.findall(r"-?[\d.]+", interval))
    assert low < 0 < high and "they could not be told apart" in README
    guide = " ".join((ROOT / "docs/guides/checkpoints.md").read_text().split())
    assert f"could not be told apart, {mean} over twelve seeds" in guide

    def last(problem, name, table="course"):
        cells = line(f"../causes/{problem}/{table}: {name}")
        return float(cells[1]), float(cells[4].replace(",", ""))

    assert "constant outputs (0.9 for ten classes)" in README  # 1: test_readme has the rows
    assert (
        last("values", "as-it-is")[1] > 400 > 1 > last("values", "as-it-is", "course_next_task")[1]
    )
    first, late = (float(x) for x in line("../causes/permuted-digits/course: none")[:2])
    assert first > late + 5  # 2: accuracy falls, the value rises
    assert last("permuted-digits", "none")[1] > float(
        line("../causes/permuted-digits/course: none")[3]
    )
    for problem in ("random-labels", "permuted-digits", "class-pairs", "transformer"):
        cells = line(f"../causes/{problem}/interventions: redundancy-floor")
        change, error = (float(number) for number in decimals(cells[2]))
        assert change < 2 * error  # forced up, none the better
    for problem in ("random-labels", "permuted-digits"):
        assert last(problem, "gelu-redundancy-floor")[0] < last(problem, "gelu")[0]


def test_a_thousand_seeds_cost_what_the_records_say():
    """A seed is ten seconds and its tasks; 64 run at a time."""
    page = (ROOT / "docs/guides/many-runs.md").read_text()
    costs = {}
    with (SMALL / "continual/costs.csv").open() as file:
        for name, _, mean, *_ in list(csv.reader(file))[1:]:
            costs[name] = float(mean)
    alone = costs["training"] + costs["local redundancy"] + costs["evaluation"]
    for task in (costs["training"], costs["training grad norm"], costs["dormant ratio"]):
        assert f"| {task:.2f} |" in page
    assert f"| in all | {sum(costs.values()):.2f} |" in page
    for task, tasks in ((sum(costs.values()), 200), (alone, 200), (10.4, 3000)):
        (said,) = re.findall(rf"\| {task:.3g} s.*\| ([\d.]+) h \|", page)
        hours = 1000 * (10 + tasks * task) / 64 / 3600
        assert said == f"{hours:.{len(said.partition('.')[2])}f}", task


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
