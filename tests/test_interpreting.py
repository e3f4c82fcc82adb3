"""Every figure in docs/interpreting.md stands in the rows of the study that it names."""

import csv
import re
from pathlib import Path

from pytest import mark

from bench.alarm.choices import LEAD, MOST_FALSE
from bench.causes.runs import PROBLEMS
from fastlr.display.alarm import FIRST
from fastlr.display.alarm import REFERENCE as BEFORE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/interpreting.md").read_text()
# What is said since the paragraph's last citation, and "problem/table, table: row, row;
# problem/table".
CLAIMS = [
    claim
    for paragraph in PAGE.split("\n\n")
    for claim in re.findall(r"(.*?)\(\*([a-z-]+/[a-z].*?)\*\)", " ".join(paragraph.split()))
]
SETTINGS = (
    r"95 % interval|at 95 %|50 is a guess|R\^2|times 100|(?:\d+ to )?\d+ (?:tasks|units)|\d+ seeds|"
    r"at 500|0\.9 of|with (?:128|256)|"
    r"the paper's \d+\.\d|Tables 1 and 2"
)


def numbers(text):
    return {
        float(number.replace(",", ""))
        for number in re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text)
    }


def rows(folder, table):
    """The numbers of a table's rows, by name."""
    place = folder if folder in ("alarm", "calibration", "inputs") else f"causes/{folder}"
    lines = csv.reader((ROOT / f"bench/results/cpu/{place}/{table}.csv").open())
    found = {}
    for name, *cells in lines:
        found[name] = found.get(name, set()) | numbers(" ".join(cells))
    return found


pytestmark = mark.skipif(
    not (ROOT / "bench/results").exists(), reason="a source distribution has no results"
)


def test_there_are_claims():
    assert len(CLAIMS) > 15


@mark.parametrize(("claim", "citation"), CLAIMS, ids=[where for _, where in CLAIMS])
def test_figures_are_in_the_rows_they_name(claim, citation):
    found = set()
    for part in citation.split("; "):
        place, _, names = part.partition(": ")
        folder, _, tables = place.partition("/")
        for of_table in (rows(folder, table) for table in tables.split(", ")):
            found |= set().union(
                *(of_table[name] for name in (names.split(", ") if names else of_table))
            )
    assert numbers(re.sub(SETTINGS, "", claim)) <= found


# Paragraphs with figures and no citation, by words of theirs, and what holds them.
ELSEWHERE = {
    "in some 50,000 tasks": "test_the_tasks_and_the_noise_are_the_studys",
    "*The verdict*": "tests/display/test_verdict.py",
    "*Below a half*": "test_what_fell_below_a_half_had_lost_accuracy_and_not_the_other_way_round",
    "An alarm rings where": "test_the_study_of_alarms_is_of_so_many_runs",
    "over 200 pairs of classes": "a caption of the row's own figure",
    "Gaussian noise gives 0.4 to 1.1 times": "test_the_tasks_and_the_noise_are_the_studys",
    "Factors of truth over bound": "a caption of the record's own figure",
    "`make causes` repeats it": "commits and versions, as in bench/results/cpu/causes/README.md",
}


def test_no_figure_is_without_its_rows():
    unheld = []
    for paragraph in PAGE.split("\n\n"):
        text = paragraph.replace("\n", " ")
        uncited = re.sub(r".*?\(\*[a-z-]+/[a-z].*?\*\)", "", text)
        is_table = paragraph.startswith(("|", "```"))
        is_held = is_table or any(words in text for words in ELSEWHERE)
        if numbers(re.sub(SETTINGS, "", uncited)) and not is_held:
            unheld.append(uncited)
    assert unheld == []


def test_the_tasks_and_the_noise_are_the_studys():
    about = (ROOT / "bench/results/cpu/causes/README.md").read_text()
    assert "of 50,400 tasks" in about
    causes = ROOT / "bench/results/cpu/causes"
    assert len((causes / "class-pairs/runs.csv").read_text().splitlines()) == 1 + 12
    problem = PROBLEMS["class-pairs"]
    assert len(problem.variants) * problem.seeds == 16
    ratios = []
    for name, noise in course("values", "course_noise").items():
        ratios.append(noise["LR last"] / course("values", "course")[name]["LR last"])
    assert (round(min(ratios), 1), round(max(ratios), 1)) == (0.4, 1.1)


def test_the_study_of_alarms_is_of_so_many_runs():
    (told,) = re.findall(
        r"seven problems, four of which were set to lose plasticity, (\d+) runs of 100", PAGE
    )
    with (ROOT / "bench/results/cpu/alarm/runs.csv").open() as file:
        judged = [row for row in csv.DictReader(file) if not row["runs"].startswith("state-kept")]
        assert sum(int(row["seeds"]) for row in judged) == int(told)
    assert (BEFORE, FIRST, LEAD, MOST_FALSE) == (range(5, 16), 16, 5, 1.0)


def course(problem, table):
    """The columns of a course by intervention or network."""
    with (ROOT / f"bench/results/cpu/causes/{problem}/{table}.csv").open() as file:
        return {
            row["intervention"]: {
                column: float(row[column].replace(",", ""))
                for column in ("first %", "last %", "LR start", "LR first", "LR last")
            }
            for row in csv.DictReader(file)
        }


def test_the_table_of_networks_is_the_studys():
    given = dict(re.findall(r"^\| ([a-z]+(?:-\w+)*) \|(.*)\|$", PAGE, re.MULTILINE))
    shapes, noise, own = (
        course("values", table) for table in ("course", "course_noise", "course_next_task")
    )
    given.pop("network")
    assert given.keys() == shapes.keys()
    for name, cells in given.items():
        on_shapes = [shapes[name][column] for column in ("LR start", "LR first", "LR last")]
        others = [noise[name]["LR last"], own[name]["LR last"], shapes[name]["last %"]]
        assert [float(cell) for cell in cells.split("|")] == on_shapes + others, name


def every_row(table):
    return [row for problem in PROBLEMS for row in course(problem, table).values()]


@mark.parametrize(("table", "fallen", "found"), [("course", 11, 10), ("course_next_task", 23, 22)])
def test_what_fell_below_a_half_had_lost_accuracy_and_not_the_other_way_round(table, fallen, found):
    below = [row for row in every_row(table) if row["LR last"] < row["LR first"] / 2]
    assert len(below) == fallen
    assert all(row["last %"] < row["first %"] for row in below)
    assert len([row for row in below if row["last %"] <= row["first %"] - 5]) == found
    assert len([row for row in every_row(table) if row["last %"] <= row["first %"] - 5]) == 28


def test_at_the_value_of_constant_outputs_nothing_is_learned():
    """Ten classes, of which the commonest has 12.8 to 13.1 % of the labels."""
    constant = [row for row in every_row("course_next_task") if row["LR last"] < 1]
    assert len(constant) > 8
    assert all(12.8 <= row["last %"] <= 13.1 for row in constant)
