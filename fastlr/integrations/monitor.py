"""A monitor for hand-written training loops."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.distributed.sharding import ALONE, team
from fastlr.drivers.runs import save_file
from fastlr.errors import InputError
from fastlr.ghost.adapt import trainable, unwrap
from fastlr.integrations.meter import Meter, Reading, Schedule
from fastlr.loggers import CallbackLogger, Logger

Keep = str | os.PathLike[str] | Callable[[Reading], Any]


class Monitor:
    """Measures a model every so many steps or epochs of a training loop, logs it, and keeps the best checkpoint.

    ``monitor.step()`` after each optimizer step, or ``monitor.epoch()`` after each epoch, is all that a loop needs. The
    training is bit for bit the same without it: parameters, gradients, buffers, flags and random states are left as they
    were. With several processes (DistributedDataParallel) the one of rank 0 measures, and the others return at once: nothing
    is communicated, so the loop may also call it on rank 0 alone; they wait for rank 0 at their next gradient. Called on all
    of them inside `fastlr.distributed.sharded`, they share the inputs, and all get the reading; buffers must then be the
    same on all, which those of batch norm are not between two steps of DistributedDataParallel.

    Gradient accumulation: call ``step`` where the optimizer steps. Mixed precision: ``dtype=torch.bfloat16`` measures under
    autocast, whatever region the call is in; a gradient scaler does not matter. EMA: ``weights=ema_model``.

    Args:
        model: the model that trains; DDP and torch.compile wrappers are looked through.
        inputs: synthetic inputs, as for `fastlr.estimate`.
        n: how many of them.
        every_n_steps: optimizer steps between two measurements.
        every_n_epochs: epochs between two measurements. Neither: only where ``measure`` is called.
        logger: a logger of `fastlr.loggers`, a function of (values, step), or several of these.
        keep_best: a file for the state dict of the best model so far ("state_dict", with "step", "epoch",
            "local_redundancy" and "local_redundancy_stderr"), or a function that is called with each best `Reading`.
        mode: "max": the best is the largest local redundancy, as in the paper's choice of checkpoints; or "min".
        prefix: before each name that is logged, such as "fastlr/".
        what: measures, x, y, loss, init_state, weights, dtype, on_error, and options of `fastlr.LocalRedundancy`; see
            `fastlr.integrations.meter.Meter`.

    Attributes:
        last: the last `Reading`, or None.
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
        >>> monitor = Monitor(model, fastlr.ShapeImages((3, 8, 8)), n=16, every_n_steps=2, logger=log)
        >>> for _ in range(5):
        ...     _ = monitor.step()
        >>> rows
        [(2, ['local_redundancy', 'local_redundancy_stderr']), (4, ['local_redundancy', 'local_redundancy_stderr'])]
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
        **what: Any,
    ) -> None:
        trainable(unwrap(model))
        self.model = model
        self.meter = Meter(inputs, n, **what)
        self.schedule = Schedule(every_n_steps, every_n_epochs)
        self.loggers = _loggers(logger)
        self.keeper = Keeper(keep_best, mode)
        self.prefix = prefix
        self.steps = self.epochs = 0
        self.seconds = 0.0
        self.last: Reading | None = None

    @property
    def best(self) -> Reading | None:  # noqa: D102  (see the class)
        return self.keeper.best

    def step(self) -> Reading | None:
        """Count an optimizer step, and measure if it is due. Returns the reading, if there is one."""
        self.steps += 1
        return self.measure() if self.schedule.step_due(self.steps - 1, self.steps) else None

    def epoch(self) -> Reading | None:
        """Count an epoch, and measure if it is due. Returns the reading, if there is one."""
        self.epochs += 1
        return self.measure() if self.schedule.epoch_due(self.epochs) else None

    def measure(self) -> Reading | None:
        """Measure and log now.

        Returns:
            The reading; None on processes that do not measure, and where a measurement failed with a warning.

        Raises:
            FastlrError: the first measurement failed; later ones only with ``on_error="raise"``.
        """
        main = rank() == 0
        if not main and team() is ALONE:
            return None

        def keep(reading: Reading) -> None:
            self.keeper.see(reading, self.model)

        reading = self.meter.attempt(
            lambda: self.meter.measure(self.model, self.steps, self.epochs, keep=keep if main else None)
        )
        if reading is not None:
            self.last = reading
            self.seconds += reading.seconds
            for logger in self.loggers if main else []:
                logger.log(reading.values(self.prefix), self.steps)
        return reading

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the training should hold: a resumed one then measures at the same steps, with the same bits."""
        return {"steps": self.steps, "epochs": self.epochs, **self.keeper.state_dict(), **self.meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the `state_dict` was taken."""
        try:
            self.steps, self.epochs = state["steps"], state["epochs"]
            self.keeper.load_state_dict(state)
            self.meter.load_state_dict(state)
        except KeyError as error:
            raise InputError(f"not the state of a Monitor: {error} is missing") from None


class Keeper:
    """Keeps the checkpoint with the best local redundancy.

    Args:
        keep: a file, a function of the reading, or None.
        mode: "max" or "min".

    Raises:
        InputError: an unknown mode, or a file whose folder is not there.
    """

    def __init__(self, keep: Keep | None, mode: str) -> None:
        if mode not in ("max", "min"):
            raise InputError(f"mode must be 'max' or 'min', not {mode!r}")
        self.path = None if keep is None or callable(keep) else Path(keep)
        self.function = keep if callable(keep) else None
        if self.path is not None and not self.path.absolute().parent.is_dir():
            raise InputError(f"keep_best={self.path}: there is no folder {self.path.absolute().parent}")
        self.sign = 1.0 if mode == "max" else -1.0
        self.value = -math.inf
        self.best: Reading | None = None

    def see(self, reading: Reading, model: nn.Module) -> None:
        """Keep the model, as it is now, if the reading is the best."""
        if not self.sign * reading.value > self.value:
            return
        if self.path is not None:
            state = {key: value for key, value in unwrap(model).state_dict().items() if isinstance(value, Tensor)}
            save_file(
                self.path, {"state_dict": state, "step": reading.step, "epoch": reading.epoch, **reading.values()}
            )
        if self.function is not None:
            self.function(reading)
        self.value, self.best = self.sign * reading.value, reading

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.sign * self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.value, self.best = self.sign * state["best"], None


def _loggers(logger: Any) -> list[Logger]:
    if logger is None:
        return []
    if isinstance(logger, (list, tuple)):
        return [one for each in logger for one in _loggers(each)]
    if isinstance(logger, Logger):
        return [logger]
    if callable(logger):
        return [CallbackLogger(logger)]
    raise InputError(
        f"logger must be one of fastlr.loggers or a function of (values, step), not {type(logger).__name__}"
    )


def rank() -> int:
    """Number of this process among those that train together; 0 where there is one."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
