"""The common part of all integrations: what to measure and when, with several processes.

A reading, and the keeper of the best checkpoint.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fastlr.display.trend import Measurement, describe
from fastlr.distributed.fully_sharded import full_params
from fastlr.errors import FastlrError, InputError, did_you_mean, one_line, warn
from fastlr.estimator.estimator import LocalRedundancy
from fastlr.estimator.identity import of_inputs, of_predictive, same
from fastlr.estimator.options import EstimateOptions, all_or, autocast_dtype
from fastlr.estimator.passes import Passes
from fastlr.estimator.predictive import Categorical, Predictive
from fastlr.estimator.progress import OnProgress
from fastlr.estimator.result import Estimate, count
from fastlr.files import save_file
from fastlr.ghost.model.view import ModelView, OutputSelector, unwrap
from fastlr.inputs.base import SupportsBatch
from fastlr.metrics import Measure
from fastlr.metrics.compute import check_names, measures
from fastlr.ops.model_lock import locked
from fastlr.ops.torch_private import holds_fully_sharded, tree_map_only

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "local_redundancy"
AUTO = "auto"
DEFAULT_N = 1000


class MeasurementOptions(TypedDict, total=False):
    """Options of every integration; `Meter` and `fastlr.estimate` describe them."""

    dtype: torch.dtype | str | None
    on_error: str
    probe: str
    batch_size: int | None
    output: OutputSelector
    in_dim: int
    out_dim: int
    target_rel_stderr: float | None
    min_n: int
    max_n: int | None
    progress: bool | OnProgress | None


class MeterOptions(MeasurementOptions, total=False):
    """Options of the integrations that are given their inputs."""

    predictive: Predictive | None
    seed: int
    measures: Collection[str]
    x: Any
    y: Any
    loss: Any
    init_state: Mapping[str, Tensor] | nn.Module | None


_OPTIONS = frozenset(MeterOptions.__annotations__)


@dataclass(frozen=True, repr=False)
class Reading:
    """The values measured at one moment of a training.

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

    @property
    def stderr(self) -> float:
        """The standard error of the local redundancy."""
        return self.estimate.stderr

    def __repr__(self) -> str:
        """Return the moment and the numbers, in one line."""
        numbers = (f"{name}={value:.6g}" for name, value in self.values().items())
        return f"Reading(step={self.step}, epoch={self.epoch}, {', '.join(numbers)})"

    def values(self, prefix: str = "") -> dict[str, float]:
        """Return the numbers for a logger by name, the prefix before each name.

        These are local_redundancy, local_redundancy_stderr and the measures; those that are not
        finite are left out.
        """
        numbers = {NAME: self.estimate.value, f"{NAME}_stderr": self.estimate.stderr}
        numbers |= {name: float(measure) for name, measure in self.measures.items()}
        return {prefix + name: value for name, value in numbers.items() if math.isfinite(value)}


