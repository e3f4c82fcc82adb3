"""ReDo: units that answer to next to nothing are replaced by new ones every so many steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastlr.experiments.continual.interventions.renewal import UnitRenewal, WatchedUnits
from fastlr.experiments.runs.options import option


class ReDo(UnitRenewal, name="redo", source="Sokar et al. 2023 (arXiv:2302.12902)"):
    """Recycles dormant neurons: after every ``every``-th step all dormant units are replaced.

    - The score of unit i of a layer is ``s_i = m_i / mean_k m_k``, with ``m_i`` the mean of
      ``|h_i|`` over the step's images (and positions), h what goes into the layer that reads it,
      and k over all units of the layer. Where several layers read it, the largest score counts;
      where a whole layer is silent, all of its scores are 0.
    - A unit is dormant if ``s_i <= threshold``. A new unit is as in `UnitRenewal`.

    Steps are counted over the whole run. Silent units are replaced without a change of the outputs;
    from others the outputs lose what they contributed.

    Source: Sokar et al. 2023, "The dormant neuron phenomenon in deep reinforcement learning"
    (arXiv:2302.12902), definition 3.1 and algorithm 1; biases and the optimiser's moments: their
    code, which leaves Adam's step counter as it is and draws the incoming weights from Glorot's
    uniform distribution.
    """

    every: int = option(
        0, at_least=0, about="Number of steps between two replacements of dormant units; 0: off."
    )
    threshold: float = option(
        0.1,
        at_least=0,
        about="Largest score of a dormant unit, in means of the layer; 0: silent units.",
    )

    steps = 0  # done in the run

    @torch.no_grad()
    def after_step(self) -> None:
        """Replace the dormant units, if it is time."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.trainer.parallel.sum_all(list(self.written()))  # of the images of all ranks
            for layer in self.layers:
                dormant = (scores(layer) <= self.threshold).nonzero().flatten().cpu()
                if len(dormant):
                    self.renew(layer.units, dormant)
        self.clear()

    def state(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"steps": self.steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put it into a state that `state` returned."""
        self.steps = state["steps"]
        self.clear()


def scores(layer: WatchedUnits) -> Tensor:  # [units]
    """Return the scores of a layer's units in the step just done, see `ReDo`."""
    of_readers = []
    for sums in layer.inputs:
        means = sums.absolute.view(-1, sums.reader.repeat).sum(1)
        of_readers.append(means / means.mean().clamp(min=torch.finfo(means.dtype).tiny))
    return torch.stack(of_readers).amax(0)
