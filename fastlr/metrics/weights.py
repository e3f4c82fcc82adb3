"""Measures of the parameters alone: their norm and their distance from initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastlr.errors import InputError, ModelError, NonFiniteError, few
from fastlr.ghost.model.view import ModelView, unwrap
from fastlr.metrics.value import Measure
from fastlr.ops.model_lock import locks_model

_WRAPPERS = ("module.", "_orig_mod.")
Take = Callable[..., Measure]


class OfParameters(NamedTuple):
    """A measure of the parameters alone, as monitors, runs, tables and figures know it.

    Attributes:
        take: Function of a model; that of `distance_from_init` also takes ``init_state``.
        label: in words.
        unit: Unit of its axis.
    """

    take: Take
    label: str
    unit: str


OF_PARAMETERS: dict[str, OfParameters] = {}


def of_parameters(label: str, unit: str = "value") -> Callable[[Take], Take]:
    """Enter a function of a model as a measure of its parameters alone, by its name.

    That name is one for ``measures=`` of monitors, and for ``--set measures=`` of runs.

    Args:
        label: in words, for tables and figures.
        unit: Unit of its axis.
    """

    def enter(take: Take) -> Take:
        OF_PARAMETERS[take.__name__] = OfParameters(take, label, unit)
        return take

    return enter


@of_parameters("weight norm", "l2 norm")
@locks_model
def weight_norm(model: nn.Module) -> Measure:
    """Return the l2 norm of all trainable parameters together.

    It is ``||theta|| = sqrt(sum over parameters p of sum of p^2)``.

    It is the norm, not its square and not a mean over parameters. A parameter held twice (tied
    weights) counts once; frozen parameters and buffers do not count. Summed in float64 on the
    model's device.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through.

    Returns:
        Measure in the unit of the weights; ``details["parameters"]`` is the number of scalars.

    Raises:
        ModelError: no trainable parameters, or uninitialised, sharded or complex ones.
        NonFiniteError: a parameter has values that are not finite.

    Source: appendix A.1 (i) of the paper, "total L2 norm of all parameters"; Lyle et al. 2023
    (arXiv:2303.01486).

    Example:
        >>> import torch, fastlr
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.constant_(layer.weight, 3.0)
        >>> abs(fastlr.metrics.weight_norm(layer) - 18**0.5) < 1e-12
        True
    """
    definition = "weight norm: l2 norm of all trainable parameters together"
    parameters = ModelView.of(model).parameters
    return _norm(definition, {name: p.detach() for name, p in parameters.items()}, "parameter {}")


@of_parameters("distance from init", "l2 norm")
@locks_model
def distance_from_init(model: nn.Module, init_state: Mapping[str, Tensor] | nn.Module) -> Measure:
    """Return the distance of the trainable parameters from their start, ``||theta - theta_init||``.

    It is an l2 norm.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through.
        init_state: what the model was initialised with: a **copy** of its state dict,
            ``copy.deepcopy(model.state_dict())``, or a copy of the model. ``model.state_dict()``
            alone refers to the live weights, which is refused. Any device and dtype; entries that
            are not trainable parameters (buffers, frozen ones) do not count.

    Returns:
        Measure in the unit of the weights; ``details["parameters"]`` is the number of scalars.

    Raises:
        InputError: a parameter is missing from ``init_state`` or has another shape, ``init_state``
            holds names that the model does not have, or it shares memory with the model.
        ModelError: no trainable parameters. NonFiniteError: a difference is not finite.

    Source: appendix A.1 (ii) of the paper.

    Example:
        >>> import copy, torch, fastlr
        >>> model = torch.nn.Linear(4, 1, bias=False)
        >>> init = copy.deepcopy(model.state_dict())
        >>> _ = model.weight.data.add_(1.0)
        >>> abs(fastlr.metrics.distance_from_init(model, init) - 2.0) < 1e-6
        True
    """
    view = ModelView.of(model)
    init = _initial_state(init_state, view)
    differences = {}
    for name, parameter in view.parameters.items():
        start, now = init[name], parameter.detach()
        if start.shape != now.shape:
            raise InputError(
                f"init_state[{name!r}] has shape {tuple(start.shape)}, the parameter "
                f"{tuple(now.shape)}: pass the state of this architecture"
            )
        if start.device == now.device and start.data_ptr() == now.data_ptr() and now.numel():
            raise InputError(
                f"init_state[{name!r}] is the live parameter, not a copy, so its distance would "
                "always be 0: keep copy.deepcopy(model.state_dict()) when the model is made"
            )
        differences[name] = now.double() - start.detach().to(now.device).double()
    definition = "distance from initialisation: l2 norm of theta - theta_init"
    return _norm(definition, differences, "the difference of {} from its initial value")


def _initial_state(init: Mapping[str, Tensor] | nn.Module, view: ModelView) -> dict[str, Tensor]:
    """Return the tensors of an initial state by the model's names.

    Raises:
        InputError: Names are missing, or unknown to the model.
    """
    if isinstance(init, nn.Module):
        init = unwrap(init).state_dict()
    if not isinstance(init, Mapping):
        raise InputError(f"init_state must be a state dict or a model, not {type(init).__name__}")
    state = {name: value for name, value in init.items() if isinstance(value, Tensor)}
    known = {name for name, _ in view.module.named_parameters(remove_duplicate=False)}
    known.update(view.module.state_dict())
    for prefix in _WRAPPERS:  # saved from a wrapped model
        if known.isdisjoint(state) and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    missing = [name for name in view.parameters if name not in state]
    foreign = [name for name in state if name not in known]
    reasons = []
    if missing:
        reasons.append(f"lacks {few(missing, 3)}")
    if foreign:
        reasons.append(f"has {few(foreign, 3)}, unknown here")
    if reasons:
        raise InputError(
            f"init_state is not of this model: it {' and '.join(reasons)}; pass "
            "copy.deepcopy(model.state_dict()), taken right after the model was made (and again "
            "after layers are added or renamed)"
        )
    return state


@torch.no_grad()
def _norm(definition: str, tensors: dict[str, Tensor], label: str) -> Measure:
    """Return the l2 norm of all tensors together in float64, with one wait for the device.

    Raises:
        ModelError: One is on the meta device; ``label`` says what of which name.
        NonFiniteError: One has values that are not finite.
    """
    for name, t in tensors.items():
        if t.is_meta:
            raise ModelError(
                f"{label.format(name)} is on the meta device, without values: load the weights "
                "first"
            )
    norms = [torch.linalg.vector_norm(t.flatten(), dtype=torch.float64) for t in tensors.values()]
    device = norms[0].device
    values = torch.stack([n.to(device) for n in norms]).tolist()
    for name, value in zip(tensors, values, strict=True):
        if not math.isfinite(value):
            raise NonFiniteError(
                f"{label.format(name)} has values that are not finite: the training has diverged"
            )
    parameters = sum(t.numel() for t in tensors.values())
    return Measure(math.hypot(*values), definition, {"parameters": parameters})
