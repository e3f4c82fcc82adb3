"""A user's loss gives the losses of the samples; each must depend on its own sample alone.

The norm of a sample's gradient exists where its loss depends on its own row of the output and of
the labels. A contrastive loss, a hardest negative, a mean of the batch by which losses are divided:
there the sum's gradient at row b has parts of the other samples' losses, and is no sample's
gradient. So the loss is asked again with the samples in other company.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fastlr.errors import FastlrError, InputError, NonFiniteError, first_line
from fastlr.ghost.model_io import FAILURES, sample_count
from fastlr.ghost.verification.agreement import agree
from fastlr.ghost.writes import unchanged
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.torch_private import (
    hooks_of_all_modules,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

Loss = Callable[[Tensor, Any], Tensor]

_SMALL = 1 << 14  # elements of an output whose samples are asked for until every two were apart
_SINGLE = 32  # samples at most that are among copies of themselves alone
_OF_LARGE = 3  # splits of the samples of larger outputs, and samples alone
_FEWEST, _AGAIN = 6, 2  # splits: at least, of a loss that has passed
_ALONE = 3  # times that the loss of a single sample is asked again
_MARGIN = 32  # differences of this many times the measured rounding are rounding
_NOISE = 3e-4  # most rounding of gradients, in parts of the largest one
# Relative difference of gradients that is taken for rounding, by the digits that they have.
_ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-9}
_times: WeakIdKeyDictionary = WeakIdKeyDictionary()  # loss -> shapes -> how often it was asked
_MIXES = (
    "the loss mixes samples: the gradient of a sample's loss changes with the other samples of "
    "its batch (negatives, statistics, ranks or sums of the batch, labels broadcast against each "
    "other), so that no sample has a gradient of its own. Give a loss of each sample's own output "
    "and labels, with what it needs of others computed before and closed over; or measure the "
    "gradient of the whole batch, 'train_grad_norm_batch', alone and in one part"
)
_OF_A_PLACE = (
    "the loss of a sample depends on its place or on the number of samples (a weight by place, a "
    "division by the batch size), and the samples are measured in parts: pass weights as a part of "
    "y, and take no mean"
)
_OF_ANOTHER = (
    "the loss of a sample is that of another: there are as many losses as samples, and two of them "
    "depend on the output at the same place, whatever sample is there (one loss for all, a choice "
    "by place). Give the loss of each sample's own output and labels; constant weights may "
    "multiply it, zeros among them"
)
_RANDOM = (
    "the loss gives another gradient when it is asked again: it draws random numbers, or keeps "
    "something between two calls, so that the norm of a gradient is no property of the model. Draw "
    "the numbers once, before, and use the same in every call"
)
# Losses of torch whose elements are of a sample each, for targets of the output's shape (classes).
_ELEMENTWISE: tuple[Any, ...] = (
    F.binary_cross_entropy_with_logits,
    F.huber_loss,
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
    nn.BCEWithLogitsLoss,
    nn.HuberLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.SmoothL1Loss,
)
_OF_CLASSES: tuple[Any, ...] = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)


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
                values = self.losses(leaf, y)
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
        if not self._known(z, y):
            _Company(self, *_fitted(z, y), gradient).require_the_same_again()
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
        if not self._known(z, y):
            company = _Company(self, *_fitted(z, y), gradient)
            company.require_the_same_again()
            if company.count > 1:
                company.require_none(whole=whole)
        return gradient

    def require_no_company(self, singles: Sequence[tuple[Tensor, Any]]) -> None:
        """Raise InputError where the losses of single samples mix samples that come together.

        A loss that reduces several samples to one number, or fails on them, may be right for single
        ones: it passes.

        Args:
            singles: output and labels of each.
        """
        outputs, labels = zip(*singles, strict=True)
        if len({z.shape for z in outputs}) > 1:
            return
        z, y = torch.cat(outputs, self.out_dim), _joined(labels)
        try:
            gradient = self.gradient(z, y)
        except FastlrError:
            return
        if not self._known(z, y):
            _Company(self, *_fitted(z, y), gradient).require_none(whole=False)

    def _known(self, z: Tensor, y: Any) -> bool:
        """Return True for a loss of torch's whose elements are known to be of a sample each."""
        if self.out_dim != 0 or z.ndim < 2 or not isinstance(y, Tensor):
            return False
        if not _of_options_alone(self.given):
            return False
        kind = type(self.given) if isinstance(self.given, nn.Module) else self.given
        if any(kind is known for known in _ELEMENTWISE):
            return y.shape == z.shape
        if any(kind is known for known in _OF_CLASSES):
            return y.shape in (z.shape, z.shape[:1] + z.shape[2:])
        return False


