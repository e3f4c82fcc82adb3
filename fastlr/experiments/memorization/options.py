"""Options and presets of the memorization driver."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from fastlr.errors import InputError
from fastlr.experiments.runs.options import ON_A_CORE, differences, option
from fastlr.experiments.training.options import TrainingOptions
from fastlr.experiments.training.steps import StepMode


@dataclasses.dataclass(frozen=True)
class MemorizeOptions(TrainingOptions):
    """Options of ``fastlr memorize``; the defaults are the preset ``vision``.

    Source: paper, section 4.3 and appendix A.3.

    The options that all drivers share are in `TrainingOptions`.

    Attributes:
        kind: ``vision``: shape images with random labels; ``series``: windows of Gaussian noise
            with targets of Gaussian noise.
        model: As for `fastlr.models.load_model`. For images it is made with
            ``num_classes=classes``, for series with ``channels``, ``context`` and ``horizon``.
        model_kwargs: Further arguments of the model, a JSON object. ``{"dropout": 0}`` for PatchTST
            lets it memorise more.
        n: Samples to memorise.
        classes: Number of classes of the labels (vision).
        size: Height and width of the images (vision).
        context: Time steps of a window (series).
        horizon: Time steps of a target (series).
        channels: Features of windows and targets (series).
        step: How a training step runs: ``eager``; ``compile``: the model through torch.compile;
            ``graph``: captured as a CUDA graph; ``auto``: ``graph`` on a GPU, else ``eager``.
        learning_rate: Learning rate of AdamW, constant.
        weight_decay: Weight decay of AdamW.
        epochs: Passes over the samples.
        evaluate_every: Epochs from one evaluation over all samples, record and checkpoint to the
            next.
        measure_every: Measure local redundancy every so many epochs, where there is a record, and
            before the first; 0: never.
        redundancy_n: Its synthetic inputs: of the kind that is memorised, but not among the
            samples, always the same ones.
        redundancy_probe: Probe of its estimates: ``sampled`` draws labels, as the paper does;
            ``rademacher`` has the same expectation and less variance; ``batch`` takes the gradient
            of each ``redundancy_batch`` inputs' mean.
        redundancy_batch: Number of inputs in a batch; 0: by the memory that is free at the first
            measurement, then kept.
    """

    kind: Literal["vision", "series"] = "vision"
    model: str = "mobilenet_v3_large"
    model_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    n: int = option(819_200, at_least=2)
    classes: int = option(1000, at_least=2)
    size: int = option(224, at_least=1)
    context: int = option(512, at_least=1)
    horizon: int = option(96, at_least=1)
    channels: int = option(7, at_least=1)
    step: StepMode = "auto"
    learning_rate: float = option(1e-3, positive=True)
    weight_decay: float = option(0.01, at_least=0)
    epochs: int = option(1000, at_least=1)
    evaluate_every: int = option(5, at_least=1)
    measure_every: int = option(0, at_least=0)
    redundancy_n: int = option(5000, at_least=2)
    redundancy_probe: Literal["sampled", "rademacher", "batch"] = "sampled"
    redundancy_batch: int = option(0, at_least=0)

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        super().__post_init__()
        if self.measure_every % self.evaluate_every:
            raise InputError(
                f"measure_every={self.measure_every}: give a multiple of "
                f"evaluate_every={self.evaluate_every}, or 0"
            )


# What the paper leaves open, in its words, and these options decide.
OPEN = {
    "weight_decay": 'it says "AdamW"',
    "dtype": 'it says "bfloat16"',
    "batch_norm_updates": "it says nothing of running statistics",
}

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
        **ON_A_CORE,
        "batch_size": 64,
        "norm_batch": 0,
        "epochs": 120,
        "evaluate_every": 4,
        "measure_every": 12,
        "redundancy_n": 200,
        "redundancy_probe": "rademacher",
        "redundancy_batch": 100,
    },
    "series-small": {
        **_SERIES,
        "model_kwargs": {"layers": 2, "width": 32, "heads": 4, "ffn": 64, "dropout": 0.0},
        "n": 256,
        "context": 64,
        "horizon": 24,
        "channels": 3,
        **ON_A_CORE,
        "batch_size": 64,
        "norm_batch": 0,
        "epochs": 1000,
        "evaluate_every": 20,
        "measure_every": 100,
        "redundancy_n": 200,
        "redundancy_probe": "rademacher",
        "redundancy_batch": 100,
    },
}

# Options that change no number, or only its last bits, or when one is recorded, or of which the
# paper says nothing; and the epochs, which may still change.
_NO_MATTER = set(
    (
        "seed device threads step epochs evaluate_every measure_every redundancy_n redundancy_batch"
    ).split()
)
_NO_MATTER |= {"redundancy_probe", "reduce_dtype", "batch_norm_updates"}
_OF_THE_OTHER = {"vision": {"context", "horizon", "channels"}, "series": {"classes", "size"}}


def substitutions(options: MemorizeOptions) -> list[str]:
    """Say in what a run differs from the paper's of its kind, each as "NAME VALUE for PAPER'S".

    Example:
        >>> substitutions(MemorizeOptions(n=1000, batch_size=64))
        ['batch_size 64 for 1024', 'n 1000 for 819200']
    """
    paper = vars(MemorizeOptions(**PRESETS[options.kind]))
    return differences(vars(options), paper, _NO_MATTER | _OF_THE_OTHER[options.kind])
