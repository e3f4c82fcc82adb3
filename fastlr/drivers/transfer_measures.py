"""What is measured of a network while it is pretrained: the numbers that checkpoints are selected by."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fastlr
from fastlr import metrics
from fastlr.data import SplitSeries
from fastlr.drivers.forecasting import Forecaster, batches
from fastlr.drivers.runs import stream_seed
from fastlr.drivers.transfer_config import TransferOptions
from fastlr.errors import InputError
from fastlr.stats import Moments

State = Mapping[str, Tensor]


class Redundancy:
    """Local redundancy of a network at several moments, always on the same Gaussian inputs.

    Attributes:
        points: ``{"step", "value", "stderr"}`` of the measurements since `begin`.
    """

    def __init__(self, net: Forecaster, options: TransferOptions, features: int, chunk: int) -> None:
        dtype = None if net.dtype == torch.float32 else net.dtype
        inputs = fastlr.GaussianSeries(length=options.context, features=features)
        predictive, size = fastlr.Gaussian(sigma=options.sigma), options.redundancy_batch or chunk or None
        n = options.redundancy_n
        self._estimator = fastlr.LocalRedundancy(
            net.model, inputs, n, predictive=predictive, seed=options.seed, dtype=dtype, batch_size=size
        )
        self._text = (
            f"local redundancy: mean over {n} Gaussian inputs of E_y ||grad log P(y|x)||^2, y ~ N(f(x), sigma^2 I) with "
            f"sigma = {options.sigma:g}, eval mode"
        )
        self.chunk = chunk
        self.begin()

    def begin(self) -> None:
        """Forget the measurements so far."""
        self.points: list[dict[str, Any]] = []
        self._sums = torch.zeros((), dtype=torch.float64)

    def measure(self, step: int) -> None:
        """Measure the network as it is now, after so many steps."""
        estimate = self._estimator.measure()
        assert estimate.per_sample is not None
        self.chunk, self._sums = estimate.batch_size, self._sums + estimate.per_sample
        self.points.append({"step": step, "value": estimate.value, "stderr": _or_none(estimate.stderr)})

    def record(self) -> dict[str, Any]:
        """The mean over the measurements; its standard error is that over inputs, which all of them share."""
        moments = Moments()
        moments.add(self._sums / len(self.points))
        text = self._text + (f"; mean of {len(self.points)} measurements" if len(self.points) > 1 else "")
        found = {"value": moments.mean, "stderr": _or_none(moments.stderr), "definition": text}
        return {**found, "n": moments.n, "points": self.points}


def weights_and_units(net: Forecaster, source: SplitSeries, options: TransferOptions) -> dict[str, dict[str, Any]]:
    """Measure the weight norm, and the dormant ratio of the activations on training windows of the source."""
    windows = source.train
    generator = torch.Generator().manual_seed(stream_seed(options.seed, "dormant windows"))
    index = torch.randperm(len(windows), generator=generator)[: options.dormant_windows].to(net.device)
    with net.autocast():
        parts = (windows.batch(part)[0] for part in index.split(options.batch_size))
        threshold = options.dormant_threshold
        dormant = metrics.dormant_ratio(net.model, parts, threshold=threshold, units="all", normalize=False)
    return {"weight_norm": metrics.weight_norm(net.model).to_dict(), "dormant_ratio": dormant.to_dict()}


class Probe:
    """Linear probes: the encoder frozen in eval mode, the head drawn anew and trained for one epoch on the target.

    The head's first weights and the order of the windows are the same for every checkpoint.

    Args:
        net: A network to do it in, just made: its head is the one that every probe begins with.
        target: The series.
        options: Of the run.

    Raises:
        InputError: The network has no part of the name that the options say, or nothing to train in it.
    """

    def __init__(self, net: Forecaster, target: SplitSeries, options: TransferOptions) -> None:
        self.net, self.target, self.options = net, target, options
        try:
            head: nn.Module = net.model.get_submodule(options.head)
        except AttributeError:
            parts = ", ".join(name for name, _ in net.model.named_children())
            raise InputError(
                f"head={options.head}: the model has no such part (it has {parts}): name the one that makes the "
                "forecast, or leave linear_probe out of the strategies"
            ) from None
        if not any(p.requires_grad for p in head.parameters()):
            raise InputError(f"head={options.head} has no parameters to train: name the part that makes the forecast")
        self._head, self._first = head, copy.deepcopy(head.state_dict())

    def measure(self, state: State) -> dict[str, Any]:
        """Return the losses of a probe of a checkpoint, which is left as it is."""
        net, o = self.net, self.options
        with trainable_only(net.model, self._head):
            net.model.load_state_dict(state)
            self._head.load_state_dict(self._first)
            seed = stream_seed(o.seed, "probe order")
            order = batches(len(self.target.train), o.batch_size, o.finetune_steps_per_epoch, seed)
            optimiser = net.optimiser(o.probe_learning_rate, o.weight_decay)
            training = net.train(self.target.train, order, optimiser, frozen=True)
            net.parallel.check()
            validation = net.validate(self.target.validation, o.validation_stride)
        text = (
            f"linear probe: {o.probe_by} loss on the target of a new head on the frozen network, after one epoch of AdamW at "
            f"{o.probe_learning_rate:g}"
        )
        losses = {"training": training, "validation": validation}
        return {"value": losses[o.probe_by], "definition": text, **losses}


class trainable_only:
    """Within this context, only the parameters of one part of a model require grad."""

    def __init__(self, model: nn.Module, part: nn.Module) -> None:
        self._flags = [(p, p.requires_grad) for p in model.parameters()]
        self._part = {id(p) for p in part.parameters()}

    def __enter__(self) -> None:
        for p, flag in self._flags:
            p.requires_grad_(flag and id(p) in self._part)

    def __exit__(self, *_: object) -> None:
        for p, flag in self._flags:
            p.requires_grad_(flag)
            p.grad = None


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
