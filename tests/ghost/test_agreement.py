"""Outputs that differ by rounding are told from others (fastlr.ghost.verification.agreement)."""

import torch
from pytest import fixture

from fastlr.ghost.verification.agreement import agree
from fastlr.ghost.verification.noise import Noise

RELATIVE = 1e-3


@fixture
def outputs():
    """Two samples of a thousand logits, the same again but for rounding, and what is measured.

    Logit 0 is so small that its rounding is more than a thousandth of it. In column 1 both samples
    happened to be exact where rounding was measured: two values say little of a column.
    """
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(2, 1000, generator=generator)
    want[0, 0] = want[1, 0] = 1e-4
    off = 1e-6 * (1 + torch.rand(2, 1000, generator=generator))
    off[:, 1] = 0.0
    return want, want + 2e-6, Noise(32 * off.double(), own=False)


def test_what_needs_no_explanation_is_not_asked_for_one(outputs):
    want, got, noise = outputs
    asked = []

    def measured():
        asked.append(True)
        return noise

    assert agree(want, got, RELATIVE, measured)
    assert asked, "logit 0 needed an explanation"


def test_what_rounding_does_not_explain_is_another_output(outputs):
    want, got, noise = outputs
    got[0, 0] += 1e-3
    assert not agree(want, got, RELATIVE, lambda: noise)
    want, got, _ = outputs
    got[0, 0] = want[0, 0]
    got[1, 1] += 0.1
    assert not agree(want, got, RELATIVE, lambda: noise)
