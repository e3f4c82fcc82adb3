"""Options of a driver: a dataclass, presets, and ``key=value`` settings checked against it."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from fastlr.errors import InputError

Options = TypeVar("Options")

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


@dataclasses.dataclass(frozen=True)
class ContinualOptions:
    """Options of ``fastlr continual``; the defaults are the preset ``paper``.

    Attributes:
        model: Name for `fastlr.models.load_model`: torchvision's, timm's, or ``package.module:function``. It is made with
            ``num_classes=2``.
        model_kwargs: Further arguments of the model, a JSON object.
        data: Folder of an image store, or ``synthetic`` for `fastlr.data.synthetic_store` with ``synthetic_classes``.
        synthetic_classes: Their number (32 x 32, 200 training and 50 test images each).
        tasks: How many, in all.
        seed: Of the model, the pairs of classes, the training and the synthetic inputs.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``.
        threads: Of torch on the CPU, set for the whole process; 0: as it is (``OMP_NUM_THREADS``). Their number changes
            the last bits of sums.
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
        shrink: Multiply every parameter by it at the start of each task after the first; 1: off (see
            `fastlr.drivers.interventions`, as for the three that follow).
        perturb: Then add normal noise of this standard deviation; 0: off.
        l2_init: Strength of L2 regularisation towards initialisation; 0: off. Not in the recorded train_loss.
        norm: ``batch`` leaves the model's batch norms, ``layer`` puts layer norms in their place.
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
    seed: int = 0
    device: str = "auto"
    threads: int = 0
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
    shrink: float = 1.0
    perturb: float = 0.0
    l2_init: float = 0.0
    norm: Literal["batch", "layer"] = "batch"
    on_nan: Literal["stop", "skip"] = "stop"
    measures: tuple[str, ...] = (
        "local_redundancy",
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
    measure_every: int = 1
    redundancy_n: int = 5000
    redundancy_batch: int = 0
    measure_images: int = 256
    tau: float = 0.1

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        for name, low in (
            ("tasks", 1),
            ("synthetic_classes", 2),
            ("batch_size", 1),
            ("norm_batch", 0),
            ("epochs", 1),
            ("measure_every", 1),
            ("redundancy_n", 1),
            ("redundancy_batch", 0),
            ("measure_images", 2),
            ("weight_decay", 0),
            ("momentum", 0),
            ("threads", 0),
            ("tau", 0),
            ("shrink", 0),
            ("perturb", 0),
            ("l2_init", 0),
        ):
            if not getattr(self, name) >= low:
                raise InputError(f"{name}={getattr(self, name)}: give at least {low}")
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate={self.learning_rate}: give a positive number")
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"seed={self.seed}: give a number in [0, 2**64)")
        for name in self.measures:
            if name not in MEASURES:
                raise InputError(f"measures: {_unknown(name, MEASURES)}")
        if len(set(self.measures)) < len(self.measures):
            raise InputError(f"measures={','.join(self.measures)}: one is named twice")


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
        "tasks": 110,
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


def resolve(
    kind: type[Options], presets: Mapping[str, Mapping[str, Any]], preset: str, settings: Mapping[str, Any]
) -> Options:
    """Return the options of a preset with some settings changed.

    Raises:
        InputError: Unknown preset or option (with the nearest one), or a value that does not fit.
    """
    if preset not in presets:
        raise InputError(f"preset {_unknown(preset, presets)}")
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in settings:
        if key not in known:
            raise InputError(f"option {_unknown(key, known)}")
    return kind(**{**presets[preset], **settings})


def parse_settings(kind: type, settings: Iterable[str]) -> dict[str, Any]:
    """Turn ``key=value`` texts into values of the types that a dataclass of options says.

    Raises:
        InputError: No ``=``, an unknown key (with the nearest one), a value of another type, or a key given twice.

    Example:
        >>> parse_settings(ContinualOptions, ["epochs=3", "flip=yes", "measures=weight_norm,srank"])
        {'epochs': 3, 'flip': True, 'measures': ('weight_norm', 'srank')}
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals:
            raise InputError(f"--set {setting}: write key=value")
        if key not in hints:
            raise InputError(f"--set {setting}: {_unknown(key, hints)}")
        if key in values:
            raise InputError(f"--set {setting}: {key} is given twice")
        try:
            values[key] = _value(hints[key], text.strip())
        except ValueError as error:
            raise InputError(f"--set {setting}: {key} wants {error}") from None
    return values


def from_record(kind: type[Options], record: Mapping[str, Any]) -> Options:
    """Return the options that ``dataclasses.asdict`` and JSON made a record of; missing ones have their defaults.

    Raises:
        InputError: An option that this version of fastlr does not have.
    """
    hints = typing.get_type_hints(kind)
    for key in record:
        if key not in hints:
            raise InputError(f"the run's option {_unknown(key, hints)}; use the version of fastlr that made it")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in record.items()})


def _value(hint: Any, text: str) -> Any:
    """Read a text as a type; ValueError says what is wanted."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        return _value(next(each for each in inner if each is not type(None)), text)
    if origin is Literal:
        if text not in inner:
            raise ValueError(f"one of {', '.join(inner)}, not {text!r}")
        return text
    if origin is tuple:
        return tuple(_value(inner[0], part.strip()) for part in text.split(",") if part.strip())
    if origin is dict:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f'a JSON object such as {{"width": 2}}, not {text!r}')
        return found
    if hint is bool:
        known = {
            "true": True,
            "yes": True,
            "1": True,
            "on": True,
            "false": False,
            "no": False,
            "0": False,
            "off": False,
        }
        if text.lower() not in known:
            raise ValueError(f"true or false, not {text!r}")
        return known[text.lower()]
    if hint in (int, float):
        try:
            number = hint(text)
        except ValueError:
            raise ValueError(f"{'a whole number' if hint is int else 'a number'}, not {text!r}") from None
        if number - number != 0:
            raise ValueError(f"a finite number, not {text!r}")
        return number
    return text


def _unknown(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{name} is unknown: " + (f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}")
