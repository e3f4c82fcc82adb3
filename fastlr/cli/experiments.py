"""The commands that carry out runs: ``fastlr continual``, ``transfer``, ``memorize``, ``sweep``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fastlr.cli.runs import RunRequest, given_settings, print_options
from fastlr.errors import InputError

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="An option of the run, such as seed=3; may be repeated."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run, or runs, in the folder.")
]
TensorBoard = Annotated[
    bool,
    typer.Option(
        "--tensorboard", help="Also write the records for TensorBoard, in the run's folder."
    ),
]


class ContinualCommand(TyperCommand):
    """``fastlr continual``: at the end of its help, the interventions and what they declare."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        from fastlr.experiments.continual.interventions import INTERVENTIONS

        parts = ["Interventions, each off unless --set says otherwise:"]
        for name, intervention in INTERVENTIONS.items():
            parts.append(f"{name} ({intervention.source})")
            for option, _, declared in intervention.declared():
                parts.append(f"--set {option}={declared.default}: {declared.metadata['about']}")
        self.epilog = "\n\n".join(parts)
        super().format_help(ctx, formatter)


def experiment_command(
    name: str, summary: str, presets: str, **extra: tuple[type, str]
) -> Callable[..., None]:
    """Return the function that typer turns into the command of an experiment, by its signature.

    Args:
        name: Of the command and of its driver.
        summary: The line of its help.
        presets: The help of its preset.
        extra: The type and the help of each setting that has an option here, beside the options
            that all commands have.
    """

    def run(
        *,
        preset: str | None = None,
        out: Annotated[
            Path | None,
            typer.Option(help="Folder of the run, new or empty (with --resume, the run's)."),
        ] = None,
        settings: Settings = None,
        seed: Annotated[
            int | None, typer.Option(help="Of all that is random: --set seed=.")
        ] = None,
        seeds: Annotated[
            int | None,
            typer.Option(
                help="Run so many seeds, from --seed on, each in a folder of its own in --out."
            ),
        ] = None,
        at_once: Annotated[
            int | None,
            typer.Option(
                help=(
                    "With --seeds: how many at a time; else 4 a GPU, or one a core with one thread."
                )
            ),
        ] = None,
        resume: Resume = False,
        tensorboard: TensorBoard = False,
        options: Annotated[
            bool,
            typer.Option(
                "--options", help="Print every option, its value and its choices; run nothing."
            ),
        ] = False,
        **named: Any,
    ) -> None:
        from fastlr.distributed.process_group import joined
        from fastlr.experiments.runs.experiment import find_driver

        driver, inputs = find_driver(name), named.pop("inputs", None)
        if inputs is not None:
            if (
                out is not None
                or resume
                or seeds is not None
                or at_once is not None
                or tensorboard
                or options
            ):
                raise InputError(
                    "--inputs measures a model and prints the result: it goes with --set and "
                    "--seed alone"
                )
            return _print_capacity(
                preset, inputs, given_settings(driver.options, settings, seed=seed, **named)
            )
        with joined() as members:  # all processes of torchrun, or this one
            given = given_settings(driver.options, settings, seed=seed, **named)
            if options:
                if members.rank == 0:
                    print_options(driver, preset, given)
                return
            if out is None:
                raise InputError("give --out, the folder of the run")
            request = RunRequest(driver, preset, out, given, resume, tensorboard, seeds, at_once)
            request.carry_out(is_first_rank=members.rank == 0)

    kinds = {"preset": Annotated[str | None, typer.Argument(help=presets)]}
    kinds |= {
        key: Annotated[kind | None, typer.Option(help=text)] for key, (kind, text) in extra.items()
    }
    parameters = [
        Parameter(key, Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for key, kind in kinds.items()
    ]
    shared = signature(run, eval_str=True).parameters.values()
    parameters += [parameter for parameter in shared if parameter.name not in ("preset", "named")]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = name, summary
    return run


continual = experiment_command(
    "continual",
    "Train on a sequence of binary tasks and measure plasticity at every boundary; PRESET names a "
    "set of options.",
    "paper, table5, dohare32, tiny or demo; without it, paper.",
    data=(str, "Folder of an image store, or synthetic."),
    tasks=(int, "How many, in all: --set tasks=."),
)
transfer = experiment_command(
    "transfer",
    "Pretrain a forecaster, select checkpoints by several strategies, fine-tune them; PRESET "
    "names a set of options.",
    "paper, small or demo; without it, paper.",
    source=(str, "Series to pretrain on: a CSV file, its name in FASTLR_DATA, generated:SEED."),
    target=(str, "Series to fine-tune on, likewise."),
)
memorize = experiment_command(
    "memorize",
    "Train on random targets and say how many bits a parameter takes up; PRESET names a set of "
    "options.",
    "vision, series, vision-small or series-small; without it, vision. With --inputs, a model.",
    epochs=(int, "How many, in all: --set epochs=."),
    inputs=(
        str,
        "Print the capacity of a model on shapes, noise, series or package.module:function (all "
        "in one batch); with --set n, classes, size, context, channels, epochs, learning_rate, "
        "model_kwargs, device, threads.",
    ),
)


def _print_capacity(model: str | None, inputs: str, given: dict[str, Any]) -> None:
    """Print how many bits of random labels on synthetic inputs a parameter of a model takes up."""
    import torch

    from fastlr import memorization_capacity
    from fastlr.cli.options import inputs_of
    from fastlr.display.tables import pm
    from fastlr.experiments.memorization.options import MemorizeOptions
    from fastlr.experiments.runs.experiment import choose_device
    from fastlr.models import load_model

    fitting = (
        "n classes size context channels epochs learning_rate model_kwargs device threads seed"
    ).split()
    if model is None or (unfit := sorted(given.keys() - set(fitting))):
        raise InputError(
            "--inputs wants a model"
            if model is None
            else f"--inputs does not go with {', '.join(unfit)}"
        )
    options = MemorizeOptions(**{"n": 1024, "size": 32, "epochs": 1000, **given})
    source, device = (
        inputs_of(inputs, options.size, options.context, options.channels),
        choose_device(options),
    )
    torch.manual_seed(options.seed)
    net = load_model(model, num_classes=given.get("classes"), kwargs=options.model_kwargs).to(
        device
    )
    found = memorization_capacity(
        net,
        source,
        options.n,
        steps=options.epochs,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    about = found.details
    share = "" if about["share"] is None else f", {100 * about['share']:.1f} % of the labels'"
    value = pm(float(found), about["stderr"])
    print(
        f"{value} bits a parameter: {about['bits']:,.0f} bits{share}, {about['parameters']:,} "
        "parameters"
    )
    print(f"{found.definition}; {options.n} {inputs}, seed {options.seed}")


def sweep(
    driver: Annotated[str, typer.Argument(help="continual, memorize or transfer.")],
    preset: Annotated[
        str | None, typer.Argument(help="Of the driver; without it, its first.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs, new or empty (with --resume, theirs).")
    ] = None,
    settings: Settings = None,
    grids: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=V1,V2,...",
            help="Values of an option; all combinations if repeated.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Seeds of each configuration, from --set seed= on.")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(help="Runs at a time; else as many as there is room for.")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on Ray: a cluster of this machine, unless --address.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="With --ray: an existing cluster, HOST:PORT or auto; its nodes must share --out."
        ),
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(
            "--gpus-per-run", help="With --ray: 0.25 puts four on a GPU; else 1 if there are any."
        ),
    ] = None,
    cpus: Annotated[
        float | None, typer.Option("--cpus-per-run", help="With --ray; else as many as threads.")
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(help="With --ray: how often a run goes on after its worker was lost; else 3."),
    ] = None,
    resume: Resume = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Run DRIVER with every combination of --grid values and seeds, a folder each, in --out."""
    from fastlr.experiments.runs.experiment import find_driver
    from fastlr.experiments.runs.ray import RETRIES, connect
    from fastlr.experiments.runs.sweep import parse_grids

    kind = find_driver(driver)
    given = given_settings(kind.options, settings)
    values = parse_grids(kind.options, grids or [])
    for key in values:
        if key in given:
            raise InputError(f"--grid {key}= and --set {key}= are both given: leave one out")
    if out is None:
        raise InputError("give --out, the folder of the runs")
    for_ray = {
        "--address": address,
        "--gpus-per-run": gpus,
        "--cpus-per-run": cpus,
        "--retries": retries,
    }
    for option, value in for_ray.items():
        if value is not None and not ray:
            raise InputError(f"{option} goes with --ray")
    tries = RETRIES if retries is None else retries
    with (
        connect(address, at_once, cpus=cpus, gpus=gpus, retries=tries)
        if ray
        else nullcontext() as cluster
    ):
        RunRequest(
            kind, preset, out, given, resume, tensorboard, seeds, at_once, values, cluster
        ).carry_out_many()
