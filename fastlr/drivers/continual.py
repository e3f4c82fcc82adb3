"""The continual-learning driver: a sequence of binary tasks, measured at every boundary (section 4.1 of the paper).

One step of a run is one task: train, test on its held-out images and again on those of the task before, measure, commit.
What is random in a task is a pure function of the run's seed and the task's number, so a run that was killed and resumed
writes the same records as one that was not: the same bits on a CPU with the same number of threads (times apart), which
needs no `torch.use_deterministic_algorithms`. On a GPU some convolutions of cuDNN add in varying order.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fastlr.data import ImageStore, Pair, Prefetcher, Task, load_task, pairs, synthetic_store
from fastlr.drivers.boundary import Measurer
from fastlr.drivers.config import PRESETS, ContinualOptions, from_record, resolve
from fastlr.drivers.interventions import layer_norm_for_batch_norm
from fastlr.drivers.runs import (
    Run,
    commit_of_source,
    now,
    random_states,
    seed_everything,
    set_random_states,
    stream_seed,
)
from fastlr.drivers.training import Trainer
from fastlr.errors import FastlrWarning, InputError
from fastlr.models import load_model
from fastlr.runtime import versions

CHANGEABLE = ("tasks", "data", "device")  # of a run that is resumed
INITIAL = "initial.pt"


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        done: Tasks done.
        total: Tasks in all.
        epoch: Epochs done of the task under way; 0 right after a task.
        epochs: Epochs a task.
        record: That of the last task done (or of the start), None right after resuming.
    """

    done: int
    total: int
    epoch: int
    epochs: int
    record: Mapping[str, Any] | None


Report = Callable[[Progress], Any]


