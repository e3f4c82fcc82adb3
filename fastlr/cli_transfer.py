"""``fastlr transfer``: the driver of time series transfer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fastlr.cli_runs import AtOnce, Out, Resume, Seed, Seeds, Settings, ShowOptions, TensorBoard, carry_out


def transfer(
    preset: Annotated[str | None, typer.Argument(help="paper, small or demo; without it, paper.")] = None,
    out: Out = None,
    source: Annotated[
        str | None, typer.Option(help="Series to pretrain on: a CSV file, its name in FASTLR_DATA, generated:SEED.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Series to fine-tune on, likewise.")] = None,
    settings: Settings = None,
    seed: Seed = None,
    seeds: Seeds = None,
    at_once: AtOnce = None,
    resume: Resume = False,
    tensorboard: TensorBoard = False,
    options: ShowOptions = False,
) -> None:
    """Pretrain a forecaster, select checkpoints by several strategies, fine-tune them; PRESET names a set of options."""
    from fastlr.drivers.transfer import DRIVER

    named: dict[str, Any] = {"source": source, "target": target, "seed": seed}
    how: Any = {"seeds": seeds, "at_once": at_once, "tensorboard": tensorboard}
    carry_out(DRIVER, preset, out, settings, resume=resume, options=options, **how, **named)
