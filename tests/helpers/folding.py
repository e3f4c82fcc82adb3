"""What tests of folded forward passes share: random models and a check by passes per sample."""

from __future__ import annotations

import torch
from exact import assert_norms
from torch import Tensor, nn

import fastlr
from bench import cases
from fastlr.ghost.api import engine_for
from fastlr.ghost.fusion import mode as fuse


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw parameters and running statistics at random, in float64 and eval mode."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
        for name, b in model.named_buffers():
            if b.is_floating_point():
                noise = torch.randn(b.shape, generator=generator, dtype=torch.float64)
                b.copy_(noise.exp() if name.endswith("var") else noise)
    return model


def check(model: nn.Module, folded: int, x: Tensor | None = None, why: str = "") -> fuse.Folding:
    """Hold the norms to one backward pass a sample, and count the convolutions that are folded.

    ``why`` is in the reason given for the others.
    """
    x = (
        torch.randn(3, 4, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        if x is None
        else x
    )
    case = cases.Case(randomise(model), x)
    v = cases.cotangent_for(case)
    truth = cases.loop_norms(case, v)
    for _ in range(2):  # the second call goes by what the first has found
        got = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
        assert_norms(got, truth, 1e-10, 1e-13)
    folding = engine_for(model, None, 0, 0).folding
    assert len(folding.folded) == folded, (
        folding.folded,
        folding.plain,
        folding.refused,
        folding.disabled,
    )
    reasons = [*folding.plain.values(), *folding.refused.values(), folding.disabled or ""]
    assert (
        any(why in r for r in reasons) if why else not folding.refused and not folding.disabled
    ), reasons
    return folding