class _Company:
    """Asks a loss for samples in other company, which must not change the gradient at their rows.

    A loss that is new, or whose output has a new shape, is asked until every two samples were apart
    (of a large output, for a few splits); later for two other splits each time.

    Args:
        losses: the user's.
        z: output, as the loss is given it.
        y: labels.
        gradient: of the losses' sum at z.
    """

    def __init__(self, losses: SampleLosses, z: Tensor, y: Any, gradient: Tensor) -> None:
        self.losses, self.state_kept = losses.losses, losses.state_kept
        self.key, self.z, self.y, self.gradient = losses.given, z, y, gradient
        self.axis = losses.out_dim % z.ndim
        self.count = z.shape[self.axis]
        self.times = _record(self.key).get(z.shape, 0)

    def require_the_same_again(self) -> None:
        """Raise InputError where the same samples give another gradient."""
        for _ in range(1 if self.count > 1 else _ALONE):
            if not self._same(self.gradient, self._asked(self.z, self.y)):
                raise InputError(_RANDOM)

    def require_none(self, *, whole: bool) -> None:
        """Raise InputError unless the company of a sample does not matter."""
        several = not self.times and self._a_loss_is_of_several()
        axes = [] if several else list(filter(self._same_in_any_order, self._label_axes()))
        if axes and not self.times:
            self._require_none_chosen_by_place(axes[0])
        if axes and (whole or self._same_in_other_numbers()):
            _record(self.key)[self.z.shape] = self.times + 1
            return
        self.require_the_same_again()
        raise InputError(_OF_A_PLACE if axes else _MIXES)

    # -- the losses one by one
    # ----------------------------------------------------------------------------------------------

    def _a_loss_is_of_several(self) -> bool:
        """Return True if one of the losses depends on the outputs of several samples."""
        return any(len(places) > 1 for places in self._places_of_losses().values())

    def _require_none_chosen_by_place(self, label_axis: int | None) -> None:
        """Raise InputError for as many losses as samples, two of one place, or one loss of a place.

        They are so with other samples there, too. Where a loss leaves out elements, and as many
        stay as there are samples, or one, they go with the samples instead.
        """
        with self.state_kept(), torch.no_grad():
            number = self.losses(self.z, self.y).numel()
        if number not in (1, self.count):
            return
        moved = self._in_other_places(label_axis)
        there = {} if moved is None else moved._places_of_losses()
        here = self._places_of_losses()
        fixed = [places[0] for loss, places in here.items() if places == there.get(loss)]
        if number == 1 and fixed:
            raise _reduced("one number", self.count)
        if len(set(fixed)) < len(fixed):
            raise InputError(_OF_ANOTHER)

    def _places_of_losses(self) -> dict[int, list[int]]:
        """Return the places of the samples on whose outputs each loss depends, by the loss' number.

        They are found for the largest loss and for some others, by one backward pass each. Those
        whose gradient is zero, or not a number, are left out.
        """
        found: dict[int, list[int]] = {}
        with self.state_kept(), torch.enable_grad():
            leaf = self.z.detach().clone().requires_grad_()
            losses = self.losses(leaf, self.y).flatten()
            for number in self._some(losses) if losses.requires_grad else ():
                gradient = _grad(losses[number], leaf, retain=True)
                if gradient is None:
                    continue
                sizes = _sizes(gradient, self.axis)
                places = (sizes > _rounding(self.gradient) * sizes.amax()).nonzero()
                if len(places):
                    found[number] = places.flatten().tolist()
        return found

    def _some(self, losses: Tensor) -> list[int]:
        """Return the numbers of the largest of the losses and of some others."""
        most = _SINGLE if self.z.numel() <= _SMALL else _OF_LARGE
        largest = losses.detach().abs().topk(min(1, len(losses))).indices
        order = torch.randperm(len(losses), generator=torch.Generator().manual_seed(0))
        return list(dict.fromkeys([*largest.tolist(), *order[:most].tolist()]))

    # -- samples in other company
    # ----------------------------------------------------------------------------------------------

    def _same_in_any_order(self, label_axis: int | None) -> bool:
        """Return True if what a sample gives at a place does not depend on the others.

        Its own place is not enough: an order statistic, or a choice by rank, may fall on the same
        place for the samples and for copies of some. So it is asked with the samples in other
        places, too.

        Args:
            label_axis: axis of the labels that goes with the samples; None: they stay in place.
        """
        moved = self._in_other_places(label_axis)
        return (
            moved is not None
            and self._same_in_place(label_axis)
            and moved._same_in_place(label_axis)
        )

    def _in_other_places(self, label_axis: int | None) -> _Company | None:
        """Return the same samples, each in another's place; None where the loss fails on them."""
        source = self._order_without_fixed_places()
        moved = copy(self)
        moved.z, moved.y = self._at(self.z, source), self._y(source, label_axis)
        gradient = self._asked(moved.z, moved.y)
        if gradient is None:
            return None
        moved.gradient = gradient
        return moved

    def _order_without_fixed_places(self) -> Tensor:
        """Return a random order in which no sample is at its own place."""
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.times))
        source = torch.empty_like(order)
        source[order] = order.roll(1)
        return source

    def _same_in_place(self, label_axis: int | None) -> bool:
        """Return True if samples give the same in their places beside copies of themselves.

        Args:
            label_axis: axis of the labels that goes with the samples; None: they stay in place.
        """
        for copied_of_kept, kept in self._companies():
            source = self._among_copies(copied_of_kept, kept)
            got = self._asked(self._at(self.z, source), self._y(source, label_axis))
            if got is None or not self._same_of(kept, self._at(got, kept)):
                return False
        return True

    def _companies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples of which there are copies, and those that stay in their places.

        A part stays among copies of itself or of one of it; at first single samples, too, among
        copies of themselves, where nothing of the others is left.
        """
        for turn, rows in enumerate(self._parts()):
            beside_copies_of_one = turn % 2 == 1
            yield rows[:1] if beside_copies_of_one else rows, rows
        if not self.times:
            most = _SINGLE if self.z.numel() <= _SMALL else _OF_LARGE
            order = torch.randperm(self.count, generator=torch.Generator().manual_seed(0))
            yield from ((row, row) for row in order[:most].split(1))

    def _among_copies(self, copied: Tensor, kept: Tensor) -> Tensor:
        """Return the sample of each place: those kept in theirs, elsewhere the copied in turn."""
        source = copied[torch.arange(self.count) % len(copied)]
        source[kept] = kept
        return source

    def _same_in_other_numbers(self) -> bool:
        """Return True if all in another order, and parts of the samples, give what they gave.

        A loss may not take a single sample: then it is asked for all of them twice over.
        """
        all_in_another_order = self._order_without_fixed_places()
        all_twice = torch.arange(self.count).repeat(2)
        for rows in (all_in_another_order, *self._parts()):
            got = self._asked_with_first_axis_of_labels(rows)
            may_take_no_single_sample = got is None and len(rows) == 1
            if may_take_no_single_sample:
                rows = all_twice
                got = self._asked_with_first_axis_of_labels(rows)
            if not self._same_of(rows, got):
                return False
        return True

    def _asked_with_first_axis_of_labels(self, rows: Tensor) -> Tensor | None:
        """Return the gradient for some samples, whose labels are picked as measures in parts do."""
        return self._asked(self._at(self.z, rows), self._labels(rows, axis=0))

    def _parts(self) -> Iterator[Tensor]:
        """Yield parts of the samples, in random order: split by each digit of numbers they have."""
        digits = (self.count - 1).bit_length()
        codes = (torch.arange(self.count) << digits) // self.count
        generator = torch.Generator().manual_seed(self.times)
        for split in range(self._splits(digits)):
            if split % digits == 0:
                order = torch.randperm(self.count, generator=generator)
            first = (codes >> (digits - 1 - split % digits)) % 2 == 0
            yield order[first]
            yield order[~first]

    def _splits(self, digits: int) -> int:
        """Return in how many splits the samples are asked for; all digits part every two."""
        if self.times:
            return _AGAIN
        return max(digits, _FEWEST) if self.z.numel() <= _SMALL else _OF_LARGE

    def _at(self, t: Tensor, rows: Tensor) -> Tensor:
        return t.index_select(self.axis, rows.to(t.device))

    def _y(self, source: Tensor, label_axis: int | None) -> Any:
        """Return the labels of samples that are put in place; those that have no axis stay."""
        return self.y if label_axis is None else self._labels(source, label_axis)

    def _labels(self, rows: Tensor, axis: int) -> Any:
        """Return the labels of these samples; tensors of another length stay whole."""

        def pick(t: Any) -> Any:
            return t.index_select(axis, rows.to(t.device)) if self._of_samples(t, axis) else t

        return tree_map(pick, self.y)

    def _of_samples(self, t: Any, axis: int) -> bool:
        return isinstance(t, Tensor) and t.ndim > axis and t.shape[axis] == self.count

    def _label_axes(self) -> list[int | None]:
        """Return the axes along which all labels have the samples; [None] where some do not."""
        tensors = [t for t in tree_flatten(self.y)[0] if isinstance(t, Tensor) and t.ndim]
        axes: list[int | None] = []
        for axis in sorted({0, self.axis}):
            if tensors and all(self._of_samples(t, axis) for t in tensors):
                axes.append(axis)
        return axes or [None]

    def _asked(self, z: Tensor, y: Any) -> Tensor | None:
        """Return the gradient of the losses' sum at z; None where the loss does not take it."""
        leaf = z.detach().clone().requires_grad_()
        try:
            with self.state_kept(), torch.enable_grad():
                return _grad(self.losses(leaf, y).sum(), leaf, none=torch.zeros_like(leaf))
        except Exception as error:
            if out_of_memory(error):
                raise
            return None

    def _same_of(self, rows: Tensor, got: Tensor | None) -> bool:
        return self._same(self._at(self.gradient, rows), got)

    def _same(self, want: Tensor, got: Tensor | None) -> bool:
        if got is None:
            return False
        relative = _rounding(self.gradient)
        if agree(want, got, relative, self.axis):
            return True
        return agree(want, got, relative, self.axis, self._noise())

    def _noise(self) -> Tensor | None:
        """Return how far the gradient is off by rounding: what the output's last digits do to it.

        No more than a little of the largest entry: a loss that draws random numbers moves it more.
        """
        some = torch.randint(2, self.z.shape, generator=torch.Generator().manual_seed(0)).to(self.z)
        dtype = _digits(self.gradient)
        # towards zero: a probability stays one
        other = self._asked(self.z * (1 - 4 * torch.finfo(dtype).eps * some), self.y)
        if other is None:
            return None
        off = (other - self.gradient).abs().nan_to_num(posinf=0.0)
        most = _NOISE * float(self.gradient.abs().max())
        return _MARGIN * off.clamp(max=most).amax(self.axis)


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


