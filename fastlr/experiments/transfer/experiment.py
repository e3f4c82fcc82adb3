"""The transfer driver: pretrain, measure, select checkpoints by several strategies, fine-tune.

Source: paper, section 4.2.

The steps of a run, each committed with its record: every epoch of pretraining (record "pretrain"),
the selection, and every fine-tuning run. What is random in a step is a pure function of the run's
seed and the step, so a run that was killed and resumed writes the same records: the same bits on a
CPU with the same number of threads (times apart).

Fine-tuning run r sees the same windows in the same order whatever the checkpoint, and a checkpoint
that several strategies picked is fine-tuned once for all of them. So differences between strategies
are paired within a run.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import InputError
from fastlr.experiments.data import SplitSeries, open_series, split_series
from fastlr.experiments.runs.experiment import Driver, Progress, Report
from fastlr.experiments.runs.fields import REDUNDANCY, Field, texts
from fastlr.experiments.runs.folder import Run, seed_everything, stream_seed
from fastlr.experiments.runs.records import measured
from fastlr.experiments.training.forecaster import Forecaster, batches, cosine, evenly
from fastlr.experiments.training.optim import spans, trainable_parameters
from fastlr.experiments.transfer.fields import strategy
from fastlr.experiments.transfer.measures import Probe, Redundancy, weights_and_units
from fastlr.experiments.transfer.options import BEFORE, PRESETS, TransferOptions
from fastlr.experiments.transfer.records import with_the_files
from fastlr.models import load_model
from fastlr.ops.clock import clock

Record = dict[str, Any]
_VALIDATION = Field("validation_loss", "validation loss", "val", form="{:.4f}")


@dataclasses.dataclass(frozen=True)
class TransferData:
    """The two series of a run."""

    source: SplitSeries
    target: SplitSeries

    def to(self, device: torch.device) -> TransferData:
        """Return them on a device."""
        parts = (
            dataclasses.replace(
                split, train=split.train.to(device), validation=split.validation.to(device)
            )
            for split in (self.source, self.target)
        )
        return TransferData(*parts)


def checkpoint_name(epoch: int) -> str:
    """Return the file name, in ``checkpoints/``, of the state dict after an epoch.

    Epoch 0 is the network before training.
    """
    return f"epoch-{epoch:02d}.pt" if epoch else "initial.pt"


def pick(name: str, epochs: Sequence[Record]) -> Record:
    """Return the pick of a strategy among the checkpoints, and the numbers that it goes by.

    Args:
        name: Name of the strategy.
        epochs: The records of kind "pretrain", in order.

    Returns:
        "epoch" (0: no pretraining); "by", "rule" ("least" or "greatest"), "value" and "candidates"
        (epoch as text to value). Of equal values the earliest epoch is picked.
    """
    by, rule, *_ = strategy(name)
    if not by:
        return {"epoch": 0, "by": None, "rule": None, "value": None, "candidates": {}}
    values = {record["epoch"]: measured(with_the_files(record), by)["value"] for record in epochs}
    # Each returns the first of equal ones.
    best = (min if rule == "least" else max)(values, key=values.__getitem__)
    candidates = {str(epoch): value for epoch, value in values.items()}
    return {"epoch": best, "by": by, "rule": rule, "value": values[best], "candidates": candidates}


def saturated(losses: Sequence[float], patience: int, tolerance: float) -> bool:
    """Return True if the losses have not fallen enough for ``patience`` validations.

    That is, if none of the last ``patience`` is below the least before by the share ``tolerance``;
    ``patience`` 0: never.

    >>> saturated([1.0, 0.9, 0.895, 0.894], 2, 0.01), saturated([1.0, 0.9, 0.895, 0.894], 2, 0.0)
    (True, False)
    """
    best, at = losses[0], 0
    for i, loss in enumerate(losses):
        if loss < best * (1 - tolerance):
            best, at = loss, i
    return bool(patience) and len(losses) - 1 - at >= patience


class Study:
    """A run under way: its networks, and a method for each kind of step."""

    def __init__(
        self, run: Run, options: TransferOptions, data: TransferData, device: torch.device
    ) -> None:
        self.run, self.options, self.data, self.device = run, options, data, device
        self.features = len(data.source.table.columns)
        self.net = self._network("model")
        self.net.optimiser = self.net.adamw(options.learning_rate, options.weight_decay)
        initial = run.read_checkpoint(checkpoint_name(0))
        if initial is None:
            run.write_checkpoint(checkpoint_name(0), self.net.model.state_dict())
        else:
            self.net.model.load_state_dict(initial)
        self.spare = self._network("probe")  # for probes and fine-tuning
        self.probe = (
            Probe(self.spare, data.target, options)
            if "linear_probe" in options.strategies
            else None
        )
        state = run.state or {}
        self.redundancy = Redundancy(self.net, options, self.features, state.get("chunk", 0))
        if "model" in state:
            self.net.load(state)
        self._at_start: dict[
            int, float
        ] = {}  # checkpoint -> its loss on the target before fine-tuning

    def _network(self, use: str) -> Forecaster:
        o = self.options
        seed_everything(stream_seed(o.seed, use))
        sizes = {"channels": self.features, "context": o.context, "horizon": o.horizon}
        model = load_model(o.model, kwargs={**sizes, **o.model_kwargs})
        return Forecaster(model, self.device, o, o.compile)

    def start(self) -> Record:
        """Measure the network before training."""
        began = clock(self.device)
        self.redundancy.begin()
        self.redundancy.measure(0)
        o, source, target = self.options, self.data.source, self.data.target
        one_pass, finetune_pass = (
            len(list(spans(len(data.train), o.batch_size))) for data in (source, target)
        )
        return {
            "kind": "start",
            "parameters": sum(p.numel() for p in trainable_parameters(self.net.model)),
            "steps_per_epoch": o.steps_per_epoch or one_pass,
            "finetune_steps_per_epoch": o.finetune_steps_per_epoch or finetune_pass,
            "validation_loss": self.net.validate(source.validation, o.validation_stride),
            "measures": self._measures(),
            "seconds": {"start": clock(self.device) - began},
        }

    def pretrain(self, epoch: int) -> Record:
        """Train for one epoch, counted from 1, measuring on the way; write the checkpoint."""
        o, net, source = self.options, self.net, self.data.source
        began = clock(self.device)
        seed_everything(net.parallel.stream_seed(o.seed, "pretrain", epoch))
        order = batches(
            len(source.train), o.batch_size, o.steps_per_epoch, stream_seed(o.seed, "order", epoch)
        )
        before, rate = (epoch - 1) * len(order), cosine(o.learning_rate, o.epochs * len(order))
        points, spent = evenly(len(order), o.redundancy_per_epoch), 0.0
        self.redundancy.begin()

        def after(step: int) -> bool:
            nonlocal spent
            if step in points:
                start = clock(self.device)
                net.parallel.check()
                self.redundancy.measure(before + step)
                spent += clock(self.device) - start
            return False

        loss = net.train(source.train, order, rate=lambda step: rate(before + step), after=after)
        trained = clock(self.device)
        validation = net.validate(source.validation, o.validation_stride)
        validated = clock(self.device)
        measures = self._measures()
        measured = clock(self.device)
        seconds = {
            "train": trained - began - spent,
            "local_redundancy": spent,
            "validate": validated - trained,
        }
        seconds["weight_norm+dormant_ratio"] = measured - validated
        state = net.model.state_dict()
        if self.probe is not None:
            measures["linear_probe"] = self.probe.measure(state)
            seconds["linear_probe"] = clock(self.device) - measured
        self.run.write_checkpoint(checkpoint_name(epoch), state)
        losses = {"train_loss": loss, "validation_loss": validation}
        return {
            "kind": "pretrain",
            "epoch": epoch,
            **losses,
            "measures": measures,
            "seconds": seconds,
        }

    def _measures(self) -> dict[str, Any]:
        return {
            "local_redundancy": self.redundancy.record(),
            **weights_and_units(self.net, self.data.source, self.options),
        }

    def select(self) -> Record:
        """Pick a checkpoint by each strategy."""
        epochs = [record for record in self.run.records if record["kind"] == "pretrain"]
        return {
            "kind": "selection",
            "picks": {name: pick(name, epochs) for name in self.options.strategies},
        }

    def finetune(self, epoch: int, number: int, strategies: Sequence[str]) -> Record:
        """Fine-tune the checkpoint of an epoch, for the ``number``-th time."""
        o, net, target = self.options, self.spare, self.data.target
        began = clock(self.device)
        net.model.load_state_dict(self.run.read_checkpoint(checkpoint_name(epoch)))
        if epoch not in self._at_start:
            self._at_start[epoch] = net.validate(target.validation, o.validation_stride)
        seed_everything(net.parallel.stream_seed(o.seed, "finetune", number))
        order: list[Tensor] = []
        for k in range(o.finetune_epochs):
            seed = stream_seed(o.seed, "finetune order", number, k)
            order += batches(len(target.train), o.batch_size, o.finetune_steps_per_epoch, seed)
        points = evenly(len(order), o.finetune_evaluations)
        steps, losses = [0], [self._at_start[epoch]]

        def after(step: int) -> bool:
            if step not in points:
                return False
            steps.append(step)
            losses.append(net.validate(target.validation, o.validation_stride))
            return saturated(losses, o.finetune_patience, o.finetune_tolerance)

        net.optimiser = net.adamw(o.finetune_learning_rate, o.weight_decay)
        training = net.train(target.train, order, after=after)
        net.parallel.check()
        return {
            "kind": "finetune",
            "epoch": epoch,
            "run": number,
            "strategies": list(strategies),
            "steps": steps,
            "validation": losses,
            "ended_by": "saturation" if steps[-1] < len(order) else "epochs",
            "train_loss": training,
            "validation_loss": losses[-1],
            "seconds": {"finetune": clock(self.device) - began},
        }

    def state(self, position: int) -> dict[str, Any]:
        """Return what a checkpoint holds after ``position`` steps.

        It holds the network only while that is pretrained.
        """
        training = self.net.state() if position < self.options.epochs else {}
        return {"position": position, "chunk": self.redundancy.chunk, **training}


def tunings(
    options: TransferOptions, picks: Mapping[str, Mapping[str, Any]]
) -> list[tuple[int, int, list[str]]]:
    """Return the fine-tuning runs in their order.

    Each is (epoch of the checkpoint, number, the strategies that picked it).
    """
    strategies: dict[int, list[str]] = {}
    for name, picked in picks.items():
        strategies.setdefault(picked["epoch"], []).append(name)
    return [
        (epoch, number, names)
        for number in range(options.finetune_runs)
        for epoch, names in strategies.items()
    ]


def _open_data(options: TransferOptions) -> tuple[TransferData, dict[str, Any]]:
    both = [
        split_series(
            open_series(name, options.generated_rows),
            options.context,
            options.horizon,
            options.train_share,
        )
        for name in (options.source, options.target)
    ]
    counts = [len(split.table.columns) for split in both]
    if counts[0] != counts[1]:
        raise InputError(
            f"{options.source} has {counts[0]} features, {options.target} {counts[1]}: one network "
            "forecasts both, so give two series with as many"
        )
    digest = hashlib.sha256("".join(split.table.digest for split in both).encode()).hexdigest()
    described = {
        "path": f"{options.source} or {options.target}",
        "digest": digest,
        "source": _described(both[0]),
        "target": _described(both[1]),
    }
    return TransferData(*both), described


def _described(split: SplitSeries) -> dict[str, Any]:
    """Return what ``config.json`` says of a series."""
    table = split.table
    return {
        "name": table.name,
        "path": None if table.path is None else str(table.path),
        "rows": len(table.values),
        "features": list(table.columns),
        "step_seconds": table.step,
        "train_windows": len(split.train),
        "validation_windows": len(split.validation),
    }


def _carry_on(
    run: Run, options: TransferOptions, data: TransferData, device: torch.device, report: Report
) -> None:
    """Do the steps that are left."""
    position = run.state["position"] if run.state else -1
    if position >= 0 and _finished(options, run.records):
        return
    study = Study(run, options, data.to(device), device)
    total = options.epochs + 1 + options.finetune_runs * len(options.strategies)

    def commit(record: Record, position: int) -> None:
        run.commit(record, study.state(position))
        report(Progress(position, total, 0, 1, record))

    if position < 0:
        commit(study.start(), 0)
    for epoch in range(max(position, 0) + 1, options.epochs + 1):
        commit(study.pretrain(epoch), epoch)
    if position <= options.epochs:
        commit(study.select(), options.epochs + 1)
    picks = next(record for record in run.records if record["kind"] == "selection")["picks"]
    left = list(enumerate(tunings(options, picks), options.epochs + 2))
    total = options.epochs + 1 + len(left)
    for at, (epoch, number, names) in left:
        if at > position:
            commit(study.finetune(epoch, number, names), at)


def _finished(options: TransferOptions, records: Sequence[Mapping[str, Any]]) -> bool:
    selection = next((record for record in records if record["kind"] == "selection"), None)
    if selection is None:
        return False
    done = sum(record["kind"] == "finetune" for record in records)
    return done >= len(tunings(options, selection["picks"]))


def _shown(record: Mapping[str, Any]) -> dict[str, str]:
    """Losses and local redundancy of a step."""
    found = texts(record, (_VALIDATION, REDUNDANCY))
    return {"tuned": found["val"]} if record["kind"] == "finetune" else found


DRIVER = Driver(
    name="transfer",
    module=__name__,
    options=TransferOptions,
    presets=PRESETS,
    changeable=("source", "target", "device", "finetune_runs"),
    step="step",
    opening="measuring the untrained network",
    open_data=_open_data,
    carry_on=_carry_on,
    finished=_finished,
    shown=_shown,
    report="fastlr.experiments.transfer.report:write_transfer_report",
    untold_by_old_runs=BEFORE,
)
begin, resume = DRIVER.begin, DRIVER.resume
