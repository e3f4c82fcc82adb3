"""``fastlr sweep``: configurations by seeds of any driver, on this machine or on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastlr.cli_runs import Resume, Settings, TensorBoard, carry_out_many, given_settings
from fastlr.errors import InputError


def sweep(
    driver: Annotated[str, typer.Argument(help="continual, memorize or transfer.")],
    preset: Annotated[str | None, typer.Argument(help="Of the driver; without it, its first.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs, new or empty (with --resume, theirs).")] = None,
    settings: Settings = None,
    grids: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=V1,V2,...", help="Values of an option; all combinations if repeated."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each configuration, from --set seed= on.")] = None,
    at_once: Annotated[int | None, typer.Option(help="Runs at a time; else as many as there is room for.")] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on Ray: a cluster of this machine, unless --address.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help="With --ray: an existing cluster, HOST:PORT or auto; its nodes must share --out."),
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option("--gpus-per-run", help="With --ray: 0.25 puts four on a GPU; else 1 if there are any."),
    ] = None,
    cpus: Annotated[float | None, typer.Option("--cpus-per-run", help="With --ray; else as many as threads.")] = None,
    retries: Annotated[
        int | None, typer.Option(help="With --ray: how often a run goes on after its worker was lost; else 3.")
    ] = None,
    resume: Resume = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Run DRIVER with every combination of --grid values and seeds, each in a folder of its own in --out."""
    from fastlr.drivers.launch import find_driver
    from fastlr.drivers.on_ray import RETRIES, connect
    from fastlr.drivers.sweep import parse_grids

    kind = find_driver(driver)
    given = given_settings(kind.options, settings or [], {})
    values = parse_grids(kind.options, grids or [])
    for key in values:
        if key in given:
            raise InputError(f"--grid {key}= and --set {key}= are both given: leave one out")
    if out is None:
        raise InputError("give --out, the folder of the runs")
    with_ray = {"--address": address, "--gpus-per-run": gpus, "--cpus-per-run": cpus, "--retries": retries}
    if not ray:
        for option, value in with_ray.items():
            if value is not None:
                raise InputError(f"{option} goes with --ray")
        carry_out_many(kind, preset, out, given, seeds, at_once, resume, tensorboard, values)
        return
    tries = RETRIES if retries is None else retries
    with connect(address, at_once, cpus=cpus, gpus=gpus, retries=tries) as cluster:
        carry_out_many(kind, preset, out, given, seeds, at_once, resume, tensorboard, values, cluster)
