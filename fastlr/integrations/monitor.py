"""A monitor for hand-written training loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from fastlr.distributed.fully_sharded import full_params
from fastlr.distributed.sharding import ALONE, team
from fastlr.errors import InputError, warn
from fastlr.ghost.model_io import trainable, unwrap
from fastlr.integrations.alarm import TaskAlarm
from fastlr.integrations.loggers import CallbackLogger, Logger
from fastlr.integrations.measurement import Integration, Keep, Reading, rank
from fastlr.ops.model_lock import locked
from fastlr.ops.torch_private import holds_fully_sharded


class Monitor(Integration):
    """Measures a model every so many steps or epochs of a training loop.

    It logs the readings, and keeps the best checkpoint.

    ``monitor.step()`` after each optimizer step, or ``monitor.epoch()`` after each epoch, is all
    that a loop needs. The training is bit for bit the same without it: parameters, gradients,
    buffers, flags and random states are left as they were. With several processes
    (DistributedDataParallel) the one of rank 0 measures, and the others return at once: nothing is
    communicated, so the loop may also call it on rank 0 alone; they wait for rank 0 at their next
    gradient. Called on all of them inside `fastlr.distributed.sharded`, they share the inputs, and
    all get the reading; buffers must then be the same on all, which those of batch norm are not
    between two steps of DistributedDataParallel. A model under
    ``torch.distributed.fsdp.fully_shard`` is measured by all of its ranks together: each calls it,
    and all get the reading.

    Gradient accumulation: call ``step`` where the optimizer steps. Mixed precision:
    ``dtype=torch.bfloat16`` measures under autocast, whatever region the call is in; a gradient
    scaler does not matter. EMA: ``weights=ema_model``.

    Args:
        model: the model that trains; DDP and torch.compile wrappers are looked through.
        inputs: synthetic inputs, as for `fastlr.estimate`.
        n: how many of them.
        every_n_steps: optimizer steps between two measurements.
        every_n_epochs: epochs between two measurements. Neither: only where ``measure`` is called.
        logger: a logger of `fastlr.integrations.loggers`, a function of (values, step), or several
            of these.
        keep_best: a file for the state dict of the best model so far ("state_dict", with "step",
            "epoch", "local_redundancy" and "local_redundancy_stderr"), or a function that is called
            with each best `Reading`.
        mode: "max": the best is the largest local redundancy, as in the paper's choice of
            checkpoints; or "min".
        prefix: before each name that is logged, such as "fastlr/".
        alarm: ring, with a warning, where plasticity is being lost, by the best rule of a study of
            alarms (docs/interpreting.md): end each task with `task`; without tasks every reading
            counts as one.
        guess: accuracy of the best answer that does not look at the input, for the alarm; 0.1 of
            ten classes alike.
        what: measures, x, y, loss, init_state, weights, dtype, on_error, and options of
            `fastlr.LocalRedundancy`; see `fastlr.integrations.measurement.Meter`.

    Attributes:
        last: the last `Reading`, or None.
        first: numbers of the first one: "value", "stderr" and "per_parameter".
        best: the best one, or None; after a resumption None until it is beaten.
        steps: optimizer steps done.
        epochs: epochs done.
        seconds: spent measuring.

    Raises:
        InputError: wrong arguments. ModelError: no trainable parameters, or sharded ones.

    Example:
        >>> import torch, fastlr
        >>> from fastlr.integrations import Monitor
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
        >>> rows = []
        >>> log = lambda values, step: rows.append((step, sorted(values)))
        >>> inputs = fastlr.ShapeImages((3, 8, 8))
        >>> monitor = Monitor(model, inputs, n=16, every_n_steps=2, logger=log)
        >>> for _ in range(5):
        ...     _ = monitor.step()
        >>> for row in rows:
        ...     print(row)
        (2, ['local_redundancy', 'local_redundancy_stderr'])
        (4, ['local_redundancy', 'local_redundancy_stderr'])
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        n: int = 1000,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        logger: Logger | Callable[[dict[str, float], int], Any] | Iterable[Any] | None = None,
        keep_best: Keep | None = None,
        mode: str = "max",
        prefix: str = "",
        alarm: bool = False,
        guess: float = 0.0,
        **what: Any,
    ) -> None:
        trainable(unwrap(model), shards=True)
        super().__init__(inputs, n, every_n_steps, every_n_epochs, prefix, keep_best, mode, **what)
        self.model = model
        self.loggers = _loggers(logger)
        self.steps = self.epochs = 0
        self.first: dict[str, Any] = {}
        self.seconds = 0.0
        self.alarm = TaskAlarm(guess) if alarm else None

    def step(self) -> Reading | None:
        """Count an optimizer step, measure if it is due, and return the reading if there is one."""
        self.steps += 1
        if self.steps == 1 and self.every_n_steps is self.every_n_epochs is None:
            text = "Monitor(every_n_steps=None, every_n_epochs=None) measures only by measure()"
            warn(text)
        return self.measure() if self.step_due(self.steps - 1, self.steps) else None

    def epoch(self) -> Reading | None:
        """Count an epoch, and measure if it is due. Returns the reading, if there is one."""
        self.epochs += 1
        return self.measure() if self.epoch_due(self.epochs) else None

    def task(self, accuracy: float | None = None) -> str | None:
        """End a task, and say so, with a warning, if the alarm rings.

        Where the accuracy on new tasks is known the alarm rings by it, for no measure was shown to
        warn earlier; where it is not, by local redundancy, measured after every second task.

        Args:
            accuracy: on this task after training on it, between 0 and 1; None: not known.

        Returns:
            What the alarm says, with the error rates of such rings; None where it does not ring.

        Raises:
            InputError: there is no alarm, or the accuracy is no share.

        Source: the study of alarms, bench/results/cpu/alarm.
        """
        if self.alarm is None:
            raise InputError("this monitor has no alarm: make it with alarm=True")

        def value() -> float | None:
            reading = self._measure_and_log()
            return None if reading is None else reading.value

        return self.alarm.end_task(accuracy, value)

    def measure(self) -> Reading | None:
        """Measure and log now.

        Returns:
            The reading; None on processes that do not measure, and where a measurement failed with
            a warning.

        Raises:
            FastlrError: the first measurement failed; later ones only with ``on_error="raise"``.
        """
        reading = self._measure_and_log()
        if reading is not None and self.alarm is not None:
            self.alarm.take_reading(reading.value)
        return reading

    def _measure_and_log(self) -> Reading | None:
        main = rank() == 0
        if not main and team() is ALONE and not holds_fully_sharded(self.model):
            return None
        with locked(self.model), full_params(self.model):
            keep = self.keeper.see if main else None
            reading = self.meter.measure(lambda: self.model, self.steps, self.epochs, keep=keep)
        if reading is not None:
            self.take(reading)
            self.first = self.first or _numbers(reading)
            self.seconds += reading.seconds
            for logger in self.loggers if main else []:
                logger.log(reading.values(self.prefix), self.steps)
        return reading

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should hold of this monitor.

        A resumed training then measures at the same steps, with the same bits.
        """
        counts = {"steps": self.steps, "epochs": self.epochs, "first": self.first}
        alarm = {} if self.alarm is None else {"alarm": self.alarm.state_dict()}
        return {**counts, **alarm, **self.keeper.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the `state_dict` was taken.

        Where that was with other inputs, or another n, seed, probe or predictive, steps, epochs
        and tasks go on, and readings begin anew, with a warning.
        """
        try:
            self.steps, self.epochs = state["steps"], state["epochs"]
            self.first = dict(state.get("first", {}))  # older states have none
            if self.alarm is not None and "alarm" in state:  # older states have none
                self.alarm.load_state_dict(state["alarm"])
            self.keeper.load_state_dict(state)
            super().load_state_dict(state)
        except KeyError as error:
            raise InputError(f"not the state of a Monitor: {error} is missing") from None

    def begin_anew(self, changed: Sequence[str]) -> None:
        """Begin the readings anew, those of the alarm and the best one as well."""
        super().begin_anew(changed)
        self.first = {}
        self.keeper.begin_anew()
        if self.alarm is not None:
            self.alarm.begin_values_anew()


def _numbers(reading: Reading) -> dict[str, Any]:
    estimate = reading.estimate
    return {
        "value": estimate.value,
        "stderr": estimate.stderr,
        "per_parameter": dict(estimate.per_parameter),
    }


def _loggers(logger: Any) -> list[Logger]:
    if logger is None:
        return []
    if isinstance(logger, (list, tuple)):
        return [one for part in logger for one in _loggers(part)]
    if isinstance(logger, Logger):
        return [logger]
    if callable(logger):
        return [CallbackLogger(logger)]
    raise InputError(
        "logger must be one of fastlr.integrations.loggers or a function of (values, step), not "
        f"{type(logger).__name__}"
    )
