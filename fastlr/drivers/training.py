"""Training on one task that lies on the device: order of the images, steps, learning curves of the loss, accuracy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlr.data import ImageStore, Task, normalise, take
from fastlr.drivers.batches import spans
from fastlr.drivers.continual_config import ContinualOptions
from fastlr.drivers.interventions import Intervention, Replay, UnitAdamW, chosen
from fastlr.drivers.optimising import add_gradients, autocast, load_optimiser, optimiser_state, trainable
from fastlr.drivers.parallel import Parallel
from fastlr.drivers.runs import seed_everything, stream_seed
from fastlr.drivers.steps import Compiled, Steps, resolve_mode, step_mode
from fastlr.errors import ModelError, NonFiniteError

EVALUATED = 500  # test images a forward pass
LOOKED_AT = 10  # epochs between two looks at the losses on a GPU, which wait for it


class Trainer:
    """A model, its optimiser, and how they learn a task; `started_at` is called once before the first.

    Everything random in a task (order of the images, flips, dropout) is a pure function of the run's seed and the task's
    number. On a CPU, the same thread count gives the same bits. Several ranks train together: `fastlr.drivers.parallel`.

    Attributes:
        model: Trained in place.
        optimiser: Of all its trainable parameters.
        dtype: Of autocast and of the images; float32 means no autocast.
        steps: How its training steps run.
        parallel: Who trains it together.
    """

    def __init__(self, model: nn.Module, options: ContinualOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
        self.model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        mode = resolve_mode(options.step, device)
        self.parallel = Parallel(self.model, options.batch_size, options.norm_batch)
        full = set(self.parallel.part_sizes(options.batch_size))
        self._forward = Compiled(self.model, full) if mode == "compile" else self.model
        graph = device.type == "cuda" and mode != "eager"
        self._step = self.parallel.work(self._gradients, self._update)
        self.steps = Steps(self._step, self.model, self._changed, device, graph, strict=options.step == "graph")
        self.optimiser = self._new_optimiser()
        self.interventions: list[Intervention] = []
        if options.head_reset:
            self.head()  # an error now rather than after the first task

    def _new_optimiser(self) -> torch.optim.Optimizer:
        options = self.options
        parameters, fused = trainable(self.model), self.device.type == "cuda"
        common: dict[str, Any] = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
        if options.optimiser == "sgd":
            return torch.optim.SGD(parameters, momentum=options.momentum, fused=fused, **common)
        if options.cbp_rate:
            return UnitAdamW(parameters, **common)
        return torch.optim.AdamW(parameters, capturable=self.steps.captured and fused, fused=fused, **common)

    def _changed(self) -> Iterator[Tensor]:
        """What a step changes, the gradients apart."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from optimiser_state(self.optimiser)
        for each in self.interventions:
            yield from each.written()

    @property
    def step_mode(self) -> str:
        """How steps run: ``eager``, ``graph``, ``compile``, or ``compile+graph``."""
        return step_mode(self._forward, self.steps)

    def started_at(self, initial: Mapping[str, Tensor], store: ImageStore) -> None:
        """Make the interventions that the options ask for.

        Args:
            initial: The parameters at initialisation, on the device.
            store: Where the tasks come from.

        Raises:
            InputError: One cannot act on this model.
        """
        self.interventions = chosen(self, initial, store)

    @property
    def replay(self) -> Replay | None:
        """The memory of earlier tasks' images, if there is one with anything in it."""
        found = [each for each in self.interventions if isinstance(each, Replay) and len(each.labels)]
        return found[0] if found else None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, by reference."""
        interventions = {each.name: each.state() for each in self.interventions}
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "interventions": interventions,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Put model, optimiser and interventions into a state that `state` returned."""
        self.model.load_state_dict(state["model"])
        load_optimiser(self.optimiser, state["optimiser"])
        for each in self.interventions:
            if each.name in state.get("interventions", {}):
                each.load(state["interventions"][each.name])

    def autocast(self) -> torch.autocast:
        """Return the context in which the model runs."""
        return autocast(self.device, self.dtype)

    def head(self) -> nn.Linear:
        """Return the linear layer that makes the two logits.

        Raises:
            ModelError: There is none.
        """
        heads = [m for m in self.model.modules() if isinstance(m, nn.Linear) and m.out_features == 2]
        if not heads:
            raise ModelError(
                "head_reset wants a model that ends in nn.Linear with two outputs: use another, or head_reset=no"
            )
        return heads[-1]

    def learn(self, task: Task, number: int, report: Callable[[int], None] = lambda epoch: None) -> float | None:
        """Train on a task; first the resets and interventions of the options that come before a task.

        Args:
            task: On the device.
            number: The task's position, which decides all that is random.
            report: Called with the epochs done after each.

        Returns:
            The mean loss of the last epoch; None if a loss was not finite and on_nan is "skip": model and optimiser are
            then as before.

        Raises:
            NonFiniteError: A loss was not finite and on_nan is "stop".
        """
        options = self.options
        before = copy.deepcopy(self.state()) if options.on_nan == "skip" else None
        seed_everything(self.parallel.stream_seed(options.seed, "task", number))
        if options.optimiser_state == "reset":
            for t in optimiser_state(self.optimiser):  # in place, where captured steps find it; zeros mean a fresh state
                t.zero_()
        for each in self.interventions:
            each.before_task(task, number)
        if options.head_reset:
            with torch.no_grad():
                self.head().weight.zero_()
                if self.head().bias is not None:
                    self.head().bias.zero_()
        with ExitStack() as stack:
            for each in self.interventions:
                stack.enter_context(each.watching())
            loss = self._epochs(task, number, report)
        self.parallel.check()
        if before is not None and loss is None:
            self.load(before)
            return None
        for each in self.interventions:
            each.after_task(task, number)
        return loss

    def _epochs(self, task: Task, number: int, report: Callable[[int], None]) -> float | None:
        """Do the epochs of a task; the mean loss of the last, None if one was not finite and on_nan is "skip"."""
        options, n = self.options, len(task.train_y)
        task = task if self.replay is None else self.replay.joined(task)
        self.model.train()
        self.steps.check()
        generator = torch.Generator().manual_seed(stream_seed(options.seed, "order", number))
        losses: list[Tensor] = []
        for epoch in range(1, options.epochs + 1):
            losses.append(self._epoch(task, n, generator))
            if self.device.type == "cpu" or epoch % LOOKED_AT == 0 or epoch == options.epochs:
                found = self.parallel.sum(torch.stack(losses)).tolist()
                bad = [i for i, loss in enumerate(found, epoch - len(found) + 1) if not math.isfinite(loss)]
                if not bad and epoch == options.epochs and not self._works(task):
                    bad = [epoch]  # the last steps have ruined the weights
                if bad and options.on_nan == "stop":
                    raise NonFiniteError(
                        f"task {number}: the loss is not finite in epoch {bad[0]}; lower learning_rate, or choose on_nan=skip, "
                        "in a new run (the run up to the task before is intact)"
                    )
                if bad:
                    return None
                losses = []
            report(epoch)
        return found[-1]

    @torch.no_grad()
    def _works(self, task: Task) -> bool:
        """Whether the network's outputs for some of the task's images are finite in eval mode."""
        self.model.eval()
        with self.autocast():
            z = self.model(normalise(task.test_x[:EVALUATED], self.dtype))
        self.model.train()
        return all(self.parallel.ranks.share(bool(z.isfinite().all())))

    def _epoch(self, task: Task, n: int, generator: torch.Generator) -> Tensor:
        """Go over the n images of the task's own once, those replayed mixed in.

        Returns:
            What this rank's images contribute to the mean loss, on the device.
        """
        if self.replay is None:
            order, batches = torch.randperm(n, generator=generator), list(spans(n, self.options.batch_size))
        else:
            order, batches = self.replay.order(n, generator)
        order, total = self._to_device(order), torch.zeros((), dtype=torch.float64, device=self.device)
        mirrored = self._to_device(torch.rand(len(order), generator=generator) < 0.5) if self.options.flip else None

        def images(start: int, stop: int) -> tuple[Tensor, ...]:
            rows = order[start:stop]
            flips = () if mirrored is None else (mirrored[start:stop],)
            return take(task.train_x, rows), task.train_y.index_select(0, rows), *flips

        for span in batches:
            total += self.parallel.step(self.steps, self._update, span, images)
            for each in self.interventions:
                each.after_step()
        return total / len(order)

    def _gradients(self, size: int, *batch: Tensor) -> Tensor:
        """Set the gradients of a batch's mean loss, as far as own images go; returns the sum of their losses.

        BatchNorm sees ``norm_batch`` images at a time; the gradients of these passes are added.
        """
        self.optimiser.zero_grad(set_to_none=True)
        return add_gradients(self._loss, batch, self.parallel.own_parts(size), size)

    def _update(self) -> None:
        """Take a step of the optimiser."""
        for each in self.interventions:
            each.add_gradients()
        self.optimiser.step()

    def _loss(self, x: Tensor, y: Tensor, mirrored: Tensor | None = None) -> Tensor:
        if mirrored is not None:
            x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
        with self.autocast():
            z = self._forward(normalise(x, self.dtype))
        return F.cross_entropy(z.float(), y, reduction="sum")

    def _to_device(self, t: Tensor) -> Tensor:
        return t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else t

    @torch.no_grad()
    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """Return the share of images whose larger logit is their label, in eval mode."""
        self.model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for images, labels in zip(x.split(EVALUATED), y.split(EVALUATED)):
            with self.autocast():
                z = self.model(normalise(images, self.dtype))
            right += (z.argmax(1) == labels).sum()
        self.model.train()
        return right.item() / len(y)
