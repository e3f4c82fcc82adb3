"""What commands that measure models share: options as text, turned into what the library takes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fastlr.errors import InputError

DTYPES = ("fp32", "bf16", "fp16")
PREDICTIVES = ("auto", "categorical", "bernoulli", "gaussian")

PredictiveName = Annotated[str, typer.Option("--predictive", help=", ".join(PREDICTIVES) + ".")]
Sigma = Annotated[float, typer.Option(help="Standard deviation, with --predictive gaussian.")]
BatchSize = Annotated[int | None, typer.Option(help="Inputs at a time; without it, by free memory.")]
DtypeName = Annotated[str, typer.Option("--dtype", help="fp32, or autocast to bf16 or fp16.")]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1; without it, a GPU if there is one.")
]


def one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise InputError unless the value of an option is one of those allowed."""
    if value not in allowed:
        raise InputError(f"{option} {value}: choose one of {', '.join(allowed)}")


def device_of(name: str | None) -> Any:
    """Return the device of ``--device``.

    Raises:
        InputError: There is no such device here.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {name}: {' '.join(str(error).split())}") from error
    return device


def autocast_dtype(name: str) -> Any:
    """Return the dtype of ``--dtype``: None for fp32."""
    import torch

    one_of("--dtype", name, DTYPES)
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def predictive_of(name: str, sigma: float) -> Any:
    """Return the predictive of ``--predictive`` and ``--sigma``: None for auto."""
    import fastlr

    one_of("--predictive", name, PREDICTIVES)
    if name == "gaussian":
        return fastlr.Gaussian(sigma=sigma)
    if sigma != 1:
        raise InputError(f"--sigma goes with --predictive gaussian, not {name}")
    return {"auto": None, "categorical": fastlr.Categorical(), "bernoulli": fastlr.Bernoulli()}[name]
