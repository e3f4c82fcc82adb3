"""A monitor for hand-written training loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import Unpack

from fastlr.distributed.fully_sharded import full_params
from fastlr.distributed.sharding import ALONE, team
from fastlr.errors import InputError, warn
from fastlr.ghost.model.view import trainable, unwrap
from fastlr.inputs.base import SupportsBatch
from fastlr.integrations.measurement import Integration, Keep, MeterOptions, Reading, rank
from fastlr.ops.model_lock import locked
from fastlr.ops.torch_private import holds_fully_sharded

_STATE = ("steps", "epochs", "first", "best", "batch_size", "course")  # keys of a state


class Monitor(Integration):
    """Measures a model every so many steps or epochs of a training loop.

    It logs the readings, and keeps the best checkpoint.

    ``monitor.step()`` after each optimizer step, or ``monitor.epoch()`` after each epoch, is all
    that a loop needs. The training is bit for bit the same without it: parameters, gradients,
    buffers, flags and random states are left as they were. With several processes
    (DistributedDataParallel) the one of rank 0 measures, and the others return at once: nothing is
    communicated, so the loop may also call it on rank 0 alone; they wait for rank 0 at their next
    gradient. Called on all of them inside `fastlr.distributed.sharded`, they share the inputs,
    measure with rank 0's buffers, and all get the reading. So do the ranks of a model under
    ``torch.distributed.fsdp.fully_shard``.

    Gradient accumulation: call ``step`` where the optimizer steps. Mixed precision:
    ``dtype=torch.bfloat16`` measures under autocast, whatever region the call is in; a gradient
    scaler does not matter. Averaged weights (EMA, SWA): monitor the averaged module itself.

    Args:
        model: Model that trains, also in a DDP or torch.compile wrapper.
        inputs: Inputs, as for `fastlr.estimate`.
        n: Number of inputs. The default is 1000, or all of them if there are fewer.
        every_n_steps: Number of optimizer steps between two measurements.
        every_n_epochs: Number of epochs between two measurements. With neither, only ``measure``
            measures.
        log: Function of (values, step) that is called after each measurement, such as
            ``lambda values, step: wandb.log(values, step=step)``. ``values`` is a dict of numbers
            by name.
        keep_best: File for the state dict of the model with the largest value so far
            ("state_dict", with "step", "epoch", "local_redundancy" and "local_redundancy_stderr"),
            or a function that is called with each such `Reading`.
        mode: "max" to keep the largest value, as the paper chooses checkpoints, or "min".
        prefix: Prefix of each name that is logged, such as "fastlr/".
        options: Options of `fastlr.integrations.measurement.Meter`: measures, x, y, loss,
            init_state, dtype, on_error, and options of `fastlr.estimate`.

    Attributes:
        last: Last `Reading`, or None.
        first: Numbers of the first reading: "value", "stderr" and "per_parameter".
        best: Reading with the largest value, or None. After a resumption it is None until a larger
            value comes.
        steps: Number of optimizer steps done.
        epochs: Number of epochs done.
        seconds: Seconds spent measuring.

    Raises:
        InputError: An argument is wrong.
        ModelError: The model has no trainable parameters, or sharded ones.

    Example:
        >>> import torch, fastlr
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
        >>> rows = []
        >>> log = lambda values, step: rows.append((step, sorted(values)))
        >>> inputs = fastlr.ShapeImages((3, 8, 8))
        >>> monitor = fastlr.Monitor(model, inputs, n=16, every_n_steps=2, log=log)
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
        inputs: SupportsBatch,
        n: int | None = None,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        log: Callable[[dict[str, float], int], Any] | None = None,
        keep_best: Keep | None = None,
        mode: str = "max",
        prefix: str = "",
        **options: Unpack[MeterOptions],
    ) -> None:
        trainable(unwrap(model), shards=True)
        super().__init__(
            inputs, n, every_n_steps, every_n_epochs, prefix, keep_best, mode, **options
        )
        if not (log is None or callable(log)):
            raise InputError(f"log must be a function of (values, step), not {type(log).__name__}")
        self.model, self.log = model, log
        self.steps = self.epochs = 0
        self.first: dict[str, Any] = {}
        self.seconds = 0.0

    def step(self) -> Reading | None:
        """Count an optimizer step, measure if it is due, and return the reading if there is one."""
        self.steps += 1
        if self.steps == 1 and not self.has_schedule:
            warn("Monitor(every_n_steps=None, every_n_epochs=None) measures only by measure()")
        return self.measure() if self.step_due(self.steps - 1, self.steps) else None

    def epoch(self) -> Reading | None:
        """Count an epoch, and measure if it is due. Returns the reading, if there is one."""
        self.epochs += 1
        return self.measure() if self.epoch_due(self.epochs) else None

    def measure(self) -> Reading | None:
        """Measure and log now.

        Returns:
            The reading; None on processes that do not measure, and where a measurement failed with
            a warning.

        Raises:
            FastlrError: the first measurement failed; later ones only with ``on_error="raise"``.
        """
        main = rank() == 0
        if not main and team() is ALONE and not holds_fully_sharded(self.model):
            return None
        with locked(self.model), full_params(self.model):
            keep = self.keeper.see if main else None
            reading = self.meter.measure(lambda: self.model, self.steps, self.epochs, keep=keep)
        if reading is not None:
            self.take(reading)
            estimate = reading.estimate
            self.first = self.first or {
                "value": estimate.value,
                "stderr": estimate.stderr,
                "per_parameter": dict(estimate.per_parameter),
            }
            self.seconds += reading.seconds
            if main and self.log is not None:
                self.log(reading.values(self.prefix), self.steps)
        return reading

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should hold of this monitor.

        A resumed training then measures at the same steps, with the same bits.
        """
        counts = {"steps": self.steps, "epochs": self.epochs, "first": self.first}
        return {**counts, **self.keeper.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`.

        If it was taken with other inputs, n, seed, probe or predictive, the counts of steps and
        epochs go on and the readings start again, with a warning.

        Raises:
            InputError: The state is not one of a Monitor.
        """
        if missing := [name for name in _STATE if name not in state]:
            raise InputError(f"not the state of a Monitor: {', '.join(missing)} is missing")
        self.steps, self.epochs = state["steps"], state["epochs"]
        self.first = dict(state["first"])
        self.keeper.load_state_dict(state)
        super().load_state_dict(state)

    def begin_anew(self, changed: Sequence[str]) -> None:
        """Drop the readings so far, the best one as well."""
        super().begin_anew(changed)
        self.first = {}
        self.keeper.begin_anew()
