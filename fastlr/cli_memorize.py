"""``fastlr memorize``: the memorization driver."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fastlr.cli_runs import AtOnce, Out, Resume, Seed, Seeds, Settings, ShowOptions, TensorBoard, carry_out


def memorize(
    preset: Annotated[
        str | None, typer.Argument(help="vision, series, vision-small or series-small; without it, vision.")
    ] = None,
    out: Out = None,
    settings: Settings = None,
    epochs: Annotated[int | None, typer.Option(help="How many, in all: --set epochs=.")] = None,
    seed: Seed = None,
    seeds: Seeds = None,
    at_once: AtOnce = None,
    resume: Resume = False,
    tensorboard: TensorBoard = False,
    options: ShowOptions = False,
) -> None:
    """Train on random targets and say how many bits a parameter takes up; PRESET names a set of options."""
    from fastlr.drivers.memorize import DRIVER

    named: dict[str, Any] = {"epochs": epochs, "seed": seed}
    how: Any = {"seeds": seeds, "at_once": at_once, "tensorboard": tensorboard}
    carry_out(DRIVER, preset, out, settings, resume=resume, options=options, **how, **named)
