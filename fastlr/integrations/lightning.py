"""A Lightning ``Callback``; needs the extra ``lightning``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from typing_extensions import Unpack

from fastlr.errors import InputError, MissingExtraError, ModelError, install
from fastlr.inputs.base import SupportsBatch
from fastlr.integrations.measurement import Integration, MeterOptions, Reading, on_main

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers.logger import DummyLogger
except ImportError as missing:
    raise MissingExtraError(
        f"lightning is not installed ({missing}): {install('lightning')}"
    ) from missing

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class LocalRedundancyMonitor(Integration, Callback):
    """Measures the module every so many steps or epochs of a fit, and at its start, and logs it.

    What the module itself logs in ``forward`` is left out while it is measured.

    The numbers go to all loggers of the trainer (step: optimizer steps done) and into
    ``trainer.callback_metrics``, so that ``ModelCheckpoint(monitor="local_redundancy",
    mode="max")`` keeps the best checkpoint; with measurements at the end of epochs and a
    validation, give it ``save_on_train_epoch_end=True``. With several processes, that of rank 0
    measures, those of a module under ``fully_shard`` (``ModelParallelStrategy``) all measure
    together, and all have its numbers. Steps are optimizer steps, however many batches are
    accumulated.

    Args:
        inputs: Inputs, as for `fastlr.estimate`.
        n: Number of inputs. The default is 1000, or all of them if there are fewer.
        every_n_steps: Number of optimizer steps between two measurements.
        every_n_epochs: Number of epochs between two measurements. Neither: every epoch.
        at_start: Whether to measure before the first step too, where mistakes show at once.
        module: what is measured: the name of a submodule, such as "model", or a function of the
            LightningModule; None: the LightningModule itself, by its ``forward``.
        prefix: Prefix of each name that is logged.
        options: Options of `fastlr.integrations.measurement.Meter`: measures, x, y, loss,
            init_state, dtype ("auto": the trainer's), on_error, and options of `fastlr.estimate`.

    Attributes:
        last: Last `Reading`, or None.

    Raises:
        InputError: An argument is wrong.

    Example:
        >>> import fastlr  # doctest: +SKIP
        >>> from fastlr.integrations.lightning import LocalRedundancyMonitor  # doctest: +SKIP
        >>> monitor = LocalRedundancyMonitor(fastlr.ShapeImages((3, 32, 32)))  # doctest: +SKIP
        >>> lightning.Trainer(callbacks=[monitor]).fit(module, loader)  # doctest: +SKIP
    """

    def __init__(
        self,
        inputs: SupportsBatch,
        n: int | None = None,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_start: bool = True,
        module: str | Callable[[Any], nn.Module] | None = None,
        prefix: str = "",
        **options: Unpack[MeterOptions],
    ) -> None:
        if every_n_steps is None and every_n_epochs is None:
            every_n_epochs = 1
        super().__init__(inputs, n, every_n_steps, every_n_epochs, prefix, **options)
        self.at_start, self.module = at_start, module
        self._steps_seen = self._epochs_done = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Look for what is measured, on every process, before anything runs."""
        self._target(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure where the training starts."""
        self._steps_seen, self._epochs_done = trainer.global_step, trainer.current_epoch
        if self.at_start:
            self.measure(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Measure if enough optimizer steps were done."""
        before, self._steps_seen = self._steps_seen, trainer.global_step
        if self.step_due(before, self._steps_seen):
            self.measure(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure if enough epochs were done."""
        self._epochs_done = trainer.current_epoch + 1
        if self.epoch_due(self._epochs_done):
            self.measure(trainer, pl_module)

    def measure(self, trainer: Any, pl_module: Any) -> Reading | None:
        """Measure and log now, and return the reading; every process must call this.

        Returns None where the measurement failed with a warning.
        """
        dtype = _AUTOCAST.get(str(trainer.precision))
        measure = partial(
            self.meter.measure,
            lambda: self._target(pl_module),
            trainer.global_step,
            self._epochs_done,
            dtype=dtype,
        )
        silent, strategy = [DummyLogger() for _ in trainer.loggers], trainer.strategy
        with (
            patch.object(LightningModule, "log", lambda *_, **__: None),
            patch.object(trainer, "_loggers", silent),
        ):
            reading = on_main(measure, trainer.is_global_zero, strategy.broadcast, pl_module)
        if reading:
            self.take(reading)
            values = reading.values(self.prefix)
            for logger in trainer.loggers:
                logger.log_metrics(values, step=reading.step)
            for name, value in values.items():
                tensor = torch.tensor(value, device=strategy.root_device)
                trainer.callback_metrics[name] = tensor
        return reading

    def _target(self, pl_module: Any) -> nn.Module:
        if self.module is None:
            target = pl_module
            if type(pl_module).forward is LightningModule.forward:
                raise ModelError(
                    f"{type(pl_module).__name__} has no forward(): define it, or say what is "
                    "measured by module='NAME'"
                )
        elif callable(self.module):
            target = self.module(pl_module)
        else:
            target = getattr(pl_module, self.module, None)
        if not isinstance(target, nn.Module):
            raise InputError(
                f"module={self.module!r} is {type(target).__name__} in {type(pl_module).__name__}, "
                "no module"
            )
        return target
