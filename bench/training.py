"""Training images a second of the continual-learning driver: steps launched one by one, as a CUDA graph, compiled.

    python -m bench.training [--device cpu] [--modes eager,graph,compile] [--rounds 5]

On a GPU the cases are the steps of the presets ``paper`` (MobileNetV3-Large, 224x224, bfloat16, batches of 1024 in parts of
256) and ``dohare32``, on random images; on a CPU a small one. Losses are first held to those of launched steps. Writes
training.json to $OUT if that is set. Exits with 1 if anything is wrong or failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fastlr.data import Task
from fastlr.drivers.config import resolve
from fastlr.drivers.continual_config import PRESETS, ContinualOptions
from fastlr.drivers.launch import choose_device
from fastlr.drivers.runs import seed_everything
from fastlr.drivers.training import Trainer
from fastlr.errors import FastlrError
from fastlr.models import load_model
from fastlr.speed import machine, tables
from fastlr.speed.clock import interleaved, release, spread, waiter
from fastlr.speed.front import say_on
from fastlr.speed.record import Record, Section, run_sections
from fastlr.speed.run import device_named, exit_code

SECTION = "training steps"
AGREE = 5e-2  # relative difference of the loss after some steps; compiled kernels round elsewhere


@dataclass(frozen=True)
class Case:
    """What is trained on.

    Attributes:
        name: of the preset whose options are taken.
        size: height and width of the images.
        images: in the task.
        epochs: timed at a time.
        target: images a second that are aimed at on an H200, or None.
        settings: options that differ from the preset's.
    """

    name: str
    size: int
    images: int
    epochs: int
    target: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)


# 2600 images x 100 epochs in the paper's 9.7 s; 2000 tasks of 1200 images x 250 epochs in half an hour
CASES = (Case("paper", 224, 2600, 2, 2600 * 100 / 9.7), Case("dohare32", 32, 1200, 20, 2000 * 1200 * 250 / 1800))
SMALL = (Case("demo", 32, 150, 1),)


def modes_for(device: torch.device) -> tuple[str, ...]:
    """Those that a device has; launched steps first."""
    return ("eager", "graph", "compile") if device.type == "cuda" else ("eager", "compile")


def measure(record: Record, case: Case, device: torch.device, modes: Sequence[str], rounds: int = 5) -> None:
    """Time one case in all modes, in rounds; rows in section "training steps: NAME"."""
    section = f"{SECTION}: {case.name}"
    task = random_task(case, device)
    learn: dict[str, Callable[[], Any]] = {}
    trainers: dict[str, Trainer] = {}
    first: float | None = None
    for mode in modes:
        with record.attempt(section, mode):
            trainer = make(case, device, mode)
            loss = trainer.learn(task, 0)
            loss = trainer.learn(task, 1)  # what occurs for the second time is captured
            assert loss is not None
            first = loss if first is None else first
            if record.check(section, f"{mode}: loss against {modes[0]}", abs(loss / first - 1), AGREE):
                learn[mode], trainers[mode] = partial(trainer.learn, task, 1), trainer
            else:
                record.add(section, mode, "wrong", error=f"loss {loss:.4g} instead of {first:.4g}")
    seconds = interleaved(learn, rounds, synchronize=waiter(device))
    count = case.images * case.epochs
    for mode, times in seconds.items():
        trainer = trainers[mode]
        row = record.add(
            section, mode, n=count, size=case.size, precision=trainer.options.dtype, mode=trainer.step_mode
        )
        row |= spread(times) | {"images_per_second": count / spread(times)["seconds"]}
        if modes[0] in seconds:
            ratios = [a / b for a, b in zip(times, seconds[modes[0]], strict=True)]
            row |= {**spread(ratios, "ratio"), "against": modes[0]}
        if device.type == "cuda" and mode not in trainer.step_mode:
            row |= {"status": "error", "error": f"ran as {trainer.step_mode}"}
    rates = [count / spread(times)["seconds"] for times in seconds.values()]
    if case.target is not None and rates:
        name = f"seconds for {case.target:.4g} images, the fastest mode"
        record.check(section, name, case.target / max(rates), 1.0, target=True)
    release(device)


def make(case: Case, device: torch.device, mode: str) -> Trainer:
    """A trainer in one mode; the same parameters every time."""
    settings = {"epochs": case.epochs, "device": str(device), "step": mode, **case.settings}
    options = resolve(ContinualOptions, PRESETS, case.name, settings)
    seed_everything(0)
    model = load_model(options.model, num_classes=2, kwargs=options.model_kwargs)
    return Trainer(model, options, choose_device(options))


def random_task(case: Case, device: torch.device) -> Task:
    """Images of random bytes: what they show does not matter to the time."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.images, case.size, case.size, 3)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2).to(device)
    y = torch.randint(0, 2, (case.images,), generator=generator).to(device)
    return Task(x, y, x[:100], y[:100])


def sections(record: Record, device: torch.device, modes: Sequence[str], rounds: int = 5) -> list[Section]:
    """A section for each case."""
    cases = CASES if device.type == "cuda" else SMALL
    estimate = 120 if "compile" in modes else 20
    return [
        Section(f"{SECTION}: {case.name}", estimate, partial(measure, record, case, device, modes, rounds))
        for case in cases
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module."""
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__.split("\n")[0])
    parser.add_argument("--device", help="cpu, cuda, cuda:1; without it, a GPU if there is one")
    parser.add_argument("--modes", help="with commas; without it, all that the device has; the first is the base")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (5)")
    args = parser.parse_args(arguments)
    try:
        device = device_named(args.device)
    except FastlrError as error:
        parser.error(str(error))
    modes = tuple(args.modes.split(",")) if args.modes else modes_for(device)
    if args.rounds < 1 or not set(modes) <= set(modes_for(device)):
        parser.error(f"give at least one round, and modes of {', '.join(modes_for(device))}")
    settings = {"device": str(device), "modes": modes, "rounds": args.rounds}
    record = Record(machine.environment() | machine.gpu_details(device), settings)
    run_sections(record, sections(record, device, modes, args.rounds), 600, say=say_on(Console(stderr=True)))
    Console().print(tables.training_report(record), highlight=False)
    if os.environ.get("OUT"):
        record.save(Path(os.environ["OUT"]) / "training.json")
    return exit_code(record)


if __name__ == "__main__":
    sys.exit(main())
