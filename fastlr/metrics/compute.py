"""Several measures by name, with as few passes over the model as they need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.ghost.model.view import ModelView, OutputSelector
from fastlr.metrics.activations import MEASURES as ACTIVATIONS
from fastlr.metrics.activations import activation_measures
from fastlr.metrics.gradients import (
    BATCH,
    Loss,
    batch_gradient_norm,
    gradient_measures,
    gradient_noise_scale,
)
from fastlr.metrics.gradients import MEASURES as GRADIENTS
from fastlr.metrics.probes import curvature_rank, ntk_rank, trainability
from fastlr.metrics.value import Measure, check_known
from fastlr.metrics.weights import OF_PARAMETERS, distance_from_init
from fastlr.ops.model_lock import locks_model

NOISE_SCALE, TRAINABILITY = "gradient_noise_scale", "trainability"
RANKS: dict[str, Callable[..., Measure]] = {
    "curvature_rank": curvature_rank,
    "ntk_rank": ntk_rank,
}
MEASURES = (*OF_PARAMETERS, *ACTIVATIONS, *GRADIENTS, NOISE_SCALE, TRAINABILITY, *RANKS)


@locks_model
def measures(
    model: nn.Module,
    names: Collection[str],
    *,
    x: Any = None,
    y: Any = None,
    loss: Loss | None = None,
    init_state: Mapping[str, Tensor] | nn.Module | None = None,
    tau: float = 0.1,
    repeats: int = 3,
    output: OutputSelector = None,
    in_dim: int = 0,
    out_dim: int = 0,
) -> dict[str, Measure]:
    """Take the named measures in as few passes as they need.

    One forward pass serves all measures of activations and the norm of the batch gradient, whose
    backward pass goes back over it; the norms of the samples' gradients take a forward and a
    backward pass of their own. So does each of "gradient_noise_scale", "trainability" (which trains
    a copy), "curvature_rank" (which goes back once a sample) and "ntk_rank" (once a sample and
    output).

    Args:
        model: any nn.Module.
        names: Names: "weight_norm", "distance_from_init", those of `activation_measures` and of
            `gradient_measures`, "gradient_noise_scale", "trainability", "curvature_rank"
            and "ntk_rank", with their default options but for ``tau`` and ``repeats``.
        x: real inputs, for the measures of activations and gradients.
        y: their labels, for those of gradients.
        loss: as for `train_grad_norm`, for those of gradients.
        init_state: as for `distance_from_init`.
        tau: threshold of "dormant_ratio_tau".
        repeats: Number of repeats of "trainability".
        output: picks the output tensor, as in `fastlr.per_sample_grad_sq_norms`.
        in_dim: sample axis of the batched inputs.
        out_dim: sample axis of the output.

    Returns:
        Name -> Measure, in the order of ``names``.

    Raises:
        InputError: an unknown name, or what a measure needs is missing. Others: those of the
            measures.

    Example:
        >>> import torch, fastlr
        >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        >>> model = torch.nn.Sequential(*layers)
        >>> x = torch.randn(64, 4)
        >>> list(fastlr.metrics.measures(model, ["feature_rank", "weight_norm"], x=x))
        ['feature_rank', 'weight_norm']
    """
    check_names(names, x=x, y=y, loss=loss, init_state=init_state)
    axes = {"in_dim": in_dim, "out_dim": out_dim}
    _refuse_other_axes([name for name in names if name in (TRAINABILITY, *RANKS)], **axes)
    results: dict[str, Measure] = {}
    for name in names:
        if name == "distance_from_init":
            assert init_state is not None
            results[name] = distance_from_init(model, init_state)
        elif name in OF_PARAMETERS:
            results[name] = OF_PARAMETERS[name].take(model)
    activations = [name for name in names if name in ACTIVATIONS]
    gradients = [name for name in names if name in GRADIENTS]

    def of_batch(z: Tensor) -> None:
        assert loss is not None
        view = ModelView.of(model, output, in_dim, out_dim)
        results[BATCH] = batch_gradient_norm(view, z, y, loss)

    if activations:
        then = None
        if BATCH in gradients and isinstance(x, (Tensor, tuple, list, Mapping)):  # one batch
            then = of_batch
            gradients = [name for name in gradients if name != BATCH]
        results |= activation_measures(
            model, x, measures=activations, tau=tau, output=output, then=then
        )
    if gradients:
        assert loss is not None
        results |= gradient_measures(model, x, y, loss, measures=gradients, output=output, **axes)
    if NOISE_SCALE in names:
        assert loss is not None
        results[NOISE_SCALE] = gradient_noise_scale(model, x, y, loss, output=output, **axes)
    if TRAINABILITY in names:
        results[TRAINABILITY] = trainability(model, x, repeats=repeats, output=output)
    for name in RANKS.keys() & set(names):
        results[name] = RANKS[name](model, x, output=output)
    return {name: results[name] for name in names}


def check_names(names: Collection[str], *, x: Any, y: Any, loss: Any, init_state: Any) -> None:
    """Raise InputError unless all names are known and what they need is there."""
    check_known(names, MEASURES)
    gradients = [name for name in names if name in (*GRADIENTS, NOISE_SCALE)]
    data = [name for name in names if name not in OF_PARAMETERS and name != "distance_from_init"]
    if data and x is None:
        raise InputError(f"{data[0]} is measured on real inputs: pass x=")
    if gradients and (y is None or loss is None):
        raise InputError(
            f"{gradients[0]} is the gradient of a loss on labelled inputs: pass y= and loss="
        )
    if "distance_from_init" in names and init_state is None:
        raise InputError(
            "distance_from_init needs init_state=: copy.deepcopy(model.state_dict()), taken right "
            "after the model was made"
        )


def _refuse_other_axes(names: Collection[str], in_dim: int, out_dim: int) -> None:
    """Raise InputError where measures that take samples along axis 0 get them along another."""
    if names and (in_dim, out_dim) != (0, 0):
        raise InputError(
            f"{next(iter(names))} takes samples along axis 0 only, not in_dim={in_dim} and "
            f"out_dim={out_dim}: leave it out, or give a model and inputs whose samples are there"
        )
