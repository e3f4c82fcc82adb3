"""Measures that try a model out: how fast a copy learns, in how many directions outputs move."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlr.errors import InputError, ModelError, NonFiniteError, first_line
from fastlr.estimator.eval_mode import eval_mode
from fastlr.estimator.loss import sample_gradients
from fastlr.estimator.options import require_predictive
from fastlr.estimator.padding import padding_mask, refuse_padding
from fastlr.estimator.passes import default_predictive
from fastlr.estimator.predictive import Bernoulli, Categorical, Gaussian, Predictive
from fastlr.estimator.result import count as checked_count
from fastlr.estimator.statistics import memorization_gain, real, regression_memorization_bound
from fastlr.estimator.whole_batch import refuse_mixed_gradients
from fastlr.ghost.api import engine_of
from fastlr.ghost.model.batch import copied
from fastlr.ghost.model.refusals import refusals
from fastlr.ghost.model.view import FAILURES, ModelView, OutputSelector, require_graph
from fastlr.ghost.norms.cotangents import scaled
from fastlr.metrics.rank import effective_rank
from fastlr.metrics.value import Measure
from fastlr.ops.deferred_checks import out_of_memory
from fastlr.ops.model_lock import locked, locks_model
from fastlr.ops.philox import check_seed
from fastlr.ops.process_state import quiet_rng

_FUSED = ("cpu", "cuda")  # where all steps of AdamW on real parameters are one kernel
_NEARLY_ALL = 0.9  # of the labels' bits: from there on they are the limit, not the model
_APART = 20  # the seeds of repeats are 2^20 apart, so that neighbouring seeds share no labels


def trainability(
    model: nn.Module,
    x: Any,
    *,
    steps: int = 100,
    learning_rate: float = 1e-3,
    repeats: int = 3,
    seed: int = 0,
    predictive: Predictive | None = None,
    output: OutputSelector = None,
) -> Measure:
    """Measure how far a copy of the model gets on random labels in ``steps`` steps.

    The value is the share of a guess's loss that the copy is rid of.

    With L the mean negative log-likelihood of the inputs' labels after so many steps of AdamW
    (weight decay 0) on all of them at once, in train mode, and H that of the best guess, the value
    is ``1 - L / H``: 1 where they are learned, 0 where nothing is, below 0 where the answers are
    worse than a guess. (Not the share of the loss at the start, which is large for a confident
    network: to unlearn is not to learn.) The direct measure of plasticity that cheaper ones are
    held against; it costs ``repeats * steps`` training steps.

    Args:
        model: any nn.Module; it is copied and left as it is.
        x: inputs of n samples on axis 0: a tensor, a tuple (positional) or a dict (keywords).
        steps: Number of steps of training.
        learning_rate: Learning rate of AdamW.
        repeats: draws of labels, for the standard error.
        seed: Seed of the labels and of what the model draws (dropout).
        predictive: Categorical (labels drawn uniformly), Bernoulli (fair coins) or Gaussian
            (standard normal targets); default as for `fastlr.estimate`.
        output: picks the output tensor from what the model returns.

    Returns:
        Measure without a unit; ``details``: "n", "stderr" (None for one repeat), "start" and "end",
        the mean losses in nats a label, and "half", the mean number of steps to half of the fall.

    Raises:
        InputError: arguments that are wrong. NonFiniteError: the loss diverged. ModelError: no
            trainable parameters, or no copy that runs with parameters of its own.

    Source: target-fitting capacity, Lyle et al. 2022 (arXiv:2204.09560), section 3.1, with labels
    for its targets.

    Example:
        >>> import torch, fastlr
        >>> layers = torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        >>> model = torch.nn.Sequential(*layers)
        >>> 0 < fastlr.metrics.trainability(model, torch.randn(16, 8), learning_rate=1e-2) <= 1
        True
    """
    checked_count("repeats", repeats)
    fit = partial(
        _fit, model, x, steps, learning_rate, predictive=predictive, output=output, evaluate=False
    )
    fits = [fit(check_seed(seed) + (repeat << _APART)) for repeat in range(repeats)]
    first = fits[0]
    guess = math.log(first.classes) if first.classes else 0.5 / first.variance
    # [repeats, steps + 1].
    loss = torch.tensor([fit.losses for fit in fits], dtype=torch.float64, device="cpu")
    fall = loss[:, :1] - loss
    values = 1 - loss[:, -1] / guess
    half = (fall < fall[:, -1:] / 2).sum(1).double()
    details = {
        "n": first.n,
        "stderr": float(values.std() / repeats**0.5) if repeats > 1 else None,
        "start": float(loss[:, 0].mean()),
        "end": float(loss[:, -1].mean()),
        "half": float(half.mean()),
    }
    definition = (
        f"trainability: 1 - loss on random labels after {steps} steps of AdamW at "
        f"{learning_rate:g} / a guess's"
    )
    return Measure(float(values.mean()), definition, details)


def memorization_capacity(
    model: nn.Module,
    inputs: Any,
    n: int = 1024,
    *,
    steps: int = 1000,
    learning_rate: float = 1e-3,
    repeats: int = 3,
    enumerated: bool = False,
    seed: int = 0,
    predictive: Predictive | None = None,
    output: OutputSelector = None,
) -> Measure:
    """Return the bits of random labels that a parameter takes up on n inputs.

    It is the memorization gain, over the number of parameters.

    ``(H(Y^n) + E log P_fit(y^n | x^n)) / ln 2 / parameters``: labels y uniform over the classes
    (fair coins, standard normal targets), P_fit a copy after ``steps`` steps of AdamW (weight decay
    0) on all n inputs at once in train mode, its likelihood in eval mode (a target that is fitted
    to the last digit of float32 counts 23 bits). A lower bound of what the model could take up: it
    grows with n (the share of all bits tells whether there were enough; from 0.9 on "conclusion"
    says that there were not) and with the steps. `fastlr memorize` trains in batches, for as long
    as it takes, with checkpoints.

    Args:
        model: any nn.Module; it is copied and left as it is.
        inputs: synthetic inputs (`fastlr.ShapeImages`, ...), of which the first n are taken, or the
            inputs themselves.
        n: how many of the synthetic ones.
        steps: Number of steps of training.
        learning_rate: Learning rate of AdamW.
        repeats: draws of labels, for the standard error.
        enumerated: take all labelings instead, at most 4096: exactly the expectation, and the
            ceiling.
        seed: Seed of inputs, labels and what the model draws (dropout).
        predictive: Categorical, Bernoulli or Gaussian; default as for `fastlr.estimate`.
        output: picks the output tensor from what the model returns.

    Returns:
        Measure in bits a parameter, 0 or less where nothing is memorised; ``details``: "n",
        "parameters", "bits", "stderr" (of the value; None for one repeat or all labelings), "share"
        of the labels' bits (None for a Gaussian), "conclusion" where that is nearly all (else
        None), and "ceiling", in bits: ``log2 sum over y^n of P_fit(y^n | x^n)``, the worst-case
        redundancy on these inputs as far as the fits reach it, which no gain exceeds (None unless
        enumerated).

    Raises:
        InputError: arguments that are wrong. NonFiniteError: the loss diverged. ModelError: no
            trainable parameters, or no copy that runs with parameters of its own.

    Source: paper, equation 6, Theorem 3.2 and Proposition 3.5. Equation 6 draws the labels from the
    model's own prediction; here they are uniform, as those of its section 4.3.

    Example:
        >>> import torch, fastlr
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
        >>> inputs = fastlr.ShapeImages((3, 8, 8))
        >>> options = {"steps": 200, "learning_rate": 0.1}
        >>> capacity = fastlr.memorization_capacity(model, inputs, 8, **options)
        >>> 7 < capacity.details["bits"] <= 8
        True
    """
    checked_count("repeats", repeats)
    view, seed = ModelView.of(model, output), check_seed(seed)
    with locked(model):
        device, parameters = view.device, sum(p.numel() for p in view.parameters.values())
    if hasattr(inputs, "batch"):
        dtype = next(iter(view.parameters.values())).dtype
        count = checked_count("n", n)
        inputs = inputs.batch(0, count, seed=seed, device=device, dtype=dtype)
    fit = partial(_fit, model, inputs, steps, learning_rate, predictive=predictive, output=output)
    fits = [fit(seed)]
    labels, classes = fits[0].labels, fits[0].classes
    count = labels.numel()
    if enumerated:
        if not classes or classes**count > 4096:
            raise InputError(
                f"enumerated: more than 4096 labelings of {count} labels: give fewer inputs"
            )
        every = product(range(classes), repeat=count)
        fits = [fit(seed, labels=labels.new_tensor(y).view(labels.shape)) for y in every]
    else:
        fits += [fit(seed + (repeat << _APART)) for repeat in range(1, repeats)]
    nats = torch.tensor([count * f.end for f in fits], dtype=torch.float64, device="cpu")
    whole = count * math.log2(classes) if classes else None
    if whole is not None:
        bits = [memorization_gain(-float(x), whole * math.log(2), "bits") for x in nats]
    else:
        errors = 2 * fits[0].variance * nats / count
        errors = errors.clamp_min(torch.finfo(labels.dtype).eps ** 2)  # a fit to the last digit
        bound = partial(regression_memorization_bound, count, 1, 1.0, unit="bits")
        bits = [bound(float(e)) for e in errors]
    gains = torch.tensor(bits, dtype=torch.float64, device="cpu")
    value = float(gains.mean())
    stderr, ceiling = None, None
    if enumerated:
        ceiling = float(torch.logsumexp(-nats, 0)) / math.log(2)
    elif len(fits) > 1:
        stderr = float(gains.std() / len(fits) ** 0.5 / parameters)
    share = value / whole if whole else None
    details = {
        "n": fits[0].n,
        "parameters": parameters,
        "bits": value,
        "stderr": stderr,
        "share": share,
        "conclusion": too_few(share),
        "ceiling": ceiling,
    }
    definition = (
        f"memorization capacity: bits of random labels a parameter, {steps} steps of AdamW at "
        f"{learning_rate:g}"
    )
    return Measure(value / parameters, definition, details)


def too_few(share: float | None) -> str | None:
    """Say that samples were too few to tell a capacity, by the share taken up of labels' bits."""
    if share is not None and share >= _NEARLY_ALL:
        return (
            "nearly all bits of the labels were taken up: n was too small for this network to show "
            "what it can hold; raise n"
        )
    return None


