"""AdamW with a step counter for each weight.

A new unit's weights then begin like those of a new network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class UnitAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` with a step counter for each element of a parameter.

    The updates are the same as torch's as long as no counter is set back.

    Adam divides its running means by ``1 - beta^t``. With one ``t`` for a whole tensor, a weight
    whose means were set to zero late in training would take first steps of up to ``(1 - beta1) /
    sqrt(1 - beta2)``, about 3.2, times the learning rate.

    The state of a parameter is ``steps``, ``exp_avg`` and ``exp_avg_sq``, each of its shape; all
    arithmetic is on the device.

    Args:
        params: As for `torch.optim.AdamW`, and so are the others.
        lr: Learning rate.
        weight_decay: Decoupled.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101); counters for each element: Dohare et al.
    2024 (Nature 632), ``AdamGnT`` of their code.
    """

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.01) -> None:
        fixed = {"betas": (0.9, 0.999), "eps": 1e-8}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **fixed})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Do one step."""
        for group in self.param_groups:
            parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = {
                        key: torch.zeros_like(p) for key in ("steps", "exp_avg", "exp_avg_sq")
                    }
            gradients = [p.grad for p in parameters if p.grad is not None]
            steps = [self.state[p]["steps"] for p in parameters]
            means = [self.state[p]["exp_avg"] for p in parameters]
            squares = [self.state[p]["exp_avg_sq"] for p in parameters]
            beta1, beta2 = group["betas"]
            torch._foreach_add_(steps, 1)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            denominators = torch._foreach_div(squares, _correction(steps, beta2))
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["eps"])
            numerators = torch._foreach_div(means, _correction(steps, beta1))
            torch._foreach_addcdiv_(parameters, numerators, denominators, -group["lr"])


def _correction(steps: list[Tensor], beta: float) -> list[Tensor]:
    """``1 - beta^t``, exact for small t."""
    powers = list(torch._foreach_mul(steps, math.log(beta)))
    torch._foreach_expm1_(powers)
    torch._foreach_neg_(powers)
    return powers
