"""Measures that a continual run takes where it is told to."""

import pytest
from continual_cases import comparable

from fastlr.experiments.continual.experiment import DRIVER

ON_REQUEST = (
    "local_redundancy_this_task",
    "learning_speed",
    "trainability",
    "gradient_noise_scale",
    "curvature_rank",
    "ntk_rank",
)
FEW = {"tasks": 2, "epochs": 2, "redundancy_n": 32, "measure_images": 32}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run the demo's network with all of them, and without; return the folders."""
    folder = tmp_path_factory.mktemp("runs")
    for name, measures in (("with", ("local_redundancy", *ON_REQUEST)), ("without", ("srank",))):
        settings = {**FEW, "measures": measures, "trainability_repeats": 1}
        DRIVER.begin(folder / name, "demo", settings)
    return folder


def tasks(folder):
    """Return the records of the tasks of a run."""
    return [record for record in comparable(folder) if record["kind"] == "task"]


def test_training_is_the_same_with_and_without(runs):
    for a, b in zip(tasks(runs / "with"), tasks(runs / "without"), strict=True):
        assert a["train_loss"] == b["train_loss"]
        assert a["accuracy"] == b["accuracy"]


def test_all_are_in_the_records_with_their_definitions(runs):
    for record in tasks(runs / "with"):
        assert set(ON_REQUEST) <= set(record["measures"])
        for name in ON_REQUEST:
            measure = record["measures"][name]
            assert measure["definition"]
            if measure["value"] is None:  # of 32 images whose gradients point anywhere
                assert name == "gradient_noise_scale"
                assert measure["error"].endswith("more samples are needed")
        assert record["measures"]["trainability"]["stderr"] is None  # of one draw of labels


def test_learning_speed_is_the_accuracy_of_a_run_of_one_epoch(runs, tmp_path):
    once = {**FEW, "epochs": 1, "tasks": 1, "measures": ("learning_speed",)}
    DRIVER.begin(tmp_path / "once", "demo", once)
    first, of_one_epoch = tasks(runs / "with")[0], tasks(tmp_path / "once")[0]
    speed = first["measures"]["learning_speed"]["value"]
    assert speed == of_one_epoch["accuracy"]
    assert speed == of_one_epoch["measures"]["learning_speed"]["value"]


def test_resumed_it_is_the_same_run(runs, tmp_path):
    settings = {**FEW, "measures": ("local_redundancy", *ON_REQUEST), "trainability_repeats": 1}
    DRIVER.begin(tmp_path / "part", "demo", {**settings, "tasks": 1})
    DRIVER.resume(tmp_path / "part", {"tasks": 2})
    assert comparable(tmp_path / "part") == comparable(runs / "with")


def test_the_report_has_them(runs, cli):
    printed = cli(f"report {runs / 'with'} --bootstrap 100 --figures none").out
    assert "trainability" in printed