def begin(path: str | Path, preset: str, settings: Mapping[str, Any], report: Report = lambda progress: None) -> Path:
    """Begin a run in a new folder and carry it through; see the module.

    Args:
        path: The run folder, new or empty.
        preset: One of `fastlr.drivers.config.PRESETS`.
        settings: Options that differ from the preset's (fields of `ContinualOptions`).
        report: Called after each epoch and each task.

    Returns:
        The folder.

    Raises:
        InputError: Options, data, model or folder are not usable.
        ModelError: The model cannot be measured. NonFiniteError: the loss is not finite (see ``on_nan``).
        FastlrError: The disk is full; the run can be resumed.
    """
    options = resolve(ContinualOptions, PRESETS, preset, settings)
    store, device = _open_store(options), _device(options)
    config = {
        "driver": "continual",
        "preset": preset,
        "options": dataclasses.asdict(options),
        "data": {
            "path": None if store.path is None else str(store.path),
            "digest": store.digest,
            "classes": len(store.classes),
            "size": store.size,
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "commit": commit_of_source(),
        "command": sys.argv,
        "date": now(),
    }
    with Run.create(path, config) as run:
        _carry_on(run, options, store, device, report)
    return run.path


def resume(
    path: str | Path, settings: Mapping[str, Any], preset: str | None = None, report: Report = lambda progress: None
) -> Path:
    """Go on with a run after a crash, an interruption or its end (with more ``tasks``).

    Args:
        path: The run folder.
        settings: Options: those of the run, except that tasks, data (the same images elsewhere) and device may change.
        preset: None, or that of the run.
        report: As for `begin`.

    Returns:
        The folder.

    Raises:
        InputError: No run there, or it was begun with other options or data. Others as `begin`.
    """
    with Run.resume(path) as run:
        config = dict(run.config)
        if config.get("driver") != "continual":
            raise InputError(f"{run.path} is a run of fastlr {config.get('driver')}, not of fastlr continual")
        if preset is not None and preset != config["preset"]:
            raise InputError(f"{run.path} was begun with the preset {config['preset']}, not {preset}: leave it out")
        options = from_record(ContinualOptions, config["options"])
        for key, value in settings.items():
            if value != getattr(options, key) and key not in CHANGEABLE:
                raise InputError(
                    f"{run.path} was begun with {key}={getattr(options, key)}, not {value}: leave it out, or begin another run"
                )
        before = vars(options)
        options = dataclasses.replace(options, **settings)
        store, device = _open_store(options), _device(options)
        if store.digest != config["data"]["digest"]:
            raise InputError(
                f"{options.data} holds other images than those that {run.path} was begun with: give the same store"
            )
        if device.type == "cpu" and torch.get_num_threads() != config["threads"]:
            warnings.warn(
                f"{run.path} was begun with {config['threads']} threads, this process has {torch.get_num_threads()}: the last "
                "bits of its numbers may differ; set OMP_NUM_THREADS to the same number",
                FastlrWarning,
                stacklevel=2,
            )
        if any(value != getattr(options, key) for key, value in before.items()):
            run.set_config({**config, "options": dataclasses.asdict(options)})
        run.append({"kind": "resume", "task": run.state["position"] if run.state else 0, "date": now()})
        _carry_on(run, options, store, device, report)
    return run.path


def _open_store(options: ContinualOptions) -> ImageStore:
    if options.data == "synthetic":
        return synthetic_store(classes=options.synthetic_classes)
    if not options.data:
        raise InputError(
            "give --data, the folder of an image store (fastlr data prepare makes one), or --data synthetic"
        )
    return ImageStore.open(options.data)


def _device(options: ContinualOptions) -> torch.device:
    if options.threads:
        torch.set_num_threads(options.threads)
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device={name}: {str(error).splitlines()[0]}") from error
    return device


def _carry_on(run: Run, options: ContinualOptions, store: ImageStore, device: torch.device, report: Report) -> None:
    """Do the tasks that are left."""
    seed_everything(stream_seed(options.seed, "model"))
    model = load_model(options.model, num_classes=2, kwargs=options.model_kwargs)
    if options.norm == "layer" and not layer_norm_for_batch_norm(model):
        raise InputError(f"norm=layer: {options.model} has no batch norm to replace; leave it out")
    trainer = Trainer(model, options, device)
    initial = _initial_state(run, trainer)
    trainer.started_at(initial)
    state = run.state or {}
    position = state.get("position", 0)
    if state:
        trainer.load(state)
        set_random_states(state["random"])
    measurer = Measurer(trainer, options, store, initial, state.get("chunks", {}))
    if position >= options.tasks:
        return
    classes = len(store.classes)
    coming = pairs(classes, options.tasks - position + measurer.looks_ahead, options.seed, start=position)
    previous: Task | None = None
    if position:
        previous = load_task(store, pairs(classes, 1, options.seed, start=position - 1)[0], device)
    with Prefetcher(store, coming, device) as tasks:
        task = next(tasks)
        if not state:
            measures, seconds = measurer.measure(task, task, -1)
            record: dict[str, Any] = {"kind": "start", "measures": measures, "seconds": seconds}
            _commit(run, trainer, measurer, record, 0, None)
            report(Progress(0, options.tasks, 0, options.epochs, record))
        accuracy_before = state.get("accuracy")
        for number, pair in enumerate(coming[: options.tasks - position], position):
            step = _Step(number, pair, task, previous, accuracy_before)
            record = _learn(step, trainer, store, report)
            following = next(tasks) if number + 1 < options.tasks or measurer.looks_ahead else None
            if measurer.due(number):
                measures, seconds = measurer.measure(task, following, number)
                record["measures"] = measures
                record["seconds"].update(seconds)
            _commit(run, trainer, measurer, record, number + 1, record["accuracy"])
            report(Progress(number + 1, options.tasks, 0, options.epochs, record))
            accuracy_before = record["accuracy"]
            if following is not None:
                previous, task = task, following


@dataclasses.dataclass
class _Step:
    number: int
    pair: Pair
    task: Task
    previous: Task | None
    accuracy_before: float | None


def _learn(step: _Step, trainer: Trainer, store: ImageStore, report: Report) -> dict[str, Any]:
    """Train and test; the record, without measures."""
    task, options = step.task, trainer.options
    began = time.perf_counter()
    at = Progress(step.number, options.tasks, 0, options.epochs, None)
    loss = trainer.learn(
        task, step.number, lambda epoch: report(dataclasses.replace(at, epoch=epoch))
    )  # ends by waiting for the device
    trained = time.perf_counter()
    accuracy = None if loss is None else trainer.accuracy(task.test_x, task.test_y)
    previous = None
    if step.previous is not None and step.accuracy_before is not None:
        previous = trainer.accuracy(step.previous.test_x, step.previous.test_y)
    return {
        "kind": "task",
        "task": step.number,
        "round": step.pair.round,
        "classes": [step.pair.first, step.pair.second],
        "names": [store.classes[step.pair.first], store.classes[step.pair.second]],
        "train_images": len(task.train_y),
        "test_images": len(task.test_y),
        "epochs": options.epochs,
        "accuracy": accuracy,
        "previous_accuracy": previous,
        "train_loss": loss,
        "optimiser_state": options.optimiser_state,
        "skipped": "nan loss" if loss is None else None,
        "measures": {},
        "seconds": {"train": trained - began, "evaluate": time.perf_counter() - trained},
    }


def _initial_state(run: Run, trainer: Trainer) -> dict[str, Any]:
    """The parameters at initialisation: from the run's file, which is written at the first start."""
    initial = run.read_checkpoint(INITIAL)
    if initial is None:
        initial = copy.deepcopy(trainer.model.state_dict())
        run.write_checkpoint(INITIAL, initial)
    else:
        trainer.model.load_state_dict(initial)  # whatever this version's initialisation gives
        initial = {name: value.to(trainer.device) for name, value in initial.items()}
    return initial


def _commit(
    run: Run, trainer: Trainer, measurer: Measurer, record: dict[str, Any], position: int, accuracy: float | None
) -> None:
    state = {
        "position": position,
        "accuracy": accuracy,
        "chunks": measurer.chunks,
        "random": random_states(),
        **trainer.state(),
    }
    run.commit(record, state)
