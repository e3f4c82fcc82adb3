"""Options and presets of the memorization driver."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from fastlr.drivers.config import RunOptions, at_least
from fastlr.drivers.steps import StepMode
from fastlr.errors import InputError


@dataclasses.dataclass(frozen=True)
class MemorizeOptions(RunOptions):
    """Options of ``fastlr memorize``; the defaults are the preset ``vision`` (paper, section 4.3 and appendix A.3).

    Attributes:
        kind: ``vision``: shape images with random labels; ``series``: windows of Gaussian noise with targets of Gaussian
            noise.
        model: As for `fastlr.models.load_model`. For images it is made with ``num_classes=classes``, for series with
            ``channels``, ``context`` and ``horizon``.
        model_kwargs: Further arguments of the model, a JSON object. ``{"dropout": 0}`` for PatchTST lets it memorise more.
        n: Samples to memorise.
        classes: Of the labels (vision).
        size: Height and width of the images (vision).
        context: Time steps of a window (series).
        horizon: Time steps of a target (series).
        channels: Features of windows and targets (series).
        dtype: ``fp32``, or ``bf16``: autocast; weights and optimiser state stay float32.
        step: How a training step runs: ``eager``; ``compile``: the model through torch.compile; ``graph``: captured as a
            CUDA graph; ``auto``: ``graph`` on a GPU, else ``eager``.
        learning_rate: Of AdamW, constant.
        weight_decay: Of AdamW.
        batch_size: Samples an optimiser step.
        norm_batch: Samples a forward pass, so that batch norm's statistics are of so many; 0: the whole batch. The gradients
            of a batch's passes are added (the paper's 4 GPUs x 256 samples on one).
        epochs: Passes over the samples.
        evaluate_every: Epochs from one evaluation over all samples, record and checkpoint to the next.
        measure_every: Measure local redundancy every so many epochs, where there is a record, and before the first; 0:
            never.
        redundancy_n: Its synthetic inputs: of the kind that is memorised, but not among the samples, always the same ones.
        redundancy_batch: Of them at a time; 0: by the memory that is free at the first measurement, then kept.
    """

    kind: Literal["vision", "series"] = "vision"
    model: str = "mobilenet_v3_large"
    model_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    n: int = 819_200
    classes: int = 1000
    size: int = 224
    context: int = 512
    horizon: int = 96
    channels: int = 7
    dtype: Literal["fp32", "bf16"] = "bf16"
    step: StepMode = "auto"
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    batch_size: int = 1024
    norm_batch: int = 256
    epochs: int = 1000
    evaluate_every: int = 5
    measure_every: int = 0
    redundancy_n: int = 5000
    redundancy_batch: int = 0

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        super().__post_init__()
        at_least(self, n=2, classes=2, size=1, context=1, horizon=1, channels=1, batch_size=1, norm_batch=0, epochs=1)
        at_least(self, evaluate_every=1, measure_every=0, redundancy_n=2, redundancy_batch=0, weight_decay=0)
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate={self.learning_rate}: give a positive number")
        if self.measure_every % self.evaluate_every:
            raise InputError(
                f"measure_every={self.measure_every}: give a multiple of evaluate_every={self.evaluate_every}, or 0"
            )


_SERIES = {"kind": "series", "model": "fastlr.models.patchtst:PatchTST"}

PRESETS: dict[str, dict[str, Any]] = {
    "vision": {},
    "series": {**_SERIES, "n": 2048, "evaluate_every": 10, "redundancy_n": 1024},
    # Each one to two minutes on one CPU core.
    "vision-small": {
        "model": "fastlr.models.convnet:ConvNet",
        "model_kwargs": {"widths": [8, 16, 32], "hidden": 32},
        "n": 3072,
        "classes": 100,
        "size": 32,
        "device": "cpu",
        "threads": 1,
        "dtype": "fp32",
        "batch_size": 64,
        "norm_batch": 0,
        "epochs": 120,
        "evaluate_every": 4,
        "measure_every": 12,
        "redundancy_n": 200,
        "redundancy_batch": 100,
    },
    "series-small": {
        **_SERIES,
        "model_kwargs": {"layers": 2, "width": 32, "heads": 4, "ffn": 64, "dropout": 0.0},
        "n": 256,
        "context": 64,
        "horizon": 24,
        "channels": 3,
        "device": "cpu",
        "threads": 1,
        "dtype": "fp32",
        "batch_size": 64,
        "norm_batch": 0,
        "epochs": 1000,
        "evaluate_every": 20,
        "measure_every": 100,
        "redundancy_n": 200,
        "redundancy_batch": 100,
    },
}

# Options that change no number, or only its last bits, or when one is recorded; and the epochs, which may still change.
_NO_MATTER = set("seed device threads step epochs evaluate_every measure_every redundancy_n redundancy_batch".split())
_OF_THE_OTHER = {"vision": {"context", "horizon", "channels"}, "series": {"classes", "size"}}


def substitutions(options: MemorizeOptions) -> list[str]:
    """Say in what a run differs from the paper's of its kind, each as "NAME VALUE for PAPER'S".

    Example:
        >>> substitutions(MemorizeOptions(n=1000, batch_size=64))
        ['n 1000 for 819200', 'batch_size 64 for 1024']
    """
    paper = MemorizeOptions(**PRESETS[options.kind])
    left = _NO_MATTER | _OF_THE_OTHER[options.kind] | {"model_kwargs"}
    names = [name for name, value in vars(options).items() if name not in left and value != getattr(paper, name)]
    found = [f"{name} {getattr(options, name)} for {getattr(paper, name)}" for name in names]
    if options.model_kwargs:
        found.append("model with " + ", ".join(f"{key} {value}" for key, value in options.model_kwargs.items()))
    return found