class _Fit(NamedTuple):
    """A training on random labels.

    Attributes:
        n: Samples.
        losses: Before each step and after the last, in train mode, in nats a label.
        end: The loss after the last step, in eval mode if it was evaluated.
        labels: Labels of all samples.
        predictive: Predictive of the outputs.
        classes: Number of classes of a label; 0 for a Gaussian.
    """

    n: int
    losses: list[float]
    end: float
    labels: Tensor
    predictive: Any
    classes: int

    @property
    def variance(self) -> float:
        """Of a Gaussian."""
        return self.predictive.sigma**2


@locks_model
def _fit(
    model: nn.Module,
    x: Any,
    steps: int,
    rate: float,
    seed: int,
    predictive: Predictive | None,
    output: OutputSelector,
    labels: Tensor | None = None,
    evaluate: bool = True,
) -> _Fit:
    """Train a copy of the model on random labels, or those given.

    Args:
        model: left as it is.
        x: inputs.
        steps: Number of steps of AdamW, on all inputs at once.
        rate: its learning rate.
        seed: Seed of the labels and of what the model draws.
        predictive: None: the default one.
        output: picks the output tensor.
        labels: None: drawn.
        evaluate: take the loss at the end in eval mode, too.
    """
    checked_count("steps", steps)
    if not (math.isfinite(real("learning_rate", rate)) and rate > 0):
        raise InputError(f"learning_rate={rate}: give a positive number")
    with torch.inference_mode(False):
        original = ModelView.of(model, output)
        x, device = original.inputs(x), original.device
        learner = _copy_of(original, x).train()
    with quiet_rng(device), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed % (1 << 63))
        view = ModelView.of(learner, output)
        fit = _learn(view, x, steps, rate, predictive, labels)
        if evaluate:
            learner.eval()
            with torch.no_grad():
                z = view.forward(copied(x))
            fit = fit._replace(end=float(_loss(z.detach(), fit.labels, fit.predictive)))
    if not all(map(math.isfinite, (*fit.losses, fit.end))):
        remedy = "lower it, or give the model in float32 if its weights are float16"
        raise NonFiniteError(
            f"the loss on random labels is not finite with learning_rate={rate:g}: {remedy}"
        )
    return fit


