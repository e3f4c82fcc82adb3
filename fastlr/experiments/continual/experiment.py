"""The continual-learning driver: a sequence of tasks, measured at every boundary.

Source: paper, section 4.1.

One step of a run is one task: train, test on its held-out images and again on those of the task
before, measure, commit. What is random in a task is a pure function of the run's seed and the
task's number, so a run that was killed and resumed writes the same records as one that was not: the
same bits on a CPU with the same number of threads (times apart), which needs no
`torch.use_deterministic_algorithms`. On a GPU some convolutions of cuDNN add in varying order.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastlr.errors import InputError
from fastlr.experiments.continual.fields import LEARNING_SPEED
from fastlr.experiments.continual.interventions.plain import layer_norm_for_batch_norm
from fastlr.experiments.continual.measures import Measurer
from fastlr.experiments.continual.options import (
    DIGITS,
    MEMORISED,
    PRESETS,
    RANDOM_DIGITS,
    SYNTHETIC,
    ContinualOptions,
)
from fastlr.experiments.continual.trainer import Trainer
from fastlr.experiments.data import (
    ClassPairs,
    ImageStore,
    Prefetcher,
    RandomLabels,
    Task,
    TaskSequence,
    synthetic_store,
)
from fastlr.experiments.runs.experiment import Driver, Progress, Report
from fastlr.experiments.runs.fields import ACCURACY, REDUNDANCY, texts
from fastlr.experiments.runs.folder import (
    Run,
    random_states,
    seed_everything,
    set_random_states,
    stream_seed,
)
from fastlr.experiments.training.options import BEFORE
from fastlr.models import load_model

INITIAL = "initial.pt"
PER_IMAGE = "local_redundancy.f32"  # a row of each reading: its synthetic images' values


def _open_data(options: ContinualOptions) -> tuple[TaskSequence, dict[str, Any]]:
    if not options.data:
        raise InputError(
            "give --data (or --set data=), the folder of an image store (fastlr data prepare "
            "makes one), or --data synthetic, or --data random-labels, random-labels-digits, "
            "permuted-digits or fresh-digits"
        )
    if options.data in (*MEMORISED, *DIGITS):
        labelled: TaskSequence
        if options.data in DIGITS:
            labelled = DIGITS[options.data](options.random_images, options.seed)
        else:
            on_digits = options.data == RANDOM_DIGITS
            labelled = RandomLabels(
                options.random_images, options.random_classes, options.seed, on_digits
            )
        about = {"classes": labelled.classes, "size": labelled.size, "images": labelled.fewest}
        return labelled, {"path": None, "digest": labelled.digest, **about}
    if options.data == SYNTHETIC:
        store = synthetic_store(classes=options.synthetic_classes)
    else:
        store = ImageStore.open(options.data)
    path = None if store.path is None else str(store.path)
    description = {
        "path": path,
        "digest": store.digest,
        "classes": len(store.classes),
        "size": store.size,
    }
    description["resize"] = store.resize
    return ClassPairs(store, options.seed), description


def _carry_on(
    run: Run, options: ContinualOptions, tasks: TaskSequence, device: torch.device, report: Report
) -> None:
    """Do the tasks that are left."""
    seed_everything(stream_seed(options.seed, "model"))
    model = load_model(options.model, num_classes=tasks.classes, kwargs=options.model_kwargs)
    if options.norm == "layer" and not layer_norm_for_batch_norm(model):
        raise InputError(f"norm=layer: {options.model} has no batch norm to replace; leave it out")
    trainer = Trainer(model, options, device)
    initial = _initial_state(run, trainer)
    trainer.started_at(initial, tasks)
    state = run.state or {}
    position = state.get("position", 0)
    if state:
        trainer.load(state)
        set_random_states(state["random"])
    measurer = Measurer(trainer, tasks, initial, state.get("chunks", {}))
    if position >= options.tasks:
        return

    def commit(record: dict[str, Any], position: int, accuracy: float | None) -> None:
        if record["measures"] and measurer.per_image is not None:
            run.write_row(PER_IMAGE, position // options.measure_every, measurer.per_image)
        resumable = {"chunks": measurer.chunks, "random": random_states(), **trainer.state()}
        run.commit(record, {"position": position, "accuracy": accuracy, **resumable})
        report(Progress(position, options.tasks, 0, options.epochs, record))

    previous = tasks.load(position - 1, device) if position else None
    with Prefetcher(
        tasks.load, range(position, options.tasks + measurer.looks_ahead), device
    ) as coming:
        task = next(coming)
        if not state:
            measures, seconds = measurer.measure(task, task, -1)
            about = {
                intervention.name: intervention.about() for intervention in trainer.interventions
            }
            commit(
                {"kind": "start", "interventions": about, "measures": measures, "seconds": seconds},
                0,
                None,
            )
        accuracy = state.get("accuracy")
        for number in range(position, options.tasks):
            record = {
                "kind": "task",
                "task": number,
                **tasks.facts(number),
                **_learn(trainer, task, number, None if accuracy is None else previous, report),
            }
            accuracy = record["accuracy"]
            following = next(coming) if number + 1 < options.tasks or measurer.looks_ahead else None
            if measurer.due(number):
                record["measures"], seconds = measurer.measure(task, following, number)
                record["seconds"].update(seconds)
            commit(record, number + 1, accuracy)
            if following is not None:
                previous, task = task, following


def _learn(
    trainer: Trainer, task: Task, number: int, previous: Task | None, report: Report
) -> dict[str, Any]:
    """Train on a task, test on it and on the one before, and return the record without measures."""
    options = trainer.options
    began = time.perf_counter()

    trainer.first_epoch_accuracy = None

    def report_epoch(epoch: int) -> None:
        if epoch == 1 and LEARNING_SPEED in options.measures:
            trainer.first_epoch_accuracy = trainer.accuracy(task.test_x, task.test_y)
        report(Progress(number, options.tasks, epoch, options.epochs, None))

    loss = trainer.learn(task, number, report_epoch)  # ends by waiting for the device
    trained = time.perf_counter()
    is_skipped = loss is None
    accuracy = None if is_skipped else trainer.accuracy(task.test_x, task.test_y)
    previous_accuracy = None
    if previous is not None:
        previous_accuracy = trainer.accuracy(previous.test_x, previous.test_y)
    of_interventions = {} if is_skipped else _intervention_records(trainer)
    return {
        "train_images": len(task.train_y),
        "test_images": len(task.test_y),
        "epochs": options.epochs,
        "accuracy": accuracy,
        "previous_accuracy": previous_accuracy,
        "train_loss": loss,
        "optimiser_state": options.optimiser_state,
        "step": trainer.step_mode,
        "skipped": "nan loss" if is_skipped else None,
        "interventions": of_interventions,
        "measures": {},
        "seconds": {"train": trained - began, "evaluate": time.perf_counter() - trained},
    }


def _intervention_records(trainer: Trainer) -> dict[str, Any]:
    """The records of the interventions that have one of the task just learned, by name."""
    records = {intervention.name: intervention.record() for intervention in trainer.interventions}
    return {name: record for name, record in records.items() if record}


def _initial_state(run: Run, trainer: Trainer) -> dict[str, Any]:
    """Return the parameters at initialisation, from the run's file.

    The file is written at the first start.
    """
    initial = run.read_checkpoint(INITIAL)
    if initial is None:
        initial = copy.deepcopy(trainer.model.state_dict())
        run.write_checkpoint(INITIAL, initial)
    else:
        trainer.model.load_state_dict(initial)  # whatever this version's initialisation gives
        initial = {name: value.to(trainer.device) for name, value in initial.items()}
    return initial


def _finished(options: ContinualOptions, records: Sequence[Mapping[str, Any]]) -> bool:
    return sum(record["kind"] == "task" for record in records) >= options.tasks


def _shown(record: Mapping[str, Any]) -> dict[str, str]:
    """Accuracy, or why the task was skipped, and local redundancy where it was measured."""
    found = texts(record, (ACCURACY, REDUNDANCY))
    found["accuracy"] = record.get("skipped") or found["accuracy"]
    return found


DRIVER = Driver(
    name="continual",
    module=__name__,
    options=ContinualOptions,
    presets=PRESETS,
    changeable=("tasks", "data", "device", "step"),
    step="task",
    opening="measuring the untrained network",
    open_data=_open_data,
    carry_on=_carry_on,
    finished=_finished,
    untold_by_old_runs={**BEFORE, "redundancy_probe": "rademacher"},
    shown=_shown,
    report="fastlr.experiments.continual.report:write_report",
    analysed=("resamples", "seed", "pool"),
)
begin, resume = DRIVER.begin, DRIVER.resume
