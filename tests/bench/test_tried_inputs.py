"""Inputs that might tell what own images tell: how they are made, read and judged."""

import numpy as np
import pytest
import torch

from bench.alarm.problems import COMMON
from bench.alarm.runs import Cell, carry_out, settings_of
from bench.alarm.signals import Course
from bench.inputs import report, runs
from bench.inputs.images import DeadLeaves, FractalNoise, SpectrumImages
from fastlr.ops.philox import indices

pytest.importorskip("sklearn")


def waves(n):
    """Images whose channels share a wave of random phase, each about a mean of its own."""
    across = 2 * torch.pi * (torch.arange(8) / 8 + torch.rand(n, 1))
    image = across.sin()[:, None, None].expand(n, 3, 6, 8)
    return image + torch.tensor([1.0, 2.0, 3.0])[:, None, None]


def test_spectrum_images_have_means_and_powers_of_the_data():
    made = SpectrumImages.fit(waves(200)).batch(0, 4000)
    assert made.mean((0, 2, 3)).tolist() == pytest.approx([1, 2, 3], abs=0.05)
    powers = torch.fft.fft2(made - made.mean((0, 2, 3))[:, None, None]).abs().square().mean(0)
    assert powers[:, 0, 1].sum() / powers.sum() == pytest.approx(0.5, abs=0.01), "of +1 and -1"
    centred = (made - made.mean((0, 2, 3))[:, None, None]).movedim(1, 0).flatten(1)
    assert torch.corrcoef(centred).min() > 0.999, "all channels are one wave"


def test_fractal_noise_has_unit_variance_and_falls_as_one_over_the_frequency():
    made = FractalNoise((3, 16, 16)).batch(0, 3000)
    assert made.var((0, 2, 3)).tolist() == pytest.approx([1] * 3, rel=0.05)
    powers = torch.fft.fft2(made).abs().square().mean((0, 1))
    assert float(powers[0, 1] / powers[0, 4]) == pytest.approx(16, rel=0.15)
    assert torch.corrcoef(made.movedim(1, 0).flatten(1))[0, 1] == pytest.approx(0.9, abs=0.02)


def test_dead_leaves_cover_the_canvas_by_the_first_leaf_over_a_pixel(monkeypatch):
    leaves = DeadLeaves((3, 12, 10), radii=(0.2, 0.3))
    whole = leaves.batch(0, 6, seed=4)
    for at_once in (1, 7):
        monkeypatch.setattr("bench.inputs.images.LEAVES_AT_ONCE", at_once)
        assert torch.equal(leaves.batch(2, 6, seed=4), whole[2:]), "whatever is drawn at once"
    image = leaves._image(4, indices(0, 1))
    colours = image.flatten(1).unique(dim=1).shape[1]
    assert 5 < colours < 60, "discs of 2 to 3 pixels"
    covers = leaves._covers(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 1.0]]).double())
    assert covers.sum((1, 2)).tolist() == [12, 32], "discs of 2 and 3 pixels about the middle"


def test_silent_units_are_those_that_own_images_leave_so():
    model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0], [0.0]]))
        model[0].bias.copy_(torch.tensor([0.0, 0.0, -1.0]))
    shares = runs.silence(
        model, torch.ones(5, 1), {"same": torch.ones(2, 1), "all": torch.eye(1) - 2}
    )
    assert shares == pytest.approx({"silent": 2 / 3, "woken_same": 0, "woken_all": 1 / 3})
    assert not model[1]._forward_hooks


def test_a_run_is_read_and_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(COMMON, "redundancy_n", 8)
    monkeypatch.setattr(runs, "N", 8)
    cell, path = Cell("random-labels", "none", 0), tmp_path / "random-labels" / "none,seed-0"
    small = {"random_images": 32, "epochs": 1, "tasks": 2}
    settings = settings_of(cell, None) | small | {"measures": tuple(runs.RUN_MEASURES.values())}
    carry_out(path, settings, lambda tasks: runs.Reader(path, "rademacher", tasks))
    first, second = report.run_rows(path)
    assert first[report.SHAPES] == ""
    assert all(second[name] for name in report.COLUMNS), "every value is there"
    (course,) = report.courses([first, second])
    assert course.read_at.tolist() == [1]
    assert course.measures["gaussian"][0] == pytest.approx(float(second["gaussian"]))


def made_up(problem, seed, apart):
    """A run whose values leave own images' by factors, by name, after task 20."""
    at = np.arange(1, 100, 2)
    own = np.full(50, 2.0)
    values = {name: np.where(at > 20, 10.0**power, 1.0) for name, power in apart.items()}
    accuracy = np.full(100, 0.8)
    return Course(problem, "none", seed, 0.1, accuracy, at, {report.OWN: own, **values})


def test_kept_is_what_is_nearer_in_every_seed_of_two_problems_and_farther_in_none():
    apart = {"shapes": 1.0, "gaussian": 0.5, "spectrum": 0.5, "leaves": -2.0, "fractal": -0.9}
    course = made_up("a", 0, apart)
    assert report.distance(course, "shapes") == pytest.approx(0.8, abs=0.001)
    assert report.distance(course, "leaves") == pytest.approx(1.6, abs=0.001)
    of_runs = [made_up(problem, seed, apart) for problem in "abc" for seed in range(2)]
    worse = apart | {"spectrum": 1.1, "fractal": 0.9}
    of_runs += [made_up("d", seed, worse) for seed in range(2)]
    assert report.verdict(of_runs, "gaussian") == (["a", "b", "c", "d"], [])
    assert report.verdict(of_runs, "spectrum") == (["a", "b", "c"], ["d"])
    *said, kept = report.sentences(of_runs)
    assert [text.split(";")[0] for text in said] == [
        "gaussian: passes",
        "spectrum: dropped",
        "leaves: dropped",
        "fractal: passes",
    ]
    assert kept == (
        "Kept: gaussian. Mean distance over the problems of those that pass: gaussian 0.40, "
        "fractal 0.72; of shapes 0.80."
    )


@pytest.mark.skipif(not report.KEPT.exists(), reason="a source distribution has no results")
@pytest.mark.parametrize("sheet", [report.distance_sheet, report.silent_sheet])
def test_tables_are_those_of_the_kept_values(sheet):
    made = sheet(report.courses(report.read_table(report.KEPT / "values.csv")))
    assert made.csv() == (report.KEPT / f"{made.slug}.csv").read_text()