def _copy_of(original: ModelView, x: Any) -> nn.Module:
    """Return a copy of a model, which runs with parameters of its own.

    Raises:
        ModelError: It cannot be copied, or a copy's forward pass on x uses the model's parameters.
    """
    remedy = "trainability and memorization_capacity train a copy and leave the model as it is"
    try:
        with torch.no_grad():
            learner = copy.deepcopy(original.module)
    except FAILURES as error:
        if out_of_memory(error):
            raise
        raise ModelError(
            f"the model cannot be copied ({first_line(error)[:200]}): {remedy}. Keep no locks and "
            "no results of forward passes in its attributes; those of torch.nn.utils.weight_norm "
            "can be copied after a forward pass under torch.no_grad()"
        ) from error
    for own, p in zip(learner.parameters(), original.module.parameters(), strict=True):
        own.requires_grad_(p.requires_grad)  # a scripted module's copies do not
    view = ModelView.of(learner, original.output)
    with eval_mode(original.module, original.device), eval_mode(learner, view.device):
        with refusals(view, x):
            z = view.forward(copied(x))
        parameters = list(original.parameters.values())
        reached: Sequence[Tensor | None] = []
        if z.requires_grad:
            reached = torch.autograd.grad(z.sum(), parameters, allow_unused=True)
    if any(gradient is not None for gradient in reached):
        raise ModelError(
            "a copy of the model still runs with the model's own parameters, which a function in "
            f"its attributes holds (a lambda, a closure, a forward that was replaced): {remedy}. "
            "Make that function a method, or put the forward pass back as it was"
        )
    return learner


