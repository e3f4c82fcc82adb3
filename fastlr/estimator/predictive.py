"""Predictive distributions P(y|x), and the cotangents that measure their scores.

The cotangents are at the model's output.

The local redundancy is a mean of ``E_{y ~ P(.|x)} ||grad_theta log P(y|x)||^2`` (paper, Theorem 3.4
and Corollary 3.6). With z the output and J = dz/dtheta of one sample, that expectation is ``tr(J^T
F J)``, F the Fisher matrix of P at z. So any random v with ``E v v^T = F`` has ``E ||J^T v||^2``
equal to it, at the price of one backward pass:

- ``"rademacher"`` (default): ``v = F^(1/2) xi`` with random signs xi, through the root of F that
  has no cancellation (see :class:`Categorical`). No label noise: for two classes ``||J^T v||^2`` is
  the expectation itself.
- ``"sampled"``: ``v = grad_z log P(y|z)`` with y drawn from P, as in the paper.
- ``"exact"``: every column of ``F^(1/2)`` in turn; the squared norms of the passes sum to the
  expectation.

Random draws are a pure function of (seed, index of the sample, element): they do not depend on the
chunk or the device. All arithmetic is in float64, whatever the dtype of the output, so that logit
gaps of 100 and more lose nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastlr import ops
from fastlr.errors import InputError, NonFiniteError
from fastlr.ops.deferred_checks import may_wait_for_device, refuse_where
from fastlr.ops.fisher import (
    categorical_root,
    categorical_values,
    normals,
    scaled_blocks,
    signs,
    uniforms,
)
from fastlr.ops.philox import check_seed

PROBES = ("rademacher", "sampled", "exact")

_KERNEL_CLASSES = 4096  # the most that the Triton kernel of softmax cotangents takes


def _check_index(index: Tensor | range, size: int, device: torch.device) -> Tensor:
    if isinstance(index, range):
        index = torch.arange(index.start, index.stop, index.step, device="cpu")
    if (
        not isinstance(index, Tensor)
        or index.ndim != 1
        or index.is_floating_point()
        or index.dtype == torch.bool
    ):
        raise InputError(
            "index must be a range or a 1-D integer tensor: the global number of each sample"
        )
    if len(index) != size:
        raise InputError(
            f"index numbers {len(index)} samples but the output holds {size}: pass one number per "
            "sample"
        )
    index = index.to(device=device, dtype=torch.int64)
    if size and may_wait_for_device() and int(index.min()) < 0:
        raise InputError("index holds a negative number: samples are numbered from 0")
    return index


@dataclass(frozen=True)
class _Asked:
    """What is asked of a predictive at an output, checked; see `Predictive.cotangent`."""

    probe: str
    index: Tensor
    seed: int
    sample_dim: int
    counted: Tensor | None


class Predictive(ABC):
    """A distribution of the label given the model's output.

    Subclasses say how its score reaches the output.
    """

    limit: int

    def cotangent(
        self,
        output: Tensor,
        probe: str,
        index: Tensor | range,
        seed: int,
        *,
        sample_dim: int = 0,
        counted: Tensor | None = None,
    ) -> Tensor | Iterator[Tensor]:
        """Return the cotangent v at the output, one per sample.

        ``E v v^T`` is the Fisher matrix of P at the output.

        Args:
            output: the model's output; its axis ``sample_dim`` numbers the samples. Any floating
                dtype.
            probe: ``"rademacher"``, ``"sampled"`` or ``"exact"``.
            index: the global number of each sample (range or 1-D integer tensor, one per sample, at
                least 0).
            seed: from 0 to 2^64 - 1. The draws depend on (seed, index, element) only.
            sample_dim: the sample axis of the output.
            counted: boolean [B, positions], False where a position of these samples is padding:
                those have no label. For `Categorical` alone.

        Returns:
            A float64 tensor shaped like ``output``; its sign has no meaning. For ``"exact"`` an
            iterator over such tensors (deterministic; no draws), whose passes' squared norms sum to
            the label expectation.

        Raises:
            InputError: an unknown probe, a wrong shape, index or seed, or more exact passes than
                ``limit``.
            NonFiniteError: the output holds NaN, or values that give no distribution.
        """
        asked = self._checked(output, probe, index, seed, sample_dim, counted)
        with torch.no_grad():
            return self._cotangent(output.detach(), asked)

    def differentiable_cotangent(
        self, output: Tensor, probe: str, index: Tensor | range, seed: int, **where: Any
    ) -> Tensor | Iterator[Tensor]:
        """Return `cotangent`, with the graph that leads to the output.

        Not for ``"sampled"``: drawn labels have no derivative.
        """
        return self._cotangent(output, self._checked(output, probe, index, seed, **where))

    def scaled_cotangent(
        self, output: Tensor, probe: str, index: Tensor | range, seed: int, **where: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return `cotangent`, holding nothing larger than a tensor of the output's dtype.

        ``where`` stands for its sample_dim and counted.

        Returns:
            (v, exponent) with ``2^exponent v`` the cotangent: v of the output's shape and dtype,
            each sample scaled to unit size; exponent [B] int64. None where this way is not needed.
        """
        return None

    def _checked(
        self,
        output: Tensor,
        probe: str,
        index: Any,
        seed: int,
        sample_dim: int = 0,
        counted: Tensor | None = None,
    ) -> _Asked:
        if probe not in PROBES:
            raise InputError(
                f"unknown probe {probe!r}: choose one of {', '.join(map(repr, PROBES))}"
            )
        if not isinstance(output, Tensor) or not output.is_floating_point():
            what = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                f"the output must be a floating-point tensor, not {what}: pick it with output="
            )
        seed = check_seed(seed)
        if not -output.ndim <= sample_dim < output.ndim:
            raise InputError(
                f"the output has shape {tuple(output.shape)}: no axis {sample_dim} for the samples"
            )
        sample_dim %= output.ndim
        index = _check_index(index, output.shape[sample_dim], output.device)
        if counted is not None and not isinstance(self, Categorical):
            refuse_where(
                ~counted,
                lambda: InputError(
                    f"some positions of the inputs are padding, but {self!r} counts them all: give "
                    "inputs without padding"
                ),
            )
        return _Asked(probe, index, seed, sample_dim, counted)

    @abstractmethod
    def _cotangent(self, z: Tensor, asked: _Asked) -> Tensor | Iterator[Tensor]:
        """Do the work of :meth:`cotangent` on checked arguments."""

    def _check_count(self, count: int, what: str) -> None:
        if count > self.limit:
            raise InputError(
                f"probe='exact' needs {count} backward passes ({what}), more than "
                f"limit={self.limit}: use probe='rademacher', or "
                f"{type(self).__name__}(limit={count})"
            )


