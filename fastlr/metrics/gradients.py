"""Gradient norms on real training data: the mean over samples, and that of the whole batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from fastlr.errors import InputError, NonFiniteError
from fastlr.ghost import adapt
from fastlr.ghost.api import per_sample_grad_sq_norms
from fastlr.metrics.measure import Measure
from fastlr.result import count as checked_count
from fastlr.runtime import as_it_was
from fastlr.stats import Moments

Loss = Callable[[Tensor, Any], Tensor]
MEASURES = _PER_SAMPLE, _BATCH = "train_grad_norm", "train_grad_norm_batch"
_DEFINITIONS = {
    _PER_SAMPLE: "training gradient norm, per sample: mean over samples of ||grad of the sample's loss||^2, eval mode",
    _BATCH: "training gradient norm, batch: ||grad of the mean loss over samples||^2, eval mode",
}


def train_grad_norm(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Loss,
    *,
    batch_size: int | None = None,
    output: adapt.OutputSelector = None,
    in_dim: int = 0,
    out_dim: int = 0,
) -> Measure:
    """Mean squared per-sample gradient norm on labelled data: ``(1/n) sum_b ||grad_theta loss(f(x_b), y_b)||^2``.

    The counterpart of local redundancy with real inputs and real labels. Not the squared norm of the batch gradient, which
    is smaller by what the samples' gradients cancel (`gradient_measures` gives both). The model is in eval mode: in train
    mode batch norm couples the samples of a batch, so that no per-sample gradient exists, and dropout is random.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through.
        x: inputs: a tensor, a tuple (positional) or a dict (keywords).
        y: labels or targets, samples along axis 0 (a tensor, or a nest of tensors).
        loss: function (output, y) -> losses, one or more elements for each sample, or a loss of torch (``F.cross_entropy``,
            ``nn.MSELoss()``), which is called with ``reduction="none"``. The elements of a sample (tokens, target
            elements) are **summed**. Outputs in half precision are given to it in float32.
        batch_size: at most so many samples in one pass; default all.
        output: picks the output tensor from what the model returns, as in `fastlr.per_sample_grad_sq_norms`.
        in_dim: sample axis of the batched inputs.
        out_dim: sample axis of the output.

    Returns:
        Measure, loss^2 / weight^2; ``details``: "n", "stderr" (standard error of the mean over samples, None for n = 1).

    Raises:
        InputError: ``loss`` gives one number for several samples or is not differentiable in the output; empty or
            mismatched batch. NonFiniteError: loss or gradient not finite. ModelError and its kinds: as for
            `fastlr.per_sample_grad_sq_norms`.

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
    found = gradient_measures(
        model, x, y, loss, measures=(_PER_SAMPLE,), batch_size=batch_size, output=output, in_dim=in_dim, out_dim=out_dim
    )
    return found[_PER_SAMPLE]


def gradient_measures(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Loss,
    *,
    measures: Collection[str] = MEASURES,
    batch_size: int | None = None,
    output: adapt.OutputSelector = None,
    in_dim: int = 0,
    out_dim: int = 0,
) -> dict[str, Measure]:
    """Both training gradient norms, each under its own name.

    - "train_grad_norm": mean over samples of the squared norm of each one's gradient (`train_grad_norm`).
    - "train_grad_norm_batch": ``|| (1/n) sum_b grad loss_b ||^2``, the squared norm of the gradient that an optimiser's
      step on the mean loss of these samples (in eval mode) would use.

    By Jensen's inequality the second is at most the first. Arguments and errors as for `train_grad_norm`; ``measures``
    names those wanted.

    Example:
        >>> import torch, fastlr
        >>> import torch.nn.functional as F
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(8, 3), torch.randint(0, 2, (8,))
        >>> found = fastlr.metrics.gradient_measures(model, x, y, F.cross_entropy)
        >>> found["train_grad_norm_batch"] <= found["train_grad_norm"]
        True
    """
    if unknown := [name for name in measures if name not in _DEFINITIONS]:
        raise InputError(f"unknown measures {unknown}: choose from {list(_DEFINITIONS)}")
    module = adapt.unwrap(model)
    parameters = list(adapt.trainable(module).values())
    x = adapt.as_inputs(x)
    adapt.check_inputs(module, x)
    losses = _unreduced(loss)
    moments, n = Moments(), 0
    sums: list[Tensor] | None = None
    with as_it_was(module, parameters[0].device):
        for part, labels in _chunks(x, y, batch_size, in_dim):

            def cotangent(z: Tensor, labels: Any = labels) -> Tensor:
                return _loss_gradient(losses, z, labels, out_dim)

            if _PER_SAMPLE in measures:
                norms = per_sample_grad_sq_norms(module, part, cotangent, output=output, in_dim=in_dim, out_dim=out_dim)
                assert isinstance(norms, Tensor)
                moments.add(norms)
            if _BATCH in measures:
                z = adapt.forward(module, part, output)
                n += adapt.sample_count(z, out_dim)
                grads = _gradient(z, parameters, cotangent(z.detach()))
                sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
    results = {}
    if _PER_SAMPLE in measures:
        stderr = None if math.isnan(moments.stderr) else moments.stderr
        details = {"n": moments.n, "stderr": stderr}
        results[_PER_SAMPLE] = Measure(moments.mean, _DEFINITIONS[_PER_SAMPLE], details)
    if sums is not None:
        total = math.fsum(torch.stack([g.square().sum() for g in sums]).tolist()) / n**2
        if not math.isfinite(total):
            raise NonFiniteError("the batch gradient is not finite: the training has diverged")
        results[_BATCH] = Measure(total, _DEFINITIONS[_BATCH], {"n": n})
    return results


