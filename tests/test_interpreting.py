"""Every figure in docs/interpreting.md stands in the rows of the study that it names."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/interpreting.md").read_text()
# What is said since the paragraph's last citation, and "problem/table, table: row, row;
# problem/table".
CLAIMS = [
    claim
    for paragraph in PAGE.split("\n\n")
    for claim in re.findall(r"(.*?)\(\*([a-z-]+/[a-z].*?)\*\)", paragraph.replace("\n", " "))
]
SETTINGS = (
    r"95 % interval|at 95 %|50 is a guess|R\^2|times 100|(?:\d+ to )?\d+ (?:tasks|units)|\d+ seeds|"
    r"at 500|0\.9 of"
)


def numbers(text):
    return {
        float(number.replace(",", ""))
        for number in re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text)
    }


def rows(folder, table):
    """The numbers of a table's rows, by name."""
    lines = csv.reader((ROOT / f"bench/results/cpu/causes/{folder}/{table}.csv").open())
    return {line[0]: numbers(" ".join(line[1:])) for line in lines}


pytestmark = pytest.mark.skipif(
    not (ROOT / "bench/results").exists(), reason="a source distribution has no results"
)


def test_there_are_claims():
    assert len(CLAIMS) > 15


@pytest.mark.parametrize(("claim", "citation"), CLAIMS, ids=[where for _, where in CLAIMS])
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
    "over 200 pairs of classes": "a caption of the row's own figure",
    "Gaussian noise gives 0.4 to 1.1 times": "test_the_tasks_and_the_noise_are_the_studys",
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
    ratios = []
    for name, noise in last_values("course_noise").items():
        ratios.append(noise / last_values("course")[name])
    assert (round(min(ratios), 1), round(max(ratios), 1)) == (0.4, 1.1)


def last_values(table: str) -> dict[str, float]:
    """The values of the last fifth by network."""
    with (ROOT / f"bench/results/cpu/causes/values/{table}.csv").open() as file:
        return {row["intervention"]: float(row["LR last"]) for row in csv.DictReader(file)}


def test_the_table_of_networks_is_the_studys():
    given = {
        name: numbers(row)
        for name, row in re.findall(r"^\| ([a-z]+(?:-\w+)*) \|(.*)$", PAGE, re.MULTILINE)
    }
    found = [rows("values", table) for table in ("course", "course_noise", "course_next_task")]
    assert given.pop("network") == set()
    assert given.keys() == found[0].keys() - {"intervention"}
    for name, figures in given.items():
        assert figures <= set().union(*(table[name] for table in found)), name
