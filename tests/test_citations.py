"""Theorems, tables and figures of the paper that sources and pages cite exist.

``paper_labels.csv`` lists them.
"""

import csv
import re
from pathlib import Path

import pytest

from fastlr.experiments.continual.association import TARGETS

ROOT = Path(__file__).parents[1]
SUFFIXES = (".py", ".md", ".cpp", ".cu", ".h", ".rst")
WHERE = ("fastlr", "kernels", "csrc", "docs", "examples", "bench")
NUMBER = r"(?:[A-Z]\.)?\d+(?:\.\d+)?"
CITATION = re.compile(
    r"\b(?P<kind>Theorem|Corollary|Lemma|Proposition|Definition|Table|Figure|Section|Equation|"
    r"Appendi)(?:x|ces|s)? "
    rf"(?P<numbers>{NUMBER}(?:(?:, | and |, and | to |-){NUMBER})*)",
    re.IGNORECASE,
)
ELSEWHERE = re.compile(r"arXiv:[^)]*\),\s*$")  # a place in another paper
LABELS = {
    (row["kind"], row["number"])
    for row in csv.DictReader((Path(__file__).parent / "paper_labels.csv").open())
}


def cited(text):
    """(kind, number) of every citation."""
    found = []
    text = re.sub(r"\s*\n\s*(?:#|\*)?\s*", " ", text)
    for match in CITATION.finditer(text):
        if ELSEWHERE.search(text[: match.start()]):
            continue
        kind = {"Appendi": "Section"}.get(match["kind"].capitalize(), match["kind"].capitalize())
        numbers = re.findall(NUMBER, match["numbers"])
        for first, last in re.findall(r"\b(\d+)(?: to |-)(\d+)\b", match["numbers"]):
            numbers += map(str, range(int(first) + 1, int(last)))
        found += [(kind, number) for number in numbers]
    return found


def wrong(text):
    """The citations of what the paper has not."""
    return [f"{kind} {number}" for kind, number in cited(text) if (kind, number) not in LABELS]


def files():
    inside = [
        path for name in WHERE for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES
    ]
    return [*ROOT.glob("*.md"), *(path for path in inside if "_build" not in path.parts)]


def test_what_is_cited_is_in_the_paper():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files()}
    assert sum(len(cited(text)) for text in texts.values()) > 50
    errors = {name: wrong(text) for name, text in texts.items()}
    assert not {name: found for name, found in errors.items() if found}
    assert {("Table", str(target.table)) for target in TARGETS.values()} <= LABELS


@pytest.mark.parametrize(
    "text, errors",
    [
        ("Pretraining and fine-tuning: Figures 4 to 8", ["Figure 8"]),
        ("Figures 4 and 5 show pretraining and fine-tuning", []),
        ('Ash and Adams (arXiv:1910.08475), section 4: "lambda"', []),
        ("Lemma 3.2 on memorization", ["Lemma 3.2"]),
        ("the cost (appendix A.5, Table 6)", ["Table 6"]),
    ],
)
def test_wrong_citations_are_found(text, errors):
    assert wrong(text) == errors