def _learn(view: ModelView, x: Any, steps: int, rate: float, predictive: Any, labels: Any) -> _Fit:
    """Train the model of a view in its mode, on labels from torch's generator if not given."""
    parameters = list(view.parameters.values())
    fused = all(p.is_floating_point() and p.device.type in _FUSED for p in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=fused)
    losses: list[float] = []
    count = 0
    for step in range(steps + 1):
        with refusals(view, x):
            z = view.forward(copied(x))
        if step == 0:
            count = view.sample_count(z)
            if predictive is None:
                predictive = default_predictive(z.detach(), 0, x, view)
            if labels is None:
                labels = _labels(x, z.detach(), predictive)
            require_graph(z)
        loss = _loss(z, labels, predictive)
        losses.append(float(loss.detach()))
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    classes = 2 if isinstance(predictive, Bernoulli) else 0
    if isinstance(predictive, Categorical):
        classes = z.shape[predictive.dim]
    return _Fit(count, losses, losses[-1], labels, predictive, classes)


def _labels(x: Any, z: Tensor, predictive: Any) -> Tensor:
    """Draw random labels for the outputs z of inputs x, for every position.

    Raises:
        InputError: Inputs are padded, or outputs and predictive do not fit.
    """
    refuse_padding(x)
    if isinstance(predictive, Predictive):  # it refuses what is no output of its kind
        predictive.cotangent(z, "rademacher", range(len(z)), 0)
    if isinstance(predictive, Categorical):
        if predictive.mask is not None:
            raise InputError(
                "Categorical(mask=...): random labels are drawn for every position: leave the "
                "mask out"
            )
        moved = z.movedim(predictive.dim, -1)
        return torch.randint(moved.shape[-1], moved.shape[:-1], device=z.device)
    if isinstance(predictive, Bernoulli):
        return torch.randint(2, z.shape, device=z.device).float()
    if isinstance(predictive, Gaussian):
        return torch.randn(z.shape, device=z.device)
    raise InputError(
        f"predictive is {predictive!r}: give a fastlr.Categorical(), Bernoulli() or Gaussian()"
    )


