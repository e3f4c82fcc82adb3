"""The convolutional network of Dohare et al. for Continual ImageNet at 32 x 32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fastlr.errors import InputError


class ConvNet(nn.Module):
    """A network of three convolutions and three linear layers.

    The convolutions are of 5 x 5, 3 x 3 and 3 x 3, each with ReLU and 2 x 2 max pooling.

    With the defaults it has 177,218 parameters and is the network of Dohare et al. (2024, "Loss of
    plasticity in deep continual learning", appendix; ``lop/nets/conv_net.py`` of their code), with
    torch's default initialisation.

    Args:
        num_classes: Size of the output.
        size: Height and width of the images, at least 24; only the first linear layer depends on
            it.
        widths: Outputs of the three convolutions.
        hidden: Units of the two hidden linear layers.

    Shapes: images ``[B, 3, size, size]`` -> logits ``[B, num_classes]``.

    Example:
        >>> sum(p.numel() for p in ConvNet().parameters())
        177218
    """

    def __init__(
        self,
        num_classes: int = 2,
        size: int = 32,
        widths: tuple[int, int, int] = (32, 64, 128),
        hidden: int = 128,
    ) -> None:
        super().__init__()
        side = ((((size - 4) // 2) - 2) // 2 - 2) // 2
        if side < 1:
            raise InputError(f"size={size}: ConvNet needs images of at least 24 x 24")
        if len(widths) != 3 or min(*widths, hidden) < 1:
            raise InputError(
                f"widths={list(widths)}, hidden={hidden}: give three widths, and at least 1 of "
                "everything"
            )
        a, b, c = widths
        self.size, self.features = size, c * side * side
        self.conv1, self.conv2, self.conv3 = (
            nn.Conv2d(3, a, 5),
            nn.Conv2d(a, b, 3),
            nn.Conv2d(b, c, 3),
        )
        self.fc1, self.fc2 = nn.Linear(self.features, hidden), nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, num_classes)
        self.relus = nn.ModuleList(nn.ReLU() for _ in range(5))  # modules, so that hooks see them

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, size, size] -> [B, num_classes]
        """Return the logits."""
        if x.shape[-2:] != (self.size, self.size):
            raise InputError(
                f"images of {x.shape[-2]} x {x.shape[-1]}, but the network is made for "
                f"size={self.size}: make it with the size of the data (--set "
                f"model_kwargs='{{\"size\": {x.shape[-1]}}}')"
            )
        relu1, relu2, relu3, relu4, relu5 = self.relus
        x = F.max_pool2d(relu1(self.conv1(x)), 2)
        x = F.max_pool2d(relu2(self.conv2(x)), 2)
        x = F.max_pool2d(relu3(self.conv3(x)), 2)
        x = relu4(self.fc1(x.flatten(1)))
        return self.fc3(relu5(self.fc2(x)))