@dataclass(frozen=True, eq=False)
class Categorical(Predictive):
    """P = softmax of the logits along ``dim``.

    Outputs with several positions have independent labels, summed.

    With p = softmax(z), s = sqrt(p), k = argmax p and signs xi (xi_k = 0), t = <s, xi>, the
    rademacher cotangent is ``v_k = -s_k t`` and ``v_j = s_j xi_j - p_j t / (1 + s_k)`` for the
    other j. It is the square root ``diag(s) H`` of ``F = diag(p) - p p^T``, H the Householder
    reflection that maps s to the axis k, so that ``E v v^T = F`` for every C; for two classes ``v =
    +-sqrt(p_0 p_1) (1, -1)``, the same up to its sign in every draw. The sampled cotangent is ``e_y
    - p``, with ``1 - p_y`` as the sum of the other classes.

    Args:
        dim: the class axis of the output, as the model returns it (size C of at least 2).
        mask: boolean, True where a position counts, broadcastable to the output's shape without
            ``dim``. Where it has a sample axis longer than 1, its rows are the global samples (row
            ``index`` is used). None: all count.
        limit: most backward passes that ``probe="exact"`` may take: (C - 1) for each position that
            counts.

    A logit of -inf is a class of probability zero.

    >>> logits = torch.tensor([[0.0, 0.0]])
    >>> Categorical().cotangent(logits, "rademacher", range(1), seed=0).abs()
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """

    dim: int = -1
    mask: Tensor | None = None
    _: KW_ONLY
    limit: int = 1024
    _moved: dict[torch.device, tuple[int, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Check the mask."""
        if self.mask is not None and (
            not isinstance(self.mask, Tensor) or self.mask.dtype != torch.bool
        ):
            raise InputError("mask must be a boolean tensor, True where a position counts")

    def __repr__(self) -> str:
        """Return the constructor call, the mask by its shape."""
        mask = "" if self.mask is None else f", mask=<{'x'.join(map(str, self.mask.shape))}>"
        return f"Categorical(dim={self.dim}{mask})"

    def _on(self, device: torch.device) -> Tensor:
        """Return the mask on a device, where it stays.

        A CUDA graph cannot copy it from the host.
        """
        assert self.mask is not None
        if self.mask.device == device or self.mask.is_inference():
            # An inference tensor does not tell when it changes.
            return self.mask.to(device)
        if device not in self._moved or self._moved[device][0] != self.mask._version:
            self._moved[device] = self.mask._version, self.mask.to(device)
        return self._moved[device][1]

    def _positions(self, shape: torch.Size, dim: int, asked: _Asked) -> Tensor | None:
        """Return the mask as [B, P], or None."""
        index, counted = asked.index, asked.counted
        if counted is not None and counted.numel() * shape[dim] != math.prod(shape):
            raise InputError(
                f"the inputs' padding mask {tuple(counted.shape)} is not of the output's positions "
                f"{tuple(shape)}: pass Categorical(mask=...) for the positions that count"
            )
        if self.mask is None:
            return None if counted is None else counted.to(index.device).reshape(len(index), -1)
        positions = [size for axis, size in enumerate(shape) if axis != dim]
        axis = asked.sample_dim - (dim < asked.sample_dim)
        mask = self._on(index.device)
        if mask.ndim == len(positions) and mask.shape[axis] > 1:
            rows = mask.shape[axis]
            refuse_where(
                index >= rows,
                lambda: InputError(
                    f"mask has {rows} rows but sample {int(index.max())} is asked for: its rows "
                    "are the global samples; give it one row for each, or size 1 (or no) sample "
                    "axis to use it for all"
                ),
            )
            mask = mask.index_select(axis, index.clamp(max=rows - 1))
        try:
            mask = mask.broadcast_to(positions)
        except RuntimeError:
            raise InputError(
                f"mask of shape {tuple(self.mask.shape)} does not broadcast to the positions "
                f"{tuple(positions)}: the output's shape {tuple(shape)} without the class axis "
                f"{dim}"
            ) from None
        mask = mask.movedim(axis, 0).reshape(len(index), -1)
        return mask if counted is None else mask & counted.to(mask.device).reshape(mask.shape)

    def _rows(
        self, z: Tensor, asked: _Asked
    ) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
        """Logits as [B, P, C], the mask as [B, P] or None, and the way back."""
        sample_dim = asked.sample_dim
        if not -z.ndim <= self.dim < z.ndim or self.dim % z.ndim == sample_dim:
            raise InputError(
                f"Categorical(dim={self.dim}) on an output of shape {tuple(z.shape)} whose axis "
                f"{sample_dim} numbers the samples: dim must be another axis; for a single logit "
                "per sample use Bernoulli()"
            )
        dim = self.dim % z.ndim
        classes = z.shape[dim]
        if classes < 2:
            raise InputError(
                f"the class axis {dim} of the output {tuple(z.shape)} has size {classes}: a "
                "softmax over one class is always certain; a single logit is Bernoulli(), a "
                "regression Gaussian()"
            )
        mask = self._positions(z.shape, dim, asked)
        moved = z.movedim((sample_dim, dim), (0, -1))

        def restore(v: Tensor) -> Tensor:
            return v.reshape(moved.shape).movedim((0, -1), (sample_dim, dim))

        return moved.reshape(len(asked.index), -1, classes), mask, restore

    def scaled_cotangent(
        self, output: Tensor, probe: str, index: Tensor | range, seed: int, **where: Any
    ) -> tuple[Tensor, Tensor] | None:
        """See `Predictive.scaled_cotangent`; for outputs that no kernel takes."""
        asked = self._checked(output, probe, index, seed, **where)
        z = output.detach()
        with torch.no_grad():
            rows, mask, restore = self._rows(z, asked)
            if probe == "exact" or (
                ops.backend_for(z) == "triton" and rows.shape[-1] <= _KERNEL_CLASSES
            ):
                return None
            if mask is not None and z.device.type == "cpu" and bool(mask.all()):
                mask = None

            values = categorical_values(rows, probe, asked.index, asked.seed)

            def block(samples: slice, positions: slice) -> Tensor:
                v = values(samples, positions)
                return v if mask is None else torch.where(mask[samples, positions, None], v, 0.0)

            v, exponent = scaled_blocks(block, rows.shape, z.dtype, z.device, refuse=_refuse)
            return restore(v), exponent

    def _cotangent(self, z: Tensor, asked: _Asked) -> Tensor | Iterator[Tensor]:
        rows, mask, restore = self._rows(z, asked)
        probe, index, seed = asked.probe, asked.index, asked.seed
        if probe == "rademacher" and not rows.requires_grad:
            v = ops.run("categorical_root_cotangent", rows, index, seed)
            return restore(_counted_only(v, mask))
        if probe != "exact":
            values = categorical_values(rows, probe, index, seed)
            v = values(slice(0, len(rows)), slice(0, rows.shape[1]))
            return restore(_counted_only(v, mask))
        root = _counted_only((rows.double().log_softmax(-1) / 2).exp_(), mask)
        classes = rows.shape[-1]
        positions = range(rows.shape[1]) if mask is None else mask.any(0).nonzero()[:, 0].tolist()
        self._check_count(
            len(positions) * (classes - 1), f"{len(positions)} positions, {classes} classes"
        )
        return map(restore, _categorical_columns(root, root.argmax(-1, keepdim=True), positions))


def _counted_only(v: Tensor, mask: Tensor | None) -> Tensor:
    """Set cotangents (or the root) [B, P, C] to zero at positions that do not count.

    NaN is refused at the others.
    """
    if mask is None:
        _refuse(v.isnan())
        return v
    _refuse(v.isnan() & mask[..., None])
    return torch.where(mask[..., None], v, 0.0)


def _refuse(bad: Tensor) -> None:
    message = (
        "the output holds NaN, +inf or only -inf where a softmax is taken: no predictive "
        "distribution exists; look for overflow in the model (its dtype, its weights) or mask the "
        "position"
    )
    refuse_where(bad, lambda: NonFiniteError(message))


def _categorical_columns(
    root: Tensor, best: Tensor, positions: range | list[int]
) -> Iterator[Tensor]:
    """Yield the columns of the root, C - 1 for each position.

    A sample's column j is its j-th class after ``best``.
    """
    classes = root.shape[-1]
    for position in positions:
        row, top = root[:, position], best[:, position]
        for step in range(1, classes):
            xi = torch.zeros_like(row).scatter_(-1, (top + step) % classes, 1.0)
            v = torch.zeros_like(root)
            v[:, position] = categorical_root(row, top, xi)
            yield v


@dataclass(frozen=True, eq=False)
class _ByElement(Predictive):
    """A distribution whose Fisher matrix is diagonal."""

    limit: int = field(default=1024, kw_only=True, repr=False)

    @abstractmethod
    def _label_or_root(self, z: Tensor, asked: _Asked) -> Tensor:
        """Return the score of drawn labels, or the root of the Fisher matrix, in z's shape."""

    def _cotangent(self, z: Tensor, asked: _Asked) -> Tensor | Iterator[Tensor]:
        v = self._label_or_root(z, asked)
        if asked.probe == "rademacher":
            return v * _drawn(signs, v, asked)
        return v if asked.probe == "sampled" else self._columns(v, asked.sample_dim)

    def _columns(self, root: Tensor, sample_dim: int) -> Iterator[Tensor]:
        """Return the root at one element of each sample and zero elsewhere, for all elements."""
        shape = [1 if axis == sample_dim else size for axis, size in enumerate(root.shape)]
        number = torch.arange(math.prod(shape), device=root.device).view(shape)
        self._check_count(number.numel(), "one for each output element")
        return (torch.where(number == k, root, 0.0) for k in range(number.numel()))


def _drawn(draw: Callable[..., Tensor], like: Tensor, asked: _Asked) -> Tensor:
    """Return random numbers for the elements of all samples, in the shape of a tensor."""
    moved = like.movedim(asked.sample_dim, 0)
    numbers = draw(asked.index, moved[:1].numel(), asked.seed)
    return numbers.view(moved.shape).movedim(0, asked.sample_dim)


@dataclass(frozen=True, eq=False)
class Bernoulli(_ByElement):
    """P(y = 1) = sigmoid(z) for each element of the output, independent, log-likelihoods summed.

    Rademacher: ``v = +-sqrt(p (1 - p)) = +-1 / (2 cosh(z/2))``, exact for one logit per sample.
    Sampled: ``y - p``.

    Args:
        limit: most backward passes that ``probe="exact"`` may take: one for each output element of
            a sample.
    """

    def _label_or_root(self, z: Tensor, asked: _Asked) -> Tensor:
        message = (
            "the output holds NaN where a sigmoid is taken: no predictive distribution exists; "
            "look for overflow in the model (its dtype, its weights)"
        )
        refuse_where(z.isnan(), lambda: NonFiniteError(message))
        z = z.double()
        if asked.probe != "sampled":
            half = (-z.abs() / 2).exp()
            return half / (1 + half * half)
        rare = torch.sigmoid(-z.abs())  # probability of the less likely label
        v = torch.where(_drawn(uniforms, z, asked) < rare, 1 / (1 + (-z.abs()).exp()), -rare)
        return v * torch.where(z > 0, -1.0, 1.0)


@dataclass(frozen=True, eq=False)
class Gaussian(_ByElement):
    """P = N(output, sigma^2 I), log-likelihood summed over all output elements of a sample.

    Rademacher: ``v = xi / sigma`` with random signs. Sampled: ``v = noise / sigma`` with normal
    noise.

    Args:
        sigma: standard deviation in the units of the output, positive.
        limit: most backward passes that ``probe="exact"`` may take: one for each output element of
            a sample.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        """Check sigma."""
        if isinstance(self.sigma, bool) or not isinstance(self.sigma, (int, float)):
            raise InputError(f"sigma must be a number, not {type(self.sigma).__name__}")
        if not (math.isfinite(self.sigma) and self.sigma > 0):
            raise InputError(f"sigma must be positive and finite, not {self.sigma}")

    def _label_or_root(self, z: Tensor, asked: _Asked) -> Tensor:
        message = (
            "the output holds NaN or infinity where a Gaussian mean is taken; look for overflow "
            "in the model (its dtype, its weights)"
        )
        refuse_where(~z.isfinite(), lambda: NonFiniteError(message))
        if asked.probe == "sampled":
            return _drawn(normals, z, asked) / self.sigma
        return torch.full_like(z, 1 / self.sigma, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(_ByElement):
    """P = N(mean, diag(deviation^2)), both learned, as a stochastic policy's or a forecast's.

    The output holds the means and then the logarithms of the deviations, in equal halves of the
    axis ``dim``. Log-likelihoods are summed. With respect to mean and log deviation the Fisher
    matrix is ``diag(1 / deviation^2, 2)``. Rademacher: ``v = (xi / deviation, sqrt(2) xi')`` with
    random signs. Sampled: ``v = (noise / deviation, noise^2 - 1)`` with normal noise.

    Args:
        dim: the axis of the output that holds both, of an even size.
        limit: most backward passes that ``probe="exact"`` may take: one for each output element of
            a sample.

    >>> output = torch.tensor([[3.0, 0.0]])  # mean 3, deviation 1
    >>> DiagonalGaussian().cotangent(output, "rademacher", range(1), seed=0).abs()
    tensor([[1.0000, 1.4142]], dtype=torch.float64)
    """

    dim: int = -1

    def _label_or_root(self, z: Tensor, asked: _Asked) -> Tensor:
        log_deviation = self._log_deviation(z, asked.sample_dim)
        precision = torch.exp(-log_deviation)
        message = (
            "the output holds NaN or infinity where a Gaussian's mean and log deviation are taken, "
            "or a log deviation too small for a float; look for overflow in the model"
        )
        refuse_where(
            ~(z.isfinite().all() & precision.isfinite().all()), lambda: NonFiniteError(message)
        )
        if asked.probe == "sampled":
            noise = _drawn(normals, log_deviation, asked)
            return torch.cat([noise * precision, noise.square() - 1], self.dim)
        return torch.cat([precision, torch.full_like(precision, math.sqrt(2))], self.dim)

    def _log_deviation(self, z: Tensor, sample_dim: int) -> Tensor:
        """Return the second half of the output, in float64."""
        if not -z.ndim <= self.dim < z.ndim or self.dim % z.ndim == sample_dim:
            raise InputError(
                f"{self!r} on an output of shape {tuple(z.shape)} whose axis {sample_dim} numbers "
                "the samples: dim must be another axis"
            )
        size = z.shape[self.dim]
        if size < 2 or size % 2:
            raise InputError(
                f"axis {self.dim} of the output {tuple(z.shape)} has size {size}: give the means "
                "and then as many log deviations; a Gaussian of fixed deviation is Gaussian(sigma)"
            )
        return z.narrow(self.dim, size // 2, size // 2).double()
