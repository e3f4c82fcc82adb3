"""What the sources and pages cite of the paper is there: ``paper_labels.csv`` lists its parts."""

import csv
import re
import subprocess
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


GONE = re.compile(r"git does\s+not know|joined\s+into")  # said where a commit is cited that is gone


def commits(path):
    """The commits that a page cites by seven digits or more, at least one of them a letter."""
    found = re.findall(r"(?<![\w.-])[0-9a-f]{7,12}(?![\w.-])", path.read_text())
    return {name for name in found if re.search("[a-f]", name) and re.search(r"\d", name)}


def known(name):
    done = subprocess.run(
        ["git", "cat-file", "-e", f"{name}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    return done.returncode == 0


def test_commits_that_git_does_not_know_are_said_to_be_gone():
    if not known("9e375d3"):
        pytest.skip("no git history, or not all of it")
    pages = [ROOT / "README.md", ROOT / "REPRODUCTION.md", *ROOT.glob("docs/**/*.md")]
    cited = {path: commits(path) for path in pages if "_build" not in path.parts}
    assert sum(map(len, cited.values())) > 8
    unsaid = {
        str(path.relative_to(ROOT)): sorted(gone)
        for path, names in cited.items()
        if (gone := {name for name in names if not known(name)})
        and not GONE.search(path.read_text())
    }
    assert unsaid == {}
