"""Options and presets of the continual-learning driver."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from fastlr.errors import InputError
from fastlr.experiments.continual.fields import FIELDS, MEASURES
from fastlr.experiments.continual.interventions import INTERVENTIONS, asked_for
from fastlr.experiments.data import FreshDigits, PermutedDigits
from fastlr.experiments.runs.options import ON_A_CORE, differences, option
from fastlr.experiments.training.options import TrainingOptions
from fastlr.experiments.training.steps import StepMode

RANDOM_LABELS, SYNTHETIC = "random-labels", "synthetic"  # data that need no store
RANDOM_DIGITS = "random-labels-digits"
DIGITS = {"permuted-digits": PermutedDigits, "fresh-digits": FreshDigits}
MEMORISED = (RANDOM_LABELS, RANDOM_DIGITS)  # with labels that only memory knows
OF_THE_ABLATION = ("local_redundancy_noise", "local_redundancy_next_task")  # the paper's Table 4
OF_THE_TABLES = (
    "local_redundancy",
    "weight_norm",
    "distance_from_init",
    "dormant_ratio",
    "train_grad_norm",
)  # 1, 2, 5
WITHOUT_ABLATION = tuple(name for name in MEASURES if name not in OF_THE_ABLATION)


# Options of which a report compares the values.
COMPARED = ["model_kwargs", "norm", "head_reset", "optimiser_state", "weight_decay"]
COMPARED += [name for kind in INTERVENTIONS.values() for name in kind.options]


def with_those_of_interventions(kind: type[TrainingOptions]) -> type[TrainingOptions]:
    """Add to a class of options, and to its docstring, what the interventions declare."""
    lines = [inspect.cleandoc(kind.__doc__ or "")]
    for intervention in INTERVENTIONS.values():
        for name, type_of_it, declared in intervention.declared():
            kind.__annotations__[name] = type_of_it
            setattr(kind, name, declared)
            lines.append(f"    {name}: {declared.metadata['about']}")
    kind.__doc__ = "\n".join(lines)
    return kind


@dataclasses.dataclass(frozen=True)
@with_those_of_interventions
class ContinualOptions(TrainingOptions):
    """Options of ``fastlr continual``; the defaults are the preset ``paper``.

    The options that all drivers share are in `TrainingOptions`; those of interventions are declared
    by the interventions.

    Attributes:
        model: Name for `fastlr.models.load_model`: torchvision's, timm's, or
            ``package.module:function``. It is made with ``num_classes``, as many as a task has
            classes.
        model_kwargs: Further arguments of the model, a JSON object.
        data: Folder of an image store, ``synthetic`` for `synthetic_store` with
            ``synthetic_classes``, or ``random-labels`` for `fastlr.experiments.data.RandomLabels`
            with ``random_images`` and ``random_classes``; ``random-labels-digits`` is the same on
            handwritten digits, ``permuted-digits`` `fastlr.experiments.data.PermutedDigits` and
            ``fresh-digits`` `fastlr.experiments.data.FreshDigits` (all of scikit-learn).
        synthetic_classes: Their number (32 x 32, 200 training and 50 test images each).
        random_images: Training images of every task of random labels or digits.
        random_classes: Number of classes of a task of random labels. Tasks of digits have 10, other
            tasks two.
        tasks: Number of tasks.
        optimiser: ``adamw`` or ``sgd``.
        learning_rate: Learning rate of the optimiser.
        weight_decay: Decoupled for AdamW, in the gradient for SGD.
        momentum: Momentum of SGD.
        optimiser_state: ``kept`` from task to task, or ``reset`` at the start of each.
        epochs: Passes over a task's training images.
        flip: Mirror each training image with probability 1/2 (neither paper says that it does).
        head_reset: Set the last linear layer to zero at the start of each task, as Dohare et al.
            do.
        norm: ``batch`` leaves the model's batch norms, ``layer`` puts layer norms in their place
            (see `fastlr.experiments.continual.interventions`).
        layout: Layout of images, activations and weights in memory: ``channels-last``, with which a
            step on a CPU takes less time for most networks, or ``contiguous`` (ResNet-18 on 32 x 32
            and 64 x 64 images: 0.93 of the time on one core; ConvNet: 1.18; MobileNetV3-Large: 1.2
            to 1.3; ResNet-50: 1.3). It changes the last bits.
        step: How a training step runs: ``eager``; ``graph``, replayed as a CUDA graph; ``compile``,
            the model compiled by `torch.compile` (on a GPU replayed too); ``auto``: ``graph`` on a
            GPU, else ``eager``. The records say which.
        on_nan: A loss that is not finite: ``stop`` with an error, or ``skip`` the task, going on
            from before it.
        measures: Which, with commas.
        measure_every: Measure after every k-th task (and before the first).
        redundancy_n: Synthetic images of local redundancy; the same ones at every measurement.
        redundancy_probe: Probe of its estimates: ``sampled`` draws labels, as the paper does;
            ``rademacher`` has the same expectation and less variance; ``exact`` enumerates them;
            ``batch`` takes the gradient of each ``redundancy_batch`` images' mean, which the paper
            may mean as well (docs/guides/measure.md).
        redundancy_batch: Number of inputs in a batch; 0: by the memory that is free at the first
            measurement, then kept.
        measure_images: Training images of the task just learned for the measures of activations and
            gradients.
        tau: Threshold of dormant_ratio_tau.
        trainability_repeats: Draws of labels of trainability, each 100 training steps of a copy.
    """

    model: str = "mobilenet_v3_large"
    model_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str = ""
    synthetic_classes: int = option(8, at_least=2)
    random_images: int = option(256, at_least=2)
    random_classes: int = option(10, at_least=2)
    tasks: int = option(3000, at_least=1)
    optimiser: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = option(1e-3, positive=True)
    weight_decay: float = option(0.01, at_least=0)
    momentum: float = option(0.0, at_least=0)
    optimiser_state: Literal["kept", "reset"] = "kept"
    epochs: int = option(100, at_least=1)
    flip: bool = False
    head_reset: bool = False
    norm: Literal["batch", "layer"] = "batch"
    layout: Literal["channels-last", "contiguous"] = "channels-last"
    step: StepMode = "auto"
    on_nan: Literal["stop", "skip"] = "stop"
    measures: tuple[str, ...] = option(MEASURES, known=tuple(FIELDS))
    measure_every: int = option(1, at_least=1)
    redundancy_n: int = option(5000, at_least=2)
    redundancy_probe: Literal["sampled", "rademacher", "exact", "batch"] = "sampled"
    redundancy_batch: int = option(0, at_least=0)
    measure_images: int = option(256, at_least=2)
    tau: float = option(0.1, at_least=0)
    trainability_repeats: int = option(3, at_least=1)

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        super().__post_init__()
        for intervention in asked_for(self):
            if self.dtype == "bf16-weights" and intervention.keeps_running_means:
                name = next(iter(intervention.options))
                raise InputError(
                    f"{name} keeps running means or counters of which bfloat16 would lose most: "
                    f"choose dtype=bf16, or {name}=0"
                )

    @property
    def classes(self) -> int:
        """Classes of a task."""
        if self.data in MEMORISED:
            return self.random_classes
        return DIGITS[self.data].classes if self.data in DIGITS else 2


# What the paper leaves open, in its words, and these options decide.
OPEN = {
    "weight_decay": 'it says "AdamW" and "no regularization"',
    "optimiser_state": "it says that weights are carried over",
    "flip": "it says nothing of augmentation",
    "dtype": 'it says "bfloat16 precision"',
    "batch_norm_updates": "it says nothing of running statistics",
    "measure_images": 'it says "a batch of real training data"',
}

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # The run of the paper's Table 5: fewer tasks, and the measures of that table alone.
    "table5": {"tasks": 500, "measures": OF_THE_TABLES},
    # Dohare et al. 2024, lop/imagenet/cfg/bp.json and lop/imagenet/single_expr.py. Their step sizes
    # are .01, .001, .0001.
    "dohare32": {
        "model": "fastlr.models.convnet:ConvNet",
        "tasks": 2000,
        "dtype": "fp32",
        "optimiser": "sgd",
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "momentum": 0.9,
        "batch_size": 100,
        "norm_batch": 0,
        "epochs": 250,
        "head_reset": True,
        "measures": WITHOUT_ABLATION,
        "redundancy_probe": "rademacher",
    },
    # Tiny ImageNet at 64 x 64 on two CPU cores.
    "tiny": {
        "model": "fastlr.models.convnet:ConvNet",
        "model_kwargs": {"size": 64},
        "tasks": 30,
        "dtype": "fp32",
        "batch_size": 128,
        "norm_batch": 0,
        "epochs": 10,
        "measures": WITHOUT_ABLATION,
        "redundancy_n": 1000,
        "redundancy_probe": "rademacher",
    },
    # Its tables in some ten minutes a run on one CPU core: Tiny ImageNet at 32 x 32.
    "small": {
        "model": "fastlr.models.convnet:ConvNet",
        "tasks": 200,
        **ON_A_CORE,
        "batch_size": 128,
        "norm_batch": 0,
        "epochs": 10,
        "measures": (*OF_THE_ABLATION, *OF_THE_TABLES),
        "redundancy_n": 500,
        "redundancy_probe": "rademacher",
        "redundancy_batch": 250,
    },
    # Half a minute on one CPU core, without any data: a network that loses its plasticity.
    "demo": {
        "model": "fastlr.models.mlp:MLP",
        "data": RANDOM_LABELS,
        "tasks": 200,
        **ON_A_CORE,
        "learning_rate": 3e-3,
        "optimiser_state": "reset",
        "batch_size": 32,
        "norm_batch": 0,
        "epochs": 20,
        "measures": WITHOUT_ABLATION,
        "redundancy_n": 512,
        "redundancy_probe": "rademacher",
        "redundancy_batch": 512,
    },
}

# Options that change no number, or only its last bits, or are reported in their own place; tau is
# of no measure of the paper.
_NO_MATTER = set(
    (
        "seed device threads layout fused step on_nan redundancy_batch measures tau data "
        "trainability_repeats "
        "synthetic_classes"
    ).split()
)
_NO_MATTER |= {"random_images", "random_classes", "reduce_dtype", "batch_norm_updates"}
_SIZE = "4,204,594 parameters for 5.47 million (the network's size with 1,000 classes is 5,483,032)"
_PAPER_IMAGES = {"images": "ImageNet's", "classes": 1000, "size": 224, "resize": "squash"}


def substitutions(options: ContinualOptions, data: Mapping[str, Any], tasks: int) -> list[str]:
    r"""Say in what a run differs from the paper's, each as "NAME VALUE for PAPER'S".

    Args:
        options: Options of the run.
        data: What ``config.json`` says of its data; older runs do not say ``resize``, which was
            ``crop``, and that of data which nobody has resized is None.
        tasks: Those that it has done.

    Example:
        >>> data = {"classes": 60, "size": 224, "resize": "crop"}
        >>> print(*substitutions(ContinualOptions(epochs=10), data, 500), sep="\n")
        tasks 500 for 3000 (500 in Table 5)
        epochs 10 for 100
        classes 60 for 1000
        resize crop for squash
        4,204,594 parameters for 5.47 million (the network's size with 1,000 classes is 5,483,032)
    """
    paper = {**vars(ContinualOptions()), **_PAPER_IMAGES}
    if options.data in (*MEMORISED, *DIGITS, SYNTHETIC):
        actual: dict[str, Any] = {"images": options.data}
    else:
        given = {"resize": "crop", **data}
        actual = {
            key: given[key] for key in ("classes", "size", "resize") if given.get(key) is not None
        }
    texts = differences({**vars(options), "tasks": tasks, **actual}, paper, _NO_MATTER)
    if options.model == ContinualOptions.model and options.classes == 2:
        texts.append(_SIZE)
    of_table5 = f"tasks 500 for {paper['tasks']}"
    return [text.replace(of_table5, f"{of_table5} (500 in Table 5)") for text in texts]
