"""Options and presets of ``fastlr transfer``, and its strategies of selection."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from fastlr.drivers.config import RunOptions, at_least, choices
from fastlr.errors import InputError

# Strategy -> (the number it goes by, whether the least or the greatest is picked), in the order of the paper's Table 3.
STRATEGIES: dict[str, tuple[str, str]] = {
    "linear_probe": ("linear_probe", "least"),
    "local_redundancy": ("local_redundancy", "greatest"),
    "validation_loss": ("validation_loss", "least"),
    "dormant_ratio": ("dormant_ratio", "least"),
    "weight_norm": ("weight_norm", "least"),
    "no_pretraining": ("", ""),
}


@dataclasses.dataclass(frozen=True)
class TransferOptions(RunOptions):
    """Options of ``fastlr transfer``; the defaults are the preset ``paper`` (section 4.2, appendix A.2).

    Attributes:
        model: As for `fastlr.models.load_model`: ``package.module:function``. It is made with ``channels``, ``context`` and
            ``horizon`` and takes windows ``[B, context, channels]`` to ``[B, horizon, channels]``, as the output or its
            ``prediction_outputs`` (``fastlr.models.patchtst:hugging_face``).
        model_kwargs: Further arguments of the model, a JSON object.
        source: Series to pretrain on, as for `fastlr.data.open_series`: a CSV file, its name in FASTLR_DATA, or
            ``generated:SEED``.
        target: Series to fine-tune on, with as many features.
        generated_rows: Of generated series.
        context: Time steps of a window that are seen.
        horizon: Time steps after them that are forecast.
        train_share: Of the rows of each series, the first ones; the rest are for validation.
        validation_stride: Validate on every k-th window.
        dtype: ``fp32``, or ``bf16``: autocast in training and measures; weights and optimiser state stay float32.
        compile: Run the training passes through torch.compile.
        batch_size: Windows an optimiser step, everywhere.
        norm_batch: Windows a pass of training, so that batch norm's statistics are of so many; 0: the whole batch. The
            gradients of a batch's passes are added (the paper's 4 GPUs x 256 windows on one).
        weight_decay: Of AdamW, everywhere.
        epochs: Of pretraining; each ends with a checkpoint.
        steps_per_epoch: Optimiser steps an epoch of pretraining; 0: as many as one pass over the windows takes. With a
            number, windows are drawn without repetition until all were seen, and again, so that a source with fewer
            windows is trained on for as many steps (ETTm1, the paper's, takes 54 at 1024 windows a step; ETTh1 14).
        learning_rate: Of pretraining at its start; it falls to zero by the cosine, step by step.
        redundancy_n: Gaussian inputs of local redundancy; the same ones at every measurement.
        redundancy_per_epoch: Evenly spaced measurements an epoch, the last at its end; their mean is the epoch's value.
        redundancy_batch: Inputs at a time; 0: by the memory that is free at the first measurement, then kept.
        sigma: Standard deviation of the predictive distribution N(f(x), sigma^2 I), in the normalised unit. Local redundancy
            is proportional to 1 / sigma^2, so it does not matter for the selection.
        dormant_threshold: A unit is dormant if its mean |activation| is at most this.
        dormant_windows: Training windows of the source for it; the same ones at every checkpoint.
        head: Name of the model's part that a linear probe draws anew and trains.
        probe_learning_rate: Of the probe, constant; the paper says only "one epoch".
        probe_by: Loss that the probe is judged by: on the target's ``validation`` windows, or the mean over its epoch of
            ``training``.
        strategies: Which to fine-tune for, with commas.
        finetune_runs: Fine-tuning runs from each checkpoint that was picked, with different order and dropout.
        finetune_epochs: Of each, at most.
        finetune_steps_per_epoch: As ``steps_per_epoch``, for fine-tuning and probes.
        finetune_learning_rate: Constant.
        finetune_evaluations: Evenly spaced validations of a fine-tuning run after the one before it; the last is its result.
        finetune_patience: End a run after so many validations without a new least loss; 0: never.
    """

    model: str = "fastlr.models.patchtst:PatchTST"
    model_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "ETTm1"
    target: str = "ETTh2"
    generated_rows: int = 4000
    context: int = 512
    horizon: int = 96
    train_share: float = 0.8
    validation_stride: int = 1
    dtype: Literal["fp32", "bf16"] = "bf16"
    compile: bool = False
    batch_size: int = 1024
    norm_batch: int = 256
    weight_decay: float = 0.01
    epochs: int = 12
    steps_per_epoch: int = 0
    learning_rate: float = 2e-3
    redundancy_n: int = 1024
    redundancy_per_epoch: int = 4
    redundancy_batch: int = 0
    sigma: float = 1.0
    dormant_threshold: float = 0.05
    dormant_windows: int = 1024
    head: str = "head"
    probe_learning_rate: float = 2e-3
    probe_by: Literal["validation", "training"] = "validation"
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    finetune_runs: int = 6
    finetune_epochs: int = 2
    finetune_steps_per_epoch: int = 0
    finetune_learning_rate: float = 2e-4
    finetune_evaluations: int = 8
    finetune_patience: int = 0

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        super().__post_init__()
        positive: tuple[str, ...] = (
            "context",
            "horizon",
            "validation_stride",
            "batch_size",
            "epochs",
            "redundancy_n",
            "dormant_windows",
        )
        positive += ("redundancy_per_epoch", "finetune_runs", "finetune_epochs", "finetune_evaluations")
        at_least(self, **dict.fromkeys(positive, 1), generated_rows=2)
        free = ("steps_per_epoch", "finetune_steps_per_epoch", "redundancy_batch", "finetune_patience", "weight_decay")
        at_least(self, **dict.fromkeys((*free, "norm_batch", "dormant_threshold"), 0))
        for name in ("learning_rate", "probe_learning_rate", "finetune_learning_rate", "sigma"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}={getattr(self, name)}: give a positive number")
        if not 0 < self.train_share < 1:
            raise InputError(f"train_share={self.train_share}: give a number between 0 and 1")
        choices("strategies", self.strategies, STRATEGIES)
        if not self.strategies:
            raise InputError(f"strategies: name at least one of {', '.join(STRATEGIES)}")


# Options that change no number, or only its last bits, or are reported in their own place.
_NO_MATTER = set("seed device threads compile generated_rows redundancy_batch head strategies model_kwargs".split())
_NO_MATTER |= {"finetune_evaluations"}

# Steps that one pass over ETTm1's 55,137 and ETTh2's 13,329 training windows takes at 1024 a step.
_PAPER_STEPS = {"steps_per_epoch": 54, "finetune_steps_per_epoch": 14}


def substitutions(options: TransferOptions, **actual: str | int) -> list[str]:
    """Say in what a run differs from the paper's, each as "NAME VALUE for PAPER'S".

    Args:
        options: Of the run.
        actual: What options with a meaning of their own came to: ``source`` and ``target`` (names of the series),
            ``steps_per_epoch`` and ``finetune_steps_per_epoch``.

    Example:
        >>> actual = {"source": "ETTh1", "target": "ETTh2", "steps_per_epoch": 14, "finetune_steps_per_epoch": 14}
        >>> substitutions(TransferOptions(epochs=3), **actual)
        ['source ETTh1 for ETTm1', 'epochs 3 for 12', 'steps_per_epoch 14 for 54']
    """
    found = {**vars(options), **actual}
    paper = {**vars(TransferOptions()), **_PAPER_STEPS}
    sizes = ", ".join(f"{key} {value}" for key, value in options.model_kwargs.items())
    texts = [f"model with {sizes}"] if sizes else []
    names = [name for name in found if name not in _NO_MATTER and found[name] != paper[name]]
    return texts + [f"{name} {found[name]} for {paper[name]}" for name in names]


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # ETTh1 to ETTh2 with a reduced network and small batches, as many steps as ETTm1 to ETTh2 in the paper.
    "small": {
        "model_kwargs": {"stride": 16, "layers": 2, "width": 32, "heads": 4, "ffn": 64},
        "source": "ETTh1",
        "device": "cpu",
        "threads": 1,
        "dtype": "fp32",
        "validation_stride": 16,
        "batch_size": 32,
        "steps_per_epoch": 54,
        "finetune_steps_per_epoch": 14,
        "redundancy_n": 256,
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
        "device": "cpu",
        "threads": 1,
        "dtype": "fp32",
        "validation_stride": 8,
        "batch_size": 64,
        "epochs": 6,
        "steps_per_epoch": 20,
        "finetune_steps_per_epoch": 10,
        "redundancy_n": 64,
        "redundancy_batch": 64,
        "dormant_windows": 128,
        "finetune_runs": 2,
    },
}
