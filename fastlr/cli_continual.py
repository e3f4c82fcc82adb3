"""``fastlr continual``: the continual-learning driver."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fastlr.cli_runs import AtOnce, Out, Resume, Seed, Seeds, Settings, ShowOptions, TensorBoard, carry_out


def continual(
    preset: Annotated[str | None, typer.Argument(help="paper, dohare32, tiny or demo; without it, paper.")] = None,
    out: Out = None,
    data: Annotated[str | None, typer.Option(help="Folder of an image store, or synthetic.")] = None,
    settings: Settings = None,
    tasks: Annotated[int | None, typer.Option(help="How many, in all: --set tasks=.")] = None,
    seed: Seed = None,
    seeds: Seeds = None,
    at_once: AtOnce = None,
    resume: Resume = False,
    tensorboard: TensorBoard = False,
    options: ShowOptions = False,
) -> None:
    """Train on a sequence of binary tasks and measure plasticity at every boundary; PRESET names a set of options."""
    from fastlr.drivers.continual import DRIVER

    named: dict[str, Any] = {"data": data, "tasks": tasks, "seed": seed}
    how: Any = {"seeds": seeds, "at_once": at_once, "tensorboard": tensorboard}
    carry_out(DRIVER, preset, out, settings, resume=resume, options=options, **how, **named)