def _unreduced(loss: Loss) -> Loss:
    """The loss without its reduction, where it has one."""
    if not callable(loss):
        raise InputError(f"loss must be a function (output, y) -> losses, not {type(loss).__name__}")
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return loss
        module: Any = loss

        def unreduced(z: Tensor, y: Any) -> Tensor:
            before, module.reduction = module.reduction, "none"
            try:
                return module(z, y)
            finally:
                module.reduction = before

        return unreduced
    try:
        reduces = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        reduces = False
    return (lambda z, y: loss(z, y, reduction="none")) if reduces else loss  # type: ignore[call-arg]


def _chunks(x: Any, y: Any, batch_size: int | None, in_dim: int) -> Iterator[tuple[Any, Any]]:
    if batch_size is None:
        yield x, y
        return
    size = checked_count("batch_size", batch_size)
    labels = [t for t in tree_flatten(y)[0] if isinstance(t, Tensor) and t.ndim]
    if not labels:
        raise InputError("batch_size= needs y as a tensor with samples along axis 0; leave batch_size out")
    total = len(labels[0])
    batch = adapt.Batch(x, total, in_dim)
    parts = -(-total // size)
    bounds = [total * i // parts for i in range(parts + 1)]  # no small rest, which might take another path
    for start, stop in zip(bounds, bounds[1:], strict=False):

        def cut(t: Any, start: int = start, stop: int = stop) -> Any:
            return t[start:stop] if isinstance(t, Tensor) and t.ndim and len(t) == total else t

        yield batch.pick(range(start, stop)), tree_map(cut, y)


def _loss_gradient(losses: Loss, z: Tensor, y: Any, out_dim: int) -> Tensor:
    """Gradient of the losses' sum at the output, checked."""
    half = torch.finfo(z.dtype).bits < 32
    leaf = z.detach().to(torch.float32 if half else z.dtype).requires_grad_()

    def fit(t: Any) -> Any:
        """Targets in the output's own half precision go with it to float32."""
        if not isinstance(t, Tensor):
            return t
        return t.to(leaf.device, leaf.dtype if half and t.dtype == z.dtype else t.dtype)

    samples = adapt.sample_count(z, out_dim)
    with torch.enable_grad():
        values = losses(leaf, tree_map(fit, y))
        if not isinstance(values, Tensor) or (values.numel() == 1 and samples > 1):
            what = "one number" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise InputError(
                f"the loss gave {what} for {samples} samples: it must return the losses of the samples, unreduced, such "
                "as F.cross_entropy(output, y, reduction='none')"
            )
        if not values.requires_grad:
            raise InputError("the loss does not depend on the output by autograd: do not detach or use .item() in it")
        if not bool(values.isfinite().all()):
            raise NonFiniteError("a loss is not finite: check the labels and the model's output")
        return torch.autograd.grad(values.sum(), leaf)[0]


def _gradient(z: Tensor, parameters: list[nn.Parameter], v: Tensor) -> list[Tensor]:
    """Gradient of <v, z> in float64; v at unit size in the backward pass, so that half precision keeps its bits."""
    exponent = max(math.frexp(float(v.abs().max()))[1], -1000)
    unit = (v.double() * 2.0**-exponent).to(z.dtype)
    grads = torch.autograd.grad(z, parameters, unit, materialize_grads=True)
    return [g.double() * 2.0**exponent for g in grads]
