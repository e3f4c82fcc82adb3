"""The commands that read results: ``fastlr report``, ``cost``, ``ablate`` and ``rank``.

``report``, ``cost`` and ``ablate`` read runs, ``rank`` and ``ablate`` read checkpoints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastlr.cli.options import (
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
    check_folders,
    device_of,
    dtype_of,
    inputs_of,
    kwargs_of,
    predictive_of,
)
from fastlr.errors import InputError, NonFiniteError
from fastlr.files import write_text

if TYPE_CHECKING:
    from torch import nn

    from fastlr.display.sheets import Sheet

RunFolders = Annotated[
    list[Path], typer.Argument(help="Run folders, or folders that hold several.")
]
Pool = Annotated[
    bool, typer.Option("--pool", help="Pool runs that differ in more than their seed, too.")
]
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Write the table as CSV to this file.")]
DEFAULT_N = 1000  # inputs of fastlr rank
MODEL = typer.Option(
    help="Model of the checkpoints: torchvision or timm name, hf:NAME, or package.module:function."
)


def report(
    runs: RunFolders,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; default: report in RUNS.")
    ] = None,
    figures: Annotated[str, typer.Option(help="Format of the figures: png or none.")] = "png",
    bootstrap: Annotated[
        int,
        typer.Option(help="Number of resamples behind each standard error of continual runs."),
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    pool: Pool = False,
) -> None:
    """Analyse RUNS of fastlr continual, transfer or memorize: tables, figures and an HTML page.

    All runs are analysed together.
    """
    from fastlr.experiments.runs.experiment import find_driver
    from fastlr.experiments.runs.records import driver_of

    driver = find_driver(driver_of(runs))
    options = {"resamples": bootstrap, "seed": seed, "pool": pool}
    if pool and "pool" not in driver.analysed:
        raise InputError(f"--pool goes with continual runs, not with those of fastlr {driver.name}")
    taken = {name: options[name] for name in driver.analysed}
    driver.write_report(runs, out, figures=figures, **taken).show()


def cost(runs: RunFolders, csv_file: CsvFile = None, pool: Pool = False) -> None:
    """Show each measure's cost in RUNS, in seconds and as a share of training."""
    from fastlr.experiments.continual import costs, read_runs
    from fastlr.experiments.continual.tables import cost_sheet

    pooled = read_runs(runs, pool=pool)
    print_sheets([cost_sheet(costs(pooled), pooled)], csv_file)


def ablate(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of continual runs, or checkpoints in their order with --model."
        ),
    ],
    model: Annotated[str | None, MODEL] = None,
    real: Annotated[
        Path | None,
        typer.Option(
            help="Real inputs for --model: an image store (its test images); images [N, C, H, W] "
            "or series [N, length, features] in a .pt, .npy or .safetensors file; a .csv series."
        ),
    ] = None,
    n: Annotated[
        int,
        typer.Option(
            "--n", "-n", help="Number of inputs of each kind; of real ones all if there are fewer."
        ),
    ] = 1000,
    classes: Classes = None,
    model_kwargs: ModelKwargs = "{}",
    context: Annotated[
        int, typer.Option(help="Number of rows of a window of a .csv series.")
    ] = 512,
    predictive: PredictiveName = "auto",
    sigma: Sigma = 1.0,
    batch_size: BatchSize = None,
    dtype: DtypeName = "fp32",
    device: DeviceName = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs, the probe and the bootstrap.")] = 0,
    bootstrap: Annotated[
        int, typer.Option(help="Number of resamples behind the standard error of r.")
    ] = 1000,
    csv_file: CsvFile = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write every estimate as JSON to this file, with --model."),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(help="File for a figure of the curves (.png, .pdf, .svg), with --model."),
    ] = None,
    pool: Pool = False,
) -> None:
    """Compare local redundancy on synthetic inputs with that on real ones.

    fastlr ablate RUNS... reads the records of continual runs: shapes and noise
    against images of the next task.

    fastlr ablate CHECKPOINTS... --model MODEL --real DATA measures checkpoints:
    shapes and noise against real images, or Gaussian series against real ones
    (predictive: Gaussian, --sigma).
    """
    from fastlr.experiments.continual import agreement
    from fastlr.experiments.continual.tables import ablation_sheet

    if model is None:
        given = {"real": real, "json": json_file, "figure": figure, "classes": classes}
        _refuse_options_of_checkpoints(given, sources)
        _ablate_runs(sources, bootstrap, seed, pool, csv_file)
        return
    if real is None:
        raise InputError("--model wants --real DATA, the real inputs to compare with")
    check_folders(csv=csv_file, json=json_file, figure=figure)
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": seed,
        "dtype": dtype_of(dtype),
    }
    place, kwargs = device_of(device), kwargs_of(model_kwargs)

    from fastlr.display.figures import save_figure
    from fastlr.display.record import machine, progress_bar, write_json
    from fastlr.experiments.checkpoints.ablation import (
        REAL,
        as_run,
        measure_checkpoints,
        real_inputs,
    )
    from fastlr.experiments.checkpoints.ablation_tables import (
        CONSTANT,
        checkpoints_sheet,
        few_checkpoints,
    )
    from fastlr.experiments.continual.figures import ablation_curves
    from fastlr.models import load_model

    data = real_inputs(real, n, context=context, seed=seed)
    settings["predictive"] = predictive_of(predictive, sigma, "series" if data.series else "")
    net = load_model(model, num_classes=classes, kwargs=kwargs).to(place).eval()
    measured = measure_checkpoints(net, sources, data, n, progress=progress_bar, **settings)
    run = as_run(measured)
    agreements = agreement([run], REAL, resamples=bootstrap, seed=seed)
    kind, probe = measured[0][REAL].predictive, measured[0][REAL].probe
    notes = [
        f"Real inputs: {data.count} {data.what}. Predictive {kind}, probe {probe}, seed {seed}.",
        *data.notes,
    ]
    paths = list(map(str, sources))
    few = few_checkpoints(len(sources))
    sheets = [
        checkpoints_sheet(paths, measured, notes),
        ablation_sheet(agreements, "real inputs", "checkpoints", CONSTANT, few),
    ]
    print_sheets(sheets, csv_file)
    if figure is not None:
        curves = ablation_curves([run], "checkpoint", _names_in_folder(sources)[1])
        print(f"figure: {save_figure(curves, figure)}")
    if json_file is not None:
        checkpoints = []
        for path, estimates in zip(paths, measured):
            values = {name: estimate.to_dict() for name, estimate in estimates.items()}
            checkpoints.append({"checkpoint": path, **values})
        record = {
            "model": model,
            "real": {
                "source": str(real),
                "inputs": data.what,
                "count": data.count,
                "note": " ".join(data.notes),
            },
            "machine": machine(),
            "checkpoints": checkpoints,
            "agreement": list(map(vars, agreements)),
        }
        write_json(json_file, record)
        print(f"json: {json_file}")


