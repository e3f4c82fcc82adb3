"""Continual backprop: in each step a few of the least useful units are replaced by new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlr.experiments.continual.interventions.renewal import UnitRenewal, WatchedUnits
from fastlr.experiments.continual.interventions.units import ReadingLayer, Units
from fastlr.experiments.runs.options import option


class _Layer(WatchedUnits):
    """Units and their running statistics.

    Attributes:
        utility: Running contribution utility, not yet divided by ``1 - decay^age``.
        means: Running mean of each feature, by reader, likewise.
        ages: Steps since the unit was made; on the CPU.
        owed: Units to be replaced, the fraction that is not a whole unit yet.
    """

    def __init__(self, units: Units) -> None:
        super().__init__(units)
        self.utility = self.inputs[0].plain.new_zeros(units.count)
        self.means = [torch.zeros_like(sums.plain) for sums in self.inputs]
        self.ages = torch.zeros(units.count, dtype=torch.int64)
        self.owed = 0.0


class ContinualBackprop(
    UnitRenewal, name="continual_backprop", source="Dohare et al. 2024 (Nature 632, 768-774)"
):
    """Continual backprop: generate-and-test of units after each step of the optimiser.

    - Utility of unit i, the contribution utility: ``u <- decay u + (1 - decay) sum_k |h_i|
      |w_ik|``, with h the values that go into the layers that read it, |h| the mean over the step's
      images (and positions), and the sum over all its outgoing weights after the step; divided by
      ``1 - decay^age``. ``f``, the running mean of h, is kept likewise.
    - A unit is mature if its age, in steps, is above ``maturity``. In each step ``rate`` times the
      number of mature units is added to what is owed, and as many whole units as are owed are
      replaced: the mature ones of the lowest utility.
    - A new unit is as in `UnitRenewal`, its age and utility 0. Of SGD's state it is the momentum
      that is set to 0, which their code leaves.
    - With ``transfer`` the mean contribution of what is replaced, ``f_i w_ik``, goes to the bias of
      the layer that read it, so that its outputs keep their mean; for a convolution that pads with
      zeros, up to the border. A layer without bias whose output goes into a batch norm alone has it
      taken from the norm's running mean: the same in eval mode, and in training the norm removes a
      mean anyway. Where there is neither, nothing is transferred. Without ``transfer``: as in
      Nature.

    Source: Dohare et al. 2024, "Loss of plasticity in deep continual learning" (Nature 632,
    768-774), Methods, eq. 1 and algorithm 1; the division by ``1 - decay^age``, the transfer and
    the optimiser's state: their generate-and-test code.
    """

    rate: float = option(
        0.0,
        at_least=0,
        at_most=1,
        named="cbp_rate",
        about="Share of each layer's mature units that is replaced in a step; 0: off. Dohare "
        "et al. take 3e-4 for dohare32.",
    )
    maturity: int = option(
        100, at_least=0, named="cbp_maturity", about="Number of steps after which a unit is mature."
    )
    decay: float = option(
        0.99,
        at_least=0,
        below=1,
        named="cbp_decay",
        about="Decay of the running means of contribution utility and activation.",
    )
    transfer: bool = option(
        True,
        named="cbp_transfer",
        about="Let the mean contribution of a replaced unit go to the bias of what reads it; "
        "no: as in Nature.",
    )
    kind_of_layer = _Layer
    layers: Sequence[_Layer]

    @torch.no_grad()
    def after_step(self) -> None:
        """Update the utilities; replace units that are due."""
        self.trainer.parallel.sum_all(list(self.written()))  # of the images of all ranks
        for layer in self.layers:
            self._update(layer)
            due = self._due(layer)
            if len(due):
                self.replace(layer, due)
        self.clear()

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
        index = units.to(layer.utility.device)
        for reader, mean in zip(layer.units.readers, layer.means, strict=True):
            features = reader.features(index)
            if self.transfer:
                ages = layer.ages[units].to(mean).repeat_interleave(reader.repeat)
                self._transfer(reader, features, mean[features] / (1 - self.decay**ages))
            mean[features] = 0
        self.renew(layer.units, units)
        layer.utility[index] = 0
        layer.ages[units] = 0

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
        self.clear()
