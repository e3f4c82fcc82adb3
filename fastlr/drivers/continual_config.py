"""Options and presets of the continual-learning driver."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from fastlr.drivers.config import RunOptions, at_least, choices
from fastlr.drivers.steps import StepMode
from fastlr.errors import InputError

MEASURES = (
    "local_redundancy",
    "local_redundancy_noise",
    "local_redundancy_next_task",
    "weight_norm",
    "distance_from_init",
    "dormant_ratio",
    "dormant_ratio_tau",
    "train_grad_norm",
    "batch_grad_norm",
    "effective_rank",
    "srank",
    "feature_rank",
)
OF_THE_ABLATION = ("local_redundancy_noise", "local_redundancy_next_task")


@dataclasses.dataclass(frozen=True)
class ContinualOptions(RunOptions):
    """Options of ``fastlr continual``; the defaults are the preset ``paper``. Those that all drivers have: `RunOptions`.

    Attributes:
        model: Name for `fastlr.models.load_model`: torchvision's, timm's, or ``package.module:function``. It is made with
            ``num_classes=2``.
        model_kwargs: Further arguments of the model, a JSON object.
        data: Folder of an image store, or ``synthetic`` for `fastlr.data.synthetic_store` with ``synthetic_classes``.
        synthetic_classes: Their number (32 x 32, 200 training and 50 test images each).
        tasks: How many, in all.
        dtype: ``fp32``, or ``bf16``: autocast in training and measures; weights and optimiser state stay float32.
        optimiser: ``adamw`` or ``sgd``.
        learning_rate: Of either.
        weight_decay: Decoupled for AdamW, in the gradient for SGD.
        momentum: Of SGD.
        optimiser_state: ``kept`` from task to task, or ``reset`` at the start of each.
        batch_size: Images an optimiser step.
        norm_batch: Images a forward pass, so that BatchNorm's statistics are of so many; 0: the whole batch. The gradients
            of a batch's passes are added (the paper's 4 GPUs x 256 images on one).
        epochs: Passes over a task's training images.
        flip: Mirror each training image with probability 1/2 (neither paper says that it does).
        head_reset: Set the last linear layer to zero at the start of each task, as Dohare et al. do.
        norm: ``batch`` leaves the model's batch norms, ``layer`` puts layer norms in their place (see
            `fastlr.drivers.interventions`, as for those that follow).
        shrink: Multiply every parameter by it at the start of each task after the first; 1: off.
        perturb: Then add normal noise of this standard deviation; 0: off.
        l2_init: Strength of L2 regularisation towards initialisation; 0: off. Not in the recorded train_loss.
        cbp_rate: Continual backprop: the share of each layer's mature units that is replaced in a step; 0: off. Dohare et
            al. take 3e-4 for ``dohare32``.
        cbp_maturity: Steps after which a unit is mature.
        cbp_decay: Of the running means of contribution utility and activation.
        cbp_transfer: Let the mean contribution of a replaced unit go to the bias of what reads it; ``no``: as in Nature.
        replay_images: Images of earlier tasks in the memory of experience replay, each with the label of its task; 0: off.
        replay_share: Of each batch that is drawn from the memory.
        ewc: Strength lambda of elastic weight consolidation, ``lambda / 2 F (theta - theta*)^2``; 0: off. Not in train_loss.
        ewc_decay: By which the Fisher information of earlier tasks is multiplied after each task.
        ewc_images: Of each task, for its Fisher information: one forward and backward pass each.
        step: How a training step runs: ``eager``; ``graph``, replayed as a CUDA graph; ``compile``, the model compiled by
            `torch.compile` (on a GPU replayed too); ``auto``: ``graph`` on a GPU, else ``eager``. The records say which.
        on_nan: A loss that is not finite: ``stop`` with an error, or ``skip`` the task, going on from before it.
        measures: Which, with commas.
        measure_every: Measure after every k-th task (and before the first).
        redundancy_n: Synthetic images of local redundancy; the same ones at every measurement.
        redundancy_batch: Of them at a time; 0: by the memory that is free at the first measurement, then kept.
        measure_images: Training images of the task just learned for the measures of activations and gradients.
        tau: Threshold of dormant_ratio_tau.
    """

    model: str = "mobilenet_v3_large"
    model_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str = ""
    synthetic_classes: int = 8
    tasks: int = 3000
    dtype: Literal["fp32", "bf16"] = "bf16"
    optimiser: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    momentum: float = 0.0
    optimiser_state: Literal["kept", "reset"] = "kept"
    batch_size: int = 1024
    norm_batch: int = 256
    epochs: int = 100
    flip: bool = False
    head_reset: bool = False
    norm: Literal["batch", "layer"] = "batch"
    shrink: float = 1.0
    perturb: float = 0.0
    l2_init: float = 0.0
    cbp_rate: float = 0.0
    cbp_maturity: int = 100
    cbp_decay: float = 0.99
    cbp_transfer: bool = True
    replay_images: int = 0
    replay_share: float = 0.5
    ewc: float = 0.0
    ewc_decay: float = 0.95
    ewc_images: int = 200
    step: StepMode = "auto"
    on_nan: Literal["stop", "skip"] = "stop"
    measures: tuple[str, ...] = tuple(name for name in MEASURES if name not in OF_THE_ABLATION)
    measure_every: int = 1
    redundancy_n: int = 5000
    redundancy_batch: int = 0
    measure_images: int = 256
    tau: float = 0.1

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        super().__post_init__()
        at_least(self, tasks=1, synthetic_classes=2, batch_size=1, norm_batch=0, epochs=1, measure_every=1)
        at_least(self, redundancy_n=1, redundancy_batch=0, measure_images=2, tau=0)
        at_least(self, weight_decay=0, momentum=0, shrink=0, perturb=0, l2_init=0)
        at_least(self, cbp_rate=0, cbp_maturity=0, cbp_decay=0, replay_images=0, ewc=0, ewc_decay=0, ewc_images=1)
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate={self.learning_rate}: give a positive number")
        for name, inside in (("cbp_rate", True), ("ewc_decay", True), ("cbp_decay", False), ("replay_share", False)):
            value = getattr(self, name)
            if value > 1 or (value == 1 and not inside):
                raise InputError(f"{name}={value}: give {'at most' if inside else 'less than'} 1")
        if not self.replay_share > 0:
            raise InputError(
                f"replay_share={self.replay_share}: give a positive number (replay_images=0 turns replay off)"
            )
        choices("measures", self.measures, MEASURES)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # Dohare et al. 2024, lop/imagenet/cfg/bp.json and lop/imagenet/single_expr.py. Their step sizes are .01, .001, .0001.
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
        "redundancy_n": 1000,
    },
    # Under two minutes on two CPU cores, without any data; as many tasks as the report needs for its correlations.
    "demo": {
        "model": "fastlr.models.convnet:ConvNet",
        "data": "synthetic",
        "tasks": 102,
        "device": "cpu",
        "threads": 1,  # two wait for each other where other processes run: three times as slow at a load of 3
        "dtype": "fp32",
        "batch_size": 50,
        "norm_batch": 0,
        "epochs": 3,
        "redundancy_n": 200,
        "redundancy_batch": 200,
        "measure_images": 128,
        "measures": MEASURES,
    },
}
