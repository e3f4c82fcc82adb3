"""The continual-learning driver: a sequence of binary tasks, measured at every boundary (section 4.1 of the paper).

One step of a run is one task: train, test on its held-out images and again on those of the task before, measure, commit.
What is random in a task is a pure function of the run's seed and the task's number, so a run that was killed and resumed
writes the same records as one that was not: the same bits on a CPU with the same number of threads (times apart), which
needs no `torch.use_deterministic_algorithms`. On a GPU some convolutions of cuDNN add in varying order.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastlr.data import ImageStore, Pair, Prefetcher, Task, load_task, pairs, synthetic_store
from fastlr.drivers.boundary import Measurer
from fastlr.drivers.continual_config import PRESETS, ContinualOptions
from fastlr.drivers.interventions import layer_norm_for_batch_norm
from fastlr.drivers.launch import Driver, Progress, Report
from fastlr.drivers.runs import Run, random_states, seed_everything, set_random_states, stream_seed
from fastlr.drivers.training import Trainer
from fastlr.errors import InputError
from fastlr.models import load_model

INITIAL = "initial.pt"


def _open_data(options: ContinualOptions) -> tuple[ImageStore, dict[str, Any]]:
    if not options.data:
        raise InputError(
            "give --data (or --set data=), the folder of an image store (fastlr data prepare makes one), or --data synthetic"
        )
    if options.data == "synthetic":
        store = synthetic_store(classes=options.synthetic_classes)
    else:
        store = ImageStore.open(options.data)
    path = None if store.path is None else str(store.path)
    return store, {"path": path, "digest": store.digest, "classes": len(store.classes), "size": store.size}


def _carry_on(run: Run, options: ContinualOptions, store: ImageStore, device: torch.device, report: Report) -> None:
    """Do the tasks that are left."""
    seed_everything(stream_seed(options.seed, "model"))
    model = load_model(options.model, num_classes=2, kwargs=options.model_kwargs)
    if options.norm == "layer" and not layer_norm_for_batch_norm(model):
        raise InputError(f"norm=layer: {options.model} has no batch norm to replace; leave it out")
    trainer = Trainer(model, options, device)
    initial = _initial_state(run, trainer)
    trainer.started_at(initial, store)
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
            about = {each.name: each.about() for each in trainer.interventions}
            record: dict[str, Any] = {
                "kind": "start",
                "interventions": about,
                "measures": measures,
                "seconds": seconds,
            }
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
        "step": trainer.step_mode,
        "skipped": "nan loss" if loss is None else None,
        "interventions": {} if loss is None else _said(trainer),
        "measures": {},
        "seconds": {"train": trained - began, "evaluate": time.perf_counter() - trained},
    }


def _said(trainer: Trainer) -> dict[str, Any]:
    """What the interventions say of a task."""
    found = {each.name: each.record() for each in trainer.interventions}
    return {name: record for name, record in found.items() if record}


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


def _finished(options: ContinualOptions, records: Sequence[Mapping[str, Any]]) -> bool:
    return sum(record["kind"] == "task" for record in records) >= options.tasks


def _shown(record: Mapping[str, Any]) -> dict[str, str]:
    """Accuracy, and local redundancy where it was measured."""
    found = {"accuracy": "", "LR": ""}
    if record.get("accuracy") is not None:
        found["accuracy"] = f"{100 * record['accuracy']:.1f} %"
    elif record.get("skipped"):
        found["accuracy"] = record["skipped"]
    value = record["measures"].get("local_redundancy", {}).get("value")
    if value is not None:
        found["LR"] = f"{value:.4g}"
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
    shown=_shown,
)
begin, resume = DRIVER.begin, DRIVER.resume
