"""The commands that carry out runs: ``fastlr continual``, ``transfer``, ``memorize``, ``sweep``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastlr.cli.commands import Command
from fastlr.cli.progress import RunBoard, progress
from fastlr.cli.settings import given_settings, print_capacity, print_options
from fastlr.errors import InputError, Interrupted

if TYPE_CHECKING:
    from fastlr.experiments.runs.experiment import Driver, Progress, Report
    from fastlr.experiments.runs.queue import Queue
    from fastlr.experiments.runs.sweep import Grids

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Option of the run, such as seed=3; may be repeated."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run or runs in the folder.")]
TensorBoard = Annotated[
    bool,
    typer.Option(
        "--tensorboard", help="Write the records for TensorBoard, too, in the run's folder."
    ),
]


class ContinualCommand(Command):
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
        name: Name of the command and of its driver.
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
            typer.Option(help="Folder of the run, new or empty; with --resume an old one."),
        ] = None,
        settings: Settings = None,
        seed: Annotated[
            int | None, typer.Option(help="Seed of the whole run (--set seed=).")
        ] = None,
        seeds: Annotated[
            int | None,
            typer.Option(
                help="Number of seeds to run, from --seed on, each in a folder of its own in --out."
            ),
        ] = None,
        at_once: Annotated[
            int | None,
            typer.Option(
                help=(
                    "Number of runs at a time, with --seeds; default: 4 per GPU, or one per core "
                    "with one thread."
                )
            ),
        ] = None,
        resume: Resume = False,
        tensorboard: TensorBoard = False,
        options: Annotated[
            bool,
            typer.Option(
                "--options", help="Print every option, its value and its choices, and run nothing."
            ),
        ] = False,
        **named: Any,
    ) -> None:
        from fastlr.distributed.sharding import joined
        from fastlr.experiments.runs.experiment import find_driver
        from fastlr.experiments.runs.queue import Queue, is_many

        driver, inputs = find_driver(name), named.pop("inputs", None)
        enumerated = bool(named.pop("enumerated", None))
        if enumerated and not inputs:
            raise InputError("--enumerated goes with --inputs")
        if inputs:
            if any((out, resume, seeds is not None, at_once is not None, tensorboard, options)):
                raise InputError(
                    "--inputs measures a model and prints the result: it goes with --set and "
                    "--seed alone"
                )
            given = given_settings(driver.options, settings, seed=seed, **named)
            return print_capacity(preset, inputs, given, enumerated=enumerated)
        with joined() as members:  # all processes of torchrun, or this one
            is_first = members.rank == 0
            given = given_settings(driver.options, settings, seed=seed, **named)
            if options:
                if is_first:
                    print_options(driver, preset, given)
                return
            if out is None:
                raise InputError("give --out, the folder of the run")
            several = is_many(out) if resume else seeds is not None
            if several:
                queue = Queue(driver, out, preset, at_once, tensorboard)
                carry_out_many(queue, given, {}, seeds, resume)
            elif seeds is not None:
                raise InputError(f"{out} does not hold runs of several seeds")
            elif at_once is not None:
                raise InputError("--at-once goes with --seeds")
            else:
                carry_out_one(driver, preset, out, given, resume, tensorboard, is_first)

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
    "Set of options: paper, table5, dohare32, tiny, small or demo; default: paper.",
    data=(
        str,
        "Data: folder of an image store, or synthetic, random-labels, random-labels-digits, "
        "permuted-digits or fresh-digits.",
    ),
    tasks=(int, "Number of tasks (--set tasks=)."),
)
transfer = experiment_command(
    "transfer",
    "Pretrain a forecaster, select checkpoints by several strategies, fine-tune them; PRESET "
    "names a set of options.",
    "Set of options: paper, small or demo; default: paper.",
    source=(str, "Series to pretrain on: a CSV file, its name in FASTLR_DATA, generated:SEED."),
    target=(str, "Series to fine-tune on: a CSV file, its name in FASTLR_DATA, generated:SEED."),
)
memorize = experiment_command(
    "memorize",
    "Train on random targets and say how many bits a parameter takes up; PRESET names a set of "
    "options.",
    "Set of options: vision, series, vision-small or series-small; default: vision. A model, with "
    "--inputs.",
    epochs=(int, "Number of epochs (--set epochs=)."),
    inputs=(
        list[str],
        "Inputs to measure a model's capacity on: shapes, noise, series or "
        "package.module:function; may be repeated. Goes with --set n, classes, size, context, "
        "channels, epochs, learning_rate, model_kwargs, device, threads.",
    ),
    enumerated=(
        bool,
        "Take all labelings, at most 4096, instead of three drawn ones, with --inputs.",
    ),
)


def sweep(
    driver: Annotated[str, typer.Argument(help="Experiment: continual, memorize or transfer.")],
    preset: Annotated[
        str | None, typer.Argument(help="Set of options of the experiment; default: its first.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs, new or empty; with --resume an old one."),
    ] = None,
    settings: Settings = None,
    grids: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=V1,V2,...",
            help="Values of an option; repeated, all combinations are run.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds of each configuration, from --set seed= on.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(help="Number of runs at a time; default: as many as there is room for."),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run on the Ray cluster at --address.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of the Ray cluster, HOST:PORT or auto; its nodes must share --out."
        ),
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(
            "--gpus-per-run",
            help="Number of GPUs of a run, with --ray; 0.25 puts four runs on one. Default: 1 if "
            "there are any.",
        ),
    ] = None,
    cpus: Annotated[
        float | None,
        typer.Option(
            "--cpus-per-run", help="Number of CPUs of a run, with --ray; default: its threads."
        ),
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(
            help="Number of times to continue a run whose worker was lost, with --ray; default: 3."
        ),
    ] = None,
    resume: Resume = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Run DRIVER with every combination of --grid values and seeds, a folder each, in --out."""
    from fastlr.experiments.runs.experiment import find_driver
    from fastlr.experiments.runs.queue import Queue
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
    with ExitStack() as stack:
        cluster = None
        if ray:
            connected = connect(address, cpus=cpus, gpus=gpus, retries=tries)
            cluster = stack.enter_context(connected)
        queue = Queue(kind, out, preset, at_once, tensorboard, cluster)
        carry_out_many(queue, given, values, seeds, resume)


