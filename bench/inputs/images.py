"""The images that are tried beside `fastlr.GaussianInputs`.

Those with the data's spectrum, dead leaves, fractal noise. Each is a function of seed, index and
what was fitted, made on the CPU, image by image.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlr.inputs import ShapeImages
from fastlr.inputs.base import Inputs
from fastlr.inputs.fitted import checked
from fastlr.ops.philox import indices, normals, random_words

FIELD, LEAVES = 1002, 1003  # streams of random words that fastlr uses for nothing
LEAVES_AT_ONCE = 64
MOST_LEAVES = 4096


def digest(*tensors: Tensor) -> str:
    """Return a hash of the values of tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(repr(tuple(tensor.shape)).encode())
        total.update(torch.view_as_real(tensor + 0j).contiguous().numpy().tobytes())
    return total.hexdigest()[:32]


class FieldImages(Inputs):
    """Stationary Gaussian images: white noise through a filter, plus a mean of each channel.

    Args:
        mean: of each channel, ``[C]``.
        roots: at each frequency of `torch.fft.fft2` the square root of the matrix of the powers of
            channels and of pairs of them, ``[H, W, C, C]`` complex.

    The Fourier transforms are in float64 and the image is rounded to float32, so that machines
    agree but for a rare last bit.
    """

    def __init__(self, mean: Tensor, roots: Tensor) -> None:
        self.mean, self.roots = mean, roots

    def to_dict(self) -> dict[str, Any]:
        """Return the class, the images' size and the hash of the filter, ready for JSON."""
        size = [len(self.mean), *self.roots.shape[:2]]
        fitted = digest(self.mean, self.roots)
        return {"inputs": type(self).__name__, "size": size, "fitted": fitted}

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Tensor:
        shape = (len(self.mean), *self.roots.shape[:2])
        white = normals(start, stop, shape, stream=FIELD, seed=seed, device="cpu").double()
        images = torch.stack([self._coloured(image) for image in white])
        return images.to(torch.float32).to(device, dtype)

    def _coloured(self, white: Tensor) -> Tensor:
        """Return the image that white noise ``[C, H, W]`` becomes."""
        spectrum = torch.einsum("hwcd,dhw->chw", self.roots, torch.fft.fft2(white))
        return torch.fft.ifft2(spectrum).real + self.mean[:, None, None]


class SpectrumImages(FieldImages):
    """Stationary Gaussian images with the data's channel means and cross-channel power spectrum."""

    @classmethod
    def fit(cls, x: Tensor) -> SpectrumImages:
        """Fit some hundred images, as the network sees them, ``[n, C, H, W]``."""
        images = checked(x)
        mean = images.mean((0, 2, 3))
        spectra = torch.fft.fft2(images - mean[:, None, None], norm="ortho")
        powers = torch.einsum("nchw,ndhw->hwcd", spectra, spectra.conj()) / len(images)
        return cls(mean, square_root(powers))


class FractalNoise(FieldImages):
    """Stationary Gaussian images whose amplitudes fall as 1 / frequency, as those of photographs.

    Each pixel has mean 0 and variance 1, as the network sees it; channels correlate by ``colour``.
    The mean of an image varies as the lowest frequency does.

    Reference: Field, JOSA A 4 (1987), for the spectrum of photographs.
    """

    def __init__(self, size: tuple[int, int, int], colour: float = 0.9) -> None:
        channels, height, width = size
        down, across = torch.fft.fftfreq(height), torch.fft.fftfreq(width)
        frequency = torch.hypot(down[:, None], across[None]).double()
        frequency[0, 0] = 1 / max(height, width)
        power = frequency.pow(-2)
        covariance = torch.full((channels, channels), colour, dtype=torch.float64)
        covariance.fill_diagonal_(1.0)
        powers = (power / power.mean())[:, :, None, None] * covariance
        super().__init__(torch.zeros(channels, dtype=torch.float64), square_root(powers + 0j))


def square_root(matrices: Tensor) -> Tensor:
    """Return the square roots of positive semi-definite matrices, ``[..., C, C]`` complex."""
    values, vectors = torch.linalg.eigh(matrices)
    return vectors * values.clamp(min=0).sqrt()[..., None, :] @ vectors.mH


@dataclass(frozen=True)
class DeadLeaves(Inputs):
    """Discs of one colour that cover one another until no canvas is left (Matheron 1968).

    Their radii r have a density as r**-3 between the shares ``radii`` of the shorter side, which
    makes the images' statistics those of photographs at every scale (Lee, Mumford and Huang, IJCV
    41, 2001); centres and 8-bit colours are uniform.

    Batches are ``[n, C, H, W]``, normalised as those of `fastlr.ShapeImages` are by default.
    """

    size: tuple[int, int, int]
    radii: tuple[float, float] = (1 / 16, 1 / 2)

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Tensor:
        table = ShapeImages(self.size).table()
        images = torch.stack([self._image(seed, i) for i in indices(start, stop).split(1)])
        values = torch.stack([table[c][images[:, c]] for c in range(self.size[0])], 1)
        return values.to(device, dtype)

    def _image(self, seed: int, index: Tensor) -> Tensor:
        """Return one image of bytes, ``[C, H, W]`` int64: the first leaf over a pixel is seen."""
        channels, height, width = self.size
        image = torch.zeros(channels, height, width, dtype=torch.int64)
        bare = torch.ones(height, width, dtype=torch.bool)
        words_a_leaf = 3 + channels
        for first in range(0, MOST_LEAVES, LEAVES_AT_ONCE):
            if not bare.any():
                break
            count, done = LEAVES_AT_ONCE * words_a_leaf, first * words_a_leaf
            words = random_words(seed, index, LEAVES, count, done).view(LEAVES_AT_ONCE, -1)
            covers = self._covers(words[:, :3].double() / 2**32)
            seen = bare & covers.any(0)
            leaf = covers.to(torch.uint8).argmax(0)
            colours = words[:, 3:] >> 24
            image[:, seen] = colours[leaf[seen]].T
            bare &= ~seen
        return image

    def _covers(self, uniform: Tensor) -> Tensor:
        """Return which pixels each leaf covers, ``[leaves, H, W]``, from three numbers each."""
        _, height, width = self.size
        least, greatest = (share * min(height, width) for share in self.radii)
        # The inverse of the distribution function: 1 / r**2 is uniform.
        inverse_square = uniform[:, 2] * (greatest**-2 - least**-2) + least**-2
        down = (torch.arange(height) + 0.5)[None] - uniform[:, :1] * height
        across = (torch.arange(width) + 0.5)[None] - uniform[:, 1:2] * width
        square = down[:, :, None] ** 2 + across[:, None] ** 2
        return square * inverse_square[:, None, None] <= 1
