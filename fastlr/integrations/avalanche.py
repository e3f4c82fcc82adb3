"""A plugin metric for Avalanche; needs the extra ``avalanche``."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from fastlr.errors import MissingExtraError, install
from fastlr.inputs.base import SupportsBatch
from fastlr.integrations.measurement import Integration, Keep, MeterOptions, rank

try:
    from avalanche.evaluation import PluginMetric
    from avalanche.evaluation.metric_results import MetricValue
    from avalanche.evaluation.metric_utils import get_metric_name
except ImportError as missing:
    raise MissingExtraError(
        f"avalanche is not installed ({missing}): {install('avalanche')}"
    ) from missing


class LocalRedundancyMetric(Integration, PluginMetric):
    """Measures the strategy's model before the first and after every experience.

    With ``every_n_steps`` or ``every_n_epochs`` it measures every so many steps or epochs.

    Give it to an ``EvaluationPlugin`` like any other metric:
    ``EvaluationPlugin(accuracy_metrics(stream=True), LocalRedundancyMetric(fastlr.ShapeImages((3,
    32, 32))), loggers=[...])``. Each number is a curve of its own, such as
    ``local_redundancy/train_phase/train_stream``. A model that grows (new heads, a wider
    classifier) is planned and checked again. It is saved and loaded with the strategy.

    Args:
        inputs: Inputs, as for `fastlr.estimate`.
        n: Number of inputs. The default is 1000, or all of them if there are fewer.
        every_n_steps: Number of training iterations between two measurements.
        every_n_epochs: Number of epochs between two measurements. Neither: after every experience.
        at_start: measure before the first iteration too, where a mistake in the arguments shows at
            once.
        keep_best: a file for the state dict of the best model so far, or a function, as for
            `Monitor`.
        mode: "max" or "min", as for `Monitor`.
        prefix: Prefix of each name.
        options: Options of `fastlr.integrations.measurement.Meter`: measures, x, y, loss,
            init_state, dtype, on_error, and options of `fastlr.estimate`.

    Attributes:
        last: Last `Reading`, or None.
        best: the best one, or None.

    Raises:
        InputError: An argument is wrong.
    """

    def __init__(
        self,
        inputs: SupportsBatch,
        n: int | None = None,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_start: bool = True,
        keep_best: Keep | None = None,
        mode: str = "max",
        prefix: str = "",
        **options: Unpack[MeterOptions],
    ) -> None:
        PluginMetric.__init__(self)
        Integration.__init__(
            self, inputs, n, every_n_steps, every_n_epochs, prefix, keep_best, mode, **options
        )
        self.at_start = at_start
        self.steps = self.epochs = 0

    def result(self) -> float | None:
        """The last local redundancy."""
        return None if self.last is None else self.last.value

    def reset(self) -> None:
        """Nothing is accumulated."""

    def before_training_exp(self, strategy: Any) -> Any:
        """Measure where the training starts."""
        return self.measure(strategy) if self.at_start and self.last is None else None

    def after_training_iteration(self, strategy: Any) -> Any:
        """Measure if enough iterations were done."""
        super().after_training_iteration(strategy)
        self.steps += 1
        return self.measure(strategy) if self.step_due(self.steps - 1, self.steps) else None

    def after_training_epoch(self, strategy: Any) -> Any:
        """Measure if enough epochs were done."""
        self.epochs += 1
        return self.measure(strategy) if self.epoch_due(self.epochs) else None

    def after_training_exp(self, strategy: Any) -> Any:
        """Measure after an experience, if nothing else was asked for."""
        return None if self.has_schedule else self.measure(strategy)

    def measure(self, strategy: Any) -> list[Any] | None:
        """Measure now, and return Avalanche's metric values.

        None on processes other than that of rank 0, or if the measurement failed.
        """
        if rank() != 0:
            return None
        reading = self.meter.measure(
            lambda: strategy.model, self.steps, self.epochs, keep=self.keeper.see
        )
        if reading is None:
            return None
        self.take(reading)
        return [
            MetricValue(
                self,
                get_metric_name(name, strategy, add_experience=False, add_task=False),
                value,
                strategy.clock.train_iterations,
            )
            for name, value in reading.values(self.prefix).items()
        ]

    def __str__(self) -> str:
        return "local_redundancy"
