"""The commands of REPRODUCTION.md run as they stand, on small data and networks."""

import csv
import re
import shlex
from pathlib import Path

import pytest
from data_sources import pixels, save

from fastlr.cli.main import main
from fastlr.experiments.data.series import generated_series

PAGE = Path(__file__).parents[1] / "REPRODUCTION.md"
CONVNET = (
    "model=fastlr.models.convnet:ConvNet model_kwargs={size} device=cpu threads=1 batch_size=16 "
    "norm_batch=8"
)
PATCHTST = (
    'model_kwargs={"patch":8,"stride":8,"layers":1,"width":8,"heads":2,"ffn":12} context=32 '
    "horizon=6 device=cpu threads=1 batch_size=32 norm_batch=16 redundancy_n=8"
)
BY_PARAGRAPH = re.MULTILINE | re.DOTALL
SIZES = '{"size":24,"widths":[2,2,2],"hidden":4}'
SMALLER = {  # settings that make a run small, and nothing else
    "continual": f"{CONVNET.format(size=SIZES)} tasks=5 epochs=1 redundancy_n=8 measure_images=8",
    "transfer": f"{PATCHTST} epochs=2 steps_per_epoch=4 finetune_steps_per_epoch=2 "
    "dormant_windows=8 validation_stride=8",
    "memorize vision": f"{CONVNET.format(size=SIZES)} n=32 classes=4 size=24 epochs=5",
    "memorize series": f"{PATCHTST} n=32 epochs=10",
}


def recipe():
    """The commands of the page's console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0].rstrip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("fastlr ")]


def small(line, seeds):
    """Return a command's arguments with small images, ``seeds`` seeds and settings of SMALLER.

    ``seeds`` None: one run without a queue.
    """
    line = re.sub(
        r" --seeds \d+",
        f" --seeds {seeds}" if seeds else "",
        line.replace("--size 224", "--size 24"),
    )
    arguments = shlex.split(line)[1:]
    settings = next(
        (text for start, text in SMALLER.items() if " ".join(arguments).startswith(start)), ""
    )
    if "table5" in arguments:
        settings = settings.replace("tasks=5", "tasks=2")
    return arguments + [part for setting in settings.split() for part in ("--set", setting)]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A small ImageNet, not square, and two series, where the page's commands look for them."""
    monkeypatch.chdir(tmp_path)
    for c in range(5):
        for split, count in (("train", 16), ("val", 4)):
            for i in range(count):
                image = pixels(1000 * c + 100 * (split == "val") + i, 24, 30) // 2 + 25 * c
                save(tmp_path / "imagenet" / split / f"n{c}" / f"{i}.png", image)
    for seed, name in enumerate(("ETTm1", "ETTh2")):
        table = generated_series(400, seed=seed)
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            rows = [
                [f"2016-07-{1 + i // 24:02d} {i % 24:02d}:00:00", *row]
                for i, row in enumerate(table.values.tolist())
            ]
            csv.writer(file).writerows([["date", *table.columns], *rows])


def carried_out(lines, seeds, capsys):
    """Carry out commands one after the other; what each printed."""
    printed = {}
    for line in lines:
        assert main(small(line, seeds)) == 0, line
        printed[line] = capsys.readouterr().out
        if re.match("fastlr (report|ablate|cost)", line):
            assert main(["report", *line.split()[2:], "--figures", "none"]) == 0
            report = capsys.readouterr().out
            (listed,) = re.findall(r"^Differences from the paper: .*?\n\n", report, BY_PARAGRAPH)
            assert not re.search("resize|redundancy_probe|dormant_by", listed), line
    for inputs in ("shapes", "Gaussian noise"):
        table = printed["fastlr ablate runs"]
        assert re.search(rf"^{inputs} +raw +-?\d\.\d+ ", table, re.MULTILINE), (
            "Table 4, not why there is none"
        )
    for row in (
        "local redundancy",
        "distance from init",
        "weight norm",
        "training grad norm",
        "dormant ratio",
    ):
        assert re.search(rf"^{row} +\d", printed["fastlr cost table5"], re.MULTILINE), (
            "each row of the paper's Table 5"
        )
    return printed


def test_the_recipe_of_tables_4_and_5(data, capsys):
    carried_out(
        [line for line in recipe() if re.match("fastlr (data|continual|ablate|cost)", line)],
        None,
        capsys,
    )


@pytest.mark.long
def test_every_recipe_prints_the_papers_tables(data, capsys):
    printed = carried_out(recipe(), 2, capsys)
    for number in (1, 2, 4, 5):
        assert f"Table {number}" in printed["fastlr report runs"]
    assert re.search("Table 3.*max local redundancy", printed["fastlr report transfer"], re.DOTALL)
    memorised = printed["fastlr report vision series"]
    assert "Bits memorised" in memorised
    assert re.search("Differences from the paper: .*In vision: ", memorised, re.DOTALL)
