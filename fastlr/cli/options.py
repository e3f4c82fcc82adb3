"""The options that commands that measure models share, turned into the library's arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fastlr.errors import InputError

DTYPES = ("fp32", "bf16", "fp16")
PREDICTIVES = ("auto", "categorical", "bernoulli", "gaussian")
OF_INPUTS = {"series": "gaussian", "tokens": "categorical"}  # predictives for --predictive auto
PROBES = ("rademacher", "sampled", "exact", "batch")
LONG_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def completion(*values: str) -> Callable[[str], list[str]]:
    """Return the shell completion of an option with these values."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


Classes = Annotated[
    int | None, typer.Option(help="Number of the model's outputs; default: its own.")
]
ModelKwargs = Annotated[str, typer.Option(help="Further arguments of the model, as a JSON object.")]
InputsName = Annotated[
    str,
    typer.Option(
        "--inputs",
        help="Inputs: shapes, noise, series, tokens, or package.module:function.",
        autocompletion=completion("shapes", "noise", "series", "tokens"),
    ),
]
Size = Annotated[int, typer.Option(help="Height and width of the images.")]
Length = Annotated[
    int | None,
    typer.Option(
        help="Length of series or tokens; default: 512, or the model's longest if that is less."
    ),
]
Features = Annotated[int, typer.Option(help="Number of features of the series.")]
ProbeName = Annotated[
    str,
    typer.Option(
        "--probe", help=f"Probe: {', '.join(PROBES)}.", autocompletion=completion(*PROBES)
    ),
]
PredictiveName = Annotated[
    str,
    typer.Option(
        "--predictive",
        help=f"Distribution of the labels: {', '.join(PREDICTIVES)}.",
        autocompletion=completion(*PREDICTIVES),
    ),
]
Sigma = Annotated[float, typer.Option(help="Standard deviation for --predictive gaussian.")]
BatchSize = Annotated[
    int | None, typer.Option(help="Number of inputs in a batch; default: what fits the device.")
]
DtypeName = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Precision: fp32, or autocast to bf16 or fp16.",
        autocompletion=completion(*DTYPES),
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", help="Device, such as cpu, cuda or cuda:1; default: a GPU if there is one."
    ),
]


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise InputError unless the value of an option is one of those allowed."""
    if value not in allowed:
        raise InputError(f"{option} {value}: choose one of {', '.join(allowed)}")


def dtype_of(name: str) -> str:
    """Return the value of ``--dtype`` as one of `DTYPES`.

    Raises:
        InputError: There is no such dtype.
    """
    name = LONG_DTYPES.get(name, name)
    one_of("--dtype", name, DTYPES)
    return name


def device_of(name: str | None) -> Any:
    """Return the device of ``--device``.

    Raises:
        InputError: There is no such device here.
    """
    import torch

    from fastlr.models.loading import usable_device

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return usable_device(name, "--device ")


def inputs_of(name: str, size: int, length: int | None, features: int, model: Any = None) -> Any:
    """Return the synthetic inputs of ``--inputs``, ``--size``, ``--length`` and ``--features``.

    Tokens are those of the model's config.

    Raises:
        InputError: An unknown name, a count below 1, or a function that gives no inputs.
    """
    import fastlr

    for option, value in (("size", size), ("length", length), ("features", features)):
        if value is not None and value < 1:
            raise InputError(f"--{option} {value}: give at least 1")
    if name == "tokens":
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "vocab_size"):
            raise InputError(
                "--inputs tokens: the model has no config with a vocab_size, as hf:NAME"
            )
        length = length or min(512, getattr(config, "max_position_embeddings", 512))
        return fastlr.TokenInputs(config.vocab_size, length, attention_mask=True)
    if name == "shapes":
        return fastlr.ShapeImages(size=(3, size, size))
    if name == "noise":
        return fastlr.NoiseImages(size=(3, size, size))
    if name == "series":
        return fastlr.GaussianSeries(length=length or 512, features=features)
    if ":" not in name:
        raise InputError(
            f"--inputs {name}: choose shapes, noise, series, tokens, or package.module:function"
        )
    from fastlr.models.loading import call_factory

    source = call_factory(name)
    if not hasattr(source, "batch"):
        raise InputError(
            f"--inputs {name}: it returned {type(source).__name__}, which has no batch(start, "
            "stop, ...)"
        )
    return source


def kwargs_of(text: str) -> dict[str, Any]:
    """Return the arguments of ``--model-kwargs``.

    Raises:
        InputError: They are no JSON object.
    """
    from fastlr.experiments.runs.options import json_object

    try:
        return json_object(text)
    except ValueError as error:
        raise InputError(f"--model-kwargs wants {error}") from None


def check_folders(**files: Path | str | None) -> None:
    """Raise InputError unless each file to be written can be: its folder exists, and it is none.

    None and "-" are no files.
    """
    for option, path in files.items():
        name, place = option.replace("_", "-"), Path(path or "-").absolute()
        if not place.parent.is_dir():
            raise InputError(f"--{name} {path}: there is no folder {place.parent}")
        if path not in (None, "-") and place.is_dir():
            raise InputError(f"--{name} {path} is a folder: name a file in it")


def predictive_of(name: str, sigma: float, inputs: str) -> Any:
    """Return the predictive that ``--predictive`` and ``--sigma`` name.

    It is None for auto, but for ``--inputs`` of `OF_INPUTS`.
    """
    import fastlr

    one_of("--predictive", name, PREDICTIVES)
    if name == "auto":
        name = OF_INPUTS.get(inputs, name)
    if name == "gaussian":
        return fastlr.Gaussian(sigma=sigma)
    if sigma != 1:
        raise InputError(f"--sigma goes with --predictive gaussian, not {name}")
    return {"auto": None, "categorical": fastlr.Categorical(), "bernoulli": fastlr.Bernoulli()}[
        name
    ]
