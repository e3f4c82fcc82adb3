"""Elastic weight consolidation: weights that earlier tasks depend on are held where they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import ModelError
from fastlr.estimator.eval_mode import eval_mode
from fastlr.estimator.predictive import Categorical
from fastlr.experiments.continual.interventions.base import Intervention, Learner
from fastlr.experiments.data import Task, take
from fastlr.experiments.runs.options import option


def diagonal_fisher(
    model: nn.Module, parameters: Sequence[nn.Parameter], x: Tensor
) -> list[Tensor]:
    """Return the diagonal of a classifier's Fisher information.

    ``F_i = mean over x of E_{y ~ P(.|x)} (d log P(y|x) / d theta_i)^2``.

    The labels are the model's own, not the true ones (with those it would be the empirical Fisher).
    For two classes the expectation over them is exact, ``p0 p1 (d(z0 - z1) / d theta_i)^2``; for
    more it is one random probe an image with that expectation (see `fastlr.Categorical`,
    ``rademacher``). Eval mode; one forward and backward pass an image, in the model's own dtype.

    Args:
        model: Left as it is; it returns logits ``[B, C]``.
        parameters: Parameters of the model.
        x: Images ``[n, ...]``, n at least 1.

    Returns:
        A tensor for each parameter, of its shape; zeros where the output does not depend on it.

    Raises:
        ModelError: The model does not return ``[B, C]`` with C of at least 2.

    Source: Kirkpatrick et al. 2017 (arXiv:1612.00796); on the labels: Kunstner et al. 2019
    (arXiv:1905.12558).
    """
    sums = [torch.zeros_like(p) for p in parameters]
    with eval_mode(model, x.device):
        for i in range(len(x)):
            z = model(x[i : i + 1])
            if not isinstance(z, Tensor) or z.ndim != 2 or z.shape[1] < 2:
                raise ModelError(
                    "EWC wants a model that returns logits [B, C] with at least two classes"
                )
            v = Categorical().cotangent(z, "rademacher", range(i, i + 1), 0)
            assert isinstance(v, Tensor)  # an iterator for the probe "exact" only
            gradients = torch.autograd.grad(z, parameters, v.to(z.dtype), allow_unused=True)
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total.addcmul_(gradient, gradient)
    return [total.div_(len(x)) for total in sums]


class EWC(
    Intervention,
    name="ewc",
    source="Kirkpatrick et al. 2017 (arXiv:1612.00796), Schwarz et al. 2018 (arXiv:1805.06370)",
):
    """Online elastic weight consolidation: a quadratic penalty around the parameters of past tasks.

    It adds the gradient of ``strength / 2 * sum_i F_i (theta_i - theta*_i)^2``.

    After each task, ``F <- decay F + F_task``, with `diagonal_fisher` on some of the task's
    training images, and ``theta*`` is where the parameters are then. So there is one quadratic
    penalty, whatever the number of tasks (Kirkpatrick et al. keep one for each). With ``decay`` 1
    no task is forgotten, and after many tasks nothing moves. The loss is the mean over the batch;
    the penalty is not in the recorded train_loss. Before the end of the first task F is 0.

    All trainable parameters take part, with ``head_reset`` those of the head apart, as it is
    another one in each task. Running statistics of batch norms are not parameters, and are not
    held.

    Source: Kirkpatrick et al. 2017, "Overcoming catastrophic forgetting in neural networks"
    (arXiv:1612.00796); one penalty around the latest parameters, with decay: Schwarz et al. 2018,
    "Progress & Compress" (arXiv:1805.06370), online EWC (their penalty has ``decay F``: the same
    with another strength).
    """

    strength: float = option(
        0.0,
        at_least=0,
        named="ewc",
        about="Strength lambda of elastic weight consolidation, lambda / 2 F (theta - "
        "theta*)^2; 0: off. Not in train_loss.",
    )
    decay: float = option(
        0.95,
        at_least=0,
        at_most=1,
        about="Factor of the Fisher information of earlier tasks after each task.",
    )
    images: int = option(
        200,
        at_least=1,
        about="Number of images of a task for its Fisher information; each takes a pass.",
    )
    keeps_running_means = True

    def __init__(self, trainer: Learner) -> None:
        super().__init__(trainer)
        head: set[int] = set()
        if trainer.options.head_reset:
            head = {id(p) for p in trainer.head().parameters()}
        self.parameters = [
            p for p in trainer.model.parameters() if p.requires_grad and id(p) not in head
        ]
        if not self.parameters:
            raise ModelError(
                "ewc: the model has no trainable parameters but those of its head: leave it out"
            )
        self.fisher = [torch.zeros_like(p) for p in self.parameters]
        self.anchor = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the penalty's gradient ``strength * F (theta - theta*)`` to ``.grad``.

        Parameters that the loss has not reached have no ``.grad`` and are left out.
        """
        for p, fisher, anchor in zip(self.parameters, self.fisher, self.anchor, strict=True):
            if p.grad is not None:
                p.grad.addcmul_(fisher, p - anchor, value=self.strength)

    @torch.no_grad()
    def penalty(self) -> float:
        """Return ``strength / 2 * sum_i F_i (theta_i - theta*_i)^2``."""
        terms = zip(self.parameters, self.fisher, self.anchor, strict=True)
        sums = [
            (fisher * (p - anchor).square()).sum(dtype=torch.float64) for p, fisher, anchor in terms
        ]
        return self.strength / 2 * torch.stack(sums).sum().item()

    def after_task(self, task: Task, number: int) -> None:
        """Add the task's Fisher information to the sum; centre the penalty on the parameters."""
        self.last_penalty = self.penalty()
        generator = self.generator_for(number)
        rows = torch.randperm(len(task.train_y), generator=generator)[: self.images]
        images = take(task.train_x, rows.to(task.train_y.device))
        fisher_of_task = self._fisher(self.trainer.normalised(images))
        with torch.no_grad():
            for p, fisher, anchor, new in zip(
                self.parameters, self.fisher, self.anchor, fisher_of_task, strict=True
            ):
                fisher.mul_(self.decay).add_(new)
                anchor.copy_(p)

    def _fisher(self, x: Tensor) -> list[Tensor]:
        """`diagonal_fisher`; the ranks share the images."""
        parallel = self.trainer.parallel
        share = x[parallel.ranks.rank :: parallel.ranks.size]
        fisher = [torch.zeros_like(p) for p in self.parameters]
        if len(share):
            fisher = [
                t * (len(share) / len(x))
                for t in diagonal_fisher(self.trainer.model, self.parameters, share)
            ]
        parallel.sum_all(fisher)
        return fisher

    def state(self) -> dict[str, Any]:
        """The Fisher information and the centre."""
        return {"fisher": self.fisher, "anchor": self.anchor}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Put it into a state that `state` returned."""
        for key in ("fisher", "anchor"):
            for current, saved in zip(getattr(self, key), state[key], strict=True):
                current.copy_(saved)

    def about(self) -> dict[str, Any]:
        """How many parameters are held."""
        return {"parameters": sum(p.numel() for p in self.parameters)}

    def record(self) -> dict[str, Any]:
        """The penalty at the end of the task, and the sum of the Fisher information after it."""
        total = (
            torch.stack([fisher.sum(dtype=torch.float64) for fisher in self.fisher]).sum().item()
        )
        return {"penalty": self.last_penalty, "fisher_sum": total}
