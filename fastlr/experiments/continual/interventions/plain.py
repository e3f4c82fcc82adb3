"""The simple interventions: shrink-and-perturb, resets, L2 towards initialisation, layer norm.

Layer norm takes the place of batch norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.experiments.continual.interventions.base import Intervention, Learner
from fastlr.experiments.data import Task
from fastlr.experiments.runs.folder import stream_seed

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@torch.no_grad()
def shrink_and_perturb(model: nn.Module, shrink: float, perturb: float, seed: int) -> None:
    """Replace every trainable parameter: ``theta <- shrink * theta + perturb * noise``.

    The noise is independent standard normal.

    It is a pure function of the seed, drawn on the CPU.

    Source: Ash and Adams 2020, "On warm-starting neural network training" (arXiv:1910.08475),
    section 4: ``theta_t <- lambda theta_{t-1} + p_t`` with ``p_t ~ N(0, sigma^2)``, at the start of
    each round of training.
    """
    generator = torch.Generator().manual_seed(stream_seed(seed, "perturb"))
    for p in model.parameters():
        if p.requires_grad:
            p.mul_(shrink)
            if perturb:
                p.add_(
                    torch.randn(p.shape, generator=generator).to(p.device, p.dtype), alpha=perturb
                )


class ShrinkAndPerturb(Intervention):
    """Applies `shrink_and_perturb` before every task but the first.

    The trainer's options ``shrink`` and ``perturb`` are the factors.
    """

    name = "shrink_and_perturb"

    def before_task(self, task: Task, number: int) -> None:
        """Shrink and perturb."""
        options = self.trainer.options
        if number > 0:
            seed = stream_seed(options.seed, "task", number)
            shrink_and_perturb(self.trainer.model, options.shrink, options.perturb, seed)


class PeriodicReset(Intervention):
    """Resets the network's last ``reset_layers`` layers before every ``reset_every``-th task.

    The layers before them go on as they are.

    A layer is a module with a weight matrix (0: all of them); what is defined after the first of
    them begins anew with it: each parameter by values drawn with replacement from those that it had
    at initialisation, a pure function of the run's seed and the task, buffers as they were at
    initialisation, the optimiser's state as before its first step.

    Raises:
        InputError: The model has fewer layers.

    Source: Nikishin et al. 2022, "The primacy bias in deep reinforcement learning"
    (arXiv:2205.07802), which draws anew from the initialiser, whose law this is wherever a tensor's
    values are drawn independently of one another.
    """

    name = "reset"

    def __init__(self, trainer: Learner, initial: Mapping[str, Tensor]) -> None:
        super().__init__(trainer)
        self.initial, wanted = initial, trainer.options.reset_layers
        modules = list(trainer.model.named_modules())
        layers = [
            i
            for i, (_, m) in enumerate(modules)
            if any(p.ndim > 1 for p in m.parameters(recurse=False))
        ]
        if wanted > len(layers):
            raise InputError(
                f"reset_layers={wanted}: the model has {len(layers)} layers; 0 resets them all"
            )
        self.modules = dict(modules[layers[-wanted] :] if wanted else modules)
        self.layers = [modules[i][0] for i in (layers[-wanted:] if wanted else layers)]
        self.was_due = False

    @torch.no_grad()
    def before_task(self, task: Task, number: int) -> None:
        """Reset, if it is time."""
        options, optimiser = self.trainer.options, self.trainer.optimiser
        self.was_due = number > 0 and number % options.reset_every == 0
        if not self.was_due:
            return
        generator = torch.Generator().manual_seed(stream_seed(options.seed, self.name, number))
        for name, module in self.modules.items():
            prefix = f"{name}." if name else ""
            for key, p in module.named_parameters(recurse=False):
                if not p.requires_grad:
                    continue
                values = self.initial[prefix + key].flatten()
                p.copy_(
                    values[
                        torch.randint(len(values), p.shape, generator=generator).to(values.device)
                    ]
                )
                for value in optimiser.state.get(p, {}).values():
                    if isinstance(value, Tensor):
                        value.zero_()
            for key, buffer in module.named_buffers(recurse=False):
                buffer.copy_(self.initial.get(prefix + key, buffer))

    def about(self) -> dict[str, Any]:
        """Return the layers that are reset, and how often."""
        return {"layers": self.layers, "every": self.trainer.options.reset_every}

    def record(self) -> dict[str, Any]:
        """Say so where there was a reset before the task."""
        return {"reset": True} if self.was_due else {}


class TowardsInit(Intervention):
    """L2 regularisation towards the parameters at initialisation.

    It adds the gradient of ``strength * ||theta - theta_init||^2``.

    The gradient is added to ``.grad`` before the optimiser's step, which is the same as adding the
    penalty to the loss.

    Args:
        trainer: Its option ``l2_init`` is the strength, with the loss the mean over the batch; no
            factor 1/2.
        initial: State dict at initialisation, on the model's device.

    Source: Kumar, Marklund and Van Roy 2023, "Maintaining plasticity in continual learning via
    regenerative regularization" (arXiv:2308.11958), L2 Init.
    """

    name = "l2_init"

    def __init__(self, trainer: Learner, initial: Mapping[str, Tensor]) -> None:
        super().__init__(trainer)
        named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.initial = [initial[name] for name, _ in named]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the penalty's gradient to ``.grad`` of every parameter that the loss has reached."""
        for p, start in zip(self.parameters, self.initial, strict=True):
            if p.grad is not None:
                p.grad.add_(p - start, alpha=2 * self.trainer.options.l2_init)


def layer_norm_for_batch_norm(model: nn.Module) -> int:
    """Replace every batch norm by a layer norm, in place; return how many.

    The layer norm of a convolutional network: over the channels and positions of each sample
    together, then a scale and a shift for each channel (``nn.GroupNorm`` with one group), with the
    epsilon of the batch norm and new parameters.

    Source: Ba, Kiros and Hinton 2016 (arXiv:1607.06450); as one group: Wu and He 2018
    (arXiv:1803.08494).
    """
    count = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BATCH_NORMS):
                setattr(
                    module,
                    name,
                    nn.GroupNorm(1, child.num_features, eps=child.eps, affine=child.affine),
                )
                count += 1
    return count
