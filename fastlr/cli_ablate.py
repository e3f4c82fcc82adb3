"""``fastlr ablate``: synthetic against real inputs, from the records of runs or from checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fastlr.cli_options import (
    BatchSize,
    Classes,
    DeviceName,
    DtypeName,
    ModelKwargs,
    PredictiveName,
    Sigma,
    autocast_dtype,
    check_folders,
    device_of,
    kwargs_of,
    predictive_of,
)
from fastlr.cli_report import CsvFile, Pool, print_sheets
from fastlr.errors import InputError

_OF_RUNS = "--{0} goes with --model MODEL --real DATA, which measure checkpoints: leave it out for RUNS"


def ablate(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCES...", help="Run folders; with --model, checkpoints, in their order.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Of the checkpoints: a torchvision or timm name, or package.module:function.")
    ] = None,
    real: Annotated[
        Path | None,
        typer.Option(
            help="With --model: an image store (its test images); images [N, C, H, W] or series [N, length, features] in a "
            ".pt, .npy or .safetensors file; or a .csv series."
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Inputs of each kind (real ones: as many as there are).")] = 1000,
    classes: Classes = None,
    model_kwargs: ModelKwargs = "{}",
    context: Annotated[int, typer.Option(help="Rows of a window of a .csv series.")] = 512,
    predictive: PredictiveName = "auto",
    sigma: Sigma = 1.0,
    batch_size: BatchSize = None,
    dtype: DtypeName = "fp32",
    device: DeviceName = None,
    seed: Annotated[int, typer.Option(help="Of inputs, probes and resamples.")] = 0,
    bootstrap: Annotated[int, typer.Option(help="Resamples behind the standard error of r.")] = 1000,
    csv_file: CsvFile = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="With --model: write every estimate with all digits here.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="With --model: draw the curves (.png, .pdf, .svg).")] = None,
    pool: Pool = False,
) -> None:
    """Compare local redundancy on synthetic inputs with that on real ones.

    fastlr ablate RUNS...

    takes it from the records of continual runs: on shapes and on noise, against
    images of the next task.

    fastlr ablate CHECKPOINTS... --model MODEL --real DATA

    measures it at each checkpoint: on shapes and on noise against real images,
    or on Gaussian series against real ones (predictive: Gaussian, --sigma).
    """
    from fastlr.analysis import agreement, read_runs
    from fastlr.report.ablation import ablation_sheet

    if model is None:
        for option, value in (("real", real), ("json", json_file), ("figure", figure), ("classes", classes)):
            if value is not None:
                raise InputError(_OF_RUNS.format(option))
        for path in sources:
            if path.is_file():
                raise InputError(f"{path} is no run folder; a checkpoint is measured by --model MODEL --real DATA")
        runs = read_runs(sources, pool=pool)
        print_sheets([ablation_sheet(agreement(runs, resamples=bootstrap, seed=seed))], csv_file)
        return
    if real is None:
        raise InputError("--model wants --real DATA, the real inputs to compare with")
    check_folders(csv=csv_file, json=json_file, figure=figure)
    settings: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "dtype": autocast_dtype(dtype)}
    place = device_of(device)

    from fastlr.drivers.ablation import REAL, as_run, measure_checkpoints, real_inputs
    from fastlr.models import load_model
    from fastlr.report.ablation import CONSTANT, checkpoints_sheet, few_checkpoints
    from fastlr.report.curves import ablation_curves
    from fastlr.report.record import machine, progress_bar, write_json

    kwargs = kwargs_of(model_kwargs)
    data = real_inputs(real, n, context=context, seed=seed)
    settings["predictive"] = predictive_of(predictive, sigma, data.series)
    net = load_model(model, num_classes=classes, kwargs=kwargs).to(place).eval()
    measured = measure_checkpoints(net, sources, data, n, progress=progress_bar, **settings)
    run = as_run(measured)
    found = agreement([run], REAL, resamples=bootstrap, seed=seed)
    first = measured[0][REAL]
    lead = [f"Real inputs: {data.count} {data.what}. Predictive {first.predictive}, probe {first.probe}, seed {seed}."]
    few = [text for text in (few_checkpoints(len(sources)),) if text]
    print_sheets(
        [
            checkpoints_sheet([str(path) for path in sources], measured, [*lead, *([data.note] if data.note else [])]),
            ablation_sheet(found, "real inputs", "checkpoints", CONSTANT, few),
        ],
        csv_file,
    )
    if figure is not None:
        ablation_curves([run], figure, at="checkpoint")
        print(f"figure: {figure}")
    if json_file is not None:
        record = {
            "model": model,
            "real": {"source": str(real), "inputs": data.what, "count": data.count, "note": data.note},
            "machine": machine(),
            "checkpoints": [
                {"checkpoint": str(path), **{name: estimate.to_dict() for name, estimate in each.items()}}
                for path, each in zip(sources, measured)
            ],
            "agreement": [vars(each) for each in found],
        }
        write_json(json_file, record)
        print(f"json: {json_file}")
