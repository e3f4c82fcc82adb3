"""The local redundancy itself, by the Shtarkov sum, for tiny models only.

The sum runs over exponentially many labelings.

Paper, section 3: ``R(theta_0, eps) = sup_x^n log Z(x^n)``, ``Z(x^n) = sum_y^n sup_theta P_theta(y^n
| x^n)``; the inner supremum over the local parameter set: ``theta_0 - eta grad L(theta_0; x'^n,
y'^n)`` for any dataset (x'^n, y'^n) and any eta in [0, eps], L the negative log-likelihood summed
over the dataset (Definition 3.1). Theorem 3.4 bounds it below by ``eps * E ||grad L||^2 +
O(eps^2)``, which is ``eps * n * LR``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import combinations_with_replacement

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fastlr.errors import InputError, ModelError, NonFiniteError
from fastlr.estimator.statistics import count as checked_count

Parameters = dict[str, Tensor]


def local_redundancy_exact(
    model: nn.Module,
    candidates: Tensor,
    n: int,
    epsilon: float,
    *,
    own_dataset_only: bool = False,
    etas: Sequence[float] | None = None,
    limit: int = 50_000_000,
) -> float:
    """Compute the local redundancy R(theta_0, epsilon) in nats by enumeration.

    The inputs are from finitely many candidates.

    The outer supremum runs over all x^n in candidates^n, the sum over all C^n labelings, and the
    family holds the gradient steps of *all* datasets of size n over the candidates, each at every
    eta of the grid. Order within a dataset changes neither its gradient nor its likelihood, so
    multisets are enumerated, with multinomial weights.

    Because the grid of eta is finite, the result is a lower bound of the supremum over [0,
    epsilon], and tends to it.

    Args:
        model: maps candidates [K, ...] to logits [K, C], C at least 2. Measured in eval mode, as a
            float64 copy.
        candidates: inputs [K, ...], K at least 1.
        n: samples in a dataset, at least 1.
        epsilon: largest step on the summed loss, in nats, at least 0.
        own_dataset_only: fit each dataset by steps of its own gradient only, the construction in
            the proof of Theorem 3.4; then log Z(x^n) / epsilon tends to sum_i LR(x_i) as epsilon ->
            0.
        etas: step sizes in [0, epsilon]; 0 and epsilon are always added. Default: quarters of
            epsilon.
        limit: largest number of (dataset, family member) pairs, and of distributions evaluated.

    Returns:
        max over x^n of log Z(x^n), a float, at least 0 up to rounding (eta = 0 gives Z = 1).

    Raises:
        InputError: empty candidates, n < 1, a step outside [0, epsilon], outputs that are not [K, C
            >= 2], or an enumeration larger than ``limit``.
        ModelError: no trainable parameters.

    Source: paper, equations 1-4, Definition 3.1 and Theorem 3.4.
    """
    n = checked_count("n", n)
    if not isinstance(candidates, Tensor) or candidates.ndim < 1 or len(candidates) < 1:
        raise InputError("candidates must be a tensor [K, ...] with at least one input")
    steps = _steps(epsilon, etas)
    model = deepcopy(model).cpu().double().eval()
    candidates = candidates.detach().cpu()
    if candidates.is_floating_point():
        candidates = candidates.double()
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ModelError("the model has no trainable parameters: nothing spans a local family")
    log_probabilities = partial(_log_probabilities, model, candidates)
    base, scores = _scores(log_probabilities, parameters)
    inputs, classes = base.shape

    count = math.comb(inputs * classes + n - 1, n)
    members = 1 + count * (len(steps) - 1)
    pairs_needed = count * (len(steps) if own_dataset_only else members)
    if max(pairs_needed, members * inputs * classes) > limit:
        raise InputError(
            f"{inputs} candidates, {classes} classes and n = {n} give {count} datasets and "
            f"{members} family members, {pairs_needed} pairs: more than limit = {limit}; use fewer "
            "candidates, a smaller n or fewer etas"
        )
    # [M, K * C] counts.
    pairs = list(combinations_with_replacement(range(inputs * classes), n))
    chosen = F.one_hot(torch.tensor(pairs, device="cpu"), inputs * classes)
    datasets = chosen.sum(1).double().flip(0)
    base_fit = datasets @ base.flatten()
    best = base_fit.clone()  # eta = 0
    for eta in steps[1:]:
        family = _moved(log_probabilities, parameters, scores, datasets, eta)
        if own_dataset_only:
            best = torch.maximum(best, (datasets * family).sum(1))
            continue
        for rows in family.split(1024):
            best = torch.maximum(best, (datasets @ rows.T).amax(1))

    # Z(x^n) - 1 = sum_y P_0(y) (sup P / P_0 - 1): expm1 keeps small redundancies accurate.
    table = datasets.view(-1, inputs, classes)
    of_input = table.sum(2)
    weight = (
        torch.lgamma(of_input + 1).sum(1) - torch.lgamma(table + 1).sum((1, 2)) + base_fit
    ).exp()
    excess = weight * torch.expm1(best - base_fit)
    _, group = torch.unique(of_input, dim=0, return_inverse=True)
    z = excess.new_zeros(int(group.max()) + 1).index_add_(0, group, excess)
    return float(torch.log1p(z).max())


def _steps(epsilon: float, etas: Sequence[float] | None) -> list[float]:
    """Return the step sizes in order, 0 and epsilon among them."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise InputError(f"epsilon must be finite and at least 0, not {epsilon}")
    if etas is None:
        etas = [epsilon * quarter / 4 for quarter in (1, 2, 3)]
    if not all(math.isfinite(eta) and 0 <= eta <= epsilon for eta in etas):
        raise InputError(f"etas must lie in [0, epsilon = {epsilon}], not {list(etas)}")
    return sorted({0.0, float(epsilon), *etas})


def _log_probabilities(model: nn.Module, candidates: Tensor, values: Parameters) -> Tensor:
    """Return log P(c | x_k) [K, C] of the model with these parameters."""
    logits = functional_call(model, values, (candidates,))
    fits = isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(candidates)
    if not fits or logits.shape[1] < 2:
        raise InputError(
            "the model must map candidates [K, ...] to logits [K, C] with C of at least 2"
        )
    return logits.log_softmax(-1)


def _scores(
    log_probabilities: Callable[[Parameters], Tensor], parameters: Parameters
) -> tuple[Tensor, Parameters]:
    """Return (log P(c | x_k) [K, C], its gradients by parameter: [K * C, ...], at k * C + c)."""
    with torch.enable_grad():
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        base = log_probabilities(leaves)
        rows = []
        for pair in base.flatten():
            rows.append(
                torch.autograd.grad(
                    pair, list(leaves.values()), retain_graph=True, materialize_grads=True
                )
            )
    columns = map(torch.stack, zip(*rows, strict=True))
    return base.detach(), dict(zip(leaves, columns, strict=True))


@torch.no_grad()
def _moved(
    log_probabilities: Callable[[Parameters], Tensor],
    parameters: Parameters,
    scores: Parameters,
    datasets: Tensor,
    eta: float,
) -> Tensor:
    """Return the family's members at one step: log P(c | x_k) [M, K * C] after each dataset's.

    The step is up the summed score of the dataset, down its loss.
    """
    members = []
    for counts in datasets:
        moved = {}
        for name, p in parameters.items():
            moved[name] = p + eta * torch.tensordot(counts, scores[name], dims=1)
        members.append(log_probabilities(moved).flatten())
    family = torch.stack(members)
    if not family.isfinite().all():
        raise NonFiniteError(
            f"a step of eta = {eta} leads to log-probabilities that are not finite: lower epsilon"
        )
    return family
