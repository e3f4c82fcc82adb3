"""A user's loss gives the losses of the samples; each must depend on its own sample alone.

The norm of a sample's gradient exists where its loss depends on its own row of the output and of
the labels. A contrastive loss, a hardest negative, a mean of the batch by which losses are divided:
there the sum's gradient at row b has parts of the other samples' losses, and is no sample's
gradient. So the loss is asked again with the samples in other company.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import FastlrError, InputError, NonFiniteError, first_line
from fastlr.ghost.model.view import FAILURES, sample_count
from fastlr.ghost.model.writes import unchanged
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.torch_private import (
    tree_leaves,
    tree_map,
)

Loss = Callable[[Tensor, Any], Tensor]

_LARGE = 1 << 20  # elements of an output
# Splits of a batch into halves, and single samples, in other company; of a large output one each.
_SPLITS, _SINGLE = 6, 8
_ROUNDING, _ROUNDING_UNDER_AUTOCAST = 1e-3, 5e-2  # of a gradient, in parts of its largest entry
_TINY = 1e-6  # rounding of gradients that vanish, in parts of the largest entry of all samples
_MIXES = (
    "the loss mixes samples: the gradient of a sample's loss changes with the other samples of "
    "its batch (negatives, statistics, ranks or sums of the batch, labels broadcast against each "
    "other), so that no sample has a gradient of its own. Give a loss of each sample's own output "
    "and labels, with what it needs of others computed before and closed over; or measure the "
    "gradient of the whole batch, 'train_grad_norm_batch', alone and in one part. A tensor in y "
    "with as many entries as there are samples is taken for their labels"
)
_OF_A_PLACE = (
    "the loss of a sample depends on its place or on the number of samples (a weight by place, a "
    "division by the batch size), and the samples are measured in parts: pass weights as a part of "
    "y, and take no mean"
)
_RANDOM = (
    "the loss gives another gradient when it is asked again: it draws random numbers, or keeps "
    "something between two calls, so that the norm of a gradient is no property of the model. Draw "
    "the numbers once, before, and use the same in every call"
)


class SampleLosses:
    """A user's loss, without its reduction where it has one.

    Args:
        loss: function (output, y) -> losses.
        out_dim: the samples' axis of the output.

    Raises:
        InputError: ``loss`` cannot be called, or is a class.
    """

    def __init__(self, loss: Loss, out_dim: int) -> None:
        self.given, self.losses, self.out_dim = loss, _unreduced(loss), out_dim

    def state_kept(self) -> AbstractContextManager[Any]:
        """Put back the state of a loss that is a module, after its backward pass."""
        return unchanged(self.given) if isinstance(self.given, nn.Module) else nullcontext()

    def gradient(self, z: Tensor, y: Any, *, whole: bool = True) -> Tensor:
        """Return the gradient of the losses' sum at the output z, in float32 at least.

        Args:
            z: output.
            y: labels.
            whole: these are all samples.

        Raises:
            InputError: Labels that are too few or without values, a loss that fails, one number for
                several samples, or losses that do not depend on the output by autograd.
            NonFiniteError: A loss or its gradient is infinite or not a number.
        """
        samples = sample_count(z, self.out_dim)
        _check_labels(y, samples)
        z, y = _fitted(z, y)
        leaf = z.requires_grad_()
        with self.state_kept(), torch.enable_grad():
            try:
                values = self.losses(leaf.clone(), y)  # which may write to it
            except FAILURES as error:
                if isinstance(error, FastlrError) or out_of_memory(error):
                    raise
                raise _refusal(error, y, samples, whole) from error
            _refuse_other_than_losses(values, samples)
            if values.requires_grad and not bool(values.isfinite().all()):
                raise NonFiniteError(
                    "a loss is not finite: check the labels and the model's output"
                )
            gradient = _grad(values.sum(), leaf)
        if gradient is None:
            raise InputError(
                "the loss does not depend on the output by autograd: do not detach or use .item() "
                "in it"
            )
        if not bool(gradient.isfinite().all()):
            raise NonFiniteError(
                "the gradient of a loss is not finite, though the loss is (a square root at "
                "zero?): add a small number under the root, or measure other samples"
            )
        if values.numel() == 1 and _samples_moved(gradient, self.out_dim) > 1:
            raise _reduced("one number", samples)  # of an axis; a sample that is kept moves its own
        return gradient

    def gradient_of_all(self, z: Tensor, y: Any) -> Tensor:
        """Return `gradient` of all samples, which may mix, where the loss is not random.

        Raises:
            InputError: The loss gives another gradient when it is asked again. Others: as for
                `gradient`.
        """
        gradient = self.gradient(z, y)
        self._require_the_same_again(*_fitted(z, y), gradient)
        return gradient

    def own_gradient(self, z: Tensor, y: Any, *, whole: bool) -> Tensor:
        """Return `gradient` where each loss depends on its own sample alone.

        Args:
            z: output.
            y: labels.
            whole: these are all samples. A loss may then weigh each by a constant of its place (a
                closure over a tensor of weights); of parts of the samples it must be a function of
                the output's rows and the labels'.

        Raises:
            InputError: The loss mixes samples, or is random. Others: as for `gradient`.
        """
        gradient = self.gradient(z, y, whole=whole)
        z, y = _fitted(z, y)
        self._require_the_same_again(z, y, gradient)
        count = sample_count(z, self.out_dim)
        if count == 1:
            return gradient
        axes = _label_axes(y, count, self.out_dim % z.ndim)
        if not any(self._losses_are_of_a_sample_each(z, y, axis) for axis in axes):
            raise InputError(_MIXES)
        twice = torch.arange(count, device="cpu").roll(1).repeat(2)
        if not (whole or self._same(self._rows(gradient, twice), self._asked(z, y, twice, 0))):
            raise InputError(_OF_A_PLACE)
        return gradient

    def require_no_company(self, z: Tensor, y: Any) -> None:
        """Raise InputError where a loss that is given single samples mixes those of a batch.

        A loss that reduces several samples to one number, or fails on them, may be right for single
        ones: it passes.
        """
        try:
            self.gradient(z, y)
        except FastlrError:
            return
        self.own_gradient(z, y, whole=False)

    def _require_the_same_again(self, z: Tensor, y: Any, gradient: Tensor) -> None:
        """Raise InputError where the same samples give another gradient."""
        every = torch.arange(sample_count(z, self.out_dim), device="cpu")
        if not self._same(gradient, self._asked(z, y, every, None)):
            raise InputError(_RANDOM)

    def _losses_are_of_a_sample_each(self, z: Tensor, y: Any, label_axis: int | None) -> bool:
        """Return True if samples have the same gradients in other company, whatever their places.

        Args:
            z: Output, as the loss gets it.
            y: Labels.
            label_axis: Axis of the labels that goes with the samples; None: they stay in place.
        """
        count = sample_count(z, self.out_dim)
        places = torch.arange(count, device="cpu")
        for order in (places, places.roll(1)):
            before = self._asked(z, y, order, label_axis)
            for kept in _kept_samples(count, is_large=z.numel() > _LARGE):
                source = kept[:1].repeat(count)
                source[kept] = kept
                got = self._asked(z, y, order[source], label_axis)
                if before is None or got is None:
                    return False
                if not self._same(self._rows(before, kept), self._rows(got, kept)):
                    return False
        return True

    def _asked(self, z: Tensor, y: Any, source: Tensor, label_axis: int | None) -> Tensor | None:
        """Return the gradient for a batch of some samples; None where the loss does not take it.

        Args:
            z: Output, as the loss gets it.
            y: Labels.
            source: Sample at each place of the batch.
            label_axis: Axis of the labels that goes with the samples; None: they stay in place.
        """
        leaf = self._rows(z, source).requires_grad_()
        if label_axis is not None:
            y = _picked(y, source, label_axis, sample_count(z, self.out_dim))
        try:
            with self.state_kept(), torch.enable_grad():
                gradient = _grad(self.losses(leaf.clone(), y).sum(), leaf)
        except Exception as error:  # a loss may raise anything
            if out_of_memory(error):
                raise
            return None
        return torch.zeros_like(leaf) if gradient is None else gradient

    def _rows(self, t: Tensor, samples: Tensor) -> Tensor:
        return t.index_select(self.out_dim, samples.to(t.device))

    def _same(self, want: Tensor | None, got: Tensor | None) -> bool:
        """Return True if gradients of the same samples are the same but for rounding."""
        if want is None or got is None:
            return False
        size = _sizes(want, self.out_dim)
        low = torch.is_autocast_enabled(got.device.type)
        allowed = (_ROUNDING_UNDER_AUTOCAST if low else _ROUNDING) * size + _TINY * size.max()
        return bool((_sizes(got - want, self.out_dim) <= allowed).all())


def _check_labels(y: Any, samples: int) -> None:
    """Raise InputError for fewer labels than samples; one may be for all."""
    if isinstance(y, Tensor) and 1 < y.numel() < samples:
        raise InputError(_other_length(y, samples))


def _other_length(y: Tensor, samples: int) -> str:
    return (
        f"y has shape {list(y.shape)} for {samples} samples: give labels of each input, samples "
        "along axis 0"
    )


def _refusal(error: Exception, y: Any, samples: int, whole: bool) -> InputError:
    """Return the error for what a loss raises: its own words, and what to look at first."""
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(y)):
        remedy = f"y is of type {type(y).__name__}: give a tensor, as by torch.as_tensor(y)"
    elif isinstance(y, Tensor) and y.ndim and samples not in y.shape:
        remedy = _other_length(y, samples)
    else:
        remedy = (
            "give y as it takes labels: classes as integers from 0 on (y.long()), other targets as "
            "floats in the shape of the output"
        )
        if not whole:
            remedy += "; pass weights that it holds by place as a part of y"
    of = "" if whole else "a part of "
    said = f"{type(error).__name__}: {first_line(error)[:200]}"
    return InputError(f"the loss fails on {of}the samples ({said}): {remedy}")


def _reduced(kind: str, samples: int) -> InputError:
    return InputError(
        f"the loss gave {kind} for {samples} samples: it must return the losses of the samples, "
        "unreduced, such as F.cross_entropy(output, y, reduction='none')"
    )


def _refuse_other_than_losses(values: Any, samples: int) -> None:
    """Raise InputError for what a loss gave in place of losses of the samples."""
    if not isinstance(values, Tensor):
        raise _reduced(f"a {type(values).__name__}", samples)
    if values.is_complex():
        raise _reduced("a complex tensor", samples)
    if values.layout != torch.strided:
        raise _reduced("a sparse tensor", samples)
    if values.ndim == 0 and samples > 1:
        raise _reduced("one number", samples)


def _samples_moved(gradient: Tensor, axis: int) -> int:
    """Return how many samples have a gradient other than zero."""
    return int(_sizes(gradient, axis).count_nonzero())


def _sizes(gradient: Tensor, axis: int) -> Tensor:
    """Return the largest entry of each sample's gradient, without its sign."""
    return gradient.movedim(axis, 0).reshape(gradient.shape[axis], -1).abs().amax(1)


