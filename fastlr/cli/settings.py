"""Settings of runs on the command line: read, printed; and ``fastlr memorize MODEL --inputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from fastlr.errors import InputError

if TYPE_CHECKING:
    from fastlr.experiments.runs.experiment import Driver
    from fastlr.metrics import Measure

# Options of the driver memorize that print_capacity knows.
_OF_CAPACITY = {"n", "classes", "size", "context", "channels", "epochs", "learning_rate"}
_OF_CAPACITY |= {"model_kwargs", "device", "threads", "seed"}


def given_settings(kind: type, settings: list[str] | None, **named: Any) -> dict[str, Any]:
    """Return the values of ``--set`` and of options of the same meaning together.

    Raises:
        InputError: A setting does not fit, or is given in both ways.
    """
    from fastlr.experiments.runs.options import parse_settings

    given = parse_settings(kind, settings or [])
    for key, value in named.items():
        if value is None:
            continue
        if key in given:
            raise InputError(f"--{key} and --set {key}= are both given: leave one out")
        given[key] = value
    return given


def print_options(driver: Driver, preset: str | None, given: Mapping[str, Any]) -> None:
    """Print every option of a driver with its value, and its choices where it has some."""
    options = driver.options_from(preset, given)
    hints = get_type_hints(driver.options)
    for key, value in vars(options).items():
        text = ",".join(value) if isinstance(value, tuple) else value
        choices = ""
        if get_origin(hints[key]) is Literal:
            choices = f"  # {', '.join(get_args(hints[key]))}"
        print(f"{key}={text}{choices}")


def print_capacity(
    model: str | None, kinds: list[str], given: dict[str, Any], *, enumerated: bool
) -> None:
    """Print how many bits of random labels a parameter of a model takes up.

    Args:
        model: Its name.
        kinds: Kinds of synthetic inputs, one measurement each.
        given: Options of the driver memorize.
        enumerated: Take all labelings.
    """
    import torch

    from fastlr import memorization_capacity
    from fastlr.cli.options import inputs_of
    from fastlr.experiments.memorization.options import MemorizeOptions
    from fastlr.experiments.runs.experiment import choose_device
    from fastlr.models import load_model

    if model is None:
        raise InputError("--inputs wants a model")
    unfit = sorted(given.keys() - _OF_CAPACITY)
    if unfit:
        raise InputError(f"--inputs does not go with {', '.join(unfit)}")
    options = MemorizeOptions(**{"n": 1024, "size": 32, "epochs": 1000, **given})
    sources = {
        kind: inputs_of(kind, options.size, options.context, options.channels) for kind in kinds
    }
    device = choose_device(options)
    torch.manual_seed(options.seed)
    net = load_model(model, num_classes=given.get("classes"), kwargs=options.model_kwargs)
    for kind, source in sources.items():
        found = memorization_capacity(
            net.to(device),
            source,
            options.n,
            steps=options.epochs,
            learning_rate=options.learning_rate,
            enumerated=enumerated,
            seed=options.seed,
        )
        _print_capacity_of(found, f"{options.n} {kind}, seed {options.seed}")


def _print_capacity_of(found: Measure, what: str) -> None:
    """Print a capacity, with its conclusion where there is one, and what it is of."""
    from fastlr.display.tables import pm

    about = found.details
    share = "" if about["share"] is None else f", {100 * about['share']:.1f} % of the labels'"
    ceiling = "" if about["ceiling"] is None else f", ceiling {about['ceiling']:.1f} bits"
    value = f"{float(found):.4g}"
    if about["stderr"] is not None:  # of all labelings there is none
        value = pm(float(found), about["stderr"])
    print(
        f"{value} bits a parameter: {about['bits']:,.0f} bits{share}{ceiling}, "
        f"{about['parameters']:,} parameters"
    )
    print(f"{found.definition}; {what}")
    if about["conclusion"]:
        print(about["conclusion"])
