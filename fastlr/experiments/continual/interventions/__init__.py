"""Interventions against loss of plasticity and against forgetting, options of ``fastlr continual``.

=======================  ======================================  ===================================
option                   intervention                            source
=======================  ======================================  ===================================
``cbp_rate`` ...         continual backprop                      Dohare et al. 2024:
                                                                 `ContinualBackprop`
``shrink``, ``perturb``  shrink-and-perturb                      Ash and Adams 2020:
                                                                 `ShrinkAndPerturb`
``reset_every`` ...      periodic resets of the last layers      Nikishin et al. 2022:
                                                                 `PeriodicReset`
``l2_init``              L2 towards initialisation               Kumar et al. 2023: `TowardsInit`
``norm``                 layer norm in place of batch norm       Ba et al. 2016:
                                                                 `layer_norm_for_batch_norm`
``head_reset``           head set to zero before each task       Dohare et al. 2024:
                                                                 the trainer does it
``redundancy_floor``     a floor under local redundancy          here: `RedundancyFloor`
``replay_images`` ...    experience replay                       Rolnick et al. 2019:
                                                                 `ExperienceReplay`
``ewc`` ...              elastic weight consolidation, online    Kirkpatrick et al. 2017,
                                                                 Schwarz et al. 2018:
                                                                 `EWC`
=======================  ======================================  ===================================

They can be combined. Each keeps its state in the run's checkpoints, so that a resumed run is the
same as an uninterrupted one, and what it did is in the records, under "interventions".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastlr.experiments.continual.interventions.base import Intervention, Learner
from fastlr.experiments.continual.interventions.continual_backprop import ContinualBackprop
from fastlr.experiments.continual.interventions.ewc import EWC, diagonal_fisher
from fastlr.experiments.continual.interventions.plain import (
    PeriodicReset,
    ShrinkAndPerturb,
    TowardsInit,
    layer_norm_for_batch_norm,
    shrink_and_perturb,
)
from fastlr.experiments.continual.interventions.redundancy_floor import RedundancyFloor
from fastlr.experiments.continual.interventions.replay import ExperienceReplay
from fastlr.experiments.continual.interventions.unit_adamw import UnitAdamW
from fastlr.experiments.continual.interventions.units import find_units
from fastlr.experiments.data import TaskSequence

__all__ = [
    "EWC",
    "ContinualBackprop",
    "Intervention",
    "PeriodicReset",
    "RedundancyFloor",
    "ExperienceReplay",
    "ShrinkAndPerturb",
    "TowardsInit",
    "UnitAdamW",
    "diagonal_fisher",
    "find_units",
    "layer_norm_for_batch_norm",
    "make_interventions",
    "shrink_and_perturb",
]


def make_interventions(
    trainer: Learner, initial: Mapping[str, Tensor], tasks: TaskSequence
) -> list[Intervention]:
    """Make the interventions that a trainer's options ask for, in the order in which they act.

    Args:
        trainer: Its model is at initialisation, or will be loaded with a later state.
        initial: State dict at initialisation, on the model's device.
        tasks: Those that it learns.

    Raises:
        InputError: One cannot act on this model, or does not fit on the device.
    """
    options = trainer.options
    interventions: list[Intervention] = []
    if options.shrink != 1 or options.perturb:
        interventions.append(ShrinkAndPerturb(trainer))
    if options.reset_every:
        interventions.append(PeriodicReset(trainer, initial))
    if options.l2_init:
        interventions.append(TowardsInit(trainer, initial))
    if options.redundancy_floor:
        interventions.append(RedundancyFloor(trainer, tasks.size))
    if options.ewc:
        interventions.append(EWC(trainer))
    if options.replay_images:
        interventions.append(ExperienceReplay(trainer, tasks))
    if options.cbp_rate:
        shape = (2, 3, tasks.size, tasks.size)
        example = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(trainer.device)
        interventions.append(ContinualBackprop(trainer, initial, example))
    return interventions