def _refuse_options_of_checkpoints(given: Mapping[str, Any], sources: Sequence[Path]) -> None:
    """Check that no option or file is given that only ``fastlr ablate --model`` takes.

    Raises:
        InputError: One is.
    """
    for option, value in given.items():
        if value is not None:
            raise InputError(
                f"--{option} goes with --model MODEL --real DATA, which measure checkpoints: "
                "leave it out for RUNS"
            )
    for path in sources:
        if path.is_file():
            raise InputError(
                f"{path} is no run folder; a checkpoint is measured by --model MODEL --real DATA"
            )


def _ablate_runs(
    paths: Sequence[Path], resamples: int, seed: int, pool: bool, csv_file: Path | None
) -> None:
    """Compare the estimates that continual runs recorded."""
    from fastlr.experiments.continual import agreement, read_runs
    from fastlr.experiments.continual.tables import ablation_sheet

    runs = read_runs(paths, pool=pool)
    agreements = agreement(runs, resamples=resamples, seed=seed)
    print_sheets([ablation_sheet(agreements)], csv_file)


def rank(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            help="Two or more state dicts, .ckpt or .safetensors files, folders of transformers, "
            "or a Trainer's folder of checkpoints.",
        ),
    ],
    model: Annotated[str, MODEL],
    model_kwargs: ModelKwargs = "{}",
    classes: Classes = None,
    inputs: InputsName = "shapes",
    size: Size = 224,
    length: Length = None,
    features: Features = 7,
    n: Annotated[
        int | None,
        typer.Option(
            "--n", "-n", help="Number of inputs; default: 1000, or all if there are fewer."
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            help="Strategies to compare, separated by commas: local_redundancy (always), "
            "weight_norm, validation_loss and dormant_ratio (both need --source), linear_probe "
            "(needs --target)."
        ),
    ] = "local_redundancy",
    source: Annotated[
        str | None,
        typer.Option(
            help="Data that the checkpoints were trained on: an image store or a .csv series."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Data to train on next: an image store or a .csv series."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Layer that a linear probe trains anew; default: head, or the last linear layer."
        ),
    ] = None,
    predictive: PredictiveName = "auto",
    sigma: Sigma = 1.0,
    batch_size: BatchSize = None,
    dtype: DtypeName = "fp32",
    device: DeviceName = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs and the probe.")] = 0,
    csv_file: CsvFile = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write everything as JSON to this file, or to stdout by -."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="File for a figure of the ranking (.png, .pdf, .svg).")
    ] = None,
) -> None:
    """Rank CHECKPOINTS by local redundancy, and say whether the largest differs from the next.

    All are measured on the same synthetic inputs, so differences are paired.
    --by adds the paper's other strategies of selection (Table 3).
    """
    check_folders(csv=csv_file, json=json_file, figure=figure)
    dtype = dtype_of(dtype)
    options = {
        "predictive": predictive_of(predictive, sigma, inputs),
        "batch_size": batch_size,
        "seed": seed,
        "dtype": dtype,
    }
    kwargs, place = kwargs_of(model_kwargs), device_of(device)

    from fastlr.display.figures import save_figure
    from fastlr.display.record import machine, progress_bar, write_json
    from fastlr.estimator.options import all_or
    from fastlr.experiments.checkpoints.measure import existing, measure_each, weight_files
    from fastlr.experiments.checkpoints.ranking import ranking
    from fastlr.experiments.checkpoints.ranking_report import (
        ranking_chart,
        ranking_record,
        ranking_sheet,
    )
    from fastlr.experiments.checkpoints.strategies import (
        Strategies,
        picks,
        strategies_sheet,
        wanted,
    )
    from fastlr.models import load_model

    paths = existing(weight_files(checkpoints), 2, "a ranking needs at least two")
    strategies = wanted(by, {"source": source, "target": target})
    if len(strategies) > 1 and dtype == "fp16":
        raise InputError(
            "--dtype fp16 goes with local_redundancy alone: choose fp32 or bf16 for --by"
        )
    if head is not None and target is None:
        raise InputError("--head goes with --by linear_probe")

    def make(outputs: int | None) -> nn.Module:
        return load_model(model, num_classes=outputs or classes, kwargs=kwargs)

    net = make(None).to(place).eval()
    synthetic = inputs_of(inputs, size, length, features, net)
    others = Strategies(
        net,
        make,
        strategies,
        source=source,
        target=target,
        context=length or 512,
        head=head,
        dtype=dtype,
        batch_size=batch_size,
        seed=seed,
    )
    total = all_or(DEFAULT_N, synthetic) if n is None else n
    left_out: dict[Path, str] = {}
    measured = measure_each(
        net, paths, {"": (synthetic, total)}, progress=progress_bar, left_out=left_out, **options
    )
    by_path = {}
    for path in measured:
        try:
            by_path[path] = others.measure(path)
        except NonFiniteError as error:
            left_out[path] = f"checkpoint {path}: {error}"
    if len(by_path) < 2:
        raise InputError(f"fewer than two checkpoints can be measured: {_reasons(left_out)}")
    folder, names = _names_in_folder(list(by_path))
    estimates = {name: measured[path][""] for name, path in zip(names, by_path)}
    ranked = ranking(estimates)
    by_strategy = dict(zip(names, by_path.values()))
    found = picks(estimates, by_strategy, strategies)
    seconds = sum(estimate.seconds for estimate in estimates.values())
    first = estimates[names[0]]
    precision = f", autocast {first.dtype}" if first.dtype else ""
    note = (
        f"{model}; {first.inputs}, {first.predictive}, probe {first.probe}, seed {first.seed}; "
        f"{seconds:.0f} s on {first.device}{precision}. Checkpoints in {folder}."
    )
    notes = [f"Left out: {_reasons(left_out)}."] if left_out else []
    sheets = [ranking_sheet(ranked, [*notes, note])]
    if len(found) > 1:
        sheets.insert(0, strategies_sheet(found))
    with redirect_stdout(sys.stderr) if json_file == "-" else nullcontext():
        print_sheets(sheets, csv_file)
        if figure is not None:
            print(f"figure: {save_figure(ranking_chart(ranked), figure)}")
    if json_file is not None:
        settings = {
            "model": model,
            "model_kwargs": kwargs,
            "classes": classes,
            "folder": folder,
            "left_out": {str(path): reason for path, reason in left_out.items()},
            "machine": machine(),
        }
        write_json(json_file, {**settings, **ranking_record(ranked), "strategies": found})
        if json_file != "-":
            print(f"json: {json_file}")


def _reasons(left_out: Mapping[Path, str]) -> str:
    return "; ".join(left_out.values())


def _names_in_folder(paths: Sequence[Path]) -> tuple[str, list[str]]:
    """Return the folder that holds all of the files, and their paths below it."""
    folder = os.path.commonpath([path.parent.absolute() for path in paths])
    return folder, [os.path.relpath(path.absolute(), folder) for path in paths]


def print_sheets(sheets: Sequence[Sheet], csv_file: Path | None) -> None:
    """Print tables, and write the last one as CSV if a file is given.

    Raises:
        InputError: The file cannot be written.
    """
    from fastlr.experiments.runs.report import show

    show(sheets)
    if csv_file is not None:
        write_text(csv_file, sheets[-1].csv())
        print(f"csv: {csv_file}")
