"""Cotangents have the Fisher matrix as second moment, at any logit gap, dtype, chunk and layout."""

import functools
import math
from itertools import product

import torch
from definitions.fisher import householder_root
from exact import seeded
from expected import refused
from fisher import (
    bernoulli_fisher,
    categorical_fisher,
    diagonal_gaussian_fisher,
    gaussian_fisher,
)
from pytest import mark
from torch import nn
from torch.testing import assert_close

from fastlr.errors import NonFiniteError
from fastlr.estimator.passes import default_predictive
from fastlr.estimator.predictive import Bernoulli, Categorical, DiagonalGaussian, Gaussian
from fastlr.ghost.model.view import ModelView
from fastlr.ops.fisher import categorical_root, uniforms

LINEAR = nn.Linear(3, 3)
VIEW = ModelView.of(LINEAR)
DRAWS = 20_000
PAIRS = DiagonalGaussian(dim=1)
CLASSES = (2, 3, 10, 100)


def logits(classes, scale=2.0):
    return scale * torch.randn(classes, generator=seeded(classes), dtype=torch.float64)


FISHER = {str(n): (Categorical(), logits(n), categorical_fisher) for n in CLASSES}
FISHER |= {
    "bernoulli": (Bernoulli(), logits(5, 1.0), bernoulli_fisher),
    "gaussian": (Gaussian(2.5), logits(5, 1.0), lambda z: gaussian_fisher(len(z), 2.5)),
    "diagonal": (DiagonalGaussian(), logits(6, 1.0), diagonal_gaussian_fisher),
}


def passes(cotangents):
    """A cotangent, or several, as a list."""
    return [cotangents] if torch.is_tensor(cotangents) else list(cotangents)


def check_second_moment(v, fisher, sigmas=5.0):
    """Require E (w.v)^2 = w^T F w for 60 random w, each within ``sigmas`` standard errors."""
    w = torch.randn(v.shape[1], 60, generator=seeded(7), dtype=torch.float64)
    w[:, :2] = 1.0 / w.shape[0]  # along the ones the softmax Fisher is zero; a wrong root is not
    w[0, 1] += 1.0
    squares = (v @ w).square()
    want = torch.einsum("id,ij,jd->d", w, fisher, w)
    stderr = squares.std(0) / math.sqrt(len(v))
    assert ((squares.mean(0) - want).abs() <= sigmas * stderr + 1e-14).all()


@mark.parametrize("classes", [2, 3])
def test_rademacher_over_all_signs_is_the_fisher_matrix(classes):
    z = logits(classes)
    fisher = categorical_fisher(z)
    p = z.softmax(0)
    best = p.argmax(0, keepdim=True)
    patterns = []
    for signs in product((-1.0, 1.0), repeat=classes - 1):
        xi = torch.tensor(signs, dtype=torch.float64)
        xi = torch.cat([xi[: int(best)], torch.zeros(1, dtype=torch.float64), xi[int(best) :]])
        patterns.append(categorical_root(p.sqrt(), best, xi))
    v = torch.stack(patterns)
    assert_close(v.T @ v / len(v), fisher, rtol=0, atol=2e-16)
    # the public function draws exactly these vectors
    drawn = Categorical().cotangent(z.expand(64, -1), "rademacher", range(64), seed=1)
    distance = (drawn[:, None] - v[None]).abs().amax(-1).amin(-1)
    assert distance.max() < 1e-15
    assert len(torch.unique(drawn.round(decimals=9), dim=0)) == len(v)


@mark.parametrize("predictive, z, fisher", FISHER.values(), ids=FISHER)
def test_exact_is_the_fisher_matrix(predictive, z, fisher):
    v = torch.stack(list(predictive.cotangent(z[None], "exact", range(1), seed=0)))[:, 0]
    assert len(v) == len(z) - isinstance(predictive, Categorical)
    assert_close(v.T @ v, fisher(z), rtol=1e-14, atol=1e-16 * len(z))


@mark.parametrize("classes", CLASSES)
def test_the_root_is_one_of_the_fisher_matrix(classes):
    z = logits(classes)
    root = householder_root(z.double().softmax(0).sqrt())
    assert_close(root @ root.T, categorical_fisher(z), rtol=0, atol=1e-15)