def carry_out_one(
    driver: Driver,
    preset: str | None,
    out: Path,
    given: dict[str, Any],
    resume: bool,
    tensorboard: bool,
    is_first_rank: bool,
) -> None:
    """Carry out one run, which the first rank shows on the terminal and in TensorBoard.

    Raises:
        InputError: Something given does not fit. Interrupted: By Ctrl-C.
    """
    from fastlr.experiments.runs.experiment import no_report
    from fastlr.experiments.runs.tensorboard import TENSORBOARD, mirrored

    last: Progress | None = None
    with ExitStack() as displays:
        report: Report = no_report
        if is_first_rank:
            show = displays.enter_context(progress(driver))
            report = displays.enter_context(mirrored(out, tensorboard, show))

        def note(at: Progress) -> None:
            nonlocal last
            last = at
            report(at)

        try:
            if resume:
                path = driver.resume(out, given, preset, note)
            else:
                path = driver.begin(out, preset, given, note)
        except KeyboardInterrupt:
            interrupted = Interrupted(_interruption(driver, out, last))
            interrupted.told_by = 0
            raise interrupted from None
    if is_first_rank:
        print(f"run: {path}")
        _print_log(path / TENSORBOARD, tensorboard)


def _interruption(driver: Driver, out: Path, last: Progress | None) -> str:
    """Say how far an interrupted run is, by its last report; without one, by its folder."""
    from fastlr.experiments.runs.texts import CONFIG, RECORDS

    if not (out / CONFIG).exists():
        return "interrupted before the run began: begin it anew"
    if last is not None and last.done:
        return (
            f"interrupted after {driver.step} {last.done} of {last.total}: --resume goes on with it"
        )
    if last is None and (out / RECORDS).exists():
        return "interrupted: --resume goes on with the run"
    return f"interrupted before the first {driver.step} was done: --resume goes on with it"


def carry_out_many(
    queue: Queue, given: dict[str, Any], grids: Grids, seeds: int | None, resume: bool
) -> None:
    """Carry out every combination of the grids' values with every seed, as a queue.

    The exit code is 1 if a run fails.

    Raises:
        InputError: Something given does not fit. Interrupted: By Ctrl-C.
    """
    from fastlr.distributed.sharding import by_torchrun
    from fastlr.experiments.runs.queue import is_many
    from fastlr.experiments.runs.sweep import product
    from fastlr.experiments.runs.tensorboard import require_tensorboard

    if by_torchrun():
        raise InputError(
            "several runs are spread over the GPUs without torchrun, which is for one run on "
            "several GPUs: leave it out"
        )
    if queue.tensorboard:
        require_tensorboard()
    try:
        with RunBoard(queue.driver, queue.path) as board:
            if resume:
                ended = queue.resume(given, board.begin, seeds, grids or None)
            else:
                count = 1 if seeds is None else seeds
                runs = product(queue.driver, queue.preset, given, grids, count)
                ended = queue.begin(runs, board.begin)
    except KeyboardInterrupt:
        when = " before the runs began: begin them anew"
        if is_many(queue.path):
            when = ": --resume goes on with the runs"
        raise Interrupted(f"interrupted{when}") from None
    failed = f", {len(ended.failed)} failed: --resume tries again" if ended.failed else ""
    print(f"runs: {queue.path} ({len(ended.finished)} finished{failed})")
    _print_log(queue.path, queue.tensorboard)
    if failed:
        raise typer.Exit(1)


def _print_log(folder: Path, is_there: bool) -> None:
    if is_there:
        print(f"log: {folder} (tensorboard --logdir FOLDER shows it)")