def _loss(z: Tensor, labels: Tensor, predictive: Any) -> Tensor:
    """Return the mean negative log-likelihood of a label, in nats.

    That of a Gaussian is without its constant.
    """
    z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
    if isinstance(predictive, Categorical):
        return F.cross_entropy(z.movedim(predictive.dim, -1).flatten(0, -2), labels.flatten())
    if isinstance(predictive, Bernoulli):
        return F.binary_cross_entropy_with_logits(z, labels.to(z.dtype))
    return F.mse_loss(z, labels.to(z.dtype)) / (2 * predictive.sigma**2)


@locks_model
def curvature_rank(
    model: nn.Module,
    x: Any,
    *,
    delta: float = 0.01,
    seed: int = 0,
    predictive: Predictive | None = None,
    output: OutputSelector = None,
) -> Measure:
    """Return the effective rank of the Gauss-Newton matrix on n inputs.

    It is the smallest k whose k largest eigenvalues make up 1 - delta of their sum.

    The matrix is ``(1/n) sum_b J_b^T F_b J_b``, which local redundancy is the trace of: the Hessian
    of the loss but for the curvature of the outputs themselves. Each ``J_b^T F_b J_b`` is sampled
    by ``g_b g_b^T``, ``g_b = J_b^T v_b`` (see `fastlr.Categorical`; exact for two classes), so the
    rank is at most n; eigenvalues are those of the n x n products.

    Args:
        model: any nn.Module whose samples do not interact in eval mode; looked at as for
            `fastlr.redundancy_loss`.
        x: inputs of n samples on axis 0, some tens: n backward passes, and the memory of n
            gradients.
        delta: share of the sum of the eigenvalues that is left out, above 0 and below 1.
        seed: Seed of the draws.
        predictive: Categorical, Bernoulli or Gaussian; default as for `fastlr.estimate`.
        output: picks the output tensor from what the model returns.

    Returns:
        Measure, from 1 to n (0 for gradients of zero); ``details``: "n" and "trace", the mean of
        ``||g_b||^2``.

    Raises:
        InputError: arguments that are wrong. NonFiniteError: a gradient is not finite. Others: as
            for `fastlr.estimate`.

    Source: Lewandowski et al. 2023 (arXiv:2312.00246), section 3, by the Gauss-Newton matrix
    instead of the Hessian.

    Example:
        >>> import torch, fastlr
        >>> layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
        >>> model = torch.nn.Sequential(*layers)
        >>> 1 <= fastlr.metrics.curvature_rank(model, torch.randn(12, 8)) <= 12
        True
    """
    view = _rank_view(model, delta, output)
    require_predictive(predictive)
    x = view.inputs(x)
    with eval_mode(view.module, view.device):
        refuse_mixed_gradients(engine_of(view), x)
        with refusals(view, x):
            z = view.forward(copied(x))
        n = view.sample_count(z)
        if predictive is None:
            predictive = default_predictive(z.detach(), 0, x, view)
        v = predictive.cotangent(
            z.detach(), "rademacher", range(n), seed, counted=padding_mask(x, z, 0)
        )
        assert isinstance(v, Tensor)
        unit, factors = scaled(v, z, 0)  # small cotangents keep their bits
        products = _products(view, z, unit)
    roots = factors.sqrt()
    definition = (
        "curvature rank: smallest k whose k largest eigenvalues of the Gauss-Newton matrix make "
        f"up {1 - delta:g}"
    )
    return _kernel_rank(products * torch.outer(roots, roots), delta, definition)


