"""Local redundancy in a run: its estimator, and what records of its measurements share."""

from __future__ import annotations

import math
from typing import Any

import fastlr
from fastlr.experiments.training.loop import TrainingLoop


def redundancy_estimator(
    net: TrainingLoop, inputs: Any, chunk: int | None, **different: Any
) -> fastlr.LocalRedundancy:
    """Return the estimator that the options of a run ask for.

    Args:
        net: What is measured, with the run's options.
        inputs: On which.
        chunk: Inputs at a time in an earlier part of the run, which changes the last bits of a
            value; None or 0: not known yet.
        different: Arguments of `fastlr.LocalRedundancy` that are not as the options say.
    """
    options: Any = net.options
    arguments = {
        "n": options.redundancy_n,
        "probe": options.redundancy_probe,
        "seed": options.seed,
        "dtype": net.autocast_dtype,
        "batch_size": options.redundancy_batch or chunk or None,
        "progress": False,
        **different,
    }
    return fastlr.LocalRedundancy(net.model, inputs, **arguments)


def or_none(value: float) -> float | None:
    """Return a number as JSON has it: None for NaN."""
    return None if math.isnan(value) else value


def by_batches(estimate: fastlr.Estimate) -> str:
    """Say what an estimate is that was made by the gradients of batches; of others nothing."""
    if estimate.probe != "batch":
        return ""
    size = estimate.batch_size
    return f"; by batches of {size}: {size} ||gradient of the batch's mean||^2"
