"""What the sources and pages cite of the paper is there, under that number, and about that.

``paper_labels.csv`` lists the paper's numbered parts, with words of which one must stand near a
citation.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from fastlr.experiments.continual.association import TARGETS

ROOT = Path(__file__).parents[1]
NEAR = {"Figure": 60}  # characters on either side, in which one of the words must stand
ELSE_NEAR = 500
SUFFIXES = (".py", ".md", ".cpp", ".cu", ".h", ".rst")
WHERE = ("fastlr", "kernels", "csrc", "docs", "examples", "bench")
NUMBER = r"(?:[A-Z]\.)?\d+(?:\.\d+)?"
CITATION = re.compile(
    r"\b(?P<kind>Theorem|Corollary|Lemma|Proposition|Definition|Table|Figure|Section|Equation|Appendi)(?:x|ces|s)? "
    rf"(?P<numbers>{NUMBER}(?:(?:, | and |, and | to |-){NUMBER})*)",
    re.IGNORECASE,
)
ELSEWHERE = re.compile(r"arXiv:[^)]*\),\s*$")  # a place in another paper
LABELS = {
    (row["kind"], row["number"]): row["words"].split("|")
    for row in csv.DictReader((Path(__file__).parent / "paper_labels.csv").open())
}


def cited(text: str) -> list[tuple[str, str, str]]:
    """(kind, number, what stands around it) of every citation."""
    found = []
    text = re.sub(r"\s*\n\s*(?:#|\*)?\s*", " ", text)
    for match in CITATION.finditer(text):
        if ELSEWHERE.search(text[: match.start()]):
            continue
        kind = {"Appendi": "Section"}.get(match["kind"].capitalize(), match["kind"].capitalize())
        numbers = re.findall(NUMBER, match["numbers"])
        for first, last in re.findall(r"\b(\d+)(?: to |-)(\d+)\b", match["numbers"]):
            numbers += map(str, range(int(first) + 1, int(last)))
        near = NEAR.get(kind, ELSE_NEAR)
        around = (
            text[max(0, match.start() - near) : match.start()]
            + text[match.end() : match.end() + near]
        )
        found += [(kind, number, around) for number in numbers]
    return found


def wrong(text: str) -> list[str]:
    """The citations that the paper has not, or not about what stands around them."""
    return [
        f"{kind} {number}"
        for kind, number, around in cited(text)
        if not any(word.lower() in around.lower() for word in LABELS.get((kind, number), ()))
    ]


def files() -> list[Path]:
    inside = [
        path for name in WHERE for path in (ROOT / name).rglob("*") if path.suffix in SUFFIXES
    ]
    return [*ROOT.glob("*.md"), *(path for path in inside if "_build" not in path.parts)]


def test_what_is_cited_is_in_the_paper():
    texts = {path: path.read_text() for path in files()}
    assert sum(len(cited(text)) for text in texts.values()) > 50
    assert not {
        str(path.relative_to(ROOT)): errors
        for path, text in texts.items()
        if (errors := wrong(text))
    }


@pytest.mark.parametrize("target", TARGETS.values())
def test_numbers_of_the_tables_of_correlations(target):
    assert not wrong(f"Table {target.table}: {target.label}")


@pytest.mark.parametrize(
    "text, errors",
    [
        ("holds for any inputs (Theorem 3.3)", ["Theorem 3.3"]),
        ("losses over the epochs of pretraining (the paper's Figure 3)", ["Figure 3"]),
        ("Pretraining and fine-tuning: Figures 4 to 6", ["Figure 6"]),
        ("Figures 4 and 5 show pretraining and fine-tuning", []),
        ('Ash and Adams (arXiv:1910.08475), section 4: "lambda"', []),
        ("Lemma 3.2 on memorization", ["Lemma 3.2"]),
        ("the cost (appendix A.5, Table 6)", ["Table 6"]),
    ],
)
def test_wrong_citations_are_found(text, errors):
    assert wrong(text) == errors
