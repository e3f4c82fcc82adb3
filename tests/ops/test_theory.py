"""Theorem 3.4 in numbers, on models small enough to enumerate every labeling."""

import math
from itertools import product

import torch
from exact import redundancy, seeded
from pytest import approx, mark, raises
from torch import nn
from torch.func import functional_call
from untouched import untouched

from fastlr import memorization_gain
from fastlr.errors import InputError, ModelError
from fastlr.metrics.exact import local_redundancy_exact


def tiny(classes=2, hidden=3):
    torch.manual_seed(classes)
    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, classes)).double()


def candidate_inputs(count):
    return torch.randn(count, 2, generator=seeded(3), dtype=torch.float64)


def redundancies(model, x):
    return torch.stack([redundancy(model, z) for z in model(x)])


def from_the_definition(model, x, n, etas, own_dataset_only):
    """Definition 3.1 and equation 2 word by word: every sequence, no symmetry used."""
    base = {name: p.detach() for name, p in model.named_parameters()}

    def log_p(theta, xs, ys):
        z = functional_call(model, theta, (x[list(xs)],)).log_softmax(-1)
        return z.gather(1, torch.tensor(ys)[:, None]).sum()

    classes = model(x).shape[1]
    datasets = [
        (xs, ys)
        for xs in product(range(len(x)), repeat=n)
        for ys in product(range(classes), repeat=n)
    ]
    family = {}
    for dataset in datasets:
        leaves = {name: p.clone().requires_grad_() for name, p in base.items()}
        grads = torch.autograd.grad(-log_p(leaves, *dataset), list(leaves.values()))
        family[dataset] = [
            {name: p - eta * g for (name, p), g in zip(base.items(), grads, strict=True)}
            for eta in etas
        ]
    everything = [theta for members in family.values() for theta in members]
    best = -math.inf
    with torch.no_grad():
        for xs in product(range(len(x)), repeat=n):
            z = 0.0
            for ys in product(range(classes), repeat=n):
                members = family[xs, ys] if own_dataset_only else everything
                z += max(float(log_p(theta, xs, ys).exp()) for theta in members)
            best = max(best, math.log(z))
    return best


@mark.parametrize("own", [True, False])
@mark.parametrize(("classes", "count", "n"), [(2, 2, 2), (3, 1, 2), (2, 1, 3)])
def test_equals_the_definition(classes, count, n, own):
    model, x = tiny(classes), candidate_inputs(count)
    want = from_the_definition(model, x, n, (0.0, 0.1, 0.3), own)
    got = local_redundancy_exact(model, x, n, 0.3, own_dataset_only=own, etas=(0.1,))
    assert got == approx(want, rel=1e-10)


@mark.parametrize(("classes", "n"), [(2, 1), (2, 4), (3, 3)])
def test_own_steps_tend_to_n_times_local_redundancy(classes, n):
    """log Z / eps - n LR is of first order in eps: it halves with eps."""
    model, x = tiny(classes), candidate_inputs(2)
    # To first order the best x^n repeats the best candidate.
    limit = n * float(redundancies(model, x).max())
    errors = [
        local_redundancy_exact(model, x, n, eps, own_dataset_only=True) / eps - limit
        for eps in (4e-3, 2e-3, 1e-3, 5e-4)
    ]
    assert abs(errors[-1]) < 0.01 * limit
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert fine / coarse == approx(0.5, abs=0.03)


@mark.parametrize(("classes", "count", "n"), [(2, 2, 3), (3, 2, 2), (2, 3, 2)])
def test_theorem_bounds_the_full_family(classes, count, n):
    """R >= eps n LR - C eps^2, and steps of all datasets reach at least a dataset's own steps."""
    model, x = tiny(classes), candidate_inputs(count)
    bound = n * float(redundancies(model, x).max())
    # C from the coarsest step holds for all finer ones
    shortfall = max(0.0, bound - local_redundancy_exact(model, x, n, 0.04) / 0.04) / 0.04
    for eps in (0.04, 0.02, 0.01, 0.005, 0.0025):
        full = local_redundancy_exact(model, x, n, eps)
        own = local_redundancy_exact(model, x, n, eps, own_dataset_only=True)
        assert full >= own - 1e-12
        assert full >= eps * bound - (shortfall + 1e-9) * eps**2


