"""What tests of folded forward passes share: random models and a check by passes per sample."""

import torch
from exact import assert_norms, seeded

import fastlr
from bench import cases
from fastlr.ghost.api import engine_for


def randomise(model, seed=0):
    """Draw parameters and running statistics at random, in float64 and eval mode."""
    generator = seeded(seed)
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
        for name, b in model.named_buffers():
            if b.is_floating_point():
                noise = torch.randn(b.shape, generator=generator, dtype=torch.float64)
                b.copy_(noise.exp() if name.endswith("var") else noise)
    return model


def check(model, folded, x=None, why=""):
    """Hold the norms to one backward pass a sample, and count the convolutions that are folded.

    ``why`` is in the reason given for the others. Returns what the folding knows of the blocks.
    """
    x = torch.randn(3, 4, 7, 6, dtype=torch.float64, generator=seeded(1)) if x is None else x
    case = cases.Case(randomise(model), x)
    v = cases.cotangent_for(case)
    truth = cases.loop_norms(case, v)
    for _ in range(2):  # the second call goes by what the first has found
        got = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
        assert_norms(got, truth, 1e-10, 1e-13)
    engine = engine_for(model)
    blocks = engine.folding.blocks
    assert len(blocks.folded) == folded, vars(blocks)
    reasons = [
        *blocks.not_folded.values(),
        *blocks.refused.values(),
        blocks.disabled or "",
        engine.ladder.reason,
    ]
    if why:
        assert any(why in r for r in reasons), reasons
    else:
        assert not blocks.refused, reasons
        assert not blocks.disabled, reasons
        assert not engine.ladder.rung, engine.ladder.reason
    return blocks
