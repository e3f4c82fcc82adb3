"""REPRODUCTION.md: its commands exist and are complete, and its sizes are the networks'."""

import re
import shlex
from pathlib import Path

import typer
from torchvision.models import mobilenet_v3_large

from fastlr.cli.main import app
from fastlr.experiments.continual.options import ContinualOptions, substitutions
from fastlr.models.patchtst import PatchTST

PAGE = (Path(__file__).parents[1] / "REPRODUCTION.md").read_text()


def commands(text):
    """The words of a page's inline commands of fastlr, without its name."""
    return [shlex.split(found)[1:] for found in re.findall(r"`(fastlr [^`]*)`", text)]


def test_the_commands_exist_and_those_of_the_table_are_complete():
    table = PAGE.partition("## At full size")[2].partition("## Small")[0]
    assert len(commands(table)) > 12
    for words in commands(PAGE):
        is_complete = words in commands(table)
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
