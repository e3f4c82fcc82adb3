"""The demo: a continual run on textures that need no download, a measurement of its network, and the report of the run.

``make demo``, ``fastlr demo`` or ``python -m fastlr.demo`` carry it out. The run is the preset ``demo`` of ``fastlr
continual``; ``fastlr demo network`` is `fastlr.demo_network`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import fastlr
from fastlr.analysis import TooShort, read_run
from fastlr.cli_display import progress as show_progress
from fastlr.drivers.continual import DRIVER, INITIAL
from fastlr.drivers.runs import CHECKPOINTS, CONFIG, LAST, read_config
from fastlr.models import load_model
from fastlr.report.continual import ContinualReport, write_report
from fastlr.report.continual_tables import hundred
from fastlr.report.folder import show
from fastlr.report.plots import per_layer_chart
from fastlr.report.record import machine, output_folder, progress_bar, write_json
from fastlr.report.tables import pm, top_modules

STRETCHES = 6  # of tasks in the summary
_TABLES = ("future-accuracy-semi-partial-raw", "forgetting")


def run(
    output: str | os.PathLike[str] = "demo-output",
    *,
    seed: int = 0,
    n: int = 1000,
    settings: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Carry out the run, measure its network before and after, report; print what happens and where the files are.

    Args:
        output: Folder of the run (in ``run``, with its report), ``per-layer.png`` and ``demo.json``; made if needed. A
            run that is there is gone on with.
        seed: Of the network, the tasks, the training and the synthetic images.
        n: Synthetic images of the measurement.
        settings: Options of the run that differ from the preset's.
        console: Where to print; stdout if None.

    Returns:
        The record written to ``demo.json``.

    Raises:
        InputError: ``output`` is not writable, or holds a run with other options.
    """
    say = console or Console(highlight=False)
    folder = output_folder(output)
    began = time.perf_counter()
    path = folder / "run"
    _carry_out(say, path, {"seed": seed, **(settings or {})})
    measured = _measure(say, path, folder, seed, n)
    say.print("\n[bold]3. What the report says of these tasks")
    report = write_report([path])
    show([sheet for sheet in report.screen if sheet.slug in _TABLES], say)
    say.print(_power(report))
    record = {
        "machine": machine(),
        "command": f"fastlr demo --seed {seed}",
        **measured,
        "seconds": time.perf_counter() - began,
    }
    write_json(folder / "demo.json", record)
    say.print(f"\n[bold]{record['seconds']:.0f} s in all. Open the report in a browser:")
    say.print(f"   {report.page}", soft_wrap=True)
    say.print("and look at:")
    for name, what in (
        ("run", "the run: configuration, records, checkpoints"),
        ("per-layer.png", "each layer's share, before and after"),
        ("demo.json", "the measurement with all digits"),
    ):
        say.print(f"   {folder / name}  {what}", soft_wrap=True)
    return record


def _carry_out(say: Console, path: Path, options: dict[str, Any]) -> None:
    say.print("[bold]1. A sequence of tasks: which of two textures is it? Then two others, and so on")
    there = (path / CONFIG).exists()
    where = (
        f"{path} is there: going on with it (remove it to begin anew)" if there else "about two minutes on two cores"
    )
    say.print(f"   {where}", soft_wrap=True)
    with show_progress(DRIVER) as progress:
        if there:
            DRIVER.resume(path, options, "demo", progress)
        else:
            DRIVER.begin(path, "demo", options, progress)
    done = read_run(path)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 3), header_style="bold")
    for column in ("tasks", "accuracy", "forgotten", "dormant", "local redundancy"):
        table.add_column(column, justify="right")
    means = (done.accuracy, done.forgetting, done.measure("dormant_ratio"))
    lr = done.measure("local_redundancy")
    edges = [len(done) * i // STRETCHES for i in range(STRETCHES + 1)]
    for first, stop in zip(edges, edges[1:]):
        if first < stop:
            known = [values[first:stop][np.isfinite(values[first:stop])] for values in means]
            shares = [hundred(float(values.mean())) if len(values) else "–" for values in known]
            table.add_row(f"{first} to {stop - 1}", *shares, f"{np.nanmedian(lr[first:stop]):.4g}")
    say.print(table)
    say.print("   Per cent, means over the tasks: accuracy on new images, what the next task")
    say.print("   costs of it, units never active. Local redundancy: its median.")


def _measure(say: Console, path: Path, folder: Path, seed: int, n: int) -> dict[str, Any]:
    """Measure the run's network at initialisation and as it is now, on the same images; draw the shares of its layers."""
    config = read_config(path)
    name, size = config["options"]["model"], config["data"]["size"]
    model = load_model(name, num_classes=2, kwargs=config["options"]["model_kwargs"])
    images = fastlr.ShapeImages(size=(3, size, size))
    estimator = fastlr.LocalRedundancy(model, images, n, seed=seed)  # plans and proves once, measures twice
    parameters = sum(p.numel() for p in model.parameters())
    kind = type(model).__name__
    say.print(f"\n[bold]2. Its network measured: a {kind} of {parameters:,} parameters, {n} synthetic images")
    say.print(f"   fastlr.estimate(model, fastlr.ShapeImages(size=(3, {size}, {size})), n={n}, seed={seed})")
    found = {}
    read = partial(torch.load, map_location="cpu", weights_only=True)
    states = read(path / CHECKPOINTS / INITIAL), read(path / CHECKPOINTS / LAST)["state"]["model"]
    for when, state in zip(("at initialisation", "after the last task"), states):
        model.load_state_dict(state)
        with progress_bar("   images", n) as estimator.progress:
            found[when] = estimator.measure()
        value, stderr = found[when].value, found[when].stderr
        say.print(
            f"   {when}: [bold]{pm(value, stderr)}[/] ({100 * stderr / value:.1f} %, {found[when].seconds:.1f} s)"
        )
    before, after = found.values()
    difference, stderr = fastlr.paired_difference(after, before)
    say.print(f"   change: {pm(difference, stderr)}, paired: both on the same images")
    say.print(top_modules(after.per_parameter, 4))
    title = f"{kind} of the demo: local redundancy by layer, in network order"
    per_layer_chart(found, folder / "per-layer.png", title=title)
    return {
        "model": name,
        "size": size,
        "seed": seed,
        "initial": before.to_dict(),
        "trained": after.to_dict(),
        "paired_difference": {"value": difference, "stderr": stderr, "n": n},
    }


def _power(report: ContinualReport) -> str:
    """What so few tasks can show."""
    found = report.correlations["future accuracy"]
    if isinstance(found, TooShort):
        return str(found)
    smallest = next(c.smallest for c in found if c.measure == "local_redundancy" and c.kind == "semi-partial")
    return (
        f"So few tasks show the instrument, not the effect: with local redundancy only a correlation beyond {smallest:.2f} "
        "would be found with probability 80 %. The paper reports 0.09 from thousands of tasks."
    )


if __name__ == "__main__":
    from fastlr.cli import main

    sys.exit(main(["demo", *sys.argv[1:]]))
