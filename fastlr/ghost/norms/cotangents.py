"""The user's cotangents, made ready for the passes of the engine.

They are checked, and each sample is scaled to unit size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlr.errors import InputError, NonFiniteError
from fastlr.ops.deferred_checks import refuse_beyond


class Scaled(NamedTuple):
    """A cotangent ``2^exponent v`` whose samples are scaled to unit size.

    v has the output's shape and dtype, exponent is [B].
    """

    v: Tensor
    exponent: Tensor


Cotangent = Tensor | Callable[[Tensor], "Tensor | Scaled | Iterable[Tensor]"]


_WANTED = (
    "the cotangent must be a tensor of the output's shape, or a function of the output that "
    "returns one"
)


class Pass(NamedTuple):
    """One backward pass of a batch.

    Attributes:
        v: Cotangent, each sample scaled to unit size.
        unscaling: Factors [B] that undo the scaling of squared norms.
        more: Whether other passes of the batch follow.
    """

    v: Tensor
    unscaling: Tensor
    more: bool

    def own(self, sample: int, out_dim: int, most: int) -> tuple[Tensor, Tensor]:
        """Return a sample's cotangent in the size that the caller gave.

        A hook that clips gradients may not show at unit size.

        Args:
            sample: Number of the sample.
            out_dim: Sample axis of the output.
            most: Largest power of two by which the size differs from unit size.

        Returns:
            (cotangent, of size 1 along ``out_dim``; factor that squared norms have for it).
        """
        v = self.v.narrow(out_dim, sample, 1)
        exponent = (self.unscaling[sample].log2() / 2).clamp(-most, most)
        return v * exponent.exp2().to(v.dtype), (2 * exponent).exp2()


def passes(cotangent: Cotangent, output: Tensor, out_dim: int) -> Iterator[Pass]:
    """Yield the backward passes of a batch, each made when it is asked for."""
    if not (isinstance(cotangent, Tensor) or callable(cotangent)):
        raise InputError(f"{_WANTED}, not {_named(cotangent)}")
    made = cotangent if isinstance(cotangent, Tensor) else cotangent(output)
    if isinstance(made, Scaled):
        yield Pass(made.v, torch.exp2(2 * made.exponent.double()), more=False)
        return
    several = _tensors(made)
    current = next(several, None)
    if current is None:
        raise InputError("the cotangent function gave no cotangents")
    while current is not None:
        following = next(several, None)
        yield Pass(*scaled(current, output, out_dim), more=following is not None)
        current = following


def _tensors(made: Any) -> Iterator[Tensor]:
    """Yield the cotangents that were made, one or several; InputError where one is no tensor."""
    several = [made] if isinstance(made, Tensor) else made
    if not isinstance(several, Iterable):
        raise InputError(f"{_WANTED}: it returned {_named(several)}")
    for v in several:
        if not isinstance(v, Tensor):
            raise InputError(f"{_WANTED}: it gave {_named(v)}")
        yield v


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def scaled(v: Tensor, output: Tensor, out_dim: int) -> tuple[Tensor, Tensor]:
    """Scale each sample's cotangent by a power of two to unit size, in the output's dtype.

    Its largest element is then between 1 and 2. The second result undoes this for squared norms.
    Confident networks make cotangents so small that their squares vanish in the model's dtype.
    """
    if v.is_complex() or v.layout != torch.strided:
        kind = "complex" if v.is_complex() else "sparse"
        raise InputError(f"the cotangent is {kind}: give real numbers in a dense tensor")
    if v.shape != output.shape:
        raise InputError(
            f"the cotangent has shape {tuple(v.shape)}, the output {tuple(output.shape)}"
        )
    small = v.is_floating_point() and v.dtype != torch.float64  # float32 holds its values
    v = v.detach().to(output.device, torch.float32 if small else torch.float64)
    others = [axis for axis in range(v.ndim) if axis != out_dim % v.ndim]
    largest = v.abs()  # with amax up to 25 times as fast on a CPU as a norm
    if others:
        largest = largest.amax(others, keepdim=True)
    refuse_beyond(largest, lambda: NonFiniteError("the cotangent has values that are not finite"))
    mantissa = torch.frexp(largest).mantissa
    power = largest / (mantissa + mantissa)  # of two, exact for every finite number
    power.nan_to_num_(1.0)  # a sample of zeros has none
    factors = power.flatten().double()
    return (v / power).to(output.dtype), factors * factors


def generic_cotangent(z: Tensor) -> Tensor:
    """Return a dense random cotangent for an output, always the same."""
    generator = torch.Generator().manual_seed(1)
    v = torch.empty_like(z, memory_format=torch.contiguous_format)
    for part in v if v.ndim > 1 else [v]:
        # No float64 copy of the whole: it may be a language model's logits.
        part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64, device="cpu"))
    return v