def _joined(labels: Sequence[Any]) -> Any:
    """Return the labels of samples together; what all share stays as it is."""
    joined, spec = tree_flatten(labels[0])
    for place, leaves in enumerate(zip(*map(tree_leaves, labels), strict=True)):
        if leaves[0] is not leaves[1]:
            joined[place] = torch.cat(leaves)
    return tree_unflatten(joined, spec)


def _record(loss: Any) -> dict[torch.Size, int]:
    """Return how often a loss was asked for outputs of each shape, and passed."""
    try:
        found: dict[torch.Size, int] = _times.setdefault(loss, {})
    except TypeError:  # nothing tells of its end: it is new at every call
        return {}
    return found


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


def _grad(
    value: Tensor, leaf: Tensor, none: Tensor | None = None, *, retain: bool = False
) -> Tensor | None:
    """Return the gradient of a number at the output, or ``none`` where it does not depend on it."""
    if not value.requires_grad:
        return none
    found = torch.autograd.grad(value, leaf, retain_graph=retain, allow_unused=True)[0]
    return none if found is None else found


def _digits(gradient: Tensor) -> torch.dtype:
    """Return the narrowest precision that holds a gradient, in which the loss may compute."""
    for dtype in _ROUNDING:
        if torch.equal(gradient.to(dtype).to(gradient.dtype), gradient):
            return dtype
    return gradient.dtype


def _rounding(gradient: Tensor) -> float:
    """Return the relative difference that is taken for rounding; autocast rounds in a loss, too."""
    low = torch.is_autocast_enabled(gradient.device.type)
    return _ROUNDING[torch.bfloat16 if low else _digits(gradient)]


def _of_options_alone(loss: Any) -> bool:
    """Return True if a loss holds no weights, which could broadcast, no hook and no forward."""
    held = tree_leaves(list(getattr(loss, "__dict__", {}).values()))
    odd = any(callable(value) or isinstance(value, Tensor) for value in held)
    return not odd and not any(hooks_of_all_modules())


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
