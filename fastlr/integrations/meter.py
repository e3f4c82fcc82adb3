"""What all integrations share: what is measured and when, one reading, and how processes share it."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastlr.errors import FastlrError, FastlrWarning, InputError, one_line
from fastlr.estimate import LocalRedundancy
from fastlr.ghost.adapt import trainable, unwrap
from fastlr.integrations.weights import Weights, with_weights
from fastlr.metrics import Measure
from fastlr.metrics.together import check_names, measures
from fastlr.result import Estimate, count

NAME = "local_redundancy"
AUTO = "auto"
_OPTIONS = frozenset(inspect.signature(LocalRedundancy).parameters) - {"model", "inputs", "n", "device"}


@dataclass(frozen=True)
class Reading:
    """What was measured at one moment of a training.

    Attributes:
        step: optimizer steps done.
        epoch: epochs done.
        estimate: the local redundancy.
        measures: name -> `fastlr.metrics.Measure`, those that were asked for.
        seconds: wall time of all of it.
    """

    step: int
    epoch: int
    estimate: Estimate
    measures: dict[str, Measure] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def value(self) -> float:
        """The local redundancy."""
        return self.estimate.value

    def values(self, prefix: str = "") -> dict[str, float]:
        """The numbers for a logger: local_redundancy, local_redundancy_stderr and the measures, the prefix before each."""
        found = {NAME: self.estimate.value, f"{NAME}_stderr": self.estimate.stderr}
        found |= {name: float(measure) for name, measure in self.measures.items()}
        return {prefix + name: value for name, value in found.items() if math.isfinite(value)}


class Schedule:
    """Every so many steps or epochs.

    Args:
        every_n_steps: optimizer steps between two measurements.
        every_n_epochs: epochs between two measurements.

    Raises:
        InputError: both or not integers of at least 1.
    """

    def __init__(self, every_n_steps: int | None, every_n_epochs: int | None) -> None:
        if every_n_steps is not None and every_n_epochs is not None:
            raise InputError("every_n_steps and every_n_epochs are both given: choose one")
        self.steps = None if every_n_steps is None else count("every_n_steps", every_n_steps)
        self.epochs = None if every_n_epochs is None else count("every_n_epochs", every_n_epochs)

    def step_due(self, before: int, now: int) -> bool:
        """Whether a multiple of every_n_steps was reached since ``before``."""
        return self.steps is not None and now // self.steps > before // self.steps

    def epoch_due(self, done: int) -> bool:
        """Whether to measure after this many epochs."""
        return self.epochs is not None and done > 0 and done % self.epochs == 0


class Meter:
    """Measures a model now and then. The integrations take its arguments after their own.

    Args:
        inputs: synthetic inputs, as for `fastlr.estimate`.
        n: how many of them.
        measures: names of `fastlr.metrics.measures` to take as well.
        x: real inputs for these.
        y: labels for these.
        loss: for these.
        init_state: for "distance_from_init".
        weights: measure the model with these weights in it: an EMA or SWA of it, as a module, a state dict or a function that
            returns one. None: its own.
        dtype: autocast dtype of the measurement; None: the model's own precision. "auto": that of the training where the
            framework tells, else None.
        on_error: "warn": where a measurement fails after the first, say so and let the training go on; "raise".
        options: of `fastlr.LocalRedundancy`: predictive, probe, batch_size, seed, output, in_dim, out_dim,
            target_rel_stderr, min_n, max_n, progress.

    Raises:
        InputError: wrong arguments.
    """

    def __init__(
        self,
        inputs: Any,
        n: int = 1000,
        *,
        measures: Collection[str] = (),
        x: Any = None,
        y: Any = None,
        loss: Any = None,
        init_state: Mapping[str, Tensor] | nn.Module | None = None,
        weights: Weights | None = None,
        dtype: torch.dtype | str | None = AUTO,
        on_error: str = "warn",
        **options: Any,
    ) -> None:
        if unknown := sorted(set(options) - _OPTIONS):
            raise InputError(f"unknown options {unknown}: choose from {sorted(_OPTIONS)}")
        if on_error not in ("warn", "raise"):
            raise InputError(f"on_error must be 'warn' or 'raise', not {on_error!r}")
        if isinstance(dtype, str) and dtype != AUTO:
            raise InputError(f"dtype must be torch.bfloat16, torch.float16, None or 'auto', not {dtype!r}")
        if not callable(getattr(inputs, "batch", None)):
            raise InputError(f"inputs must be fastlr.ShapeImages(...) or other inputs of fastlr, not {inputs!r}")
        check_names(measures, x=x, y=y, loss=loss, init_state=init_state)
        self.inputs, self.n, self.measures, self.weights = inputs, count("n", n), tuple(measures), weights
        self.x, self.y, self.loss, self.init_state = x, y, loss, init_state
        self.dtype, self.on_error, self.options = dtype, on_error, options
        self.batch_size: int | None = options.pop("batch_size", None)
        self._estimator: LocalRedundancy | None = None
        self._key: Any = None
        self._proven = False

    def measure(
        self,
        model: nn.Module,
        step: int,
        epoch: int,
        *,
        dtype: torch.dtype | None = None,
        keep: Callable[[Reading], Any] | None = None,
    ) -> Reading:
        """Measure the model as it is now.

        Args:
            model: left as it was, wherever this ends.
            step: optimizer steps done.
            epoch: epochs done.
            dtype: autocast dtype of the training, for "auto".
            keep: called with the reading while the measured weights are in the model.

        Raises:
            FastlrError: it cannot be measured.
        """
        began = time.perf_counter()
        model = unwrap(model)
        precision = dtype if self.dtype == AUTO else self.dtype
        assert not isinstance(precision, str)
        with with_weights(model, self.weights):
            estimate = self._estimator_of(model, precision).measure()
            self.batch_size = estimate.batch_size
            found = self._measures(model, precision) if self.measures else {}
            reading = Reading(step, epoch, estimate, found, time.perf_counter() - began)
            if keep is not None:
                keep(reading)
        self._proven = True
        return reading

    def attempt(self, measure: Callable[[], Reading]) -> Reading | None:
        """Call it; an error of fastlr is a warning, and None returned, if the user wants that and one has gone well."""
        try:
            return measure()
        except FastlrError as error:
            if self.on_error == "raise" or not self._proven:
                raise
            warnings.warn(f"not measured, the training goes on: {one_line(error)}", FastlrWarning, stacklevel=3)
            return None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs for the same bits: how many inputs at a time."""
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.batch_size = state["batch_size"]
        self._estimator = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without the estimator, which holds the model and its plan and is made anew."""
        return {**vars(self), "_estimator": None}

    def _estimator_of(self, model: nn.Module, dtype: torch.dtype | None) -> LocalRedundancy:
        """The estimator of the last time, or a new one where the model is another or has other parameters."""
        shapes = tuple((name, p.shape, p.device, p.dtype) for name, p in trainable(model).items())
        key = (id(model), dtype, shapes)
        if self._estimator is None or key != self._key:
            self._estimator = LocalRedundancy(
                model, self.inputs, self.n, dtype=dtype, batch_size=self.batch_size, **self.options
            )
            self._key = key
        return self._estimator

    def _measures(self, model: nn.Module, dtype: torch.dtype | None) -> dict[str, Measure]:
        device = next(model.parameters()).device
        x, y = (tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, data) for data in (self.x, self.y))
        axes = {key: self.options[key] for key in ("output", "in_dim", "out_dim") if key in self.options}
        ambient = torch.is_autocast_enabled(device.type)
        context: Any = nullcontext()
        if ambient or dtype is not None:
            context = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=not ambient)
        with context:
            state = self.init_state
            return measures(model, self.measures, x=x, y=y, loss=self.loss, init_state=state, **axes)


def on_main(
    measure: Callable[[], Reading | None], main: bool, broadcast: Callable[[Any], Any] | None
) -> Reading | None:
    """Measure on the main process; the others return its reading or raise its error. All of them must call this.

    Args:
        measure: called on the main process alone.
        main: whether this is it.
        broadcast: gives every process the main one's object; None where there is one process.
    """
    if broadcast is None:
        return measure()
    reading, failure, text = None, None, None
    if main:
        try:
            reading = measure()
        except Exception as error:  # told to the others first: they would wait for ever
            failure, text = error, one_line(error)
    reading, text = broadcast((reading, text))
    if failure is not None:
        raise failure
    if text is not None:
        raise FastlrError(f"the measurement failed on the main process: {text}")
    return reading
