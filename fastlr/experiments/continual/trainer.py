"""Training on one task whose data lie on the device: order of images, steps, losses, accuracy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlr.errors import NonFiniteError
from fastlr.experiments.continual.interventions import Intervention, asked_for
from fastlr.experiments.continual.interventions.base import Learner
from fastlr.experiments.continual.interventions.replay import ExperienceReplay
from fastlr.experiments.continual.interventions.unit_adamw import UnitAdamW
from fastlr.experiments.continual.options import ContinualOptions
from fastlr.experiments.data import Task, TaskSequence, take
from fastlr.experiments.runs.folder import seed_everything, stream_seed
from fastlr.experiments.training.optim import optimiser_tensors, spans, trainable_parameters

EVALUATED = 500  # test images a forward pass
LOSS_CHECK_EPOCHS = 10  # between two looks at the losses on a GPU, which wait for it


class Trainer(Learner):
    """Learns a sequence of tasks; `started_at` is called once before the first.

    Everything random in a task (order of the images, flips, dropout) is a pure function of the
    run's seed and the task's number. On a CPU, the same thread count gives the same bits.

    Args:
        model: Moved to the device, trained in place.
        options: Options of the run.
        device: Where it is trained.

    Raises:
        InputError: The device has no such steps, or the ranks cannot share a batch.
        ModelError: With ``head_reset``: the model has no head.
    """

    options: ContinualOptions

    def __init__(self, model: nn.Module, options: ContinualOptions, device: torch.device) -> None:
        self.channels_last = options.layout == "channels-last"
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        model = model.to(device, memory_format=layout)  # type: ignore[call-overload]
        super().__init__(model, device, options, options.step)
        self.first_epoch_accuracy: float | None = None  # of the task under way
        self.optimiser = self.new_optimiser()
        self.interventions: list[Intervention] = []
        if options.head_reset:
            self.head()  # an error now rather than after the first task

    def new_optimiser(self) -> torch.optim.Optimizer:
        """Return the optimiser that the options ask for, with no state."""
        options = self.options
        rates: dict[str, Any] = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
        if options.optimiser == "sgd":
            momentum, fused = options.momentum, self.fused
            return torch.optim.SGD(
                trainable_parameters(self.model), momentum=momentum, fused=fused, **rates
            )
        if any(kind.counts_steps_by_weight for kind in asked_for(options)):
            return UnitAdamW(trainable_parameters(self.model), **rates)
        return self.adamw(options.learning_rate, options.weight_decay)

    def changed_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a step changes, the gradients apart."""
        yield from super().changed_tensors()
        for intervention in self.interventions:
            yield from intervention.written()

    def started_at(self, initial: Mapping[str, Tensor], tasks: TaskSequence) -> None:
        """Make the interventions that the options ask for.

        Args:
            initial: The parameters at initialisation, on the device.
            tasks: Those that it learns.

        Raises:
            InputError: One cannot act on this model.
        """
        self.initial, self.tasks = initial, tasks
        self.interventions = [kind(self) for kind in asked_for(self.options)]

    @property
    def replay(self) -> ExperienceReplay | None:
        """The memory of earlier tasks' images, if there is one with anything in it."""
        return next(
            (i for i in self.interventions if isinstance(i, ExperienceReplay) and len(i.labels)),
            None,
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, by reference."""
        return {**super().state(), "interventions": {i.name: i.state() for i in self.interventions}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put model, optimiser and interventions into a state that `state` returned."""
        super().load(state)
        saved = state.get("interventions", {})
        for intervention in self.interventions:
            if intervention.name in saved:
                intervention.load(saved[intervention.name])

    def learn(
        self, task: Task, number: int, report: Callable[[int], None] = lambda epoch: None
    ) -> float | None:
        """Train on a task, after the resets and interventions that come before a task.

        Args:
            task: On the device.
            number: The task's position, which decides all that is random.
            report: Called with the epochs done after each.

        Returns:
            The mean loss of the last epoch; None if a loss was not finite and on_nan is "skip":
            model and optimiser are then as before.

        Raises:
            NonFiniteError: A loss was not finite and on_nan is "stop".
        """
        before = copy.deepcopy(self.state()) if self.options.on_nan == "skip" else None
        seed_everything(self.parallel.stream_seed(self.options.seed, "task", number))
        if self.options.optimiser_state == "reset":
            for t in optimiser_tensors(self.optimiser):
                # In place, where captured steps find it; zeros: a fresh state.
                t.zero_()
        for intervention in self.interventions:
            intervention.before_task(task, number)
        if self.options.head_reset:
            with torch.no_grad():
                for p in self.head().parameters():
                    p.zero_()
        with ExitStack() as stack:
            for intervention in self.interventions:
                stack.enter_context(intervention.watching())
            try:
                loss = self._epochs(task, number, report)
            except NonFiniteError as error:  # an intervention may see it first
                if before is None:
                    raise NonFiniteError(
                        f"task {number}: {error}; lower learning_rate, or choose on_nan=skip, in a "
                        "new run (the run up to the task before is intact)"
                    ) from error
                loss = None
        self.parallel.check()
        if before is not None and loss is None:
            self.load(before)
            return None
        for intervention in self.interventions:
            intervention.after_task(task, number)
        return loss

    def _epochs(self, task: Task, number: int, report: Callable[[int], None]) -> float:
        """Do the epochs of a task; the mean loss of the last."""
        options, n = self.options, len(task.train_y)
        task = task if self.replay is None else self.replay.joined(task)
        self.model.train()
        self.steps.check()
        generator = torch.Generator().manual_seed(stream_seed(options.seed, "order", number))
        losses: list[float] = []
        unread: list[Tensor] = []
        for epoch in range(1, options.epochs + 1):
            unread.append(self._epoch(task, n, generator))
            last = epoch == options.epochs
            if self.device.type == "cpu" or epoch % LOSS_CHECK_EPOCHS == 0 or last:
                losses += self.parallel.sum(torch.stack(unread)).tolist()
                unread = []
                bad = next((i for i, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
                if bad is None and last and not self._outputs_are_finite(task):
                    bad = epoch  # the last steps have ruined the weights
                if bad is not None:
                    raise NonFiniteError(f"the loss is not finite in epoch {bad}")
            report(epoch)
        return losses[-1]

    @torch.no_grad()
    def _outputs_are_finite(self, task: Task) -> bool:
        """Return True if the model's outputs are finite in eval mode, on every rank.

        Some of the task's images are tried.
        """
        self.model.eval()
        z = self.outputs(self.normalised(task.test_x[:EVALUATED], self.dtype), self.model)
        self.model.train()
        return all(self.parallel.ranks.share(bool(z.isfinite().all())))

    def _epoch(self, task: Task, n: int, generator: torch.Generator) -> Tensor:
        """Train for one epoch: once over the task's first ``n`` images, replayed ones mixed in.

        Returns:
            What this rank's images contribute to the mean loss, on the device.
        """
        if self.replay is None:
            order, batches = (
                torch.randperm(n, generator=generator),
                list(spans(n, self.options.batch_size)),
            )
        else:
            order, batches = self.replay.order(n, generator)
        order, total = (
            self._to_device(order),
            torch.zeros((), dtype=torch.float64, device=self.device),
        )
        mirrored = (
            self._to_device(torch.rand(len(order), generator=generator) < 0.5)
            if self.options.flip
            else None
        )

        def images(start: int, stop: int) -> tuple[Tensor, ...]:
            rows = order[start:stop]
            flips = () if mirrored is None else (mirrored[start:stop],)
            return take(task.train_x, rows), task.train_y.index_select(0, rows), *flips

        for span in batches:
            total += self.train_batch(span, images)
            for intervention in self.interventions:
                intervention.after_step()
        return total / len(order)

    def update(self) -> None:
        """Update the parameters by their gradients and those of the interventions."""
        for intervention in self.interventions:
            intervention.add_gradients()
        super().update()

    def loss(self, *part: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of images.

        Args:
            part: Images ``[B, 3, H, W]`` uint8, labels ``[B]`` and, with ``flip``, whether to
                mirror each ``[B]`` bool.
        """
        x, y, *mirrored = part
        if mirrored:
            x = torch.where(mirrored[0][:, None, None, None], x.flip(3), x)
        z = self.outputs(self.normalised(x, self.dtype))
        return F.cross_entropy(z.float(), y, reduction="sum")

    def _to_device(self, t: Tensor) -> Tensor:
        return (
            t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else t
        )

    @torch.no_grad()
    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """Return the share of images ``x`` whose largest logit is their label ``y`` (eval mode)."""
        self.model.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        for images, labels in zip(x.split(EVALUATED), y.split(EVALUATED)):
            z = self.outputs(self.normalised(images, self.dtype), self.model)
            correct += (z.argmax(1) == labels).sum()
        self.model.train()
        return correct.item() / len(y)
