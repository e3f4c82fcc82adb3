"""A multilayer perceptron for small images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fastlr.errors import InputError


class MLP(nn.Sequential):
    """Linear layers on flattened images, each but the last followed by an activation.

    Args:
        num_classes: Size of the output.
        size: Height and width of the images, which have three channels.
        widths: Units of the hidden layers.
        activation: Name of a module of torch.nn.
        layer_norm: Normalise before each activation.
        initialisation: Name of a function of torch.nn.init for the weights of all layers; None:
            torch's own for linear ones.

    Shapes: images ``[B, 3, size, size]`` -> logits ``[B, num_classes]``.

    Raises:
        InputError: torch has no such activation or initialisation.

    Example:
        >>> sum(p.numel() for p in MLP().parameters())
        21322
    """

    def __init__(
        self,
        num_classes: int = 10,
        size: int = 8,
        widths: Sequence[int] = (64, 64, 64),
        activation: str = "ReLU",
        layer_norm: bool = False,
        initialisation: str | None = None,
    ) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in zip([3 * size**2, *widths], widths):
            layers += [
                nn.Linear(before, after),
                *([nn.LayerNorm(after)] if layer_norm else []),
                _named(nn, "activation", activation)(),
            ]
        super().__init__(*layers, nn.Linear(widths[-1], num_classes))
        if initialisation:
            for layer in self:
                if isinstance(layer, nn.Linear):
                    _named(nn.init, "initialisation", initialisation)(layer.weight)


def _named(library: Any, option: str, name: str) -> Callable[..., Any]:
    found = getattr(library, name, None)
    if not callable(found):
        raise InputError(f"{option}={name!r}: {library.__name__} has none of that name")
    return found
