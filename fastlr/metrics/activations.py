"""Measures of the activations in one forward pass: dormant units, ranks of the representation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.errors import InputError, ModelError, NonFiniteError
from fastlr.estimator.eval_mode import eval_mode
from fastlr.estimator.padding import refuse_padding
from fastlr.ghost.model.batch import copied
from fastlr.ghost.model.refusals import refusals
from fastlr.ghost.model.view import ModelView, OutputSelector, call, select_output
from fastlr.metrics.activation_hooks import RELU, Activation, Watch
from fastlr.metrics.rank import Spectrum
from fastlr.metrics.value import Measure, check_known
from fastlr.ops.model_lock import locks_model

MEASURES = (
    "dormant_ratio",
    "dormant_ratio_tau",
    "effective_rank",
    "effective_rank_entropy",
    "feature_rank",
)
_RANKS = MEASURES[2:]


def activation_measures(
    model: nn.Module,
    x: Any,
    *,
    measures: Collection[str] = MEASURES,
    tau: float = 0.1,
    delta: float = 0.01,
    epsilon: float = 0.01,
    layer: str | None = None,
    also: Sequence[Any] = (),
    output: OutputSelector = None,
    then: Callable[[Tensor], Any] | None = None,
) -> dict[str, Measure]:
    """Take all measures of activations, or those named, from one forward pass in eval mode.

    - "dormant_ratio": the paper's, share of ReLU units that are never active (`dormant_ratio` with
      threshold 0);
    - "dormant_ratio_tau": share of tau-dormant units of all activations (`dormant_ratio` with
      threshold ``tau`` > 0);
    - "effective_rank", "effective_rank_entropy": `effective_rank`, its two definitions;
    - "feature_rank": `feature_rank`.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through.
        x: one batch (a tensor, a tuple (positional), a dict (keywords)), or an iterable of such
            batches: a generator, an iterator, a DataLoader of inputs without labels. A list counts
            as a tuple: pass ``iter(list_of_batches)``.
        measures: names of those wanted; what only others need is not required of the model.
        tau: threshold of "dormant_ratio_tau".
        delta: as for `effective_rank`.
        epsilon: as for `feature_rank`.
        layer: as for `effective_rank`.
        also: as for `dormant_ratio`.
        output: as for `effective_rank`.
        then: called with the output of each batch, for what else is wanted of the same pass, which
            autograd then records.

    Returns:
        Name -> Measure, in the order of ``measures``.

    Raises:
        As the functions named above.

    Example:
        >>> import torch, fastlr
        >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        >>> model = torch.nn.Sequential(*layers)
        >>> measures = fastlr.metrics.activation_measures(model, torch.randn(64, 4))
        >>> list(measures)[:2], float(measures["dormant_ratio"])
        (['dormant_ratio', 'dormant_ratio_tau'], 0.0)
    """
    check_known(measures, MEASURES)
    _check_options(tau=tau, delta=delta, epsilon=epsilon)
    ranks = any(name in _RANKS for name in measures)
    activations, spectrum = _observe(
        model, x, also=also, layer=layer, output=output, ranks=ranks, then=then
    )
    make: dict[str, Callable[[], Measure]] = {
        "dormant_ratio": partial(_dormant, activations, 0.0),
        "dormant_ratio_tau": partial(_dormant, activations, tau, "all"),
        "effective_rank": partial(spectrum.srank, delta),
        "effective_rank_entropy": spectrum.entropy_rank,
        "feature_rank": partial(spectrum.feature_rank, epsilon),
    }
    return {name: make[name]() for name in measures}


def dormant_ratio(
    model: nn.Module,
    x: Any,
    *,
    threshold: float = 0.0,
    units: str | None = None,
    normalize: bool = True,
    signed: bool = False,
    also: Sequence[Any] = (),
) -> Measure:
    """Return the share of dormant units among all units of all activations.

    The model runs in eval mode on a batch of real data.

    A unit is a channel of a convolution (its positions pooled with the samples) or an element of
    the last axis after a linear layer, also where that is split into heads; with ``m_u`` the mean
    of ``|a_u|`` over all samples and positions, its score is ``s_u = m_u / mean_v m_v``, v over the
    units of the same activation (0 where that whole layer is silent), and it is dormant if ``s_u <=
    threshold``.

    - ``threshold=0``: the paper's dead units. A ReLU unit has score 0 exactly if it is never
      active. As in the paper only ReLU and ReLU6 units are counted, unless the model has none.
    - ``threshold=tau > 0``: tau-dormant units of Sokar et al., defined for any activation
      (Hardswish, GELU, SiLU, ...).

    Counted are calls of relu, relu6, hardswish, gelu, silu, mish, elu, selu, celu, leaky_relu,
    prelu, rrelu and hardtanh, as modules, functions or methods, in place or not; also modules Tanh,
    Softplus, Softsign and small modules named after an activation, such as Hugging Face's
    NewGELUActivation. A ReLU or ReLU6 of a layer's output counts as one if it is written out:
    ``h.clamp(0, 6)``, ``h * (h > 0)``. Not counted: gates (sigmoid, hardsigmoid, softmax) and, as
    part of formulas, the function tanh: see ``also``. A module or function used several times is a
    layer each time.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through.
        x: one batch or an iterable of batches, as in `activation_measures`; a unit is dormant over
            all of them. Calls are matched between batches by module and order (experts that some
            batches skip: give one batch).
        threshold: at least 0.
        units: "relu" (ReLU and ReLU6), "all", or None: "relu" at threshold 0 if the model has any,
            else "all".
        normalize: False compares ``m_u`` itself with the threshold.
        signed: with ``normalize=False``, take the mean of ``a_u`` itself, and call a unit dormant
            if that is *below* the threshold: so the paper's appendix on time series has it, with
            0.05.
        also: more activations: module classes, or functions of torch such as ``torch.tanh``.

    Returns:
        Measure in [0, 1]; ``details``: "units", "dormant"; ``layers``: the ratio of each activation
        by module name (``#2``: its second call).

    Raises:
        InputError: empty batch, no batches, wrong option, ``signed`` with ``normalize``.
            ModelError: no activations found.
        NonFiniteError: an activation is not finite.

    Source: appendix A.1 (iii) of the paper; Sokar et al. 2023 (arXiv:2302.12902).

    Example:
        >>> import torch, fastlr
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> _ = model[0].bias.data[0].fill_(-100.0)
        >>> ratio = fastlr.metrics.dormant_ratio(model, torch.ones(5, 3))
        >>> ratio.details["units"], ratio >= 0.25
        (4, True)
    """
    _check_options(threshold=threshold)
    if units not in (None, "relu", "all"):
        raise InputError(f"units must be 'relu', 'all' or None, not {units!r}")
    if signed and normalize:
        raise InputError(
            "signed=True compares the mean activation with the threshold itself: give "
            "normalize=False"
        )
    activations, _ = _observe(model, x, also=also, signed=signed)
    return _dormant(activations, threshold, units, normalize, signed=signed)


def effective_rank(
    model: nn.Module,
    x: Any,
    *,
    kind: str = "srank",
    delta: float = 0.01,
    layer: str | None = None,
    output: OutputSelector = None,
) -> Measure:
    """Return the effective rank of the representation.

    That is of the features ``Phi`` [n, d], with singular values ``s_1 >= s_2 >= ...``.

    - ``kind="srank"``: ``srank_delta = min {k: sum_{i<=k} s_i >= (1 - delta) sum_i s_i}`` (Kumar et
      al., as the paper cites);
    - ``kind="entropy"``: ``exp(-sum_i p_i log p_i)`` with ``p_i = s_i / sum_j s_j`` (Roy and
      Vetterli).

    The features are the input of the linear layer that makes the output, found by following the
    output back through elementwise operations and rearrangements; each sample is a row, and each
    position of it where the features have more than two axes (tokens, pixels). They are not
    centred. 0 if all features are 0. Computed in float64.

    Args:
        model: any nn.Module; DDP and torch.compile wrappers are looked through.
        x: one batch or an iterable of batches, as in `activation_measures`.
        kind: "srank" or "entropy".
        delta: share of the singular values' sum left out, in (0, 1).
        layer: name of the module whose input is the representation; default: the linear layer that
            is found. A convolution's input is taken with its channels as features.
        output: picks the output tensor from what the model returns, as in
            `fastlr.per_sample_grad_sq_norms`.

    Returns:
        Measure (a whole number for "srank"); ``details``: "n" rows, "d" features, "layer".

    Raises:
        ModelError: the output does not come from one linear layer, or ``layer`` was not run.
        InputError: empty batch, no batches, unknown layer, wrong option. NonFiniteError: features
            that are not finite.

    Source: Kumar et al. 2021 (arXiv:2010.14498); Roy and Vetterli 2007 (EUSIPCO).

    Example:
        >>> import torch, fastlr
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        >>> _ = torch.nn.init.eye_(model[0].weight), torch.nn.init.zeros_(model[0].bias)
        >>> float(fastlr.metrics.effective_rank(model, torch.eye(3)))
        3.0
    """
    _check_options(delta=delta)
    if kind not in ("srank", "entropy"):
        raise InputError(f"kind must be 'srank' or 'entropy', not {kind!r}")
    _, spectrum = _observe(model, x, layer=layer, output=output, ranks=True)
    return spectrum.srank(delta) if kind == "srank" else spectrum.entropy_rank()


def feature_rank(
    model: nn.Module,
    x: Any,
    *,
    epsilon: float = 0.01,
    layer: str | None = None,
    output: OutputSelector = None,
) -> Measure:
    """Return the feature rank: the number of large singular values of ``Phi / sqrt(n)``.

    These are those above ``epsilon``, an absolute threshold.

    The features ``Phi`` [n, d], the other arguments and the errors are those of `effective_rank`;
    ``epsilon`` > 0 is in the unit of the features.

    Source: Lyle et al. 2022 (arXiv:2204.09560).

    Example:
        >>> import torch, fastlr
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 2))
        >>> _ = torch.nn.init.ones_(model[0].weight)
        >>> float(fastlr.metrics.feature_rank(model, torch.ones(9, 4)))
        1.0
    """
    _check_options(epsilon=epsilon)
    _, spectrum = _observe(model, x, layer=layer, output=output, ranks=True)
    return spectrum.feature_rank(epsilon)


def _check_options(**options: float) -> None:
    """Raise InputError for a delta not in (0, 1), an epsilon not above 0, a threshold below 0."""
    for name, value in options.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name == "delta":
            wanted, right = "in (0, 1)", number and 0 < value < 1
        elif name == "epsilon":
            wanted, right = "positive", number and 0 < value < math.inf
        else:
            wanted, right = "at least 0", number and 0 <= value < math.inf
        if not right:
            raise InputError(f"{name} must be a finite number {wanted}, not {value!r}")


@locks_model
def _observe(
    model: nn.Module,
    x: Any,
    *,
    also: Sequence[Any] = (),
    layer: str | None = None,
    output: OutputSelector = None,
    ranks: bool = False,
    signed: bool = False,
    then: Callable[[Tensor], Any] | None = None,
) -> tuple[list[Activation], Spectrum]:
    """Watch a forward pass of each batch, in eval mode.

    Args:
        model: any nn.Module.
        x: one batch or an iterable of batches.
        also: as for `dormant_ratio`.
        layer: as for `effective_rank`.
        output: as for `effective_rank`.
        ranks: take the features' singular values, too.
        signed: as for `dormant_ratio`.
        then: called with the output of each batch.

    Returns:
        The activations, summed over the batches, and the features' spectrum (empty without ranks).
    """
    if isinstance(also, str) or not isinstance(also, Iterable) or not all(map(callable, also)):
        raise InputError(
            f"also={also!r}: give a list of module classes and functions of torch, such as "
            "also=[torch.tanh]"
        )
    view = ModelView.of(model, output)
    module = view.module
    parameter = next(module.parameters(), None)
    if parameter is None:
        raise ModelError("the model has no parameters, so it has no plasticity to measure")
    for name, p in module.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name} is not initialised (a lazy module); run one forward pass first"
            )
    watch, spectrum, batches = Watch(module, also, layer, signed=signed), Spectrum(), 0
    with eval_mode(module, parameter.device), torch.set_grad_enabled(then is not None):
        for batch in _batches(x):
            batch = view.inputs(batch)
            refuse_padding(batch)
            batches += 1
            with refusals(view, batch), watch.watching():
                result = call(module, copied(batch))
                chosen = select_output(result, output) if ranks and layer is None else None
            if ranks:
                spectrum.add(*watch.features(chosen))
            watch.reset()
            if then is not None:
                then(select_output(result, output) if chosen is None else chosen)
    if not batches:
        raise InputError("x gave no batches (a generator that was used up?)")
    return list(watch.activations.values()), spectrum


def _batches(x: Any) -> Iterable[Any]:
    """Return the batches of x: itself alone, unless it is an iterable of batches."""
    if isinstance(x, (tuple, list, dict)) and not x:
        raise InputError(f"x is an empty {type(x).__name__}: give inputs, or batches of them")
    if isinstance(x, (Tensor, tuple, list, dict, Mapping)) or not isinstance(x, Iterable):
        return [x]
    return x


def _dormant(
    activations: list[Activation],
    threshold: float,
    units: str | None = None,
    normalize: bool = True,
    signed: bool = False,
) -> Measure:
    """Return the share of dormant units; arguments and errors as for `dormant_ratio`."""
    activations, units = _counted(activations, threshold, units)
    dormant = _dormant_counts(activations, threshold, normalize, signed)
    total = sum(len(activation.sums) for activation in activations)
    of = "ReLU units" if units == "relu" else "units of all activations"
    if signed:
        definition = f"dormant ratio: share of {of} with mean a below {threshold:g}"
    elif threshold == 0:
        definition = f"dormant ratio: share of {of} that are never active"
    elif normalize:
        definition = (
            f"tau-dormant ratio: share of {of} with mean |a| at most {threshold:g} of their "
            "layer's mean"
        )
    else:
        definition = f"dormant ratio: share of {of} with mean |a| at most {threshold:g}"
    uses = Counter(activation.name for activation in activations)
    layers = {}
    for activation, count in zip(activations, dormant, strict=True):
        name = activation.name
        if uses[name] > 1:
            name += f":{activation.kind}"
        layers[name] = count / len(activation.sums)
    details = {"units": total, "dormant": sum(dormant)}
    return Measure(sum(dormant) / total, definition, details, layers)


def _counted(
    activations: list[Activation], threshold: float, units: str | None
) -> tuple[list[Activation], str]:
    """Return the activations whose units are counted, and which these are: "relu" or "all"."""
    if not activations:
        raise ModelError(
            "no activations found in the model's forward pass (a scripted or compiled part, or "
            "fused layers such as nn.LSTM, hide them; tanh and sigmoid functions do not count): "
            "name them by also=(torch.tanh, MyActivation)"
        )
    relu = [activation for activation in activations if activation.kind in RELU]
    if units is None:
        units = "relu" if threshold == 0 and relu else "all"
    if units == "relu":
        if not relu:
            kinds = ", ".join(sorted({activation.kind for activation in activations}))
            raise ModelError(
                f"the model has no ReLU units; its activations are {kinds}: pass units='all'"
            )
        activations = relu
    return activations, units


def _dormant_counts(
    activations: list[Activation], threshold: float, normalize: bool, signed: bool
) -> list[int]:
    """Return the number of dormant units of each activation, with one wait for the device.

    Raises:
        NonFiniteError: Activations are not finite.
    """
    counts = []
    for activation in activations:
        mean = activation.sums / activation.count
        if signed:
            dormant = mean < threshold
        elif normalize:  # s <= threshold, without 0/0 in a silent layer
            dormant = mean <= threshold * mean.mean()
        else:
            dormant = mean <= threshold
        counts.append(torch.stack([dormant.sum(), mean.isfinite().all().long()]))
    pairs = torch.stack(counts).tolist()
    for activation, (_, is_finite) in zip(activations, pairs, strict=True):
        if not is_finite:
            where = f"{activation.name} ({activation.kind})"
            raise NonFiniteError(
                f"the activations of {where} are not finite: the training has diverged"
            )
    return [dormant for dormant, _ in pairs]
