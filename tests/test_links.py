"""What the pages refer to exists: files, headings, make targets, modules, names and commits.

The pages are README.md and the other .md files at the top, docs/ and the records' .md files.
"""

import importlib.util
import pkgutil
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from page import markdown_pages

from fastlr.errors import MissingExtraError

ROOT = Path(__file__).parents[1]
PAGES = markdown_pages()
RECORDS = sorted(ROOT.glob("bench/results/**/*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MOST_BYTES = 140_000  # of the pages at the top and in docs/

parametrized = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page):
    """Return the text of a page without fenced blocks."""
    return FENCE.sub("", page.read_text())


@cache
def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    """Return the links of a page that lead nowhere."""
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


def test_links_lead_somewhere():
    if not RECORDS:
        pytest.skip("a source distribution has no records")
    broken = {page: broken_links(page) for page in (*PAGES, *RECORDS)}
    assert {str(page): links for page, links in broken.items() if links} == {}


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](#two) [c](gone.md) [d](https://x.org/y)\n")
    assert broken_links(page) == ["#two", "gone.md"]


@parametrized
def test_files_of_the_repository_exist(page):
    named = re.findall(
        r"`((?:fastlr|kernels|csrc|docs|examples|bench|tests)/[\w/.-]+)`", page.read_text()
    )
    for name in named:
        if name.startswith("bench/results") and not RECORDS:
            continue
        assert (ROOT / name).exists(), name


@parametrized
def test_targets_and_modules_exist(page):
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {*re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)} <= targets
    assert {*re.findall(r"`make ([a-z-]+)", text)} <= targets
    for module in re.findall(r"python -m (bench[\w.]*|tests[\w.]*)", text):
        assert importlib.util.find_spec(module.rstrip(".")), module


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted(ROOT.glob("examples/*.py"))], ids=lambda page: page.name
)
def test_names_of_fastlr_exist(page):
    """Every ``fastlr.module.name``, without the pages' code, which runs."""
    text = prose(page) if page.suffix == ".md" else page.read_text()
    for name in sorted(set(re.findall(r"(?<![\w/])fastlr(?:\.\w+)+", text))):
        try:
            pkgutil.resolve_name(name)
        except MissingExtraError as error:  # of a framework
            assert name.split(".")[2] in str(error)


def commit_exists(name):
    """Return whether git has a commit of this name."""
    command = ["git", "cat-file", "-e", f"{name}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def test_commits_exist():
    """Names of 7 hexadecimal digits, with a letter and a digit."""
    if not commit_exists("9e375d3"):
        pytest.skip("no git history, or not all of it")
    text = "\n".join(page.read_text() for page in (*PAGES, *RECORDS))
    named = set(re.findall(r"(?<![\w.-])(?=\w*[a-f])(?=\w*\d)[0-9a-f]{7}(?![\w.-])", text))
    assert len(named) > 8
    assert {name for name in named if not commit_exists(name)} == set()


def test_pages_stay_small():
    assert sum(page.stat().st_size for page in PAGES) <= MOST_BYTES
