"""Folders that an earlier fastlr wrote, before its modules moved to where they are, still open."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from continual_cases import lines
from data_sources import pixels, rows

from fastlr.experiments.data import ImageStore, load_task
from fastlr.experiments.runs.experiment import find_driver
from fastlr.experiments.runs.folder import Run
from fastlr.files import read_object

EARLIER = Path(__file__).parent / "earlier"


@pytest.fixture(params=["continual", "memorize", "transfer"])
def earlier(request, tmp_path):
    """A copy of a run folder, since reading takes its lock and writes a report."""
    return Path(shutil.copytree(EARLIER / request.param, tmp_path / request.param))


def test_a_run_opens_with_its_records_and_its_checkpoint(earlier):
    with Run.resume(earlier) as run:
        assert run.config["driver"] == earlier.name
        assert run.records == lines(EARLIER / earlier.name)
        assert run.state["position"] == len(run.records) - 1
        for file in (earlier / "checkpoints").iterdir():
            assert run.read_checkpoint(file.name)


def test_a_report_is_made_of_it(earlier, cli):
    assert "report: " in cli(f"report {earlier} --figures none").out


@pytest.mark.filterwarnings("ignore:.*the last bits of its numbers may differ")
def test_it_goes_on(earlier):
    threads = torch.get_num_threads()
    before = lines(earlier)
    more = {"continual": {"tasks": 3}, "memorize": {"epochs": 3}, "transfer": {}}[earlier.name]
    find_driver(earlier.name).resume(earlier, more)
    assert read_object(earlier / "config.json")["options"]["batch_norm_updates"] == "every-part", (
        "as it was before there was a choice"
    )
    torch.set_num_threads(threads)
    kinds = {"continual": ["task"], "memorize": ["epoch"], "transfer": []}
    assert lines(earlier)[: len(before)] == before
    assert [line["kind"] for line in lines(earlier)[len(before) :]] == [
        "resume",
        *kinds[earlier.name],
    ]


def test_a_store_opens_and_gives_a_task():
    store = ImageStore.open(EARLIER / "store")
    assert store.classes == ["n0", "n1", "n2"]
    assert store.damaged() == []
    assert [item["file"] for item in store.index["classes"][1]["left_out"]] == ["train/n1/9.png"]
    assert np.array_equal(rows(store, 2, "test"), np.stack([pixels(2100), pixels(2101)]))
    task = load_task(store, (2, 1))
    assert task.train_y.tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(task.train_x[4].permute(1, 2, 0).numpy(), pixels(1000))
