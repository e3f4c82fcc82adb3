"""Options and presets of ``fastlr transfer``."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from fastlr.errors import InputError
from fastlr.experiments.runs.options import ON_A_CORE, differences, option
from fastlr.experiments.training import options as training
from fastlr.experiments.transfer.fields import FURTHER, STRATEGIES


@dataclasses.dataclass(frozen=True)
class TransferOptions(training.TrainingOptions):
    """Options of ``fastlr transfer``; the defaults are the preset ``paper``.

    Source: paper, section 4.2 and appendix A.2.

    The options that all drivers share are in `TrainingOptions`.

    Attributes:
        model: As for `fastlr.models.load_model`: ``package.module:function``. It is made with
            ``channels``, ``context`` and ``horizon`` and takes windows ``[B, context, channels]``
            to ``[B, horizon, channels]``, as the output or its ``prediction_outputs``
            (``fastlr.models.patchtst:hugging_face``).
        model_kwargs: Further arguments of the model, a JSON object.
        source: Series to pretrain on, as for `fastlr.experiments.data.open_series`: a CSV file, its
            name in FASTLR_DATA, or ``generated:SEED``.
        target: Series to fine-tune on, with as many features.
        generated_rows: Number of rows of generated series.
        context: Time steps of a window that are seen.
        horizon: Time steps after them that are forecast.
        train_share: Share of the rows of each series, the first ones; the rest are for validation.
        validation_stride: Validate on every k-th window.
        compile: Run the training passes through torch.compile.
        weight_decay: Weight decay of AdamW, everywhere.
        epochs: Number of epochs of pretraining; each ends with a checkpoint.
        steps_per_epoch: Optimiser steps an epoch of pretraining; 0: as many as one pass over the
            windows takes. With a number, windows are drawn without repetition until all were seen,
            and again, so that a source with fewer windows is trained on for as many steps (ETTm1,
            the paper's, takes 54 at 1024 windows a step; ETTh1 14).
        learning_rate: Learning rate at the start of pretraining; it falls to zero by the cosine.
        redundancy_n: Gaussian inputs of local redundancy; the same ones at every measurement.
        redundancy_probe: Probe of its estimates: ``sampled`` draws labels, as the paper does;
            ``rademacher`` has the same expectation and less variance; ``batch`` takes the gradient
            of each ``redundancy_batch`` inputs' mean.
        redundancy_per_epoch: Evenly spaced measurements an epoch, the last at its end; their mean
            is the epoch's value.
        redundancy_batch: Inputs at a time; 0: by the memory that is free at the first measurement,
            then kept.
        sigma: Standard deviation of the predictive distribution N(f(x), sigma^2 I), in the
            normalised unit. Local redundancy is proportional to 1 / sigma^2, so it does not matter
            for the selection.
        dormant_threshold: Threshold of `dormant_by`.
        dormant_by: A unit is dormant if its ``mean`` activation is below the threshold, as in the
            paper, or if the mean of its ``absolute`` activation is at most that.
        dormant_windows: Training windows of the source for it; the same ones at every checkpoint.
        head: Name of the model's part that a linear probe draws anew and trains.
        probe_learning_rate: Learning rate of the probe, constant; the paper says only "one epoch".
        probe_by: Loss that the probe is judged by: on the target's ``validation`` windows, or the
            mean over its epoch of ``training``.
        strategies: Which to fine-tune for, with commas: the paper's, which are the default, and
            ``local_redundancy_at_end``, by the checkpoint's own value, not the mean of the
            measurements within its epoch.
        finetune_runs: Fine-tuning runs from each checkpoint that was picked, with different order
            and dropout.
        finetune_epochs: Largest number of epochs of each fine-tuning.
        finetune_steps_per_epoch: As ``steps_per_epoch``, for fine-tuning and probes.
        finetune_learning_rate: Constant.
        finetune_evaluations: Evenly spaced validations of a fine-tuning run after the one before
            it; the last is its result.
        finetune_patience: End a run when its validation loss saturates, as section 4.2 has it:
            after so many validations in which it has not fallen by `finetune_tolerance`; 0: never,
            as in appendix A.2.
        finetune_tolerance: The part of the least loss before by which it must fall; 0: any fall
            counts.
    """

    model: str = "fastlr.models.patchtst:PatchTST"
    model_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "ETTm1"
    target: str = "ETTh2"
    generated_rows: int = option(4000, at_least=2)
    context: int = option(512, at_least=1)
    horizon: int = option(96, at_least=1)
    train_share: float = option(0.8, positive=True, below=1)
    validation_stride: int = option(1, at_least=1)
    compile: bool = False
    weight_decay: float = option(0.01, at_least=0)
    epochs: int = option(12, at_least=1)
    steps_per_epoch: int = option(0, at_least=0)
    learning_rate: float = option(2e-3, positive=True)
    redundancy_n: int = option(1024, at_least=2)
    redundancy_probe: Literal["sampled", "rademacher", "batch"] = "sampled"
    redundancy_per_epoch: int = option(4, at_least=1)
    redundancy_batch: int = option(0, at_least=0)
    sigma: float = option(1.0, positive=True)
    dormant_threshold: float = option(0.05, at_least=0)
    dormant_by: Literal["mean", "absolute"] = "mean"
    dormant_windows: int = option(1024, at_least=1)
    head: str = "head"
    probe_learning_rate: float = option(2e-3, positive=True)
    probe_by: Literal["validation", "training"] = "validation"
    strategies: tuple[str, ...] = option(tuple(STRATEGIES), known=(*STRATEGIES, *FURTHER))
    finetune_runs: int = option(6, at_least=1)
    finetune_epochs: int = option(2, at_least=1)
    finetune_steps_per_epoch: int = option(0, at_least=0)
    finetune_learning_rate: float = option(2e-4, positive=True)
    finetune_evaluations: int = option(8, at_least=1)
    finetune_patience: int = option(0, at_least=0)
    finetune_tolerance: float = option(0.0, at_least=0, below=1)

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        super().__post_init__()
        if not self.strategies:
            raise InputError(f"strategies: name at least one of {', '.join(STRATEGIES)}")
        if self.finetune_tolerance and not self.finetune_patience:
            raise InputError(
                "finetune_tolerance goes with finetune_patience: give that too, at least 1"
            )


# What the paper leaves open, in its words, and these options decide.
OPEN = {
    "weight_decay": 'it says "AdamW"',
    "train_share": 'it says "80/20"; here the first rows train and the last validate',
    "redundancy_per_epoch": "the mean of which picks; it says four points, not which of them picks",
    "sigma": "it gives none; the selection does not depend on it",
    "dormant_windows": 'it says "on pretraining data"',
    "probe_learning_rate": 'it says "one epoch"',
    "probe_by": 'it says "lowest probing loss"',
    "dtype": 'it says "bfloat16"',
}

BEFORE = {
    **training.BEFORE,
    "norm_batch": 0,
    "redundancy_probe": "rademacher",
    "dormant_by": "absolute",
}

# Options that change no number, or only its last bits, or are reported in their own place, or of
# which the paper says nothing.
_NO_MATTER = set(
    "seed device threads compile generated_rows redundancy_batch head strategies".split()
)
_NO_MATTER |= {"finetune_evaluations", "reduce_dtype"}

# Steps that one pass over ETTm1's 55,137 and ETTh2's 13,329 training windows takes at 1024 a step.
_PAPER_STEPS = {"steps_per_epoch": 54, "finetune_steps_per_epoch": 14}


def substitutions(options: TransferOptions, **actual: str | int) -> list[str]:
    """Say in what a run differs from the paper's, each as "NAME VALUE for PAPER'S".

    Args:
        options: Options of the run.
        actual: What options with a meaning of their own came to: ``source`` and ``target`` (names
            of the series), ``steps_per_epoch`` and ``finetune_steps_per_epoch``.

    Example:
        >>> actual = {"source": "ETTh1", "target": "ETTh2"}
        >>> actual |= {"steps_per_epoch": 14, "finetune_steps_per_epoch": 14}
        >>> substitutions(TransferOptions(epochs=3), **actual)
        ['source ETTh1 for ETTm1', 'epochs 3 for 12', 'steps_per_epoch 14 for 54']
    """
    paper = {**vars(TransferOptions()), **_PAPER_STEPS}
    return differences({**vars(options), **actual}, paper, _NO_MATTER)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # ETTh1 to ETTh2 with a reduced network and small batches, as many steps as ETTm1 to ETTh2 in
    # the paper.
    "small": {
        "model_kwargs": {"stride": 16, "layers": 2, "width": 32, "heads": 4, "ffn": 64},
        "source": "ETTh1",
        **ON_A_CORE,
        "validation_stride": 16,
        "batch_size": 32,
        "steps_per_epoch": 54,
        "finetune_steps_per_epoch": 14,
        "redundancy_n": 256,
        "redundancy_probe": "rademacher",
        "redundancy_batch": 128,
        "dormant_windows": 256,
    },
    # Well under a minute on one CPU core, without any data.
    "demo": {
        "model_kwargs": {"stride": 16, "layers": 2, "width": 16, "heads": 2, "ffn": 32},
        "source": "generated:1",
        "target": "generated:2",
        "context": 96,
        "horizon": 24,
        **ON_A_CORE,
        "validation_stride": 8,
        "batch_size": 64,
        "epochs": 6,
        "steps_per_epoch": 20,
        "finetune_steps_per_epoch": 10,
        "redundancy_n": 64,
        "redundancy_probe": "rademacher",
        "redundancy_batch": 64,
        "dormant_windows": 128,
        "finetune_runs": 2,
    },
}
