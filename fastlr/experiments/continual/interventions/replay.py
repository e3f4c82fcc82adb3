"""Experience replay: a memory of earlier tasks' images, which are part of every batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import InputError
from fastlr.experiments.continual.interventions.base import Intervention, Learner
from fastlr.experiments.data import Task, take
from fastlr.experiments.runs.options import option
from fastlr.experiments.training.optim import mixed_order, spans
from fastlr.ops.memory import free_bytes


class ExperienceReplay(
    Intervention,
    name="replay",
    source="Rolnick et al. 2019 (arXiv:1811.11682), Chaudhry et al. 2019 (arXiv:1902.10486)",
):
    """Experience replay with a reservoir.

    - The memory holds at most ``replay_images`` training images. After t tasks it is a uniform
      sample, without replacement, of all training images of these tasks: each image draws a random
      number once, and those with the smallest ones are kept (the distribution of reservoir
      sampling). An image whose class is in several tasks counts once for each.
    - An image keeps the label, 0 or 1, that it had in its task: whether its class was the first or
      the second of the pair. The head is shared, so a class that was first in one task and second
      in another is in the memory under both labels.
    - In each batch a share ``replay_share`` is drawn from the memory and the rest from the task at
      hand, in random order; an epoch is one pass over the task's images, so it has more steps. The
      memory is gone through in random order, all of it before any image comes again. All images of
      a batch weigh the same in the loss, and in the recorded train_loss.

    The images lie on the device. A checkpoint holds only which they are; on resuming they are
    loaded again.

    Raises:
        InputError: The memory does not fit on the device.

    Source: Rolnick et al. 2019, "Experience replay for continual learning" (arXiv:1811.11682):
    reservoir and mixed batches; Chaudhry et al. 2019, "On tiny episodic memories in continual
    learning" (arXiv:1902.10486), for classification.
    """

    capacity: int = option(
        0,
        at_least=0,
        named="replay_images",
        about="Number of images of earlier tasks in the memory, with their labels; 0: off.",
    )
    share: float = option(
        0.5,
        positive=True,
        below=1,
        hint="replay_images=0 turns replay off",
        about="Share of each batch that is drawn from the memory.",
    )

    def __init__(self, trainer: Learner) -> None:
        super().__init__(trainer)
        size = trainer.tasks.size
        # Once more where a task's images are joined to them.
        needed = 2 * self.capacity * 3 * size**2
        if needed > free_bytes(trainer.device):
            raise InputError(
                f"replay_images={self.capacity}: {needed / 2**30:.1f} GiB do not fit on "
                f"{trainer.device}; choose fewer"
            )
        self.images = torch.empty(0, 3, size, size, dtype=torch.uint8, device=trainer.device)
        self.labels = torch.empty(0, dtype=torch.int64, device=trainer.device)
        self.draws = torch.empty(0, dtype=torch.float64)
        self.origin = torch.empty(0, 2, dtype=torch.int64)  # task, row among its training images

    def joined(self, task: Task) -> Task:
        """Return the task with the memory's images after its own training images."""
        if not len(self.labels):
            return task
        train_x = torch.cat([task.train_x, self.images])
        train_y = torch.cat([task.train_y, self.labels])
        return task._replace(train_x=train_x, train_y=train_y)

    def order(self, n: int, generator: torch.Generator) -> tuple[Tensor, list[tuple[int, int]]]:
        """Draw an epoch's batches of a `joined` task with n images of its own, as `mixed_order`."""
        size = self.trainer.options.batch_size
        fresh = max(1, size - round(size * self.share))
        return mixed_order(
            list(spans(n, fresh)), len(self.labels), (size - fresh) / fresh, generator
        )

    def after_task(self, task: Task, number: int) -> None:
        """Let the task's training images into the memory."""
        n, generator = len(task.train_y), self.generator_for(number)
        draws = torch.cat([self.draws, torch.rand(n, generator=generator, dtype=torch.float64)])
        new = torch.stack([torch.full((n,), number), torch.arange(n)], dim=1)
        kept = draws.sort(stable=True).indices[: self.capacity].sort().values
        rows = kept.to(self.labels.device)
        self.images = take(torch.cat([self.images, task.train_x]), rows)
        self.labels = torch.cat([self.labels, task.train_y]).index_select(0, rows)
        self.draws, self.origin = draws[kept], torch.cat([self.origin, new])[kept]

    def state(self) -> dict[str, Any]:
        """Which images the memory holds."""
        return {"draws": self.draws, "origin": self.origin}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put it into a state that `state` returned; loads the images."""
        if torch.equal(state["draws"], self.draws) and torch.equal(state["origin"], self.origin):
            return
        self.draws, self.origin = state["draws"].clone(), state["origin"].clone()
        images, labels = [self.images[:0]], [self.labels[:0]]
        for number in self.origin[:, 0].unique().tolist():
            task = self.trainer.tasks.load(number)
            rows = self.origin[self.origin[:, 0] == number, 1]
            images.append(take(task.train_x, rows).to(self.labels.device))
            labels.append(task.train_y[rows].to(self.labels.device))
        self.images = torch.cat(images).contiguous(memory_format=torch.channels_last)
        self.labels = torch.cat(labels)

    def record(self) -> dict[str, Any]:
        """How many images the memory holds, of how many tasks."""
        return {"images": len(self.labels), "tasks": len(self.origin[:, 0].unique())}
