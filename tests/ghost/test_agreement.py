"""Outputs that differ by rounding, and others (fastlr.ghost.trust.agreement)."""

import torch
from pytest import fixture

from fastlr.ghost.trust.agreement import agree

RELATIVE = 1e-3


@fixture
def outputs():
    """Two samples of a thousand logits, the same again but for rounding, and what is measured.

    Logit 0 is so small that its rounding is more than a thousandth of it.
    """
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(2, 1000, generator=generator)
    want[0, 0] = want[1, 0] = 1e-4
    off = 1e-6 * (1 + torch.rand(1000, generator=generator))
    return want, want + 2e-6, 32 * off.double()


def test_rounding_is_allowed_where_it_was_measured(outputs):
    want, got, rounding = outputs
    assert not agree(want, got, RELATIVE), "logit 0 needs an explanation"
    assert agree(want, got, RELATIVE, measured_rounding=rounding)


def test_what_rounding_does_not_explain_is_another_output(outputs):
    want, got, rounding = outputs
    got[0, 0] += 1e-3
    assert not agree(want, got, RELATIVE, measured_rounding=rounding)
    want, got, _ = outputs
    got[0, 0] = want[0, 0]
    got[1, 1] += 0.1
    assert not agree(want, got, RELATIVE, measured_rounding=rounding)


def test_measured_rounding_is_each_columns_own():
    want = torch.tensor([[1e-6, 1.0], [2e-6, 1.0]])
    rounding = torch.tensor([1e-7, 1.0])
    assert agree(want, want + torch.tensor([9e-8, 0.5]), RELATIVE, measured_rounding=rounding)
    assert not agree(want, want + torch.tensor([2e-7, 0.0]), RELATIVE, measured_rounding=rounding)
