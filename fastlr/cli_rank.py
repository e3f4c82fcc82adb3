"""``fastlr rank``: a user's own checkpoints by local redundancy."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from fastlr.cli_options import (
    BatchSize,
    Classes,
    DeviceName,
    DtypeName,
    Features,
    InputsName,
    Length,
    ModelKwargs,
    PredictiveName,
    Sigma,
    Size,
    autocast_dtype,
    check_folders,
    device_of,
    inputs_of,
    kwargs_of,
    predictive_of,
)
from fastlr.cli_report import CsvFile, print_sheets


def rank(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CHECKPOINTS...", help="State dicts, two or more.")],
    model: Annotated[
        str, typer.Option(help="Of the checkpoints: a torchvision or timm name, or package.module:function.")
    ],
    model_kwargs: ModelKwargs = "{}",
    classes: Classes = None,
    inputs: InputsName = "shapes",
    size: Size = 224,
    length: Length = 512,
    features: Features = 7,
    n: Annotated[int, typer.Option("--n", "-n", help="Synthetic inputs, the same for all checkpoints.")] = 1000,
    predictive: PredictiveName = "auto",
    sigma: Sigma = 1.0,
    batch_size: BatchSize = None,
    dtype: DtypeName = "fp32",
    device: DeviceName = None,
    seed: Annotated[int, typer.Option(help="Of the inputs and the probes.")] = 0,
    csv_file: CsvFile = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Write everything here; - is stdout, alone.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the ranking (.png, .pdf, .svg).")] = None,
) -> None:
    """Rank CHECKPOINTS by local redundancy, and say whether the best can be told from the next.

    All are measured on the same synthetic inputs, so differences are paired.
    """
    check_folders(csv=csv_file, json=json_file, figure=figure)
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "dtype": autocast_dtype(dtype)}
    options["predictive"] = predictive_of(predictive, sigma, inputs == "series")
    kwargs, place = kwargs_of(model_kwargs), device_of(device)
    source = inputs_of(inputs, size, length, features)

    from fastlr.analysis.ranking import ranking
    from fastlr.drivers.checkpoints import existing, measure_each
    from fastlr.models import load_model
    from fastlr.report.ranking import ranking_chart, ranking_record, ranking_sheet
    from fastlr.report.record import machine, progress_bar, write_json

    paths = existing(checkpoints, 2, "a ranking needs at least two")
    net = load_model(model, num_classes=classes, kwargs=kwargs).to(place).eval()
    measured = measure_each(net, paths, {"": (source, n)}, progress=progress_bar, **options)
    shared = os.path.commonpath([path.parent.absolute() for path in paths])
    names = [os.path.relpath(path.absolute(), shared) for path in paths]
    estimates = {name: found[""] for name, found in zip(names, measured)}
    found = ranking(estimates)
    first, seconds = estimates[names[0]], sum(estimate.seconds for estimate in estimates.values())
    precision = f", autocast {first.dtype}" if first.dtype else ""
    notes = [
        f"{model}; {first.inputs}, {first.predictive}, probe {first.probe}, seed {first.seed}; {seconds:.0f} s on "
        f"{first.device}{precision}. Checkpoints in {shared}.",
    ]
    with redirect_stdout(sys.stderr) if json_file == "-" else nullcontext():
        print_sheets([ranking_sheet(found, notes)], csv_file)
        if figure is not None:
            ranking_chart(found, figure)
            print(f"figure: {figure}")
    if json_file is not None:
        settings = {"model": model, "model_kwargs": kwargs, "classes": classes, "folder": shared, "machine": machine()}
        write_json(json_file, {**settings, **ranking_record(found)})
        if json_file != "-":
            print(f"json: {json_file}")
