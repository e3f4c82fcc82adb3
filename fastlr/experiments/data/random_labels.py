"""Tasks on images of 8 x 8: labels drawn anew, digits with permuted pixels, digits as they are."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import InputError
from fastlr.experiments.data.memorization import random_labels
from fastlr.experiments.data.tasks import Task
from fastlr.ops.philox import STREAMS, check_seed, indices, random_words

SIZE = 8  # height and width of the images
_TASK_BITS = 32  # label of image i in task t: that of sample t * 2**32 + i


class RandomLabels:
    """A sequence of tasks, the same images with other random labels: only memory helps.

    It is a `fastlr.experiments.data.tasks.TaskSequence`.

    A network that can still learn memorises the labels of task 1,000 as well as those of task 0, so
    accuracy on a task's own training images is a direct measure of plasticity (Lyle et al. 2023,
    "Understanding plasticity in neural networks", arXiv:2303.01486). Images and labels are pure
    functions of the seed, the image and the task.

    Args:
        images: How many, of 8 x 8 uniformly random bytes in three channels.
        classes: Number of classes of each task.
        seed: Seed of images and labels.
        digits: The first of `load_digits` in place of random bytes.

    Raises:
        InputError: Fewer than two images or classes, or a seed out of range.
    """

    size = SIZE

    def __init__(
        self, images: int = 256, classes: int = 10, seed: int = 0, digits: bool = False
    ) -> None:
        if images < 2 or classes < 2:
            raise InputError(
                f"random labels need at least two images and two classes, got {images} and "
                f"{classes}"
            )
        self.classes, self.fewest, self.seed = classes, images, check_seed(seed)
        if digits:
            self.images = load_digits(images)[0][:images]
            return
        words = random_words(seed, indices(0, images), STREAMS["pixels"], 3 * SIZE * SIZE)
        self.images = (words >> 24).to(torch.uint8).view(images, SIZE, SIZE, 3).permute(0, 3, 1, 2)

    @property
    def digest(self) -> str:
        """SHA-256 of the images and of the number of classes."""
        content = self.images.permute(0, 2, 3, 1).numpy().tobytes()
        return hashlib.sha256(b"%d " % self.classes + content).hexdigest()

    def labels(self, number: int) -> Tensor:
        """Return the labels ``[images]`` of a task, uniform over the classes."""
        first = number << _TASK_BITS
        return random_labels(indices(first, first + self.fewest), self.classes, self.seed)

    def load(self, number: int, device: torch.device | str | None = None) -> Task:
        """Return a task, whose test images are its training images.

        There are no other images with these labels.
        """
        x, y = self.images.to(device or "cpu"), self.labels(number).to(device or "cpu")
        return Task(x, y, x, y)

    def facts(self, number: int) -> dict[str, Any]:
        """Return what the record of a task says of it: its classes."""
        return {
            "round": 0,
            "classes": list(range(self.classes)),
            "names": [str(c) for c in range(self.classes)],
        }


class PermutedDigits:
    """A sequence of tasks (`TaskSequence`): handwritten digits, their pixels permuted anew in each.

    Source: Goodfellow et al. 2013, "An empirical investigation of catastrophic forgetting"
    (arXiv:1312.6211), with MNIST.

    Args:
        images: The first so many of `load_digits` are trained on, the others tested on.
        seed: Seed of the orders.
    """

    size, classes = SIZE, 10

    def __init__(self, images: int = 256, seed: int = 0) -> None:
        self.x, self.y = load_digits(images + 1)
        self.fewest, self.seed = images, check_seed(seed)

    @property
    def digest(self) -> str:
        """SHA-256 of the digits and of the number that is trained on."""
        return hashlib.sha256(
            b"%d " % self.fewest + self.x.permute(0, 2, 3, 1).numpy().tobytes()
        ).hexdigest()

    def load(self, number: int, device: torch.device | str | None = None) -> Task:
        """Return a task."""
        order = self.order(number, SIZE * SIZE)
        return self.split(self.x.flatten(2)[:, :, order].view(self.x.shape), self.y, device)

    def order(self, number: int, count: int) -> Tensor:
        """Return a random order of so many things ``[count]``, a function of seed and task."""
        words = random_words(self.seed, indices(number, number + 1), STREAMS["pixels"], count)
        return words[0].argsort()

    def split(self, x: Tensor, y: Tensor, device: torch.device | str | None) -> Task:
        """Return a task that trains on the first images and tests on the others."""
        x, y = x.to(device or "cpu", memory_format=torch.channels_last), y.to(device or "cpu")
        return Task(x[: self.fewest], y[: self.fewest], x[self.fewest :], y[self.fewest :])

    facts = RandomLabels.facts


class FreshDigits(PermutedDigits):
    """A sequence of tasks that are one: handwritten digits, drawn anew for each.

    Nothing changes from task to task but which digits are trained on and which are tested: the null
    case of a study of lost plasticity.

    Args:
        images: So many digits are drawn for training, the others tested on.
        seed: Seed of the draws.
    """

    def load(self, number: int, device: torch.device | str | None = None) -> Task:
        """Return a task."""
        order = self.order(number, len(self.y))
        return self.split(self.x[order], self.y[order], device)


def load_digits(fewest: int = 2) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 handwritten digits and their labels.

    The digits are uint8 ``[n, 3, 8, 8]`` with channels_last strides.

    Raises:
        InputError: scikit-learn is missing, or there are fewer than ``fewest``.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise InputError("the digits are scikit-learn's: pip install scikit-learn") from error
    grey, labels = datasets.load_digits(return_X_y=True)
    if not 2 <= fewest <= len(labels):
        raise InputError(f"random_images: there are {len(labels)} digits, and {fewest} are needed")
    images = torch.from_numpy(grey * 255 / 16).to(torch.uint8).view(-1, SIZE, SIZE, 1)
    return images.repeat(1, 1, 1, 3).permute(0, 3, 1, 2), torch.from_numpy(labels).long()
