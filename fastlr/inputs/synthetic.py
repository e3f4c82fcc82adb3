"""Generated inputs: images of shapes, noise, time series, tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.errors import InputError
from fastlr.inputs.base import Batch, Inputs, check_dtype
from fastlr.ops.philox import (
    BLOCK,
    STREAMS,
    check_index,
    indices,
    normal_quantiles,
    normals,
    random_words,
    uniform_integers,
)
from fastlr.ops.shape_images import (
    CIRCLE_RADII,
    RECTANGLE_SIDES,
    check_images,
    shape_bounds,
    shape_images,
)

Normalize = str | tuple | None

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise InputError(f"{name} must be an integer of at least 1, got {count!r}")


def _mean_std(normalize: Normalize, channels: int) -> tuple[Tensor, Tensor] | None:
    """Return the float64 mean and standard deviation of each channel, or None.

    ``normalize`` names them; None is for None.
    """
    if normalize is None:
        return None
    if normalize == "imagenet":
        normalize = IMAGENET
    if isinstance(normalize, str) or not isinstance(normalize, Sequence) or len(normalize) != 2:
        raise InputError(f'normalize must be "imagenet", None or (mean, std), got {normalize!r}')
    pair = []
    for name, values in zip(("mean", "std"), normalize, strict=True):
        values = list(values) if isinstance(values, Sequence) else [values] * channels
        if len(values) != channels or not all(
            isinstance(v, (int, float)) and math.isfinite(v) for v in values
        ):
            raise InputError(
                f"normalize: {name} must be one finite number or {channels}, one a channel, got "
                f"{values}"
            )
        pair.append(torch.tensor(values, dtype=torch.float64, device="cpu")[:, None])
    if not (pair[1] > 0).all():
        raise InputError(f"normalize: std must be positive, got {pair[1].flatten().tolist()}")
    return pair[0], pair[1]


class Generated(Inputs):
    """Base of inputs that are a function of their class, their arguments and the seed."""

    def __repr__(self) -> str:
        """Return the constructor call: the first argument, and those that are not the default."""
        first, *others = fields(self)  # type: ignore[arg-type]
        shown = [first, *(f for f in others if getattr(self, f.name) != f.default)]
        arguments = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in shown)
        return f"{type(self).__name__}({arguments})"

    def identity(self, used: int, seed: int) -> str:
        """Return class, arguments and seed, but for arguments that change no value."""
        if type(self).__module__ != __name__:  # a subclass may make others
            return ""
        record = self.to_dict() | {"seed": seed}
        record.pop("channels_last", None)
        record.pop("name", None)
        if record.get("normalize") is not None:
            mean_std = _mean_std(record["normalize"], record["size"][0])
            record["normalize"] = [t.tolist() for t in mean_std or ()]
        return f"arguments:{json.dumps(record, sort_keys=True)}"


@dataclass(frozen=True, repr=False)
class ShapeImages(Generated):
    """Images of overlapping random shapes: the vision inputs of the paper (Section 3.6).

    A canvas in a uniform random colour; over it ``rectangles`` rectangles and ``circles`` circles
    in random order, with random sizes, positions and 8-bit colours.
    :func:`fastlr.ops.shape_images.shape_images` gives the distributions. On a GPU the images are
    made by the Triton kernel of the same name, with the same bits.

    Args:
        size: (C, H, W), C in 1..4.
        rectangles: rectangles an image.
        circles: circles an image.
        normalize: "imagenet" (three channels), (mean, std) with one number or one a channel, in
            units where a byte of 255 is 1: the output is (byte / 255 - mean) / std; None gives byte
            / 255.
        channels_last: give batches ``torch.channels_last`` memory format.
        rectangle_sides: least and greatest side of a rectangle, as shares of the image's height and
            width. The paper says only "random sizes"; the ranges are ours.
        circle_radii: least and greatest radius of a circle, as shares of the image's shorter side.

    Batches are ``[n, C, H, W]``.

    >>> ShapeImages((3, 8, 8)).batch(0, 2, seed=1).shape
    torch.Size([2, 3, 8, 8])
    """

    size: tuple[int, int, int] = (3, 224, 224)
    rectangles: int = 5
    circles: int = 5
    normalize: Normalize = "imagenet"
    channels_last: bool = field(default=False, kw_only=True)
    rectangle_sides: tuple[float, float] = field(default=RECTANGLE_SIDES, kw_only=True)
    circle_radii: tuple[float, float] = field(default=CIRCLE_RADII, kw_only=True)

    def __post_init__(self) -> None:
        channels, height, width = check_images(self.size, self.rectangles, self.circles)
        shape_bounds(height, width, self.rectangle_sides, self.circle_radii)
        for name in ("size", "rectangle_sides", "circle_radii"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.normalize == "imagenet" and channels != 3:
            raise InputError(
                f'normalize="imagenet" needs 3 channels, size has {channels}: '
                "pass (mean, std) or None"
            )
        _mean_std(self.normalize, channels)

    def table(self) -> Tensor:  # [C, 256]
        """Return the output of each byte in each channel, ``[C, 256]`` float32.

        It is rounded once from float64.
        """
        levels = torch.arange(256, dtype=torch.float64, device="cpu")[None] / 255
        mean_std = _mean_std(self.normalize, self.size[0])
        levels = (
            levels.expand(self.size[0], 256)
            if mean_std is None
            else (levels - mean_std[0]) / mean_std[1]
        )
        return levels.float()

    def raw(
        self, start: int, stop: int, *, seed: int = 0, device: torch.device | str | None = None
    ) -> Tensor:
        """Return the images ``start .. stop-1`` as displayable bytes, ``[n, C, H, W]`` uint8."""
        device = torch.get_default_device() if device is None else torch.device(device)
        return self._images(start, stop, seed, device, torch.uint8, None)

    def at(
        self, index: Tensor, *, seed: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:  # [n]
        """Return the images with the numbers ``index``, on its device and in its order.

        They have the bits that `batch` gives.

        Args:
            index: ``[n]`` int64, such as a part of a permutation; numbers from 2**63 on as the
                int64 of the same bits.
            seed: integer in ``[0, 2**64)``.
            dtype: float16, bfloat16, float32 or float64 (None: float32).

        Raises:
            InputError: an argument is out of range.
        """
        index, table = check_index(index), self.table()
        check_dtype(dtype)
        if index.is_cuda:
            # The host need not wait for the GPU.
            table = table.pin_memory().to(index.device, non_blocking=True)
        options = self._options(seed, table, dtype)
        kernel = len(index) > 0 and self._by_kernel("shape_images_at", (index,), index, options)
        return ops.get("shape_images_at", "triton" if kernel else "torch")(index, **options)

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Tensor:
        return self._images(start, stop, seed, device, dtype, self.table())

    def from_device(
        self, n: int, *, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Callable[[Tensor], Tensor] | None:
        """Return ``first -> batch(first, first + n)`` with ``first`` read on the GPU.

        ``first`` is a tensor, [1] int64. Where the Triton kernel does not serve, return None.

        A CUDA graph needs it to be replayed for other images; the kernel waits for nothing on the
        host.
        """
        options = self._options(seed, self.table().to(device), dtype)
        if not self._by_kernel_from(indices(0, 1, device), n, options):
            return None
        return lambda first: ops.get("shape_images_from", "triton")(first, n, **options)

    def _images(
        self,
        start: int,
        stop: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype | None,
        table: Tensor | None,
    ) -> Tensor:
        options = self._options(seed, table, dtype)
        if device.type != "cuda" or start == stop:
            return shape_images(start, stop, device=device, **options)
        first, count = indices(start, start + 1, device), stop - start
        if not self._by_kernel_from(first, count, options):
            return shape_images(start, stop, device=device, **options)
        return ops.get("shape_images_from", "triton")(first, count, **options)

    def _by_kernel_from(self, first: Tensor, n: int, options: dict[str, Any]) -> bool:
        """Return True if a kernel makes ``n`` images from the number in ``first`` on."""
        ends = torch.cat([first, first + (n - 1)])
        return self._by_kernel("shape_images_from", (first, n), ends, options)

    @staticmethod
    def _by_kernel(name: str, args: tuple, ends: Tensor, options: dict[str, Any]) -> bool:
        return ends.is_cuda and ops.has_triton() and ops.images_agree(name, args, ends, options)

    def _options(
        self, seed: int, table: Tensor | None, dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """Keyword arguments of every op that makes these images."""
        names = ("size", "rectangles", "circles", "rectangle_sides", "circle_radii")
        shapes = {name: getattr(self, name) for name in names}
        values = {
            "table": table,
            "dtype": dtype or torch.float32,
            "channels_last": self.channels_last,
        }
        return {"seed": seed, **shapes, **values}


@dataclass(frozen=True, repr=False)
class NoiseImages(Generated):
    """Independent Gaussian noise in every pixel and channel.

    Input type (i) of the paper's ablation (Appendix A.4).

    The paper gives no scale. Here the network sees z ~ N(0, 1), noise of unit variance in the
    *normalised* space, the scale of ImageNet images after the usual normalisation. With
    ``normalize`` the *pixels* are z ~ N(0, 1), unclipped, and the network sees (z - mean) / std. z
    is discretised as :func:`fastlr.ops.philox.normal_quantiles` describes (65536 values; mean 0,
    variance 1, kurtosis 2.9992).

    Args:
        size: (C, H, W), any C.
        normalize: None, "imagenet" or (mean, std) as for :class:`ShapeImages`.

    Batches are ``[n, C, H, W]``.
    """

    size: tuple[int, int, int] = (3, 224, 224)
    normalize: Normalize = None

    def __post_init__(self) -> None:
        if not isinstance(self.size, (tuple, list)) or len(self.size) != 3:
            raise InputError(
                f"size must be three integers (channels, height, width), got {self.size!r}"
            )
        _positive(
            **dict(
                zip(("size's channels", "size's height", "size's width"), self.size, strict=True)
            )
        )
        object.__setattr__(self, "size", tuple(self.size))
        _mean_std(self.normalize, self.size[0])

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Tensor:
        tables = normal_quantiles()[None]
        mean_std = _mean_std(self.normalize, self.size[0])
        if mean_std is not None:
            tables = ((tables.double() - mean_std[0]) / mean_std[1]).float()
        stream, dtype = STREAMS["noise"], dtype or torch.float32
        return normals(
            start,
            stop,
            self.size,
            stream=stream,
            seed=seed,
            tables=tables,
            dtype=dtype,
            device=device,
        )


@dataclass(frozen=True, repr=False)
class GaussianSeries(Generated):
    """Random context windows x ~ N(0, I): the time series inputs of the paper (Section 3.6).

    Args:
        length: time steps.
        features: channels of the series.

    Batches are ``[n, length, features]``, discretised as :func:`fastlr.ops.philox.normal_quantiles`
    describes.

    >>> GaussianSeries(length=96).batch(0, 4, seed=0).shape
    torch.Size([4, 96, 7])
    """

    length: int = 512
    features: int = 7

    def __post_init__(self) -> None:
        _positive(length=self.length, features=self.features)

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Tensor:
        shape, dtype = (self.length, self.features), dtype or torch.float32
        return normals(
            start, stop, shape, stream=STREAMS["series"], seed=seed, dtype=dtype, device=device
        )


@dataclass(frozen=True, repr=False)
class TokenInputs(Generated):
    """Independent, uniformly random tokens, for language models.

    Args:
        vocab_size: Size of the vocabulary, below ``2**31``. Tokens are uniform in
            ``[0, vocab_size)``.
        length: Tokens per sample.
        attention_mask: Add ``attention_mask``, all ones.
        name: Name of the model's argument that takes the tokens. None: its first argument.

    Batches are ``{name: [n, length] int64}``, with ``"attention_mask": [n, length] int64`` if asked
    for, or the tensor alone for ``name=None``.

    >>> sorted(TokenInputs(50257, 16, attention_mask=True).batch(0, 2, seed=0))
    ['attention_mask', 'input_ids']
    """

    vocab_size: int
    length: int
    attention_mask: bool = False
    name: str | None = field(default="input_ids", kw_only=True)

    def __post_init__(self) -> None:
        _positive(vocab_size=self.vocab_size, length=self.length)
        if self.name is None and self.attention_mask:
            raise InputError(
                "attention_mask=True needs the name of the model's argument for the tokens: pass "
                "name= too"
            )
        if self.vocab_size >= 1 << 31:
            raise InputError(f"vocab_size must be below 2**31, got {self.vocab_size}")

    def _make(
        self, start: int, stop: int, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> Batch:
        out = torch.empty(stop - start, self.length, dtype=torch.int64, device=device)
        block = max(1, BLOCK // self.length)
        for begin in range(start, stop, block):
            index = indices(begin, min(begin + block, stop), device)
            words = random_words(seed, index, STREAMS["tokens"], self.length)
            out[begin - start : begin - start + len(index)] = uniform_integers(
                words, self.vocab_size
            )
        if self.name is None:
            return out
        mask = {"attention_mask": torch.ones_like(out)} if self.attention_mask else {}
        return {self.name: out, **mask}
