"""Continual backprop: in each step a few of the least useful units are replaced by new ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.experiments.continual.interventions.base import Intervention, Learner
from fastlr.experiments.continual.interventions.find_units import find_units
from fastlr.experiments.continual.interventions.units import ReadingLayer, Units
from fastlr.experiments.data import Task
from fastlr.experiments.runs.options import option


class _InputSums:
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


class _Layer:
    """Units and their running statistics.

    Attributes:
        utility: Running contribution utility, not yet divided by ``1 - decay^age``.
        means: Running mean of each feature, by reader, likewise.
        ages: Steps since the unit was made; on the CPU.
        owed: Units to be replaced, the fraction that is not a whole unit yet.
    """

    def __init__(self, units: Units) -> None:
        self.units, self.inputs = units, [_InputSums(reader) for reader in units.readers]
        self.utility = self.inputs[0].plain.new_zeros(units.count)
        self.means = [torch.zeros_like(sums.plain) for sums in self.inputs]
        self.ages = torch.zeros(units.count, dtype=torch.int64)
        self.owed = 0.0


class ContinualBackprop(
    Intervention, name="continual_backprop", source="Dohare et al. 2024 (Nature 632, 768-774)"
):
    """Continual backprop: generate-and-test of units after each step of the optimiser.

    It acts on each layer whose units can be replaced.

    - Utility of unit i, the contribution utility: ``u <- decay u + (1 - decay) sum_k |h_i|
      |w_ik|``, with h the values that go into the layers that read it, |h| the mean over the step's
      images (and positions), and the sum over all its outgoing weights after the step; divided by
      ``1 - decay^age``. ``f``, the running mean of h, is kept likewise.
    - A unit is mature if its age, in steps, is above ``maturity``. In each step ``rate`` times the
      number of mature units is added to what is owed, and as many whole units as are owed are
      replaced: the mature ones of the lowest utility.
    - A new unit has incoming weights drawn from the layer's weights at initialisation
      (independently, with replacement: the distribution of any initialisation that is the same for
      all elements), biases 0, its batch norms as at initialisation (running mean 0, running
      variance 1), outgoing weights 0, age and utility 0. Its optimiser state is 0, for Adam with
      the step counters of these weights (see `UnitAdamW`; theirs); for SGD that is the momentum,
      which their code leaves.
    - With ``transfer`` the mean contribution of what is replaced, ``f_i w_ik``, goes to the bias of
      the layer that read it, so that its outputs keep their mean; for a convolution that pads with
      zeros, up to the border. A layer without bias whose output goes into a batch norm alone has it
      taken from the norm's running mean: the same in eval mode, and in training the norm removes a
      mean anyway. Where there is neither, nothing is transferred. Without ``transfer``: as in
      Nature.

    What a unit is in a convolutional network, and which are left alone:
    `fastlr.experiments.continual.interventions.units`.

    Raises:
        InputError: No layer of the model has units that can be replaced.

    Source: Dohare et al. 2024, "Loss of plasticity in deep continual learning" (Nature 632,
    768-774), Methods, eq. 1 and algorithm 1; the division by ``1 - decay^age``, the transfer and
    the optimiser's state: their generate-and-test code.
    """

    rate: float = option(
        0.0,
        at_least=0,
        at_most=1,
        named="cbp_rate",
        about="The share of each layer's mature units that is replaced in a step; 0: off. Dohare "
        "et al. take 3e-4 for ``dohare32``.",
    )
    maturity: int = option(
        100, at_least=0, named="cbp_maturity", about="Steps after which a unit is mature."
    )
    decay: float = option(
        0.99,
        at_least=0,
        below=1,
        named="cbp_decay",
        about="Of the running means of contribution utility and activation.",
    )
    transfer: bool = option(
        True,
        named="cbp_transfer",
        about="Let the mean contribution of a replaced unit go to the bias of what reads it; "
        "``no``: as in Nature.",
    )
    counts_steps_by_weight = keeps_running_means = True

    def __init__(self, trainer: Learner) -> None:
        super().__init__(trainer)
        size = trainer.tasks.size
        generator = torch.Generator().manual_seed(0)
        example = torch.randn((2, 3, size, size), generator=generator).to(trainer.device)
        replaceable, self.left_alone = find_units(trainer.model, example)
        if not replaceable:
            reasons = "; ".join(f"{name} {why}" for name, why in list(self.left_alone.items())[:3])
            raise InputError(
                f"cbp_rate: no layer of the model has units that can be replaced ({reasons}): "
                "leave it out"
            )
        self.layers = [_Layer(units) for units in replaceable]
        self.replaced: Counter[str] = Counter()
        self.generator = self.generator_for(0)

    def before_task(self, task: Task, number: int) -> None:
        """Begin a stream of random numbers of its own for the task."""
        self.generator = self.generator_for(number)
        self.replaced.clear()
        self._clear()

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
    def after_step(self) -> None:
        """Update the utilities; replace units that are due."""
        self.trainer.parallel.sum_all(list(self.written()))  # of the images of all ranks
        for layer in self.layers:
            self._update(layer)
            due = self._due(layer)
            if len(due):
                self.replace(layer, due)
        self._clear()

    def _update(self, layer: _Layer) -> None:
        """Take the step's contributions into the running utilities and means; all units age."""
        contribution = torch.zeros_like(layer.utility)
        for sums, mean in zip(layer.inputs, layer.means, strict=True):
            reader, count = sums.reader, sums.count.clamp(min=1)
            outgoing = reader.by_feature(reader.layer.weight.abs()).sum(1).flatten()
            contribution += (sums.absolute / count * outgoing).view(-1, reader.repeat).sum(1)
            mean.lerp_(sums.plain / count, 1 - self.decay)
        layer.utility.lerp_(contribution, 1 - self.decay)
        layer.ages += 1

    def _due(self, layer: _Layer) -> Tensor:
        """Return the mature units of the lowest utility, as many as are owed."""
        mature = (layer.ages > self.maturity).nonzero().flatten()
        layer.owed += self.rate * len(mature)
        due = min(int(layer.owed), len(mature))
        if not due:
            return mature[:0]
        layer.owed -= due
        utility = layer.utility.cpu()[mature] / (1 - self.decay ** layer.ages[mature])
        worst = utility.sort(stable=True).indices[:due]
        return mature[worst].sort().values

    @torch.no_grad()
    def replace(self, layer: _Layer, units: Tensor) -> None:
        """Replace some units (int64, on the CPU) by new ones."""
        self.replaced[layer.units.name] += len(units)
        index = units.to(layer.utility.device)
        for reader, mean in zip(layer.units.readers, layer.means, strict=True):
            features = reader.features(index)
            if self.transfer:
                ages = layer.ages[units].to(mean).repeat_interleave(reader.repeat)
                self._transfer(reader, features, mean[features] / (1 - self.decay**ages))
            mean[features] = 0
            for t in self._with_optimiser_state(reader.layer.weight):
                view, columns = reader.outgoing_columns(t, features)
                view[columns] = 0
        for name, module in layer.units.layers.items():
            pool = self.trainer.initial[f"{name}.weight"].flatten()
            shape = (len(units), *module.weight.shape[1:])
            drawn = torch.randint(len(pool), shape, generator=self.generator).to(pool.device)
            self._zero(module.weight, index)
            module.weight[index] = pool[drawn].to(module.weight.dtype)
            if module.bias is not None:
                self._zero(module.bias, index)
        for name, norm in layer.units.norms.items():
            for part in ("weight", "bias"):
                p = getattr(norm, part)
                if p is not None:
                    self._zero(p, index)
                    p[index] = self.trainer.initial[f"{name}.{part}"][index]
            if norm.running_mean is not None:
                norm.running_mean[index], norm.running_var[index] = 0, 1
        layer.utility[index] = 0
        layer.ages[units] = 0

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

    @staticmethod
    def _transfer(reader: ReadingLayer, features: Tensor, means: Tensor) -> None:
        """Keep the mean of a layer's outputs when some features, of these means, go."""
        weights = reader.by_feature(reader.layer.weight)
        gone = means.new_zeros(reader.groups * weights.shape[2]).index_copy_(0, features, means)
        shift = (weights * gone.view(reader.groups, 1, -1)).sum(2).flatten()
        if reader.layer.bias is not None:
            reader.layer.bias += shift
        elif reader.norm is not None and reader.norm.running_mean is not None:
            reader.norm.running_mean -= shift

    def _clear(self) -> None:
        for t in self.written():
            t.zero_()

    def state(self) -> dict[str, Any]:
        """Return utilities, means, ages and what is owed, by layer."""
        return {
            layer.units.name: {
                "utility": layer.utility,
                "means": layer.means,
                "ages": layer.ages,
                "owed": layer.owed,
            }
            for layer in self.layers
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Put it into a state that `state` returned."""
        for layer in self.layers:
            saved = state[layer.units.name]
            layer.owed = saved["owed"]
            layer.utility.copy_(saved["utility"])
            layer.ages.copy_(saved["ages"])
            for mean, value in zip(layer.means, saved["means"], strict=True):
                mean.copy_(value)
        self._clear()

    def about(self) -> dict[str, Any]:
        """Return the number of units of each layer, and the layers left alone with the reasons."""
        return {
            "units": {layer.units.name: layer.units.count for layer in self.layers},
            "left_alone": self.left_alone,
        }

    def record(self) -> dict[str, Any]:
        """Return the numbers of units replaced, by layer."""
        return {"replaced": dict(self.replaced)}
