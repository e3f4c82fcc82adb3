"""Interventions against loss of plasticity and against forgetting, options of ``fastlr continual``.

Each is a file here, or part of one: a subclass of `Intervention` that declares its options and its
source, and is found by that alone (`INTERVENTIONS`); ``fastlr continual --help`` lists them. Three
more are options of the trainer: ``norm`` (`layer_norm_for_batch_norm`: Ba et al. 2016),
``head_reset`` (Dohare et al. 2024) and ``optimiser_state``.

They can be combined. Each keeps its state in the run's checkpoints, so that a resumed run is the
same as an uninterrupted one, and what it did is in the records, under "interventions".
"""

from __future__ import annotations

import importlib
import pkgutil

from fastlr.experiments.continual.interventions.base import INTERVENTIONS, Intervention
from fastlr.experiments.training.options import TrainingOptions

__all__ = ["INTERVENTIONS", "Intervention", "asked_for"]

# Interventions act in the order in which their files are imported: these, then all others.
_FIRST = ("plain", "redundancy_floor", "continual_backprop", "replay", "ewc")
for _name in (*_FIRST, *(file.name for file in pkgutil.iter_modules(__path__))):
    importlib.import_module(f"{__name__}.{_name}")


def asked_for(options: TrainingOptions) -> list[type[Intervention]]:
    """Return the interventions that a run's options ask for, in the order in which they act."""
    return [kind for kind in INTERVENTIONS.values() if kind.is_on(options)]
