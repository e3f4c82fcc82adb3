"""A Hugging Face ``TrainerCallback``; needs the extra ``huggingface``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastlr.errors import InputError, MissingExtraError, install
from fastlr.integrations.measurement import NAME, Integration, Reading, on_main
from fastlr.ops.model_lock import locked

try:
    import accelerate  # noqa: F401  (the Trainer does not run without it)
    from transformers import TrainerCallback
except ImportError as missing:
    raise MissingExtraError(f"not installed ({missing}): {install('huggingface')}") from missing


class LocalRedundancyCallback(Integration, TrainerCallback):
    """Measures the trainer's model every so many steps or epochs, or at evaluations.

    It logs the numbers by ``trainer.log``.

    So the numbers are in ``trainer.state.log_history`` and wherever ``report_to`` says. Without
    ``every_n_steps`` and ``every_n_epochs`` the model is measured at every evaluation, whose
    metrics then hold ``eval_local_redundancy``: ``TrainingArguments(load_best_model_at_end=True,
    metric_for_best_model="local_redundancy", greater_is_better=True)`` keeps the best checkpoint.
    Steps are optimizer steps, however many batches are accumulated. With several processes that of
    rank 0 measures, those of a model under ``fully_shard`` (FSDP2) all measure together, and all
    have its numbers. A resumed training goes on with the same steps.

    Args:
        trainer: the ``transformers.Trainer``:
            ``trainer.add_callback(LocalRedundancyCallback(trainer, inputs))``.
        inputs: synthetic inputs, as for `fastlr.estimate`; for language models
            `fastlr.TokenInputs`, with ``predictive=fastlr.Categorical()``.
        n: how many of them.
        every_n_steps: optimizer steps between two measurements.
        every_n_epochs: epochs between two measurements.
        at_start: measure before the first step too, where a mistake in the arguments shows at once.
        prefix: before each name that is logged.
        what: measures, x, y, loss, init_state, dtype ("auto": the trainer's), on_error,
            and options of `fastlr.LocalRedundancy`; see `fastlr.integrations.measurement.Meter`.

    Attributes:
        last: the last `Reading`, or None.

    Raises:
        InputError: wrong arguments.
    """

    def __init__(
        self,
        trainer: Any,
        inputs: Any,
        n: int = 1000,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_start: bool = True,
        prefix: str = "",
        **what: Any,
    ) -> None:
        if not callable(getattr(trainer, "log", None)) or not hasattr(trainer, "state"):
            raise InputError(
                f"trainer must be a transformers.Trainer, not {type(trainer).__name__}"
            )
        super().__init__(inputs, n, every_n_steps, every_n_epochs, prefix, **what)
        self.trainer, self.at_start = trainer, at_start

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure where the training starts."""
        if self.at_start:
            self.measure()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure if enough optimizer steps were done."""
        if self.step_due(state.global_step - 1, state.global_step):
            self.measure()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure if enough epochs were done."""
        if self.epoch_due(round(state.epoch)):
            self.measure()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Measure with an evaluation, and put the value among its metrics."""
        if not self.has_schedule:
            reading = self.measure()
            if reading is not None and metrics is not None:
                metrics[f"eval_{NAME}"] = reading.value

    def measure(self) -> Reading | None:
        """Measure and log now, and return the reading; every process must call this.

        Returns None where the measurement failed with a warning.
        """
        args, state = self.trainer.args, self.trainer.state
        dtype = torch.bfloat16 if args.bf16 else None
        if args.fp16 and not args.bf16:
            dtype = torch.float16
        model = self.trainer.model

        def measure() -> Reading | None:
            with locked(model), _original_forward(model, self.meter.dtype is None):
                return self.meter.measure(
                    lambda: model, state.global_step, int(state.epoch or 0), dtype=dtype
                )

        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        main = self.trainer.is_world_process_zero()
        reading = on_main(measure, main, _broadcast if several else None, model)
        if reading is None:
            return None
        self.take(reading)
        control = self.trainer.control
        pending = control.should_log
        self.trainer.log(reading.values(self.prefix))
        control.should_log = (
            pending  # logging has put it back, and the trainer's own log of this step would be lost
        )
        return reading


@contextmanager
def _original_forward(model: Any, wanted: bool) -> Iterator[None]:
    """The model's forward without the autocast that accelerate has put around it, if wanted."""
    wrapped, original = vars(model).get("forward"), vars(model).get("_original_forward")
    if not wanted or wrapped is None or original is None:
        yield
        return
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped


def _broadcast(message: Any) -> Any:
    box = [message]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
