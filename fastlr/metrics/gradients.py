"""Gradient norms on real training data: the mean over samples, and that of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastlr.errors import InputError, NonFiniteError, warn
from fastlr.estimator.eval_mode import eval_mode
from fastlr.estimator.result import count as checked_count
from fastlr.estimator.statistics import Moments
from fastlr.estimator.whole_batch import gradient_of_batch, refuse_mixed_gradients
from fastlr.ghost.api import engine_of
from fastlr.ghost.model.batch import Batch, along, copied
from fastlr.ghost.model.refusals import refusals
from fastlr.ghost.model.view import ModelView, OutputSelector
from fastlr.ghost.trust.audits import Draw
from fastlr.metrics.sample_losses import Loss, SampleLosses
from fastlr.metrics.value import Measure, check_known
from fastlr.ops.compiled_parts import uncompiled
from fastlr.ops.model_lock import locks_model
from fastlr.ops.torch_private import tree_leaves, tree_map

_TOGETHER = 8  # samples that the loss is asked for together where it is given single ones
MEASURES = _PER_SAMPLE, BATCH = "train_grad_norm", "train_grad_norm_batch"
_DEFINITIONS = {
    _PER_SAMPLE: "training gradient norm, per sample: mean over samples of "
    "||grad of the sample's loss||^2, eval mode",
    BATCH: "training gradient norm, batch: ||grad of the mean loss over samples||^2, eval mode",
}


def train_grad_norm(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Loss,
    *,
    batch_size: int | None = None,
    output: OutputSelector = None,
    in_dim: int = 0,
    out_dim: int = 0,
) -> Measure:
    """Return the mean squared norm of the samples' gradients on labelled data.

    It is ``(1/n) sum_b ||grad_theta loss(f(x_b), y_b)||^2``.

    The counterpart of local redundancy with real inputs and real labels. Not the squared norm of
    the batch gradient, which is smaller by what the samples' gradients cancel (`gradient_measures`
    gives both). The model is in eval mode: in train mode batch norm couples the samples of a batch,
    so that no per-sample gradient exists, and dropout is random.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through.
        x: inputs: a tensor, a tuple (positional) or a dict (keywords).
        y: labels or targets, samples along axis 0 (a tensor, or a nest of tensors).
        loss: function (output, y) -> losses, one or more elements for each sample, or a loss of
            torch (``F.cross_entropy``, ``nn.MSELoss()``), which is called with
            ``reduction="none"``. The elements of a sample (tokens, target elements) are **summed**.
            Outputs in half precision are given to it in float32. The loss of a sample must depend
            on its own output and labels alone: it is asked again with the samples in other company.
            A weight by place that it closes over goes with ``batch_size=None`` alone. With
            ``batch_size=1`` it is asked for a few samples together.
        batch_size: at most so many samples in one pass; default all.
        output: picks the output tensor from what the model returns, as in
            `fastlr.per_sample_grad_sq_norms`.
        in_dim: sample axis of the batched inputs.
        out_dim: sample axis of the output.

    Returns:
        Measure, loss^2 / weight^2; ``details``: "n", "stderr" (standard error of the mean over
        samples, None for n = 1).

    Raises:
        InputError: ``loss`` fails, gives one number for several samples, mixes samples (negatives
            or statistics of the batch), is random, or is not differentiable in the output; empty or
            mismatched batch. NonFiniteError: loss or gradient not finite. ModelError and its kinds:
            as for `fastlr.per_sample_grad_sq_norms`.

    Source: appendix A.1 (iv) of the paper, "mean squared gradient norm on real task data".

    Example:
        >>> import torch, fastlr
        >>> import torch.nn.functional as F
        >>> model, x = torch.nn.Linear(3, 1, bias=False), torch.randn(5, 3)
        >>> value = fastlr.metrics.train_grad_norm(model, x, torch.zeros(5, 1), F.mse_loss)
        >>> wanted = (2 * model(x) * x).square().sum(1).mean()
        >>> torch.allclose(torch.tensor(float(value)), wanted.detach(), rtol=1e-4)
        True
    """
    results = gradient_measures(
        model,
        x,
        y,
        loss,
        measures=(_PER_SAMPLE,),
        batch_size=batch_size,
        output=output,
        in_dim=in_dim,
        out_dim=out_dim,
    )
    return results[_PER_SAMPLE]


@locks_model
def gradient_measures(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Loss,
    *,
    measures: Collection[str] = MEASURES,
    batch_size: int | None = None,
    output: OutputSelector = None,
    in_dim: int = 0,
    out_dim: int = 0,
) -> dict[str, Measure]:
    """Return both training gradient norms, each under its own name.

    - "train_grad_norm": mean over samples of the squared norm of each one's gradient
      (`train_grad_norm`).
    - "train_grad_norm_batch": ``|| (1/n) sum_b grad loss_b ||^2``, the squared norm of the gradient
      that an optimiser's step on the mean loss of these samples (in eval mode) would use.

    The second alone, in one part, is also that of a loss that mixes samples; one that gives another
    gradient when it is asked again is refused there, too.

    By Jensen's inequality the second is at most the first. Arguments and errors as for
    `train_grad_norm`; ``measures`` names those wanted.

    Example:
        >>> import torch, fastlr
        >>> import torch.nn.functional as F
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.randint(0, 2, (8,))
        >>> norms = fastlr.metrics.gradient_measures(model, x, y, F.cross_entropy)
        >>> norms["train_grad_norm_batch"] <= norms["train_grad_norm"]
        True
    """
    check_known(measures, MEASURES)
    view = ModelView.of(model, output, in_dim, out_dim)
    moments, n = Moments(), 0
    sums: list[Tensor] | None = None
    for norms, grads, size in _parts(view, x, y, loss, batch_size, measures):
        if norms is not None:
            moments.add(norms)
        if grads is not None:
            n += size
            if sums is not None:
                grads = [a + b for a, b in zip(sums, grads, strict=True)]
            sums = grads
    results = {}
    if _PER_SAMPLE in measures:
        stderr = None if math.isnan(moments.stderr) else moments.stderr
        details = {"n": moments.n, "stderr": stderr}
        results[_PER_SAMPLE] = Measure(moments.mean, _DEFINITIONS[_PER_SAMPLE], details)
    if sums is not None:
        results[BATCH] = _batch_measure(sums, n)
    return results


def batch_gradient_norm(view: ModelView, z: Tensor, y: Any, loss: Loss) -> Measure:
    """Return "train_grad_norm_batch" of `gradient_measures` from an output z of the model.

    The graph of z is used up.
    """
    v = SampleLosses(loss, view.out_dim).gradient_of_all(z.detach(), y)
    return _batch_measure(gradient_of_batch(view, z, v), view.sample_count(z))


def _batch_measure(sums: list[Tensor], n: int) -> Measure:
    """Make "train_grad_norm_batch" of the sums of n samples' gradients, one for each parameter."""
    total = math.fsum(torch.stack([g.square().sum() for g in sums]).tolist()) / n**2
    if not math.isfinite(total):
        raise NonFiniteError("the batch gradient is not finite: the training has diverged")
    return Measure(total, _DEFINITIONS[BATCH], {"n": n})


