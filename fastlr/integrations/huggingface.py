"""A Hugging Face ``TrainerCallback``; needs the extra ``huggingface``."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from typing_extensions import Unpack

from fastlr.errors import InputError, MissingExtraError, install, warn
from fastlr.inputs.base import SupportsBatch
from fastlr.integrations.measurement import NAME, Integration, MeterOptions, Reading, on_main
from fastlr.ops.model_lock import locked

try:
    from accelerate.utils import broadcast_object_list
    from transformers.trainer_callback import CallbackHandler, TrainerCallback
except ImportError as missing:
    raise MissingExtraError(f"not installed ({missing}): {install('huggingface')}") from missing


class LocalRedundancyCallback(Integration, TrainerCallback):
    """Measures the trainer's model every so many steps or epochs, or at evaluations, and logs it.

    The numbers are in ``trainer.state.log_history`` and wherever ``report_to`` says. Without
    ``every_n_steps`` and ``every_n_epochs`` the model is measured at every evaluation, whose
    metrics then hold ``eval_local_redundancy``: ``TrainingArguments(load_best_model_at_end=True,
    metric_for_best_model="local_redundancy", greater_is_better=True)`` keeps the best checkpoint.
    Several evaluation sets share a measurement. Steps are optimizer steps, however many batches are
    accumulated. With several processes that of rank 0 measures, those of a model under
    ``fully_shard`` (FSDP2) all measure together, and all have its numbers. A resumed training goes
    on with the same steps.

    Args:
        inputs: Synthetic inputs, as for `fastlr.estimate`; for language models
            `fastlr.TokenInputs`.
        n: Number of inputs. The default is 1000, or all of them if there are fewer.
        every_n_steps: Number of optimizer steps between two measurements.
        every_n_epochs: Number of epochs between two measurements.
        at_start: Whether to measure before the first step too, where mistakes show at once.
        prefix: Prefix of each name that is logged.
        options: Options of `fastlr.integrations.measurement.Meter`: measures, x, y, loss,
            init_state, dtype ("auto": the trainer's), on_error, and options of `fastlr.estimate`.

    Attributes:
        last: Last `Reading`, or None.

    Raises:
        InputError: An argument is wrong.

    Example:
        >>> callback = LocalRedundancyCallback(inputs, n=128)  # doctest: +SKIP
        >>> Trainer(model, arguments, callbacks=[callback]).train()  # doctest: +SKIP
    """

    def __init__(
        self,
        inputs: SupportsBatch,
        n: int | None = None,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_start: bool = True,
        prefix: str = "",
        **options: Unpack[MeterOptions],
    ) -> None:
        super().__init__(inputs, n, every_n_steps, every_n_epochs, prefix, **options)
        self.at_start = at_start
        self._event: Any = None
        self._measured: Any = None, None  # a moment, and the reading of then

    def on_train_begin(self, *event: Any, **given: Any) -> None:
        """Measure where the training starts."""
        if not self.has_schedule and event[0].eval_strategy == "no":
            warn(
                "LocalRedundancyCallback measures at evaluations, and there are none: give it "
                "every_n_steps or every_n_epochs"
            )
        self._measure_if(self.at_start, event, given)

    def on_step_end(self, *event: Any, **given: Any) -> None:
        """Measure if enough optimizer steps were done."""
        steps = event[1].global_step
        self._measure_if(self.step_due(steps - 1, steps), event, given)

    def on_epoch_end(self, *event: Any, **given: Any) -> None:
        """Measure if enough epochs were done."""
        self._measure_if(self.epoch_due(round(event[1].epoch)), event, given)

    def on_evaluate(self, *event: Any, **given: Any) -> None:
        """Measure with an evaluation, and put the value among its metrics."""
        if not self.has_schedule:
            is_new = self._measured[0] != _moment(event[1], given["model"])
            self._measure_if(is_new, event, given)
            if reading := self._measured[1]:
                given["metrics"][f"eval_{NAME}"] = reading.value

    def _measure_if(self, due: bool, event: Any, given: Any) -> None:
        self._event = (*event, given["model"], _handler())
        if due:
            self.measure()

    def measure(self) -> Reading | None:
        """Measure and log now, and return the reading; every process must call this.

        Returns None where the measurement failed with a warning.

        Raises:
            InputError: no trainer has begun.
        """
        if self._event is None:
            raise InputError(
                "there is no model before a trainer begins: pass the callback to "
                "Trainer(callbacks=[...]), and train"
            )
        args, state, control, model, handler = self._event
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None

        def measure() -> Reading | None:
            with locked(model), _original_forward(model, self.meter.dtype is None):
                return self.meter.measure(
                    lambda: model, state.global_step, int(state.epoch or 0), dtype=dtype
                )

        main = state.is_world_process_zero
        reading = on_main(measure, main, lambda box: broadcast_object_list([box])[0], model)
        self._measured = _moment(state, model), reading
        if reading is None:
            return None
        self.take(reading)
        logs = reading.values(self.prefix)
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})
        if handler:
            pending = control.should_log
            handler.on_log(args, state, control, logs)
            control.should_log = pending  # else the trainer's own log of this step would be lost
        return reading


def _moment(state: Any, model: Any) -> tuple[int, ...]:
    """Tell apart two models, and one before and after its weights were written."""
    return id(model), state.global_step, sum(p._version for p in model.parameters())


def _handler() -> CallbackHandler | None:
    """Return what calls this event; it alone knows the callbacks of ``report_to``."""
    frame = inspect.currentframe()
    while frame and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    return frame and frame.f_locals["self"]


def _original_forward(model: Any, wanted: bool) -> AbstractContextManager[Any]:
    """Take off the autocast that accelerate has put around the model's forward, if wanted."""
    own = vars(model)
    if wanted and "forward" in own and own.get("_original_forward") is not None:
        return patch.object(model, "forward", own["_original_forward"])
    return nullcontext()