@mark.parametrize("probe", ["rademacher", "sampled"])
@mark.parametrize("predictive, z, fisher", FISHER.values(), ids=FISHER)
def test_draws_converge_to_the_fisher_matrix(predictive, z, fisher, probe):
    v = predictive.cotangent(z.expand(DRAWS, -1), probe, range(DRAWS), seed=5)
    assert v.dtype == torch.float64
    check_second_moment(v, fisher(z))
    trace = v.square().sum(1)
    stderr = trace.std() / math.sqrt(DRAWS) + 1e-13
    assert abs(trace.mean() - fisher(z).trace()) / stderr < 4.5


@mark.parametrize("probe", ["rademacher", "sampled"])
def test_gaussian_draws_are_signs_or_normal(probe):
    v = 2.5 * Gaussian(2.5).cotangent(torch.zeros(DRAWS, 5), probe, range(DRAWS), 0)
    if probe == "rademacher":
        assert (v.abs() == 1).all()
    else:
        assert abs(float(v.pow(4).mean()) - 3.0) < 0.1


@mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@mark.parametrize("gap", [1.0, 20.0, 40.0, 60.0, 80.0, 95.0, 100.0])
def test_logit_gaps_lose_nothing(dtype, gap):
    z = torch.tensor([[gap, 0.0], [-gap, 0.0]], dtype=dtype)
    q = 1 / (1 + math.exp(gap if dtype == torch.float64 else float(z[0, 0])))
    p = 1 / (1 + math.exp(-float(z[0, 0])))
    v = Categorical().cotangent(z, "rademacher", range(2), 0)
    assert_close(
        v.abs(), torch.full((2, 2), math.sqrt(p * q), dtype=torch.float64), rtol=1e-13, atol=0
    )
    sampled = Categorical().cotangent(z, "sampled", range(2), 0)
    if gap >= 20:  # the label drawn is the sure one: its score is q
        assert_close(sampled.abs(), torch.full((2, 2), q, dtype=torch.float64), rtol=1e-13, atol=0)
        logit = z[:, :1]
        for probe, want in (("rademacher", math.sqrt(p * q)), ("sampled", q)):
            v = Bernoulli().cotangent(logit, probe, range(2), 0).abs()
            assert_close(v, torch.full((2, 1), want, dtype=torch.float64), rtol=1e-13, atol=0)


def test_scores_of_both_labels_have_full_precision():
    """A label of probability 1e-5 is drawn at its rate, with scores p_wrong and 1 - p_wrong."""
    gap, draws = 11.5, 200_000
    z = torch.tensor([[gap, 0.0]], dtype=torch.float64).expand(draws, -1)
    q = 1 / (1 + math.exp(gap))
    v = Categorical().cotangent(z, "sampled", range(draws), seed=2)
    rare = v[:, 1] > 0
    assert_close(v[~rare, 1], torch.full_like(v[~rare, 1], -q), rtol=1e-13, atol=0)
    assert_close(v[rare, 1], torch.full_like(v[rare, 1], 1 - q), rtol=1e-13, atol=0)
    assert abs(int(rare.sum()) - draws * q) < 5 * math.sqrt(draws * q) + 1
    bernoulli = Bernoulli().cotangent(z[:, :1] - z[:, 1:], "sampled", range(draws), seed=2)
    assert abs(int((bernoulli < 0).sum()) - draws * q) < 5 * math.sqrt(draws * q) + 1


def test_uniforms_are_uniform_and_fine_near_zero():
    u = uniforms(torch.arange(50_000), 2, seed=0)
    assert 0 <= u.min()
    assert u.max() < 1
    ordered = u.flatten().sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    assert (ordered - steps).abs().max() * math.sqrt(
        len(ordered)
    ) < 2.0  # Kolmogorov-Smirnov, p about 6e-4
    assert ((u * 2**53) % 1 != 0).any()  # values below 1/2 keep more bits than a 53-bit grid has


