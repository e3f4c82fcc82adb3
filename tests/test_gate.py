"""Products with one number a sample and channel, as in squeeze-and-excitation: their node, and where it is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from folding import check
from torch import Tensor, nn
from torchvision.models import mobilenet_v3_small

import fastlr
from fastlr.ghost.gate import Gate


class Excited(nn.Module):
    """Squeeze and excitation between two convolutions; how the product is written is the test's."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.squeeze, self.excite = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 3, 1), nn.Conv2d(3, 6, 1)
        self.after, self.product = nn.Conv2d(6, 5, 1), product

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        gate = F.hardsigmoid(self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()))
        return self.after(self.product(x, gate)).tanh().flatten(1)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "times": (lambda x, gate: x * gate, 1),
    "reversed": (lambda x, gate: gate * x, 1),
    "function": (lambda x, gate: torch.mul(gate, x), 1),
    "method": (lambda x, gate: x.mul(gate), 1),
    "twice": (lambda x, gate: x * gate * gate, 2),
    "in_place": (lambda x, gate: x.clone().mul_(gate), 0),
    "one_number_for_all_channels": (lambda x, gate: x * gate[:, :1], 0),
    "a_number_a_position": (lambda x, gate: x * x.tanh(), 0),
    "square": (lambda x, gate: (gate * gate).expand_as(x) + x, 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_norms_are_those_of_the_model(name: str) -> None:
    product, gates = PRODUCTS[name]
    assert check(Excited(product), 0, why="no batch norm follows" if gates else "").gates == gates


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 2, 1), (3, 4, 7), (2, 3, 2, 3, 2)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.preserve_format])
def test_its_gradients_are_right(shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    x = (
        x if memory_format == torch.contiguous_format else x.transpose(0, 1).contiguous().transpose(0, 1)
    ).requires_grad_()
    gate = torch.randn(*shape[:2], *[1] * (len(shape) - 2), dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(Gate.apply, (x, gate))


def test_parameters_are_not_taken_for_gates() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = nn.Conv2d(4, 6, 3), nn.Parameter(torch.ones(1, 6, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.conv(x) * self.scale).flatten(1)

    assert check(Scaled(), 0).gates == 0


def test_mobilenet_runs_its_nine() -> None:
    report = fastlr.support_report(mobilenet_v3_small(num_classes=2).eval(), torch.randn(2, 3, 64, 64))
    assert report.gates == 9 and "9 products with one number a channel" in str(report)
