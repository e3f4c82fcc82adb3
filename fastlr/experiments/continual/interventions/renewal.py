"""What interventions that replace units by new ones share: the units found, their inputs, new ones.

Continual backprop and ReDo choose differently which units are replaced, and when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.experiments.continual.interventions.base import Intervention, Learner
from fastlr.experiments.continual.interventions.find_units import find_units
from fastlr.experiments.continual.interventions.units import ReadingLayer, Units
from fastlr.experiments.data import Task


class InputSums:
    """Sums over the inputs of a layer that reads units, taken in the forward passes of a step.

    The tensors are updated in place, and so keep their memory.

    Attributes:
        absolute: Sum of ``|h|`` of each feature over samples and positions.
        plain: Sum of ``h``.
        count: Number of samples and positions.
    """

    def __init__(self, reader: ReadingLayer) -> None:
        weight = reader.layer.weight
        self.reader, self.axis = reader, -1 if isinstance(reader.layer, nn.Linear) else 1
        width = reader.groups * weight.shape[1]
        self.absolute, self.plain = weight.new_zeros(width), weight.new_zeros(width)
        self.count = weight.new_zeros(())

    @torch.no_grad()
    def hook(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Add the layer's input, in training mode."""
        if layer.training:
            h = args[0].detach()
            others = [d for d in range(h.ndim) if d != self.axis % h.ndim]
            self.absolute.add_(torch.linalg.vector_norm(h, 1, others, dtype=self.absolute.dtype))
            self.plain.add_(h.sum(others, dtype=self.plain.dtype))
            self.count.add_(h.numel() // len(self.plain))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums and the count."""
        return self.absolute, self.plain, self.count


class WatchedUnits:
    """Units, and the sums over the inputs of the layers that read them."""

    def __init__(self, units: Units) -> None:
        self.units, self.inputs = units, [InputSums(reader) for reader in units.readers]


class UnitRenewal(Intervention):
    """Replaces units of a model by new ones; a subclass chooses which, after which steps.

    It acts on each layer whose units can be replaced.

    A new unit has incoming weights drawn from the layer's weights at initialisation (independently,
    with replacement: the distribution of any initialisation that is the same for all elements),
    biases 0, its batch norms as at initialisation (running mean 0, running variance 1), and
    outgoing weights 0. Its optimiser state is 0, for Adam with the step counters of these weights
    (see `fastlr.experiments.continual.interventions.unit_adamw.UnitAdamW`).

    What a unit is in a convolutional network, and which are left alone:
    `fastlr.experiments.continual.interventions.units`.

    Attributes:
        layers: The units that can be replaced, by layer, each a ``kind_of_layer``.
        left_alone: Reasons why others cannot, by the name of the layer.
        replaced: How many were, in the task under way, by layer.

    Raises:
        InputError: No layer of the model has units that can be replaced.
    """

    counts_steps_by_weight = keeps_running_means = True
    kind_of_layer: ClassVar[type[WatchedUnits]] = WatchedUnits
    layers: Sequence[WatchedUnits]

    def __init__(self, trainer: Learner) -> None:
        super().__init__(trainer)
        size = trainer.tasks.size
        generator = torch.Generator().manual_seed(0)
        example = torch.randn((2, 3, size, size), generator=generator).to(trainer.device)
        replaceable, self.left_alone = find_units(trainer.model, example)
        if not replaceable:
            reasons = "; ".join(f"{name} {why}" for name, why in list(self.left_alone.items())[:3])
            raise InputError(
                f"{next(iter(self.options))}: no layer of the model has units that can be "
                f"replaced ({reasons}): leave it out"
            )
        self.layers = [self.kind_of_layer(units) for units in replaceable]
        self.replaced: Counter[str] = Counter()
        self.generator = self.generator_for(0)

    def before_task(self, task: Task, number: int) -> None:
        """Begin a stream of random numbers of its own for the task."""
        self.generator = self.generator_for(number)
        self.replaced.clear()
        self.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the inputs of the layers that read units."""
        handles = [
            sums.reader.layer.register_forward_pre_hook(sums.hook)
            for layer in self.layers
            for sums in layer.inputs
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def written(self) -> Iterator[Tensor]:
        """Yield the sums over the inputs of the layers that read units."""
        return (t for layer in self.layers for sums in layer.inputs for t in sums.tensors)

    @torch.no_grad()
    def renew(self, units: Units, chosen: Tensor) -> None:
        """Replace some of a layer's units (int64, on the CPU) by new ones."""
        self.replaced[units.name] += len(chosen)
        index = chosen.to(self.trainer.device)
        for reader in units.readers:
            features = reader.features(index)
            for t in self._with_optimiser_state(reader.layer.weight):
                view, columns = reader.outgoing_columns(t, features)
                view[columns] = 0
        for name, module in units.layers.items():
            pool = self.trainer.initial[f"{name}.weight"].flatten()
            shape = (len(chosen), *module.weight.shape[1:])
            drawn = torch.randint(len(pool), shape, generator=self.generator).to(pool.device)
            self._zero(module.weight, index)
            module.weight[index] = pool[drawn].to(module.weight.dtype)
            if module.bias is not None:
                self._zero(module.bias, index)
        for name, norm in units.norms.items():
            for part in ("weight", "bias"):
                p = getattr(norm, part)
                if p is not None:
                    self._zero(p, index)
                    p[index] = self.trainer.initial[f"{name}.{part}"][index]
            if norm.running_mean is not None:
                norm.running_mean[index], norm.running_var[index] = 0, 1

    def _with_optimiser_state(self, p: Tensor) -> Iterator[Tensor]:
        """Yield a parameter and the tensors of its optimiser state that have its shape."""
        yield p
        for value in self.trainer.optimiser.state.get(p, {}).values():
            if isinstance(value, Tensor) and value.shape == p.shape:
                yield value

    def _zero(self, p: Tensor, units: Tensor) -> None:
        """Set the rows of some units to zero, in a parameter and its optimiser state."""
        for t in self._with_optimiser_state(p):
            t[units] = 0

    def clear(self) -> None:
        """Set the sums of a step to zero."""
        for t in self.written():
            t.zero_()

    def about(self) -> dict[str, Any]:
        """Return the number of units of each layer, and the layers left alone with the reasons."""
        return {
            "units": {layer.units.name: layer.units.count for layer in self.layers},
            "left_alone": self.left_alone,
        }

    def record(self) -> dict[str, Any]:
        """Return the numbers of units replaced, by layer."""
        return {"replaced": dict(self.replaced)}