@mark.parametrize("probe", ["rademacher", "sampled"])
@mark.parametrize("predictive", [Categorical(dim=1), Bernoulli(), Gaussian(2.0), PAIRS], ids=repr)
def test_draws_do_not_depend_on_the_chunk(predictive, probe):
    # A drawn label would move it by one; probabilities may differ in a last bit, as where a vector
    # of them ends.
    same = functools.partial(torch.allclose, rtol=1e-14, atol=1e-14)
    z = torch.randn(13, 6, 3, 7, generator=seeded(0))
    whole = predictive.cotangent(z, probe, range(100, 113), seed=2**63 + 5)
    parts = [
        predictive.cotangent(z[i : i + 4], probe, range(100 + i, min(104 + i, 113)), 2**63 + 5)
        for i in (0, 4, 8, 12)
    ]
    assert same(whole, torch.cat(parts))
    order = torch.randperm(13, generator=seeded(1))
    assert same(whole[order], predictive.cotangent(z[order], probe, order + 100, 2**63 + 5))
    assert not torch.equal(whole, predictive.cotangent(z, probe, range(100, 113), seed=6))
    assert not torch.equal(whole, predictive.cotangent(z, probe, range(101, 114), seed=2**63 + 5))


@mark.parametrize("probe", ["rademacher", "sampled", "exact"])
@mark.parametrize("predictive", ["categorical", "bernoulli", "gaussian", "diagonal"])
def test_layout_of_the_output_does_not_matter(predictive, probe):
    """Sample axis and class axis anywhere, strided memory: the same numbers in the same places."""
    z = torch.randn(4, 6, 4, generator=seeded(0))

    def make(dim):
        return {
            "categorical": Categorical(dim=dim),
            "bernoulli": Bernoulli(),
            "gaussian": Gaussian(),
            "diagonal": DiagonalGaussian(dim=dim),
        }[predictive]

    def run(output, dim, sample_dim):
        v = make(dim).cotangent(output, probe, range(4), 3, sample_dim=sample_dim)
        return passes(v)

    base = run(z, -1, 0)
    for a, b in zip(base, run(z.transpose(0, 1), -1, 1), strict=True):
        assert torch.equal(a, b.transpose(0, 1))
    if predictive == "categorical":  # positions keep their order when only the class axis moves
        for a, b in zip(base, run(z.transpose(1, 2).contiguous().clone(), 1, 0), strict=True):
            assert torch.equal(a, b.transpose(1, 2))
    for v in base:
        assert v.shape == z.shape
        assert v.dtype == torch.float64


@mark.parametrize("probe", ["rademacher", "sampled", "exact"])
def test_mask_leaves_positions_out(probe):
    z = torch.randn(3, 5, 4, generator=seeded(0))
    z[:, 4] = torch.nan  # masked everywhere: not even looked at
    mask = torch.tensor([True, False, True, True, False])

    def total(v):
        return sum(w.square() for w in passes(v))

    got = total(Categorical(mask=mask).cotangent(z, probe, range(3), 0))
    want = total(Categorical().cotangent(z.nan_to_num(0.0), probe, range(3), 0))
    assert torch.equal(got[:, mask], want[:, mask])
    assert (got[:, ~mask] == 0).all()
    rows = mask.expand(7, 5).clone()
    rows[5] = torch.tensor([False, True, False, False, False])
    got = total(Categorical(mask=rows).cotangent(z.nan_to_num(0.0), probe, range(4, 7), 0))
    assert (got[1, [0, 2, 3, 4]] == 0).all()
    assert (got[1, 1] > 0).any()
    assert (got[0, 0] > 0).any()
    if probe == "exact":
        assert len(list(Categorical(mask=mask).cotangent(z, probe, range(3), 0))) == 3 * 3


@mark.parametrize("probe", ["rademacher", "sampled", "exact"])
def test_classes_of_probability_zero(probe):
    z = torch.tensor([[1.0, -math.inf, 2.0, -math.inf], [-math.inf, 0.0, -math.inf, -math.inf]])
    v = Categorical().cotangent(z, probe, range(2), 0)
    v = torch.stack(passes(v))
    assert v.isfinite().all()
    assert (v[:, 0, [1, 3]] == 0).all()
    assert (v[:, 0, [0, 2]] != 0).any()
    assert (v[:, 1] == 0).all()
    b = Bernoulli().cotangent(torch.tensor([[math.inf, -math.inf]]), probe, range(1), 0)
    assert not any(w.any() for w in passes(b))


@mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_no_distribution(value):
    z = torch.tensor([[1.0, value, 2.0]])
    with refused("softmax", NonFiniteError):
        Categorical().cotangent(z, "rademacher", range(1), 0)
    with refused("softmax", NonFiniteError):
        Categorical().cotangent(torch.full((1, 3), -math.inf), "sampled", range(1), 0)
    with refused("Gaussian", NonFiniteError):
        Gaussian().cotangent(z, "rademacher", range(1), 0)
    with refused("log deviation", NonFiniteError):
        DiagonalGaussian().cotangent(torch.tensor([[0.0, -value]]), "sampled", range(1), 0)
    with refused("sigmoid", NonFiniteError):
        Bernoulli().cotangent(z * math.nan, "rademacher", range(1), 0)


Z, PLAIN = torch.zeros(2, 3), Categorical()


def drawn(z=Z, probe="sampled", index=range(2), seed=0, kind=PLAIN, **axes):
    return kind.cotangent(z, probe, index, seed, **axes)


@mark.parametrize(
    ("given", "match"),
    [
        ({"z": torch.zeros(2, 1)}, "Bernoulli"),
        ({"z": torch.zeros(2)}, "Bernoulli"),
        ({"kind": Categorical(dim=0)}, "another axis"),
        ({"kind": Categorical(dim=2)}, "another axis"),
        ({"probe": "hutchinson"}, "unknown probe"),
        ({"probe": "batch"}, "unknown probe"),
        ({"z": Z.long()}, "floating-point"),
        ({"z": [1.0]}, "floating-point"),
        ({"index": range(3)}, "3 samples but the output holds 2"),
        ({"index": torch.zeros(2)}, "integer tensor"),
        ({"index": [0, 1]}, "integer tensor"),
        ({"index": range(-2, 0)}, "negative"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"sample_dim": 2}, "no axis 2"),
        ({"probe": "exact", "kind": Categorical(limit=1)}, "needs 2 .*limit=1"),
        ({"probe": "exact", "kind": Gaussian(limit=2)}, "needs 3 .*limit=2"),
        ({"probe": "exact", "kind": Bernoulli(limit=2)}, "needs 3 .*limit=2"),
        ({"kind": DiagonalGaussian()}, r"size 3.*Gaussian\(sigma\)"),
        ({"kind": DiagonalGaussian(dim=0)}, "another axis"),
        ({"probe": "exact", "z": torch.zeros(2, 40, 100)}, "needs 3960"),
        ({"kind": Categorical(mask=torch.ones(3) > 0), "z": torch.zeros(2, 4, 3)}, "broadcast"),
        (
            {
                "kind": Categorical(mask=torch.ones(2, 4) > 0),
                "z": torch.zeros(2, 4, 3),
                "index": range(1, 3),
            },
            "global",
        ),
    ],
)
def test_what_has_no_cotangent_is_named(given, match):
    with refused(match):
        drawn(**given)


@mark.parametrize(
    ("kind", "argument", "match"),
    [
        (Gaussian, 0.0, "positive"),
        (Gaussian, math.nan, "positive"),
        (Gaussian, "1", "number"),
        (lambda mask: Categorical(mask=mask), torch.ones(3), "boolean"),
        (lambda z: default_predictive(z, 0, z, VIEW), torch.zeros(4), "Bernoulli"),
        (lambda z: default_predictive(z, 0, z, VIEW), torch.zeros(4, 1), "Bernoulli"),
        (lambda z: default_predictive(z, 0, z, VIEW), torch.zeros(4, 5, 3), "Categorical"),
        (lambda z: default_predictive(z, 1, z, VIEW), torch.zeros(4, 3), "Categorical"),
    ],
)
def test_predictives_that_do_not_fit_are_named(kind, argument, match):
    with refused(match):
        kind(argument)


def test_global_random_state_is_not_used():
    before = torch.random.get_rng_state()
    for probe in ("rademacher", "sampled"):
        for predictive in (Categorical(), Bernoulli(), Gaussian()):
            predictive.cotangent(Z, probe, range(2), 0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_mask_is_moved_once_and_again_when_it_changes():
    """Also one that was made in inference mode, which does not tell whether it has changed."""
    meta, mask = torch.device("meta"), torch.ones(3, dtype=torch.bool)
    kind = Categorical(mask=mask)
    first = kind._on(meta)
    assert first.device == meta
    assert kind._on(meta) is first
    assert kind._on(mask.device) is mask
    mask[1] = False
    assert kind._on(meta) is not first
    with torch.inference_mode():
        made = torch.ones(3, dtype=torch.bool)
    assert Categorical(mask=made)._on(meta).device == meta