def test_more_candidates_and_finer_grids_never_lower_it():
    model, x = tiny(), candidate_inputs(3)
    values = [local_redundancy_exact(model, x[:count], 2, 0.2) for count in (1, 2, 3)]
    assert values == sorted(values)
    assert values[0] > 0
    assert abs(local_redundancy_exact(model, x, 3, 0.0)) < 1e-14
    coarse = local_redundancy_exact(model, x, 2, 0.2, etas=(0.1,))
    assert local_redundancy_exact(model, x, 2, 0.2, etas=(0.05, 0.1, 0.15)) >= coarse


def test_memorization_gain_bounds_the_redundancy_and_tends_to_the_gradient_bound():
    """Theorem 3.2 holds over all labelings of softmax regression at zero.

    There P_0 is uniform, and LR is known in closed form.
    """
    classes, n = 3, 2
    x = candidate_inputs(1).expand(n, 2)
    model = nn.Linear(2, classes).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    limit = n * float((1 - 1 / classes) * (x[0].square().sum() + 1))

    def gain(eps):
        fitted = []
        for labels in product(range(classes), repeat=n):
            y = torch.tensor(labels)[:, None]
            score = model(x).log_softmax(-1).gather(1, y).sum()
            steps = torch.autograd.grad(score, list(model.parameters()))
            weight, bias = (p + eps * step for p, step in zip(model.parameters(), steps))
            fitted.append((x @ weight.T + bias).log_softmax(-1).gather(1, y).flatten().detach())
        return memorization_gain(torch.stack(fitted), n * math.log(classes))

    errors = [gain(eps) / eps - limit for eps in (4e-3, 2e-3, 1e-3)]
    assert abs(errors[-1]) < 0.01 * limit
    assert errors[1] / errors[0] == approx(0.5, abs=0.03) == errors[2] / errors[1]
    for eps in (0.01, 0.1, 0.5):
        assert 0 < gain(eps) <= local_redundancy_exact(model, x[:1], n, eps, own_dataset_only=True)


def test_only_trainable_parameters_step_and_the_model_stays():
    model, x = tiny(), candidate_inputs(1)
    whole = local_redundancy_exact(model, x, 2, 0.1, own_dataset_only=True)
    model[0].requires_grad_(False)
    with untouched(model.train()):
        part = local_redundancy_exact(model, x, 2, 0.1, own_dataset_only=True)
    assert 0 < part < whole


@mark.parametrize(
    ("change", "error", "match"),
    [
        ({"n": 0}, InputError, "n must be"),
        ({"n": 2.0}, InputError, "n must be"),
        ({"candidates": torch.zeros(0, 2)}, InputError, "candidates"),
        ({"candidates": [1.0]}, InputError, "candidates"),
        ({"epsilon": -1.0}, InputError, "epsilon"),
        ({"epsilon": math.inf}, InputError, "epsilon"),
        ({"etas": (0.2,)}, InputError, "etas"),
        ({"etas": (-0.1,)}, InputError, "etas"),
        ({"n": 40, "candidates": torch.zeros(4, 2)}, InputError, "limit"),
        ({"limit": 10}, InputError, "limit = 10"),
        ({"model": nn.Linear(2, 1)}, InputError, "logits"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, ModelError, "trainable"),
    ],
)
def test_errors(change, error, match):
    arguments = {
        "model": tiny(),
        "candidates": candidate_inputs(2),
        "n": 2,
        "epsilon": 0.1,
    } | change
    extra = {key: arguments.pop(key) for key in ("etas", "limit") if key in arguments}
    with raises(error, match=match):
        local_redundancy_exact(**arguments, **extra)
