"""Random data to memorise: every sample is a pure function of seed and index.

Source: paper, section 4.3 and appendix A.3.

Targets are drawn apart from the inputs, so that nothing but memory lowers a network's loss on them
below that of the best constant prediction, and the bits that it has memorised follow from the loss
(`LabelledShapes.bits`, `GaussianPairs.bits`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr.errors import InputError
from fastlr.estimator.predictive import Categorical, Gaussian, Predictive
from fastlr.estimator.statistics import memorization_gain, regression_memorization_bound
from fastlr.inputs import GaussianSeries, ShapeImages
from fastlr.ops.philox import STREAMS, check_index, normals, random_words, uniform_integers


def random_labels(
    index: Tensor,  # [n] int64
    classes: int,
    seed: int = 0,
) -> Tensor:
    """Return the labels of the samples ``index``, uniform over the classes.

    They are independent of each other and of the inputs.

    Args:
        index: Indices of the samples.
        classes: From 1 to ``2**31 - 1``.
        seed: In ``[0, 2**64)``.

    Example:
        >>> random_labels(torch.tensor([3, 0, 1]), 1000).tolist()
        [773, 409, 753]
    """
    return uniform_integers(
        random_words(seed, check_index(index), STREAMS["labels"], 1)[:, 0], classes
    )


@dataclass(frozen=True)
class LabelledShapes:
    """Shape images with random labels.

    Images and labels are made whenever they are asked for, from their indices alone.

    Args:
        n: Samples.
        classes: Number of classes of the labels, at least 2.
        size: Height and width of the images.
        seed: Seed of images and labels.
    """

    n: int
    classes: int
    size: int
    seed: int = 0

    @property
    def predictive(self) -> Predictive:
        """The distribution that the model's outputs stand for."""
        return Categorical()

    @cached_property
    def inputs(self) -> ShapeImages:
        """The images, of which the first n are memorised."""
        return ShapeImages(size=(3, self.size, self.size), channels_last=True)

    def batch(self, index: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return images ``[B, 3, size, size]`` and labels ``[B]`` of the samples ``index``.

        The images are channels_last; both are on the device of ``index``.
        """
        return self.inputs.at(index, seed=self.seed, dtype=dtype), random_labels(
            index, self.classes, self.seed
        )

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        """Return each sample's cross-entropy in nats from its logits.

        The logits are ``[B, classes]``, the cross-entropies ``[B]`` float32.

        Raises:
            InputError: The model's output has another shape.
        """
        if z.shape != (len(y), self.classes):
            raise InputError(
                f"the model gives {tuple(z.shape)} for {len(y)} images of {self.classes} classes: "
                "it must end in as many outputs as there are classes"
            )
        return F.cross_entropy(z.float(), y, reduction="none")

    def right(self, z: Tensor, y: Tensor) -> Tensor | None:
        """Return where the largest logit is the label, ``[B]`` bool."""
        return z.argmax(1) == y

    def bits(self, loss: float) -> float:
        """Return the bits memorised at a mean cross-entropy: ``n log2 C - n loss / ln 2``.

        See `fastlr.memorization_gain`.

        Negative (nothing) where the loss is above that of guessing.

        Example:
            >>> LabelledShapes(n=100, classes=4, size=8).bits(math.log(2))
            100.0
        """
        return memorization_gain(-self.n * loss, self.n * math.log(self.classes), unit="bits")

    @property
    def ceiling(self) -> float | None:
        """The bits there are to memorise, ``n log2 C``."""
        return self.n * math.log2(self.classes)


@dataclass(frozen=True)
class GaussianPairs:
    """Windows of Gaussian noise with targets of Gaussian noise, both of mean 0 and variance 1.

    They are made once and lie on the device: 14 kB a window of 512 x 7.

    Args:
        n: Samples.
        context: Time steps of a window.
        horizon: Time steps of a target.
        features: Number of features of windows and targets.
        seed: Seed of windows and targets.
    """

    n: int
    context: int
    horizon: int
    features: int
    seed: int = 0
    _made: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def predictive(self) -> Predictive:
        """The distribution that the model's outputs stand for."""
        return Gaussian(sigma=1.0)

    @cached_property
    def inputs(self) -> GaussianSeries:
        """The windows, of which the first n are memorised."""
        return GaussianSeries(length=self.context, features=self.features)

    def batch(self, index: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return float32 windows ``[B, context, features]`` and targets of the samples ``index``.

        Targets are ``[B, horizon, features]``.

        Networks scale windows by their own deviation, so they stay float32 whatever ``dtype`` is.
        """
        device = index.device
        if device not in self._made:
            x = self.inputs.batch(0, self.n, seed=self.seed, device=device, dtype=torch.float32)
            shape = (self.horizon, self.features)
            y = normals(0, self.n, shape, stream=STREAMS["targets"], seed=self.seed, device=device)
            assert isinstance(x, Tensor)
            self._made[device] = x, y
        x, y = self._made[device]
        return x[index], y[index]

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error of each sample over its elements, ``[B]`` float32.

        Raises:
            InputError: The model's output has another shape.
        """
        if z.shape != y.shape:
            raise InputError(
                f"the model forecasts {tuple(z.shape)} where the targets are {tuple(y.shape)}"
            )
        return (z.float() - y).square().flatten(1).mean(1)

    def right(self, z: Tensor, y: Tensor) -> Tensor | None:
        """Return None: no forecast is right."""
        return None

    def bits(self, loss: float) -> float:
        """Return the bits memorised at a mean squared error D: ``(n m / 2) log2(1 / D)``.

        Here m is the number of elements of a target.

        This is `fastlr.regression_memorization_bound`; negative (nothing) where D is above the
        variance.

        Example:
            >>> round(GaussianPairs(n=100, context=16, horizon=5, features=2).bits(0.25), 6)
            1000.0
        """
        return regression_memorization_bound(
            self.n, self.horizon * self.features, 1.0, loss, unit="bits"
        )

    @property
    def ceiling(self) -> float | None:
        """None: the squared error can fall to zero, so the bits have no upper bound.

        (Strictly they have one, as targets take 65,536 values.)
        """
        return None


RandomData = LabelledShapes | GaussianPairs


def digest(data: RandomData) -> str:
    """Return a hash of what the data are, and of the bits of their first and last samples."""
    whole = hashlib.sha256(repr(data).encode())
    for part in data.batch(torch.tensor([0, data.n - 1])):
        whole.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
