"""Truth beside bound: the factors, and what the report says of their course."""

import pytest
import torch

from bench import calibration
from bench.calibration import Row
from fastlr.models.mlp import MLP


@pytest.mark.parametrize(("candidates", "n"), [(3, 1), (2, 2)])
def test_factors_multiply_to_truth_over_bound(candidates, n):
    torch.manual_seed(0)
    model = MLP(num_classes=2, widths=(3,))
    value, truth, worst, others, order = calibration.enumerated(model, candidates, n, 1e-4)
    assert truth / value == pytest.approx(worst * others * order)
    assert worst > 1
    assert others >= 1
    assert order == pytest.approx(1, abs=1e-3)


def rows(factor):
    """A course whose worst input doubles at each checkpoint, and the value falls meanwhile."""
    for task in range(3):
        values = 8.0 / 2**task, factor * 8.0, factor * 2.0**task, 1.0, 1.0
        yield Row("none", 0, task, 24, 1, 0.1, *values)


def test_the_report_says_what_moves(tmp_path):
    path = tmp_path / "values.csv"
    path.write_text("\n".join([",".join(calibration.COLUMNS), *(repr_of(r) for r in rows(1.0))]))
    found = calibration.read([path])
    assert found == list(rows(1.0))
    (cells,) = calibration.sheet(found).rows
    assert cells[:3] == ("none K=24 n=1 0.1", "1.00", "4.00")
    assert cells[3:7] == ("0.69", "0.00", "0.00", "0.69")


def repr_of(row):
    return ",".join(map(str, row))


def test_what_was_enumerated_twice_counts_once(tmp_path):
    path = tmp_path / "values.csv"
    path.write_text("\n".join(repr_of(row) for row in [*rows(1.0), *rows(2.0)]))
    assert calibration.read([path]) == list(rows(2.0))
