"""Measure a network while it is pretrained: the numbers that checkpoints are selected by."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fastlr
from fastlr import metrics
from fastlr.errors import InputError
from fastlr.estimator.statistics import Moments
from fastlr.experiments.data import SplitSeries
from fastlr.experiments.redundancy import by_batches, or_none, redundancy_estimator
from fastlr.experiments.runs.folder import stream_seed
from fastlr.experiments.training.forecaster import Forecaster, batches
from fastlr.experiments.transfer.options import TransferOptions

State = Mapping[str, Tensor]


class Redundancy:
    """Local redundancy of a network at several moments, always on the same Gaussian inputs.

    Attributes:
        points: ``{"step", "value", "stderr"}`` of the measurements since `begin`.
    """

    def __init__(
        self, net: Forecaster, options: TransferOptions, features: int, chunk: int
    ) -> None:
        inputs = fastlr.GaussianSeries(length=options.context, features=features)
        predictive = fastlr.Gaussian(sigma=options.sigma)
        self._estimator = redundancy_estimator(net, inputs, chunk, predictive=predictive)
        self._definition = (
            f"local redundancy: mean over {options.redundancy_n} Gaussian inputs of E_y ||grad log "
            f"P(y|x)||^2, y ~ N(f(x), sigma^2 I) with sigma = {options.sigma:g}, eval mode"
        )
        self.chunk = chunk
        self.begin()

    def begin(self) -> None:
        """Forget the measurements so far."""
        self.points: list[dict[str, Any]] = []
        self._sums = torch.zeros((), dtype=torch.float64)
        self._by = ""

    def measure(self, step: int) -> None:
        """Measure the network as it is now, after so many steps."""
        estimate = self._estimator.measure()
        assert estimate.per_sample is not None
        self.chunk, self._sums = estimate.batch_size, self._sums + estimate.per_sample
        self._by = by_batches(estimate)
        self.points.append(
            {"step": step, "value": estimate.value, "stderr": or_none(estimate.stderr)}
        )

    def record(self) -> dict[str, Any]:
        """Return the record of the mean local redundancy over the measurements.

        Its standard error is that over inputs, which all measurements share.
        """
        moments = Moments()
        moments.add(self._sums / len(self.points))
        definition = self._definition + self._by
        if len(self.points) > 1:
            definition += f"; mean of {len(self.points)} measurements"
        return {
            "value": moments.mean,
            "stderr": or_none(moments.stderr),
            "definition": definition,
            "n": moments.n,
            "probe": self._estimator.options.probe,
            "points": self.points,
        }


def weights_and_units(
    net: Forecaster, source: SplitSeries, options: TransferOptions
) -> dict[str, dict[str, Any]]:
    """Measure the weight norm and the dormant ratio of the activations.

    The activations are those on training windows of the source.
    """
    windows = source.train
    generator = torch.Generator().manual_seed(stream_seed(options.seed, "dormant windows"))
    index = torch.randperm(len(windows), generator=generator)[: options.dormant_windows].to(
        net.device
    )
    with net.autocast():
        parts = (net.as_input(windows.batch(part)[0]) for part in index.split(options.batch_size))
        how: dict[str, Any] = {
            "threshold": options.dormant_threshold,
            "signed": options.dormant_by == "mean",
        }
        dormant = metrics.dormant_ratio(net.model, parts, units="all", normalize=False, **how)
    return {
        "weight_norm": metrics.weight_norm(net.model).to_dict(),
        "dormant_ratio": dormant.to_dict(),
    }


class Probe:
    """Linear probes: a new head on the frozen encoder, trained for one epoch on the target.

    The encoder is in eval mode.

    The head's first weights and the order of the windows are the same for every checkpoint.

    Args:
        net: Just made: every probe begins with its head.
        target: The series.
        options: Options of the run.

    Raises:
        InputError: The network has no part of the name that the options say, or nothing to train in
            it.
    """

    def __init__(self, net: Forecaster, target: SplitSeries, options: TransferOptions) -> None:
        self.net, self.target, self.options = net, target, options
        try:
            head: nn.Module = net.model.get_submodule(options.head)
        except AttributeError:
            parts = ", ".join(name for name, _ in net.model.named_children())
            raise InputError(
                f"head={options.head}: the model has no such part (it has {parts}): name the one "
                "that makes the forecast, or leave linear_probe out of the strategies"
            ) from None
        if not any(p.requires_grad for p in head.parameters()):
            raise InputError(
                f"head={options.head} has no parameters to train: name the part that makes the "
                "forecast"
            )
        self._head, self._new_head = head, copy.deepcopy(head.state_dict())

    def measure(self, state: State) -> dict[str, Any]:
        """Return the losses of a probe of a checkpoint, which is left as it is."""
        net, o = self.net, self.options
        with trainable_only(net.model, self._head):
            net.model.load_state_dict(state)
            self._head.load_state_dict(self._new_head)
            seed = stream_seed(o.seed, "probe order")
            order = batches(len(self.target.train), o.batch_size, o.finetune_steps_per_epoch, seed)
            net.optimiser = net.adamw(o.probe_learning_rate, o.weight_decay)
            training = net.train(self.target.train, order, frozen=True)
            net.parallel.check()
            validation = net.validate(self.target.validation, o.validation_stride)
        definition = (
            f"linear probe: {o.probe_by} loss on the target of a new head on the frozen network, "
            f"after one epoch of AdamW at {o.probe_learning_rate:g}"
        )
        losses = {"training": training, "validation": validation}
        return {"value": losses[o.probe_by], "definition": definition, **losses}


@contextmanager
def trainable_only(model: nn.Module, part: nn.Module) -> Iterator[None]:
    """Within this context, only the parameters of one part of a model require grad.

    Afterwards ``requires_grad`` is as before, and no parameter has a gradient.
    """
    flags = [(p, p.requires_grad) for p in model.parameters()]
    inside = set(part.parameters())
    try:
        for p, flag in flags:
            p.requires_grad_(flag and p in inside)
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)
            p.grad = None
