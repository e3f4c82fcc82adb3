"""Options of every driver that trains: precision, batches and their parts, data parallelism."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fastlr.experiments.runs.options import RunOptions, option
from fastlr.experiments.runs.records import RunFolder

# What options meant for runs that were begun before they existed, where that is not their default.
BEFORE = {"batch_norm_updates": "every-part"}


@dataclasses.dataclass(frozen=True)
class TrainingOptions(RunOptions):
    """The options that every driver has that trains a network; samples are images or windows.

    Attributes:
        dtype: ``fp32``; ``bf16``: autocast in training and measures, weights and optimiser state
            stay float32; ``bf16-weights``: no autocast, but everything in bfloat16: weights,
            running statistics, activations, gradients and optimiser state. The paper says only "in
            bfloat16 precision".
        batch_size: Samples an optimiser step.
        norm_batch: Samples of a part of a batch, at most: a part is one forward and backward pass,
            and batch norm takes its statistics of it; 0: the whole batch. The gradients of the
            parts are added (the paper's 4 GPUs x 256 samples).
        batch_norm_updates: The parts of a batch that update the running statistics of batch norms:
            the ``first-part``, since DataParallel (the paper's for series) keeps those of one
            device, as DistributedDataParallel does by default; or ``every-part``, one after the
            other. It is the same with any number of processes.
        reduce_dtype: In what several processes add up their gradients: ``fp32``, or ``bf16``, half
            the bytes: each process rounds its gradients to bfloat16, they are added in float32 in
            the order of the processes, and the sum is rounded once. One process adds nothing up.
        fused: The optimiser's steps in one kernel, as on a GPU always, on a CPU too: small networks
            train in three quarters of the time (an MLP, 64-64-64-64-10). It changes the last bits.
    """

    dtype: Literal["fp32", "bf16", "bf16-weights"] = "bf16"
    batch_size: int = option(1024, at_least=1)
    norm_batch: int = option(256, at_least=0)
    batch_norm_updates: Literal["first-part", "every-part"] = "first-part"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    fused: bool = False


_PRECISION = {
    "fp32": "in float32",
    "bf16": "under autocast to bfloat16, with weights and optimiser state in float32",
    "bf16-weights": "in bfloat16, with weights and optimiser state in it too",
}
_UPDATES = {
    "first-part": "only the first updates the running statistics of batch norms, as of one "
    "device of several",
    "every-part": "each updates the running statistics of batch norms",
}


def training_text(run: RunFolder) -> str:
    """Say in a sentence how a run was trained.

    Options that its version of fastlr did not have mean what that version did.
    """
    options, processes = {**BEFORE, **run.options}, run.config.get("processes", 1)
    size, part = options.get("batch_size", 0), options.get("norm_batch", 0)
    texts = [f"Trained {_PRECISION.get(options.get('dtype', ''), 'in an unknown precision')}"]
    if 0 < part < size:
        texts.append(
            f"batches of {size} in parts of {part}: {_UPDATES[options['batch_norm_updates']]}"
        )
    if processes > 1:
        kind = {"fp32": "float32", "bf16": "bfloat16"}[options.get("reduce_dtype", "fp32")]
        texts.append(f"{processes} processes added up their gradients in {kind}")
    return "; ".join(texts) + "."