@locks_model
def gradient_noise_scale(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Loss,
    *,
    groups: int = 8,
    output: OutputSelector = None,
    in_dim: int = 0,
    out_dim: int = 0,
) -> Measure:
    """Return the batch size at which noise and signal of the gradient are equal.

    It is ``tr(Sigma) / ||G||^2``, in samples.

    G is the expected gradient of a sample's loss, Sigma its covariance over samples, in eval mode.
    From the mean S of the squared norms of n samples' gradients and the squared norm M of their
    mean, both are estimated without bias: ``tr(Sigma) = n / (n - 1) (S - M)`` and ``||G||^2 = (n M
    - S) / (n - 1)``; the ratio has a bias of order 1 / n. Batches far smaller than this average
    noise away, larger ones gain little.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through.
        x: inputs, as for `train_grad_norm`.
        y: labels or targets, samples along axis 0.
        loss: as for `train_grad_norm`.
        groups: parts of the samples, each left out once for the standard error (jackknife): so many
            gradients are held.
        output: picks the output tensor from what the model returns.
        in_dim: sample axis of the batched inputs.
        out_dim: sample axis of the output.

    Returns:
        Measure in samples, inf where the estimate of ||G||^2 is not positive (more samples are
        needed), with a warning that says so. ``details``: "n", "stderr" (None where it cannot be
        told), "trace" and "grad_sq_norm", the two estimates, in loss^2 / weight^2, and "reason"
        where it is inf.

    Raises:
        InputError: fewer than two groups, or fewer samples than two for each. Others: as for
            `train_grad_norm`.

    Source: B_simple of McCandlish et al. 2018 (arXiv:1812.06162), with its unbiased estimates from
    two batch sizes, here 1 and n.

    Example:
        >>> import torch, fastlr
        >>> model, x = torch.nn.Linear(4, 2), torch.randn(64, 4)
        >>> y, loss = (x[:, 0] > 0).long(), torch.nn.functional.cross_entropy
        >>> scale = fastlr.gradient_noise_scale(model, x, y, loss)
        >>> scale > 0 and scale.details["n"] == 64
        True
    """
    groups = checked_count("groups", groups)
    n = _labelled(y)
    if groups < 2 or n < 2 * groups:
        raise InputError(
            f"groups={groups} of {n} samples: give at least two groups, of two samples or more each"
        )
    view = ModelView.of(model, output, in_dim, out_dim)
    parts = list(_parts(view, x, y, loss, -(-n // groups), MEASURES))
    plan = engine_of(view).plan
    if plan is not None and plan.by_sample:
        with eval_mode(view.module, view.device), uncompiled():
            refuse_mixed_gradients(engine_of(view), view.inputs(x))
    of_groups = _Groups(parts)
    everything = torch.arange(len(parts), device="cpu")
    trace, square = of_groups.trace_and_square(everything)
    if not math.isfinite(trace + square):
        raise NonFiniteError("a gradient is not finite: the training has diverged")
    without = [of_groups.trace_and_square(everything[everything != k]) for k in everything]
    stderr = None
    if square > 0 and all(s > 0 for _, s in without):
        left = torch.tensor([t / s for t, s in without], dtype=torch.float64, device="cpu")
        stderr = float(((len(parts) - 1) * (left - left.mean()).square().mean()).sqrt())
    details: dict[str, Any] = {"n": n, "stderr": stderr, "trace": trace, "grad_sq_norm": square}
    if square <= 0:
        details["reason"] = reason = (
            f"the mean gradient of {n} samples cannot be told from zero: more samples are needed"
        )
        warn(f"gradient_noise_scale is inf: {reason}")
    definition = (
        "gradient noise scale: trace of the gradients' covariance over the squared norm of their "
        "mean, eval mode"
    )
    return Measure(trace / square if square > 0 else math.inf, definition, details)


class _Groups:
    """Sums over groups of samples, of which the noise scale of any groups is made.

    Args:
        parts: Results of `_parts`, one per group.
    """

    def __init__(self, parts: list[_Part]) -> None:
        norms, columns = [], []
        for part in parts:
            assert part.norms is not None and part.sums is not None
            norms.append(part.norms.sum())
            columns.append(part.sums)
        self.sizes = torch.tensor([part.size for part in parts], dtype=torch.float64, device="cpu")
        self.norms = torch.stack(norms).cpu()  # [groups], of the samples' squared norms
        flat = (torch.stack(c).reshape(len(parts), -1) for c in zip(*columns, strict=True))
        self.products = torch.stack([m @ m.T for m in flat]).sum(0).cpu()  # [groups, groups]

    def trace_and_square(self, chosen: Tensor) -> tuple[float, float]:
        """Return the estimates of tr(Sigma) and ||G||^2 from some groups, given by their indices.

        With `mean` for S and `whole` for M in `gradient_noise_scale`.
        """
        count = float(self.sizes[chosen].sum())
        mean = float(self.norms[chosen].sum()) / count
        whole = float(self.products[chosen][:, chosen].sum()) / count**2
        return count / (count - 1) * (mean - whole), (count * whole - mean) / (count - 1)


class _Part(NamedTuple):
    """What a part of the samples gives to the measures of gradients.

    Attributes:
        norms: ``[b]``: squared norms of the samples' gradients, if they are wanted.
        sums: sum of these gradients, a tensor for each parameter, if it is wanted.
        size: Size of the part, where its sum is wanted; else 0.
    """

    norms: Tensor | None
    sums: list[Tensor] | None
    size: int


def _parts(
    view: ModelView, x: Any, y: Any, loss: Loss, batch_size: int | None, measures: Collection[str]
) -> Iterator[_Part]:
    """Yield what each part of the samples gives to the named measures, in eval mode."""
    x = view.inputs(x)
    losses = SampleLosses(loss, view.out_dim)
    with eval_mode(view.module, view.device), uncompiled():
        if batch_size == 1:
            few = next(_chunks(x, y, _TOGETHER, view.in_dim))
            losses.require_no_company(view.outputs(copied(few[0])), few[1])
        chunks = _chunks(x, y, batch_size, view.in_dim)
        for part, labels, whole, draw in chunks:

            def own(z: Tensor, labels: Any = labels, whole: bool = whole) -> Tensor:
                return losses.own_gradient(z, labels, whole=whole)

            norms, grads, size = None, None, 0
            if _PER_SAMPLE in measures:
                norms = engine_of(view).run(part, own, draw).total
            if BATCH in measures:
                with refusals(view, part):
                    z = view.forward(copied(part))
                size = view.sample_count(z)
                # the mean loss of all samples has a gradient even where they mix, that of parts has
                # not
                if norms is not None:
                    v = losses.gradient(z.detach(), labels)
                else:
                    v = losses.gradient_of_all(z.detach(), labels) if whole else own(z.detach())
                grads = gradient_of_batch(view, z, v)
            yield _Part(norms, grads, size)


def _chunks(
    x: Any, y: Any, batch_size: int | None, in_dim: int
) -> Iterator[tuple[Any, Any, bool, Draw]]:
    """Yield inputs and labels of each part of the samples.

    With them go whether it is all of them, and which samples of it are audited.
    """
    if batch_size is None:
        yield x, y, True, Draw(1, last=True)
        return
    size = checked_count("batch_size", batch_size)
    total = _labelled(y)
    if not along(x, total, in_dim):
        shapes = [tuple(t.shape) for t in tree_leaves(x) if isinstance(t, Tensor)]
        raise InputError(
            f"y has length {total}, but no input of shapes {shapes} has as many along "
            f"in_dim={in_dim}: give labels of each input, samples along axis 0"
        )
    batch = Batch(x, total, in_dim)
    parts = -(-total // size)
    # Parts of equal size: a small rest might take another path.
    for part in range(parts):
        start, stop = total * part // parts, total * (part + 1) // parts

        def cut(t: Any, start: int = start, stop: int = stop) -> Any:
            if isinstance(t, Tensor) and t.ndim and len(t) == total:
                return t[start:stop]
            return t

        draw = Draw(int(part == 0), last=part == parts - 1)
        yield batch.pick(range(start, stop)), tree_map(cut, y), parts == 1, draw


def _labelled(y: Any) -> int:
    """Return the number of samples that have labels, to measure them in parts."""
    labels = [t for t in tree_leaves(y) if isinstance(t, Tensor) and t.ndim]
    if not labels:
        raise InputError(
            "samples are measured in parts by the labels of each, but y is of type "
            f"{type(y).__name__}: give a tensor with samples along axis 0, as by torch.as_tensor(y)"
        )
    return len(labels[0])