class Meter:
    """Measures a model now and then. The integrations take its arguments after their own.

    Args:
        inputs: synthetic inputs, as for `fastlr.estimate`.
        n: Number of inputs. The default is 1000, or all of them if there are fewer.
        measures: Names of `fastlr.metrics.measures` to take as well.
        x: Real inputs for these measures.
        y: Labels for these measures.
        loss: Loss function for these measures.
        init_state: State dict or model that "distance_from_init" compares with.
        dtype: Autocast dtype of the measurement, as for `fastlr.estimate`. "auto" takes the
            training's where the framework knows it.
        on_error: "warn" or "raise", for measurements that fail after the first. With "warn" the
            training goes on.
        options: Options of `fastlr.estimate`: predictive, probe, batch_size, seed, output, in_dim,
            out_dim, target_rel_stderr, min_n, max_n, progress (False unless given).

    Raises:
        InputError: wrong arguments.
    """

    def __init__(
        self,
        inputs: SupportsBatch,
        n: int | None = None,
        *,
        measures: Collection[str] = (),
        x: Any = None,
        y: Any = None,
        loss: Any = None,
        init_state: Mapping[str, Tensor] | nn.Module | None = None,
        dtype: torch.dtype | str | None = AUTO,
        on_error: str = "warn",
        **options: Any,
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise InputError(f"on_error must be 'warn' or 'raise', not {on_error!r}")
        if dtype != AUTO:
            dtype = autocast_dtype(dtype)
        n = all_or(DEFAULT_N, inputs) if n is None else n
        defaults = {k: p.default for k, p in inspect.signature(LocalRedundancy).parameters.items()}
        given = {"model": nn.Module(), "inputs": inputs, "n": n, **options}
        self.n = EstimateOptions(**{**defaults, **given}).n  # mistakes show here
        check_names(measures, x=x, y=y, loss=loss, init_state=init_state)
        self.inputs, self.measures = inputs, tuple(measures)
        self.x, self.y, self.loss, self.init_state = x, y, loss, init_state
        self.dtype, self.on_error, self.options = dtype, on_error, options
        self.batch_size: int | None = options.pop("batch_size", None)
        self._estimator: LocalRedundancy | None = None
        self._key: Any = None
        self._has_measured = False

    def measure(
        self,
        model: Callable[[], nn.Module],
        step: int,
        epoch: int,
        *,
        dtype: torch.dtype | None = None,
        keep: Callable[[Reading, nn.Module], Any] | None = None,
    ) -> Reading | None:
        """Measure the model as it is now, and return the reading.

        Returns None where the measurement failed, with a warning that the training goes on.

        Args:
            model: returns the model, which is left as it was wherever this ends.
            step: optimizer steps done.
            epoch: epochs done.
            dtype: autocast dtype of the training, for "auto".
            keep: Function that is called with the reading and the model.

        Raises:
            FastlrError: the first measurement failed; later ones only with ``on_error="raise"``.
        """
        began = time.perf_counter()
        precision: Any = dtype if self.dtype == AUTO else self.dtype
        try:
            module = unwrap(model())
            with locked(module):
                estimator = self._estimator_of(module, precision)
                estimate = estimator.measure()
                if not step:  # nobody knows yet what memory the training takes at its peak
                    estimator.release()
                self.batch_size = estimate.batch_size
                values = self._measures(module, estimator.passes) if self.measures else {}
                reading = Reading(step, epoch, estimate, values, time.perf_counter() - began)
                if keep is not None:
                    keep(reading, module)
        except FastlrError as error:
            if self.on_error == "raise" or not self._has_measured:
                raise
            warn(f"not measured, the training goes on: {one_line(error)}")
            return None
        self._has_measured = True
        return reading

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs for the same bits, and what is measured.

        The first is how many inputs at a time.
        """
        return {"batch_size": self.batch_size, "measured": self._measured()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.batch_size = state["batch_size"]
        self._estimator = None

    def changed_since(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names of what a `state_dict` was measured with, and this meter is not.

        What cannot be told, as in states of older versions, is not among them.
        """
        then, now = state.get("measured"), self._measured()
        if not then:
            return []
        names = [name for name in ("n", "seed", "probe") if then[name] != now[name]]
        if same(then["inputs"], now["inputs"]) is False and not names:
            names.append("inputs")
        if same(then["predictive"], now["predictive"]) is False:
            names.append("predictive")
        return names

    def _measured(self) -> dict[str, Any]:
        """Return what tells readings that may be compared from others, as plain values."""
        seed = self.options.get("seed", 0)
        predictive = self.options.get("predictive")
        return {
            "inputs": of_inputs(self.inputs, self.n, seed),
            "n": self.n,
            "seed": seed,
            "probe": self.options.get("probe", "rademacher"),
            "predictive": of_predictive(predictive or Categorical(), None),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without the estimator, which holds the model and its plan and is made anew."""
        return {**vars(self), "_estimator": None}

    def _estimator_of(self, model: nn.Module, dtype: torch.dtype | None) -> LocalRedundancy:
        """Return the estimator of the last time, or a new one for another model.

        A model that has other parameters counts as another.
        """
        shapes = tuple(
            (name, p.shape, p.device, p.dtype) for name, p in ModelView.of(model).parameters.items()
        )
        key = (id(model), dtype, shapes)
        if self._estimator is None or key != self._key:
            self._estimator = LocalRedundancy(
                model,
                self.inputs,
                self.n,
                dtype=dtype,
                batch_size=self.batch_size,
                **{"progress": False, **self.options},
            )
            self._key = key
        return self._estimator

    def _measures(self, model: nn.Module, passes: Passes) -> dict[str, Measure]:
        device = passes.view.device
        x, y = tree_map_only(Tensor, lambda t: t.to(device), (self.x, self.y))
        axes = {
            key: self.options[key] for key in ("output", "in_dim", "out_dim") if key in self.options
        }
        with passes.autocast():
            return measures(
                model,
                self.measures,
                x=x,
                y=y,
                loss=self.loss,
                init_state=self.init_state,
                **axes,
            )


Keep = str | os.PathLike[str] | Callable[[Reading], Any]


class Keeper:
    """Keeps the checkpoint with the best local redundancy.

    Args:
        keep: a file, a function of the reading, or None.
        mode: "max" or "min".

    Raises:
        InputError: an unknown mode, a folder, or a file whose folder is not there.
    """

    def __init__(self, keep: Keep | None, mode: str) -> None:
        if mode not in ("max", "min"):
            raise InputError(f"mode must be 'max' or 'min', not {mode!r}")
        self.path = None if keep is None or callable(keep) else Path(keep)
        self.function = keep if callable(keep) else None
        if self.path is not None:
            folder = self.path.absolute().parent
            if not folder.is_dir():
                raise InputError(f"keep_best={self.path}: there is no folder {folder}")
            if self.path.is_dir():
                raise InputError(f"keep_best={self.path} is a folder: name a file in it")
        self.sign = 1.0 if mode == "max" else -1.0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Take the next reading for the best so far."""
        self.value = -math.inf
        self.best: Reading | None = None

    def see(self, reading: Reading, model: nn.Module) -> None:
        """Keep the model, as it is now, if the reading is the best."""
        if not self.sign * reading.value > self.value:
            return
        if self.path is not None:
            state = {
                key: value
                for key, value in unwrap(model).state_dict().items()
                if isinstance(value, Tensor)
            }
            save_file(
                self.path,
                {
                    "state_dict": state,
                    "step": reading.step,
                    "epoch": reading.epoch,
                    **reading.values(),
                },
            )
        if self.function is not None:
            self.function(reading)
        self.value, self.best = self.sign * reading.value, reading

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"best": self.sign * self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.value, self.best = self.sign * state["best"], None


class Integration:
    """Base of the monitor and the callbacks: when to measure, what to measure, the readings.

    It keeps the last and the best reading, and of each reading what the trend needs: the value,
    its standard error and the images' values (4 bytes per input).

    A subclass asks `step_due` and `epoch_due` at the events of its framework, has its ``meter``
    measure, gives the reading to `take`, and logs it where its framework wants it.

    Raises:
        InputError: wrong arguments, such as both ``every_n_steps`` and ``every_n_epochs``.
    """

    def __init__(
        self,
        inputs: SupportsBatch,
        n: int | None,
        every_n_steps: int | None,
        every_n_epochs: int | None,
        prefix: str,
        keep_best: Keep | None = None,
        mode: str = "max",
        **options: Unpack[MeterOptions],
    ) -> None:
        if every_n_steps is not None and every_n_epochs is not None:
            raise InputError("every_n_steps and every_n_epochs are both given: choose one")
        self.every_n_steps = (
            None if every_n_steps is None else count("every_n_steps", every_n_steps)
        )
        self.every_n_epochs = (
            None if every_n_epochs is None else count("every_n_epochs", every_n_epochs)
        )
        self.has_schedule = every_n_steps is not None or every_n_epochs is not None
        known = _OPTIONS | set(inspect.signature(type(self)).parameters) - {"options"}
        for name in options:
            if name not in _OPTIONS:
                hint = did_you_mean(name, known) or f"choose from {', '.join(sorted(known))}"
                raise InputError(f"unknown option {name}: {hint}")
        self.meter = Meter(inputs, n, **options)
        self.keeper = Keeper(keep_best, mode)
        self.prefix = prefix
        self.last: Reading | None = None
        self.start: Measurement | None = None  # reading before training began
        self.course: list[Measurement] = []  # readings after training began

    def take(self, reading: Reading) -> None:
        """Keep a reading. The trend skips the first if it was taken before training began."""
        before_training = self.last is None and not (reading.step or reading.epoch or self.course)
        self.last = reading
        measured = Measurement.of(vars(reading.estimate), reading.estimate.per_sample)
        measured = measured._replace(step=reading.step, epoch=reading.epoch)
        if before_training:
            self.start = measured
        else:
            self.course.append(measured)

    def trend(self) -> str:
        """Return the trend of local redundancy since training began, as a sentence.

        The sentence has the ratio of the last three readings to the first three, with its 99 %
        confidence interval. `fastlr.display.trend` has the rule, and
        ``fastlr.display.trend.trend(self.course)`` the numbers.
        """
        return describe(self.course)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the readings over the optimizer steps, or over the epochs if no step was counted.

        Args:
            path: File to write as well, ``.png``, ``.pdf`` or ``.svg``.

        Returns:
            A matplotlib figure, which notebooks show.

        Raises:
            InputError: There is no reading yet, or the file cannot be written.
        """
        from fastlr.display.figures import save_figure
        from fastlr.display.plots import course_figure

        figure = course_figure([*([self.start] if self.start else []), *self.course])
        if path is not None:
            save_figure(figure, path)
        return figure

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint should hold, for the same bits and the same trend."""
        course = [reading._asdict() for reading in self.course]
        start = self.start and self.start._asdict()
        return {**self.meter.state_dict(), "start": start, "course": course}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`.

        Readings with other inputs, n, seed, probe or predictive are dropped with a warning.
        """
        changed = self.meter.changed_since(state)
        if changed:
            self.begin_anew(changed)
            return
        self.meter.load_state_dict(state)
        start = state.get("start")
        self.start = None if start is None else Measurement(**start)
        self.course = [Measurement(**reading) for reading in state.get("course", [])]

    def begin_anew(self, changed: Sequence[str]) -> None:
        """Drop the readings so far, with a warning that names what changed."""
        self.start, self.course = None, []
        warn(
            f"the readings of the state were taken with another {', '.join(changed)} and cannot "
            "be compared: the trend and the best reading start again; to resume them, measure "
            "with the same inputs, n, seed, probe and predictive"
        )

    @property
    def best(self) -> Reading | None:
        """The best reading so far."""
        return self.keeper.best

    def step_due(self, before: int, now: int) -> bool:
        """Return True if a multiple of every_n_steps was reached since ``before`` steps."""
        return (
            self.every_n_steps is not None
            and now // self.every_n_steps > before // self.every_n_steps
        )

    def epoch_due(self, done: int) -> bool:
        """Return True if the model is to be measured after this many epochs."""
        return self.every_n_epochs is not None and done > 0 and done % self.every_n_epochs == 0


def on_main(
    measure: Callable[[], Reading | None],
    main: bool,
    broadcast: Callable[[Any], Any],
    model: nn.Module,
) -> Reading | None:
    """Measure on the main process; the others return its reading or raise its error.

    All processes must call this.

    Args:
        measure: called on the main process alone; on all of them together where the model is under
            ``fully_shard``.
        main: True on the main process.
        broadcast: gives every process the main one's object.
        model: the whole of what is measured, or what holds it.
    """
    if holds_fully_sharded(model):
        with locked(model), full_params(model):
            reading = measure()
        return broadcast(reading)
    reading = failure = None
    if main:
        try:
            reading = measure()
        except Exception as error:  # told to the others first: they would wait for ever
            failure = error
    reading, text = broadcast((reading, failure and one_line(failure)))
    if failure is not None:
        raise failure
    if text is not None:
        raise FastlrError(f"the measurement failed on the main process: {text}")
    return reading


def rank() -> int:
    """Number of this process among those that train together; 0 where there is one."""
    distributed = torch.distributed
    return (
        distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    )
