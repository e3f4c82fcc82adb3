"""The simple interventions: shrink-and-perturb, resets, L2 towards initialisation, layer norm.

Layer norm takes the place of batch norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.experiments.continual.interventions.base import Intervention, Learner
from fastlr.experiments.data import Task
from fastlr.experiments.runs.folder import stream_seed
from fastlr.experiments.runs.options import option
from fastlr.experiments.training.options import TrainingOptions

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


class ShrinkAndPerturb(
    Intervention, name="shrink_and_perturb", source="Ash and Adams 2020 (arXiv:1910.08475)"
):
    """Applies `shrink_and_perturb` before every task but the first."""

    shrink: float = option(
        1.0,
        at_least=0,
        named="shrink",
        about="Factor of every parameter at the start of each task after the first; 1: off.",
    )
    perturb: float = option(
        0.0,
        at_least=0,
        named="perturb",
        about="Standard deviation of the noise that is added then; 0: off.",
    )

    @classmethod
    def is_on(cls, options: TrainingOptions) -> bool:
        """Return True if the options ask for either."""
        return super().is_on(options) or vars(options)["perturb"] != 0

    def before_task(self, task: Task, number: int) -> None:
        """Shrink and perturb."""
        if number > 0:
            seed = stream_seed(self.trainer.options.seed, "task", number)
            shrink_and_perturb(self.trainer.model, self.shrink, self.perturb, seed)


class PeriodicReset(Intervention, name="reset", source="Nikishin et al. 2022 (arXiv:2205.07802)"):
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

    every: int = option(
        0,
        at_least=0,
        about="Number of tasks between two resets of the last layers; 0: off.",
    )
    last: int = option(
        1,
        at_least=0,
        named="reset_layers",
        about="Number of layers to reset that have a weight matrix, with all that is defined after "
        "them; 0: the whole network.",
    )

    def __init__(self, trainer: Learner) -> None:
        super().__init__(trainer)
        modules = dict(trainer.model.named_modules())
        layers = [name for name, module in modules.items() if _has_weight_matrix(module)]
        if self.last > len(layers):
            raise InputError(
                f"reset_layers={self.last}: the model has {len(layers)} layers; 0 resets them all"
            )
        self.modules, self.layers = modules, layers
        if self.last:
            self.layers = layers[-self.last :]
            names = list(modules)
            first = names.index(self.layers[0])
            self.modules = {name: modules[name] for name in names[first:]}
        self.was_due = False

    @torch.no_grad()
    def before_task(self, task: Task, number: int) -> None:
        """Reset, if it is time."""
        self.was_due = number > 0 and number % self.every == 0
        if not self.was_due:
            return
        initial = self.trainer.initial
        generator = self.generator_for(number)
        for name, module in self.modules.items():
            prefix = f"{name}." if name else ""
            for key, p in module.named_parameters(recurse=False):
                if not p.requires_grad:
                    continue
                values = initial[prefix + key].flatten()
                drawn = torch.randint(len(values), p.shape, generator=generator)
                p.copy_(values[drawn.to(values.device)])
                for value in self.trainer.optimiser.state.get(p, {}).values():
                    if isinstance(value, Tensor):
                        value.zero_()
            for key, buffer in module.named_buffers(recurse=False):
                buffer.copy_(initial.get(prefix + key, buffer))

    def about(self) -> dict[str, Any]:
        """Return the layers that are reset, and how often."""
        return {"layers": self.layers, "every": self.every}

    def record(self) -> dict[str, Any]:
        """Say so where there was a reset before the task."""
        return {"reset": True} if self.was_due else {}


def _has_weight_matrix(module: nn.Module) -> bool:
    return any(p.ndim > 1 for p in module.parameters(recurse=False))


class TowardsInit(Intervention, name="l2_init", source="Kumar et al. 2023 (arXiv:2308.11958)"):
    """L2 regularisation towards the parameters at initialisation.

    It adds the gradient of ``strength * ||theta - theta_init||^2``.

    The gradient is added to ``.grad`` before the optimiser's step, which is the same as adding the
    penalty to the loss, the mean over the batch; there is no factor 1/2.

    Source: Kumar, Marklund and Van Roy 2023, "Maintaining plasticity in continual learning via
    regenerative regularization" (arXiv:2308.11958), L2 Init.
    """

    strength: float = option(
        0.0,
        at_least=0,
        named="l2_init",
        about="Strength of L2 regularisation towards initialisation; 0: off. Not in the recorded "
        "train_loss.",
    )

    def __init__(self, trainer: Learner) -> None:
        super().__init__(trainer)
        named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.initial = [trainer.initial[name] for name, _ in named]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the penalty's gradient to ``.grad`` of every parameter that the loss has reached."""
        for p, start in zip(self.parameters, self.initial, strict=True):
            if p.grad is not None:
                p.grad.add_(p - start, alpha=2 * self.strength)


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
