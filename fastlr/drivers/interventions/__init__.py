"""Interventions against loss of plasticity and against forgetting, options of the continual-learning driver.

=======================  ======================================  ========================================================
option                   intervention                            source
=======================  ======================================  ========================================================
``cbp_rate`` ...         continual backprop                      Dohare et al. 2024: `ContinualBackprop`
``shrink``, ``perturb``  shrink-and-perturb                      Ash and Adams 2020: `ShrinkAndPerturb`
``l2_init``              L2 towards initialisation               Kumar et al. 2023: `TowardsInit`
``norm``                 layer norm in place of batch norm       Ba et al. 2016: `layer_norm_for_batch_norm`
``head_reset``           head set to zero before each task       Dohare et al. 2024: the trainer does it
``replay_images`` ...    experience replay                       Rolnick et al. 2019: `Replay`
``ewc`` ...              elastic weight consolidation, online    Kirkpatrick et al. 2017, Schwarz et al. 2018: `EWC`
=======================  ======================================  ========================================================

They can be combined. Each keeps its state in the run's checkpoints, so that a resumed run is the same as an uninterrupted
one, and what it did is in the records, under "interventions".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastlr.data import ImageStore
from fastlr.drivers.interventions.base import Intervention
from fastlr.drivers.interventions.continual_backprop import ContinualBackprop
from fastlr.drivers.interventions.ewc import EWC, diagonal_fisher
from fastlr.drivers.interventions.plain import (
    ShrinkAndPerturb,
    TowardsInit,
    layer_norm_for_batch_norm,
    shrink_and_perturb,
)
from fastlr.drivers.interventions.replay import Replay
from fastlr.drivers.interventions.unit_adamw import UnitAdamW
from fastlr.drivers.interventions.units import find_units

if TYPE_CHECKING:
    from fastlr.drivers.training import Trainer

__all__ = [
    "EWC",
    "ContinualBackprop",
    "Intervention",
    "Replay",
    "ShrinkAndPerturb",
    "TowardsInit",
    "UnitAdamW",
    "chosen",
    "diagonal_fisher",
    "find_units",
    "layer_norm_for_batch_norm",
    "shrink_and_perturb",
]


def chosen(trainer: Trainer, initial: Mapping[str, Tensor], store: ImageStore) -> list[Intervention]:
    """Make the interventions that a trainer's options ask for, in the order in which they act.

    Args:
        trainer: Its model is at initialisation, or will be loaded with a later state.
        initial: State dict at initialisation, on the model's device.
        store: Where the tasks come from.

    Raises:
        InputError: One cannot act on this model, or does not fit on the device.
    """
    options = trainer.options
    found: list[Intervention] = []
    if options.shrink != 1 or options.perturb:
        found.append(ShrinkAndPerturb(trainer))
    if options.l2_init:
        found.append(TowardsInit(trainer, initial))
    if options.ewc:
        found.append(EWC(trainer))
    if options.replay_images:
        found.append(Replay(trainer, store))
    if options.cbp_rate:
        shape = (2, 3, store.size, store.size)
        example = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(trainer.device)
        found.append(ContinualBackprop(trainer, initial, example))
    return found
