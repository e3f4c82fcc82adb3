"""Batch norm that runs alone as a scaling and a shift: its node's gradients, its use, its norms."""

import torch
import torch.nn.functional as F
from exact import assert_same_function, seeded
from folding import check, randomise
from pytest import mark, raises
from single_samples import Written
from torch import nn

import fastlr
from bench import cases
from fastlr.ghost.api import engine_for
from fastlr.ghost.fusion import batch_norm as fixed_norm
from fastlr.ghost.fusion.batch_norm import FixedNorm
from fastlr.ghost.norms.rules import RULES


def transposed(times=1, **options):
    """Rows of features that are transposed for batch norm, and back, as in sequence models.

    One module is applied twice if so asked.
    """

    def forward(m, x):
        y = m.inner(x)
        for _ in range(times):
            y = torch.tanh(m.bn(y.transpose(1, 2)).transpose(1, 2))
        return m.outer(y).mean(1)

    bn = nn.BatchNorm1d(5, **options)
    return Written(forward, inner=nn.Linear(4, 5), bn=bn, outer=nn.Linear(5, 3))


def series(batch=3):
    return torch.randn(batch, 7, 4, dtype=torch.float64, generator=seeded(1))


@mark.parametrize("frozen", [(), ("x",), ("gamma",), ("beta",), ("gamma", "beta")])
@mark.parametrize("shape", [(3, 5), (3, 5, 4), (2, 5, 4, 3), (2, 5, 2, 3, 2)])
@mark.parametrize("given", ["both", "gamma", "beta"])
def test_its_gradients_are_right(frozen, shape, given):
    generator = seeded(0)
    tensors = {
        name: torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_(
            name not in frozen
        )
        for name, size in {"x": shape, "gamma": (5,), "beta": (5,)}.items()
    }
    if given != "both":
        tensors["beta" if given == "gamma" else "gamma"] = None  # type: ignore[assignment]
    x, gamma, beta = tensors.values()
    mean = torch.randn(5, generator=generator, dtype=torch.float64)
    var = torch.rand(5, dtype=torch.float64) + 0.5
    got = FixedNorm.apply(x, gamma, beta, mean, var, 1e-3, "norm")
    want = F.batch_norm(x, mean, var, gamma, beta, eps=1e-3)
    assert_same_function(
        got, want, [t for t in (x, gamma, beta) if t is not None and t.requires_grad]
    )


def test_strides_are_kept():
    x = torch.randn(3, 7, 5).transpose(1, 2).requires_grad_()
    ones, zeros = torch.ones(5), torch.zeros(5)
    out = FixedNorm.apply(x, ones, zeros, zeros, ones, 0.0, "norm")
    (gx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert out.stride() == gx.stride() == x.stride()


MODELS = {
    "transposed": (lambda: transposed(), {"bn.weight"}),
    "used_twice": (lambda: transposed(times=2), {"bn.weight"}),
    "no_affine": (lambda: transposed(affine=False), set()),
    "no_running_statistics": (lambda: transposed(track_running_stats=False), None),
    "first": (
        lambda: nn.Sequential(nn.BatchNorm1d(7), nn.Flatten(), nn.Linear(28, 3)),
        {"0.weight"},
    ),
    "flat": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(28, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        {"2.weight"},
    ),
    "before_its_activation": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(28, 6), nn.BatchNorm1d(6), nn.ReLU(True), nn.Linear(6, 3)
        ),
        {"2.weight"},
    ),
    "after_a_block": (
        lambda: nn.Sequential(
            nn.Conv1d(7, 5, 2),
            nn.BatchNorm1d(5),
            nn.ReLU(),
            nn.BatchNorm1d(5),
            nn.Flatten(),
            nn.Linear(15, 2),
        ),
        {"3.weight"},
    ),
}


@mark.parametrize("name", MODELS)
def test_norms_are_those_of_the_model(name):
    make, fixed = MODELS[name]
    if fixed is None:  # batch statistics: samples interact
        with raises(fastlr.errors.ModelError):
            fastlr.per_sample_grad_sq_norms(
                make().double().eval(), series(), torch.randn(3, 3, dtype=torch.float64)
            )
        return
    blocks = check(make(), int(name == "after_a_block"), series())
    assert blocks.fixed == fixed


@mark.parametrize("frozen", ["bn.weight", "bn.bias", "inner.weight"])
def test_frozen_parts(frozen):
    model = transposed()
    model.get_parameter(frozen).requires_grad_(False)
    assert check(model, 0, series()).fixed == {"bn.weight"}


def test_samples_of_several_rows_are_told_apart():
    """Channels folded into the batch, as PatchTST does."""
    folded = Written(
        lambda m, x: m.inner(x.reshape(-1, 7, 4)).reshape(len(x), -1), inner=transposed()
    )
    assert check(folded, 0, torch.randn(4, 3, 7, 4, dtype=torch.float64)).fixed == {
        "inner.bn.weight"
    }


def test_a_wrong_one_is_refuted(monkeypatch):
    right = RULES[fixed_norm.NODE]
    monkeypatch.setitem(
        RULES,
        fixed_norm.NODE,
        lambda site, slots: {k: _doubled(f) for k, f in right(site, slots).items()},
    )
    blocks = check(transposed(), 0, series(), "is off by")
    assert not blocks.fixed


def _doubled(factor):  # type: ignore[no-untyped-def]
    factor.grads = factor.grads * 2
    return factor


def test_a_wrong_output_is_refuted(monkeypatch):
    right = fixed_norm._along
    monkeypatch.setattr(fixed_norm, "_along", lambda t, like: right(t * 1.01, like))
    blocks = check(transposed(), 0, series(), "gives another output")
    assert not blocks.fixed


def test_other_precisions_run_as_they_are():
    model, x = randomise(transposed()), series(5)
    v = cases.cotangent_for(cases.Case(model, x))
    want = fastlr.per_sample_grad_sq_norms(model, x, v)
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fastlr.per_sample_grad_sq_norms(model, x.float(), v.float())
    assert not engine_for(model).folding.blocks.fixed
    torch.testing.assert_close(got, want, rtol=0.1, atol=0)


def test_the_report_counts_them():
    report = fastlr.support_report(randomise(transposed()), series())
    assert report.fixed == ("bn.weight",)
    assert "1 batch norms run as a scaling and a shift" in str(report)
