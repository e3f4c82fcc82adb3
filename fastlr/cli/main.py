"""The command line: ``fastlr estimate``, ``fastlr bench``, ``fastlr doctor``, ``fastlr demo``.

Exit codes: 0 done; 1 the model cannot be measured (or failed while running); 2 wrong arguments,
names or files; 130 ended by Ctrl-C or SIGTERM. An error is one line on stderr; ``--traceback``
shows where it came from.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from resource import RLIMIT_AS, getrlimit
from typing import Annotated, Any

import typer
from rich.console import Console

from fastlr.cli.commands import Command, CommandGroup
from fastlr.cli.data import app as data_commands
from fastlr.cli.experiments import ContinualCommand, continual, memorize, sweep, transfer
from fastlr.cli.options import (
    PROBES,
    BatchSize,
    Classes,
    DeviceName,
    DtypeName,
    Features,
    InputsName,
    Length,
    ModelKwargs,
    PredictiveName,
    ProbeName,
    Sigma,
    Size,
    check_folders,
    device_of,
    dtype_of,
    inputs_of,
    kwargs_of,
    one_of,
    predictive_of,
)
from fastlr.cli.reports import ablate, cost, rank, report
from fastlr.errors import FastlrWarning, InputError, Interrupted, one_line

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help=(
        "Local redundancy of a PyTorch model: the mean squared per-sample gradient norm, with a "
        "standard error."
    ),
)
INTERRUPTED = 130  # typer's exit code for Ctrl-C
TRACEBACK = "--traceback"  # taken by `main`, wherever it stands


def _version_and_exit(value: bool) -> None:
    if value:
        from importlib.metadata import version

        import torch

        print(f"fastlr {version('fastlr')} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version_and_exit, is_eager=True, help="Print the version."
        ),
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option(TRACEBACK, help="Print a traceback after an error.")
    ] = False,
) -> None:
    """Take the options of all commands."""


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: torchvision or timm name, hf:NAME, or package.module:function."
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Weights: a state dict, .ckpt or .safetensors file, or a folder."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Published weights to download, such as DEFAULT.")
    ] = None,
    classes: Classes = None,
    model_kwargs: ModelKwargs = "{}",
    inputs: InputsName = "shapes",
    size: Size = 224,
    length: Length = None,
    features: Features = 7,
    n: Annotated[
        int | None,
        typer.Option(
            "--n", "-n", help="Number of inputs; default: 5000, or all if there are fewer."
        ),
    ] = None,
    target_rel_stderr: Annotated[
        float | None, typer.Option(help="Stop once stderr / value is at most this.")
    ] = None,
    min_n: Annotated[int, typer.Option(help="Fewest inputs with --target-rel-stderr.")] = 512,
    max_n: Annotated[
        int | None, typer.Option(help="Most inputs with --target-rel-stderr; default: -n.")
    ] = None,
    probe: ProbeName = "rademacher",
    predictive: PredictiveName = "auto",
    sigma: Sigma = 1.0,
    batch_size: BatchSize = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the inputs, the probe and the initial parameters.")
    ] = 0,
    dtype: DtypeName = "fp32",
    device: DeviceName = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write the result as JSON to this file, or to stdout by -."),
    ] = None,
    save_images: Annotated[
        Path | None, typer.Option(help="File for a picture of the first synthetic images.")
    ] = None,
    per_layer: Annotated[
        Path | None, typer.Option(help="File for a chart of each layer's share (.png, .pdf, .svg).")
    ] = None,
    support: Annotated[
        bool, typer.Option("--support", help="Print how each parameter is handled, too.")
    ] = False,
) -> None:
    """Measure the local redundancy of MODEL on synthetic inputs.

    Under torchrun (torchrun --nproc-per-node 8 -m fastlr estimate ...), all
    processes share the inputs.
    """
    one_of("--probe", probe, PROBES)
    dtype = dtype_of(dtype)
    kind = predictive_of(predictive, sigma, inputs)
    kwargs = kwargs_of(model_kwargs)
    check_folders(json=json_file, save_images=save_images, per_layer=per_layer)

    import torch

    import fastlr
    from fastlr.display import record
    from fastlr.display.tables import summary
    from fastlr.distributed.sharding import launched, local_device
    from fastlr.models import load_model

    with launched() as members:  # all processes of torchrun, or this one
        out = Console(stderr=json_file == "-", quiet=members.rank > 0)
        place = device_of(local_device(device) if members.size > 1 else device)
        torch.manual_seed(seed)
        net = load_model(
            model, weights=weights, checkpoint=checkpoint, num_classes=classes, kwargs=kwargs
        )
        net = net.to(place).eval()
        source = inputs_of(inputs, size, length, features, net)

        if support and members.rank == 0:
            x = source.batch(0, 3, seed=seed, device=place, dtype=_float_dtype(net))
            out.print(str(fastlr.support_report(net, x)), highlight=False, markup=False)
        if save_images is not None and members.rank == 0:
            picture = record.save_images(save_images, source, seed=seed)
            out.print(f"images: {picture}", highlight=False, soft_wrap=True)

        with (
            record.progress_bar(model, max_n or n)
            if members.rank == 0
            else nullcontext(False) as progress
        ):
            result = fastlr.estimate(
                net,
                source,
                n=n,
                predictive=kind,
                probe=probe,
                batch_size=batch_size,
                seed=seed,
                dtype=dtype,
                target_rel_stderr=target_rel_stderr,
                min_n=min_n,
                max_n=max_n,
                progress=progress,
            )

        if members.rank > 0:
            return
        parameters = sum(p.numel() for p in net.parameters() if p.requires_grad)
        initial = "its own weights" if model.startswith("hf:") else f"initialised with seed {seed}"
        title = f"{model}: {parameters:,} parameters, {checkpoint or weights or initial}"
        out.print(summary(result, title=title))
        if per_layer is not None:
            from fastlr.display.plots import per_layer_chart

            chart = per_layer_chart(result, per_layer, title=title)
            out.print(f"chart: {chart}", highlight=False, soft_wrap=True)
        if json_file is not None:
            settings = {
                "model": model,
                "checkpoint": None if checkpoint is None else str(checkpoint),
                "weights": weights,
                "classes": classes,
                "parameters": parameters,
                "machine": record.machine(),
            }
            record.write_json(json_file, {**settings, **result.to_dict()})
            if json_file != "-":
                out.print(f"json: {json_file}", highlight=False, soft_wrap=True)


def doctor(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compare every GPU kernel with plain torch, too.")
    ] = False,
) -> None:
    """Report what fastlr finds on this machine, what is missing, what that costs and the remedy."""
    from fastlr.cli.doctor import print_findings

    print_findings(kernels)


def demo(
    output: Annotated[
        Path, typer.Option("--out", "--output", help="Folder for the results.")
    ] = Path("demo-output"),
    seed: Annotated[
        int, typer.Option(help="Seed of the network, the labels, the training and the inputs.")
    ] = 0,
) -> None:
    """Train a network that loses its plasticity and one that keeps it, and draw both.

    This takes a minute on two CPU cores.
    """
    from fastlr.cli.demo import run

    run(output, seed=seed)


def bench(
    device: DeviceName = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Time one small network, in a few seconds.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the record as JSON to this file.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Compare two records, A.json B.json, and time nothing."),
    ] = None,
) -> None:
    """Compare fastlr's speed with plain passes, after checking its results.

    This takes two minutes on a CPU. The full benchmark is make bench.
    """
    from fastlr.cli.bench import run

    run(device, quick, json_file, compare)


# In the order of the help: what a newcomer types, what runs for long, what reads its results.
for command in (
    estimate,
    rank,
    demo,
    doctor,
    bench,
    continual,
    transfer,
    memorize,
    sweep,
    report,
    cost,
    ablate,
):
    app.command(cls=ContinualCommand if command is continual else Command)(command)
app.add_typer(data_commands, name="data")


def _float_dtype(model: Any) -> Any:
    import torch

    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _print_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FastlrWarning):
        print(f"warning: {one_line(message)}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code.

    An error is one line on stderr, with --traceback after the traceback.

    Args:
        arguments: Without the program's name; None takes ``sys.argv``.
    """
    given = sys.argv[1:] if arguments is None else arguments
    shows_traceback = TRACEBACK in given
    with warnings.catch_warnings():
        warnings.showwarning = _print_warning
        try:
            plain = [word for word in given if word != TRACEBACK]
            code = app(args=plain, prog_name="fastlr", standalone_mode=False)
            if code == INTERRUPTED:  # typer has caught KeyboardInterrupt and printed nothing
                raise KeyboardInterrupt
            return code if isinstance(code, int) else 0
        except (KeyboardInterrupt, Interrupted) as error:
            if _is_printed_here(error):
                print(str(error) or "interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:  # the reader of our stdout has gone; nothing more can be said there
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except Exception as error:
            return _report(error, shows_traceback)


def _is_printed_here(error: BaseException) -> bool:
    """Return True if this process is to print the error, not another rank."""
    return getattr(error, "told_by", None) in (None, int(os.environ.get("RANK", "0")))


def _report(error: Exception, shows_traceback: bool) -> int:
    """Print one line for an error and return its exit code.

    It is 2 if the user can mend the error by other arguments, else 1.
    """
    if shows_traceback:
        import traceback

        traceback.print_exception(error)
    if hasattr(error, "format_message"):  # typer's own: unknown options, missing arguments
        text, code = error.format_message(), 2
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
            return 2
        context = getattr(error, "ctx", None)
        place = context.command_path if context else "fastlr"
        end = "" if text.endswith((".", "?")) else "."
        text = f"{text}{end} Try '{place} --help'."
    elif isinstance(error, typer.Abort):
        text, code = "aborted", 1
    else:
        text, code = one_line(error), 2 if isinstance(error, InputError) else 1
        if isinstance(error, (ImportError, MemoryError)) and getrlimit(RLIMIT_AS)[0] >= 0:
            text += ": ulimit -v limits this process, raise it"
    if _is_printed_here(error):
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return code