def _kept_samples(count: int, *, is_large: bool) -> list[Tensor]:
    """Return the samples that stay in their places while copies of one of them replace the others.

    They are some single samples, and halves of the batch. Any two of up to 64 samples are once in
    different halves.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count), device="cpu")
    digits = (count - 1).bit_length()
    numbers = (torch.arange(count, device="cpu") << digits) // count
    kept = list(order[: 1 if is_large else _SINGLE].split(1))
    for digit in range(digits)[-1 if is_large else -_SPLITS :]:
        is_first_half = (numbers >> digit) % 2 == 0
        kept += [order[is_first_half], order[~is_first_half]]
    return kept


def _label_axes(y: Any, count: int, out_dim: int) -> list[int | None]:
    """Return the axes along which all labels have the samples; [None] where some do not."""
    tensors = [t for t in tree_leaves(y) if isinstance(t, Tensor) and t.ndim]
    axes: list[int | None] = []
    for axis in sorted({0, out_dim}):
        if tensors and all(_has_samples(t, axis, count) for t in tensors):
            axes.append(axis)
    return axes or [None]


def _has_samples(t: Any, axis: int, count: int) -> bool:
    return isinstance(t, Tensor) and t.ndim > axis and t.shape[axis] == count


def _picked(y: Any, rows: Tensor, axis: int, count: int) -> Any:
    """Return the labels of some samples; tensors of another length stay whole."""

    def pick(t: Any) -> Any:
        return t.index_select(axis, rows.to(t.device)) if _has_samples(t, axis, count) else t

    return tree_map(pick, y)


def _fitted(z: Tensor, y: Any) -> tuple[Tensor, Any]:
    """Return output and labels as a loss is given them, on the output's device.

    Outputs in half precision, and targets in the output's own, become float32.
    """
    half = torch.finfo(z.dtype).bits < 32
    fitted = z.detach().to(torch.float32 if half else z.dtype)

    def fit(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.to(fitted.device, fitted.dtype if half and t.dtype == z.dtype else t.dtype)

    return fitted, tree_map(fit, y)


def _grad(value: Tensor, leaf: Tensor) -> Tensor | None:
    """Return the gradient of a number at the output; None where it does not depend on it."""
    if not value.requires_grad:
        return None
    return torch.autograd.grad(value, leaf, allow_unused=True)[0]


def _unreduced(loss: Loss) -> Loss:
    """Return the loss without its reduction, where it has one."""
    if isinstance(loss, type) or not callable(loss):
        kind = loss.__name__ if isinstance(loss, type) else type(loss).__name__
        raise InputError(
            f"loss must be a function (output, y) -> losses, or an instance of a loss, not {kind}"
        )
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction") or isinstance(loss, torch.jit.ScriptModule):
            return loss  # a constant, there
        unreduced: Any = copy(loss)  # of the module alone: its parameters and buffers are the same
        unreduced.reduction = "none"
        return unreduced
    try:
        reduces = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        reduces = False
    return partial(loss, reduction="none") if reduces else loss  # type: ignore[call-arg]
