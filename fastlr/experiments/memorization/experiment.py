"""The memorization driver: how many bits of random targets a network takes up over training.

Source: paper, section 4.3.

A step of a run is one epoch. After every ``evaluate_every``-th the loss over all samples in eval
mode says how many bits are memorised; record and checkpoint are written there. What is random in an
epoch is a pure function of the run's seed and the epoch's number, so a run that was killed and
resumed writes the same records: the same bits on a CPU with the same number of threads (times
apart).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fastlr
from fastlr.errors import NonFiniteError
from fastlr.experiments.continual.measures import redundancy_record
from fastlr.experiments.data.memorization import GaussianPairs, LabelledShapes, RandomData, digest
from fastlr.experiments.memorization.fields import FIELDS
from fastlr.experiments.memorization.options import PRESETS, MemorizeOptions, substitutions
from fastlr.experiments.redundancy import redundancy_estimator
from fastlr.experiments.runs.experiment import Driver, Progress, Report
from fastlr.experiments.runs.fields import ACCURACY, REDUNDANCY, texts
from fastlr.experiments.runs.folder import Run, seed_everything, stream_seed
from fastlr.experiments.training.loop import TrainingLoop
from fastlr.experiments.training.optim import spans, trainable_parameters
from fastlr.experiments.training.options import BEFORE
from fastlr.models import load_model
from fastlr.ops.clock import clock

_SHOWN = (FIELDS["loss"], ACCURACY, FIELDS["bits_per_parameter"], REDUNDANCY)
REPORTS = 20  # of progress within an epoch, at most
Record = dict[str, Any]


class Memorizer(TrainingLoop):
    """A network that memorises random data: its epochs and how much it has memorised.

    Args:
        data: The samples to memorise.
        options: Options of the run.
        device: Where to train.
        chunk: Inputs at a time when local redundancy is measured, from a checkpoint; 0: not known
            yet.

    Attributes:
        parameters: Number of trainable parameters.
    """

    options: MemorizeOptions

    def __init__(
        self, data: RandomData, options: MemorizeOptions, device: torch.device, chunk: int = 0
    ) -> None:
        seed_everything(stream_seed(options.seed, "model"))
        model = load_model(options.model, **_arguments(options))
        model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        super().__init__(model, device, options, options.step)
        self.data, self.chunk = data, chunk
        self.parameters = sum(p.numel() for p in trainable_parameters(model))
        self.optimiser = self.adamw(options.learning_rate, options.weight_decay)
        self._redundancy: fastlr.LocalRedundancy | None = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, by reference."""
        return {**super().state(), "chunk": self.chunk}

    def epoch(
        self, number: int, report: Callable[[int, int], None] = lambda done, of: None
    ) -> float:
        """Go over all samples once, in random order.

        Args:
            number: The epoch's, from 1, which decides all that is random.
            report: Called now and then with the batches done, and of how many.

        Returns:
            The mean loss over the samples, each as the network met it, in train mode.

        Raises:
            NonFiniteError: It is not finite.
        """
        seed = self.options.seed
        seed_everything(self.parallel.stream_seed(seed, "epoch", number))
        generator = torch.Generator().manual_seed(stream_seed(seed, "order", number))
        order = torch.randperm(self.data.n, generator=generator).to(self.device)
        self.model.train()
        self.steps.check()
        batches = list(spans(self.data.n, self.options.batch_size))
        total = torch.zeros((), dtype=torch.float64, device=self.device)

        def samples(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return self.data.batch(order[start:stop], self.dtype)

        for done, span in enumerate(batches):
            if done and done % -(-len(batches) // REPORTS) == 0:
                report(done, len(batches))
            total += self.train_batch(span, samples)
        return _finite(self.parallel.sum(total).item() / self.data.n, f"in epoch {number}")

    def loss(self, *part: Tensor) -> Tensor:
        """Return the sum of the losses of some samples, given as their inputs and targets."""
        x, y = part
        return self.data.losses(self.outputs(x), y).sum()

    @torch.no_grad()
    def evaluate(self, when: str) -> Record:
        """Return the record of an evaluation: mean loss over all samples and bits memorised.

        The network is in eval mode.

        Args:
            when: For errors, such as "after epoch 3".

        Raises:
            NonFiniteError: The loss is not finite.
        """
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        indices = torch.arange(self.data.n, device=self.device)
        for index in self.parallel.turns(indices.split(self.options.batch_size)):
            x, y = self.data.batch(index, self.dtype)
            z = self.outputs(x, self.model)
            total[0] += self.data.losses(z, y).double().sum()
            correct = self.data.right(z, y)
            if correct is not None:
                total[1] += correct.sum()
        loss, accuracy = (self.parallel.sum(total) / self.data.n).tolist()
        bits = self.data.bits(_finite(loss, f"in eval mode {when}"))
        ceiling = self.data.ceiling
        if self.options.kind != "vision":
            accuracy = None
        return {
            "loss": loss,
            "accuracy": accuracy,
            "bits": bits,
            "bits_per_parameter": bits / self.parameters,
            "share_of_ceiling": bits / ceiling if ceiling else None,
        }

    def measure(self) -> Record:
        """Return local redundancy, on inputs of the same kind that are not among the samples."""
        options = self.options
        if self._redundancy is None:
            seed = stream_seed(options.seed, "redundancy")
            self._redundancy = redundancy_estimator(
                self, self.data.inputs, self.chunk, predictive=self.data.predictive, seed=seed
            )
        estimate = self._redundancy.measure()
        self.chunk = estimate.batch_size
        kind = {"vision": "synthetic shapes", "series": "Gaussian windows (y ~ N(f(x), I))"}[
            options.kind
        ]
        return redundancy_record(estimate, f"{kind}, others than those memorised,")


def _finite(loss: float, when: str) -> float:
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the loss is not finite {when}: lower learning_rate, in a new run (this one is intact "
            "up to its last record)"
        )
    return loss


def _arguments(options: MemorizeOptions) -> dict[str, Any]:
    """Arguments of `load_model` besides the network's name."""
    if options.kind == "vision":
        return {"num_classes": options.classes, "kwargs": options.model_kwargs}
    sizes = {"channels": options.channels, "context": options.context, "horizon": options.horizon}
    return {"kwargs": {**sizes, **options.model_kwargs}}


def _open_data(options: MemorizeOptions) -> tuple[RandomData, dict[str, Any]]:
    data: RandomData
    if options.kind == "vision":
        data = LabelledShapes(options.n, options.classes, options.size, options.seed)
    else:
        data = GaussianPairs(
            options.n, options.context, options.horizon, options.channels, options.seed
        )
    return data, {
        "path": None,
        "digest": digest(data),
        "samples": options.n,
        "ceiling_bits": data.ceiling,
    }


def _carry_on(
    run: Run, options: MemorizeOptions, data: RandomData, device: torch.device, report: Report
) -> None:
    """Do the epochs that are left."""
    state = run.state or {}
    memorizer = Memorizer(data, options, device, state.get("chunk", 0))
    position = state.get("position", 0)
    if state:
        memorizer.load(state)
    else:
        start = {"kind": "start", "epoch": 0, "parameters": memorizer.parameters}
        _record(run, memorizer, {**start, "substitutions": substitutions(options)}, {}, report)
    losses: list[float] = []
    began = clock(device)
    for epoch in range(position + 1, options.epochs + 1):

        def within(done: int, of: int, epoch: int = epoch) -> None:
            report(Progress(epoch - 1, options.epochs, done, of, None))

        losses.append(memorizer.epoch(epoch, within))
        if epoch % options.evaluate_every and epoch < options.epochs:
            report(Progress(epoch, options.epochs, 0, 1, None))
            continue
        trained = {"train_loss": losses[-1], "train_losses": losses, "step": memorizer.step_mode}
        record = {"kind": "epoch", "epoch": epoch, **trained}
        _record(run, memorizer, record, {"train": clock(device) - began}, report)
        losses, began = [], clock(device)


def _record(
    run: Run, memorizer: Memorizer, record: Record, seconds: dict[str, float], report: Report
) -> None:
    """Evaluate, measure if that is due, commit and report."""
    options, epoch = memorizer.options, record["epoch"]
    memorizer.parallel.check()
    began = clock(memorizer.device)
    record |= {**memorizer.evaluate(f"after epoch {epoch}"), "measures": {}}
    seconds["evaluate"] = clock(memorizer.device) - began
    if options.measure_every and epoch % options.measure_every == 0:
        began = clock(memorizer.device)
        record["measures"]["local_redundancy"] = memorizer.measure()
        seconds["local_redundancy"] = clock(memorizer.device) - began
    run.commit({**record, "seconds": seconds}, {"position": epoch, **memorizer.state()})
    report(Progress(epoch, options.epochs, 0, 1, record))


def _finished(options: MemorizeOptions, records: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        record["kind"] == "epoch" and record["epoch"] >= options.epochs for record in records
    )


def _shown(record: Mapping[str, Any]) -> dict[str, str]:
    """Loss, accuracy, bits a parameter; local redundancy where it was measured."""
    return texts(record, _SHOWN)


DRIVER = Driver(
    name="memorize",
    module=__name__,
    options=MemorizeOptions,
    presets=PRESETS,
    changeable=("epochs", "device"),
    step="epoch",
    opening="evaluating the untrained network",
    open_data=_open_data,
    carry_on=_carry_on,
    finished=_finished,
    untold_by_old_runs={**BEFORE, "redundancy_probe": "rademacher"},
    shown=_shown,
    report="fastlr.experiments.memorization.report:write_memorization_report",
)
begin, resume = DRIVER.begin, DRIVER.resume
