"""README.md and its pages: Python runs, commands exist, links lead somewhere, table is record."""

import re
from pathlib import Path

import pytest
import torch
from page import fenced

from bench import table
from fastlr.cli.main import app
from fastlr.experiments.continual.options import MEMORISED, PERMUTED_DIGITS, PRESETS, SYNTHETIC

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SMALLER = (("(3, 64, 64)", "(3, 32, 32)"), ("n=64", "n=8"), ("n, total = 1000", "n, total = 4"))


def blocks(language):
    return [text for name, text in fenced(ROOT / "README.md") if name == language]


def test_the_python_runs_as_printed():
    """README's blocks run one after the other, on fewer and smaller images.

    They run up to what torchrun would start.
    """
    first, plain = blocks("python")
    names = {}
    for text in (first, plain):
        for large, small in SMALLER:
            text = text.replace(large, small)
        exec(compile(text, "README.md", "exec"), names)
    assert names["lr"].n == 8
    assert names["lr"].value > 0
    assert names["total"] > 0
    assert all(large in first + plain for large, _ in SMALLER), (
        "what this test makes smaller is there"
    )
    printed = blocks("text")[0].splitlines()
    shape = re.sub(r"\d[\d.]*", "#", printed[0])
    assert shape == re.sub(r"\d[\d.]*", "#", str(names["lr"]).splitlines()[0])


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
    for name in [*PRESETS, SYNTHETIC, *MEMORISED, PERMUTED_DIGITS]:
        assert name in re.sub(r"[\s│]+", "", told), name
        assert f"`{name}`" in page or f"continual {name} " in page, name


def test_there_is_one_recipe_of_installation():
    recipe = "pip install .`"
    assert "\npip install . " in README
    for page in ("index.md", "installation.md"):
        assert recipe in (ROOT / "docs" / page).read_text()