@locks_model
def ntk_rank(
    model: nn.Module, x: Any, *, delta: float = 0.01, output: OutputSelector = None
) -> Measure:
    """Return the effective rank of the neural tangent kernel on n inputs.

    It is the smallest k whose k largest eigenvalues make up 1 - delta of their sum.

    The kernel is the n x n matrix ``K_ab = sum over outputs o of <J_ao, J_bo>``, with ``J_ao`` the
    gradient of output o of input a with respect to the trainable parameters; of a model whose
    outputs have positions, each element is an output. It says in how many directions a step can
    move the outputs on these inputs.

    `curvature_rank` weighs each input's outputs by the Fisher matrix of the predictive
    distribution: what a confident network answers counts little there, and it draws one direction
    of the outputs for each input. Here all outputs count alike whatever the network predicts, no
    predictive distribution is needed, and nothing is drawn. Where the output is one number with a
    Gaussian they are equal.

    Args:
        model: any nn.Module whose samples do not interact in eval mode; looked at as for
            `fastlr.redundancy_loss`.
        x: inputs of n samples on axis 0, some tens, without padding: n backward passes for each
            output, and the memory of n gradients.
        delta: share of the sum of the eigenvalues that is left out, above 0 and below 1.
        output: picks the output tensor from what the model returns.

    Returns:
        Measure, from 1 to n (0 for gradients of zero); ``details``: "n" and "trace", the mean over
        inputs of ``sum over o of ||J_ao||^2``.

    Raises:
        InputError: arguments that are wrong. NonFiniteError: a gradient is not finite. Others: as
            for `fastlr.estimate`.

    Source: the kernel, Jacot et al. 2018 (arXiv:1806.07572), its trace over the outputs; the rank,
    srank of Kumar et al. 2021 (arXiv:2010.14498).

    Example:
        >>> import torch, fastlr
        >>> layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
        >>> model = torch.nn.Sequential(*layers)
        >>> 1 <= fastlr.metrics.ntk_rank(model, torch.randn(12, 8)) <= 12
        True
    """
    view = _rank_view(model, delta, output)
    x = view.inputs(x)
    refuse_padding(x)
    with eval_mode(view.module, view.device):
        refuse_mixed_gradients(engine_of(view), x)
        with refusals(view, x):
            z = view.forward(copied(x))
        kernel = torch.zeros((), dtype=torch.float64, device=z.device)
        for number in range(z[0].numel()):
            one = z.new_zeros(z.shape)
            one.view(len(z), -1)[:, number] = 1
            kernel = kernel + _products(view, z, one)
    definition = (
        "NTK rank: smallest k whose k largest eigenvalues of the neural tangent kernel make up "
        f"{1 - delta:g}"
    )
    return _kernel_rank(kernel, delta, definition)


def _rank_view(model: nn.Module, delta: float, output: OutputSelector) -> ModelView:
    """Return the view of a model of which a rank is taken, unless delta is no share."""
    if not 0 < real("delta", delta) < 1:
        raise InputError(f"delta={delta}: give a number above 0 and below 1")
    return ModelView.of(model, output)


def _products(view: ModelView, z: Tensor, v: Tensor) -> Tensor:  # [n, n], float64
    """Return the products of the samples' gradients of <z_b, v_b>, those of all pairs."""
    grads = sample_gradients(z, list(view.parameters.values()), v)
    flat = (g.double().reshape(len(g), -1) for g in grads if g is not None)
    return torch.stack([g @ g.T for g in flat]).sum(0)


def _kernel_rank(kernel: Tensor, delta: float, definition: str) -> Measure:
    """Return the effective rank of the matrix of products of n samples' gradients."""
    if not kernel.isfinite().all():
        raise NonFiniteError("the gradient of a sample is not finite: the training has diverged")
    values = torch.linalg.eigvalsh(kernel).flip(0).clamp_min(0)
    n = len(values)
    return Measure(
        effective_rank(values, delta), definition, {"n": n, "trace": float(values.sum()) / n}
    )
