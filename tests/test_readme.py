"""README.md: its code runs and prints what it says, and its table is that of the record."""

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


def blocks(language):
    return [text for name, text in fenced(ROOT / "README.md") if name == language]


def test_the_python_runs_as_printed(capsys):
    """README's blocks run one after the other, the second on fewer images, and print what it says.

    On another machine the last digits may differ.
    """
    first, plain = blocks("python")
    names = {}
    fewer = plain.replace("n, total = 1000", "n, total = 4")
    assert fewer != plain
    for text in (first, fewer):
        exec(compile(text, "README.md", "exec"), names)
    assert names["total"] > 0
    said, printed = (text.splitlines() for text in (blocks("text")[0], capsys.readouterr().out))
    figure = r"\d+(?:\.\d+)?"
    for line, other in zip(said[:-1], printed):
        assert re.sub(figure, "#", line) == re.sub(figure, "#", other)
    assert all("  largest of 62 parameters: fc.weight" in lines[4] for lines in (said, printed))
    said, printed = said[0], printed[0]
    found = [float(number) for number in re.findall(figure, printed)]
    assert [float(number) for number in re.findall(figure, said)] == pytest.approx(found, rel=1e-2)


def test_the_plain_loop_is_the_same_quantity():
    """The printed loop gives fastlr's value over all labels, weighted by their probabilities."""
    text = blocks("python")[1].replace("n, total = 1000", "n, total = 3")
    text = text.replace("y = torch.multinomial(log_p.exp(), 1).item()", "y = label")
    text = text.replace("images = fastlr.ShapeImages(size=(3, 64, 64))\n", "")
    assert "y = label" in text and "images =" not in text
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
