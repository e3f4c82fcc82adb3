"""The networks of the study, and the measures that no run of fastlr takes by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastlr import metrics
from fastlr.errors import NonFiniteError
from fastlr.models import load_model

_built: list[nn.Module] = []  # the network of the run under way


def remembered(num_classes: int, name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """Build a network by name, and keep it for `network_of_the_run`: a run's ``model``."""
    model = load_model(name, num_classes=num_classes, kwargs=kwargs)
    _built[:] = [model]
    return model


def network_of_the_run() -> nn.Module:
    """Return the network that the run under way trains."""
    return _built[0]


class ProbeReading(NamedTuple):
    """What the PlasticityProbe of traintools says of a network.

    Attributes:
        score: its global score, 1 at best.
        critical: number of layers that it calls critical.
    """

    score: float
    critical: int


def probe_reading(model: nn.Module, x: Tensor) -> ProbeReading:
    """Return what the PlasticityProbe, at its defaults and with empty buffers, says on inputs."""
    from traintools.plasticity import PlasticityProbe

    probe = PlasticityProbe(model)
    with torch.no_grad():
        model(x)
    result = probe.measure()
    probe.remove_hooks()
    return ProbeReading(result.global_score, len(result.critical_layers))


def trainability(model: nn.Module, x: Tensor) -> float:
    """Return how far a copy gets on one draw of random labels; NaN where its loss diverges."""
    try:
        return float(metrics.trainability(model, x, repeats=1))
    except NonFiniteError:
        return math.nan
