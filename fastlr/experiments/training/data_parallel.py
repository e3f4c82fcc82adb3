"""Data parallel training: the ranks of a run share each batch.

They train together as one process does.

A batch is done in parts, each one forward and backward pass (``norm_batch`` samples: what batch
norm takes its statistics of). The ranks share the parts, in order; their gradients are added in
float32 in the order of the ranks (with ``reduce_dtype=bf16`` they are rounded to bfloat16 before,
and their sum once), the same bits on every rank, and every rank takes the same optimiser step.
Running statistics of batch norms become what one process would have made of the parts one after the
other, or of the first (``batch_norm_updates``). So the number of ranks changes the last bits of a
run, and which units dropout drops: rank 0 draws as one process does, every other rank has random
numbers of its own.

The ranks are those of `fastlr.distributed.sharded`, or of torchrun, for the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastlr.distributed import all_reduce
from fastlr.distributed.sharding import digests_of, team
from fastlr.errors import InputError, ModelError
from fastlr.experiments.runs.folder import stream_seed
from fastlr.experiments.training.optim import part_sizes, split, trainable_parameters
from fastlr.experiments.training.options import TrainingOptions
from fastlr.experiments.training.usage import ONE_PROCESS, Observer, Usage
from fastlr.ops.torch_private import BatchNorm, StatisticsNorm

_SOMETIMES = "{} has a gradient in some steps only, " + ONE_PROCESS


class Parallel:
    """Divides a batch among the ranks, and adds up their gradients; one process alone does it all.

    Args:
        model: Trained on every rank, from the same parameters.
        options: Samples of a batch and of its parts (``norm_batch=0``: the whole batch, or, for a
            model without batch norm, a part a rank), which of them update running statistics, and
            in what gradients are added up.

    Attributes:
        ranks: The `fastlr.distributed.sharding.Team` that trains.

    Raises:
        InputError: A batch has fewer parts than there are ranks.
        ModelError: The ranks' running statistics cannot be merged.
    """

    def __init__(self, model: nn.Module, options: TrainingOptions) -> None:
        self.ranks, self.model, self.norm_batch = team(), model, options.norm_batch
        self._first_only = options.batch_norm_updates == "first-part"
        self._rounded = options.reduce_dtype == "bf16"
        self._usage: dict[tuple[Any, ...], Usage] = {}
        self._factors: dict[tuple[int, ...], Tensor] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        # Parameters that no rank reached though it was expected, over all steps.
        self._unreached: Tensor | int = 0
        self._failure: str | None = None
        self._norms: list[Any] = [
            m
            for m in model.modules()
            if isinstance(m, StatisticsNorm) and m.running_mean is not None
        ]
        if not self.alone:
            self._check_parts(options.batch_size)
            self._check_model()

    def _check_parts(self, batch_size: int) -> None:
        size, norm_batch = self.ranks.size, self.norm_batch
        batch_norm = next(
            (name for name, m in self.model.named_modules() if isinstance(m, BatchNorm)), None
        )
        if batch_norm is not None and not norm_batch:
            raise InputError(
                f"norm_batch=0: {size} processes share a batch of {batch_size}, and {batch_norm} "
                "takes its statistics over all of it: start one process, or a new run with "
                f"norm_batch={max(1, batch_size // size)}"
            )
        if (parts := len(self.part_sizes(batch_size))) < size:
            remedy = f"start {parts}"
            if size <= batch_size:
                remedy += f", or a new run with norm_batch={batch_size // size}"
            raise InputError(
                f"{size} processes share a batch of {batch_size} in parts of {norm_batch or 1}, "
                f"which is {parts}: {remedy}"
            )

    def _check_model(self) -> None:
        if any(p.is_complex() for p in self.model.parameters()):
            raise ModelError("gradients of complex parameters cannot be added: start one process")
        for name, m in self.model.named_modules():
            if isinstance(m, StatisticsNorm) and m.track_running_stats and m.momentum is None:
                raise ModelError(
                    f"{name} averages over all batches (momentum=None): give it a momentum, or "
                    "start one process"
                )

    @property
    def alone(self) -> bool:
        """True if this process is the only one."""
        return self.ranks.size == 1

    def part_sizes(self, size: int) -> list[int]:
        """Return the sizes of the parts of a batch of ``size`` samples, on all ranks."""
        if self.alone or self.norm_batch:
            return part_sizes(size, self.norm_batch)
        return split(size, min(size, self.ranks.size))

    def own_parts(self, size: int) -> list[int]:
        """Return the sizes of this rank's parts of a batch; there may be none."""
        return self._shares(size)[self.ranks.rank]

    def parts(self, size: int, batch: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield this rank's parts of a batch, one after another, from its own samples of it.

        Once all are done, the running statistics are those after the parts that update them.
        """
        sizes, updates = self.own_parts(size), self._updates(size)
        counts = [m.num_batches_tracked for m in self._norms]
        statistics = [*self._statistics(), *(t for t in counts if t is not None)]
        kept: list[Tensor] = []
        for done, part in enumerate(zip(*(t.split(sizes) for t in batch))):
            if done == updates:
                kept = [t.clone() for t in statistics]
            yield part
        for t, value in zip(statistics, kept):
            t.copy_(value)

    def _updates(self, size: int) -> int:
        """How many of this rank's parts of a batch, its first ones, update running statistics."""
        *before, own = self._shares(size)[: self.ranks.rank + 1]
        if not self._first_only:
            return len(own)
        is_first = len(own) > 0 and not any(before)
        return int(is_first)

    def own_span(self, start: int, stop: int) -> tuple[int, int]:
        """Return where this rank's share of the batch ``start`` to ``stop`` begins and ends."""
        shares = self._shares(stop - start)
        start += sum(map(sum, shares[: self.ranks.rank]))
        return start, start + sum(shares[self.ranks.rank])

    def _shares(self, size: int) -> list[list[int]]:
        """The sizes of the parts of a batch, by rank."""
        sizes, ranks = self.part_sizes(size), self.ranks.size
        bounds = [len(sizes) * rank // ranks for rank in range(ranks + 1)]
        return [sizes[start:stop] for start, stop in zip(bounds, bounds[1:])]

    def stream_seed(self, seed: int, *use: int | str) -> int:
        """Return a seed for random numbers that differ between the ranks.

        It is `fastlr.experiments.runs.folder.stream_seed` with the rank among the uses; rank 0
        draws as one process does.
        """
        if self.ranks.rank == 0:
            return stream_seed(seed, *use)
        return stream_seed(seed, *use, "rank", self.ranks.rank)

    def sum(self, t: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks, and return it."""
        return t if self.alone else all_reduce(t, self.ranks.group)

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over the ranks, in one exchange."""
        if not self.alone:
            _copy_from(self.sum(torch.cat([t.flatten() for t in tensors])), tensors)

    def turns(self, parts: Sequence[Any]) -> Iterator[Any]:
        """Yield every R-th part, for a sum over parts without gradients that the R ranks share."""
        yield from parts[self.ranks.rank :: self.ranks.size]

    def check(self) -> None:
        """Compare the models of all ranks after some steps, before a result is kept.

        Raises:
            InputError: They differ (the first difference is named).
            ModelError: The ranks cannot share the steps of this model.
        """
        if self.alone:
            return
        if int(self._unreached):
            self._failure = self._failure or _SOMETIMES.format("a parameter")
        for rank, failure in enumerate(self.ranks.share(self._failure)):
            if failure is not None:
                raise self.ranks.everybodys(ModelError(f"rank {rank}: {failure}"))
        digests = digests_of([*self.model.named_parameters(), *self.model.named_buffers()])
        self.ranks.agree("the model after training", {}, "start one process", digests)

    def take_gradients(self) -> list[bool]:
        """Move ``.grad`` into tensors kept here; say which trainable parameters had one.

        (A capture's own would be held for each size of a batch.)
        """
        buffers = self._gradient_buffers()
        reached = [p.grad is not None for p in buffers]
        for p, buffer in buffers.items():
            if p.grad is not None:
                buffer.copy_(p.grad)
                p.grad = None
        return reached

    def _gradient_buffers(self) -> dict[nn.Parameter, Tensor]:
        """A tensor for the gradient of each trainable parameter."""
        parameters = trainable_parameters(self.model)
        self._gradients.update(
            {p: torch.zeros_like(p) for p in parameters if p not in self._gradients}
        )
        return {p: self._gradients[p] for p in parameters}

    def set_gradients(self, size: int, work: Callable[[], tuple[Tensor, list[bool]]]) -> Tensor:
        """Set ``.grad`` and running statistics to those of a batch that the ranks share.

        Args:
            size: Samples of the batch.
            work: Runs this rank's parts; returns the sum of their losses, and `take_gradients`.

        Returns:
            The sum of this rank's losses, float64, on the device.
        """
        buffers = self._gradient_buffers()
        before = _flat(self._statistics(), next(iter(buffers)).device)
        key = (self.model.training, *map(id, buffers))
        observer = None if key in self._usage else Observer(self.model, self._norms)
        loss = torch.zeros((), dtype=torch.float64, device=before.device)
        reached = [False] * len(buffers)
        if self.own_parts(size):
            loss, reached = work()
        if observer is not None:
            self._usage[key] = self._agree_on_usage(
                reached, *observer.observed(self._updates(size))
            )
        self._exchange(size, buffers, reached, self._usage[key], before)
        return loss

    def _statistics(self) -> list[Tensor]:
        return [t for m in self._norms for t in (m.running_mean, m.running_var)]

    @torch.no_grad()
    def _exchange(
        self,
        size: int,
        buffers: dict[nn.Parameter, Tensor],
        reached: list[bool],
        usage: Usage,
        before: Tensor,
    ) -> None:
        """Add up over the ranks the gradients and the changes of the running statistics.

        The gradients are those that a rank has reached; ``before`` are the statistics before the
        step.
        """
        flags = self._reached_flags(buffers, reached, usage, before.device)
        for (p, buffer), here, expected in zip(buffers.items(), reached, usage.reached):
            if expected and not here:
                buffer.zero_()
            p.grad = None
        gradients = {
            p: buffer for (p, buffer), expected in zip(buffers.items(), usage.reached) if expected
        }
        statistics = self._statistics()
        change = (_flat(statistics, before.device) - before) * self._factor(
            size, usage.norm_uses, before
        )
        device = before.device
        if self._rounded:
            sums = self._sums([*gradients.values()], device, torch.bfloat16)
            change, flags = self._sums([change, flags], device)
        else:
            *sums, change, flags = self._sums([*gradients.values(), change, flags], device)
        self._unreached += (flags == 0).sum()
        for (p, buffer), total in zip(gradients.items(), sums, strict=True):
            p.grad = buffer.copy_(total.view(p.shape))
        _copy_from(before + change, statistics)
        parts_that_update = 1 if self._first_only else len(self.part_sizes(size))
        others = parts_that_update - self._updates(size)
        for m, uses in zip(self._norms, usage.norm_uses, strict=True):
            if uses and m.num_batches_tracked is not None:
                m.num_batches_tracked += others * uses

    def _sums(
        self, tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None = None
    ) -> Sequence[Tensor]:
        """The sums over ranks of tensors, flat, in one exchange."""
        flat = all_reduce(_flat(tensors, device, dtype), self.ranks.group)
        return flat.split([t.numel() for t in tensors])

    def _reached_flags(
        self,
        buffers: dict[nn.Parameter, Tensor],
        reached: list[bool],
        usage: Usage,
        device: torch.device,
    ) -> Tensor:
        """1 for each expected parameter that this rank's samples have reached, else 0."""
        for p, here, expected in zip(buffers, reached, usage.reached):
            if here and not expected:  # raised in `check`, where the ranks wait for each other
                name = next(name for name, other in self.model.named_parameters() if other is p)
                self._failure = _SOMETIMES.format(name)
        flags = [here for here, expected in zip(reached, usage.reached) if expected]
        if all(flags):
            return torch.ones(len(flags), device=device)
        return torch.tensor(flags, dtype=torch.float32, device=device)

    def _agree_on_usage(
        self, reached: list[bool], norm_uses: list[int], failure: str | None
    ) -> Usage:
        """Merge what the ranks observed in their first step of a kind."""
        everyone = self.ranks.share([reached, norm_uses])
        self._failure = self._failure or failure
        reached_by_rank, uses_by_rank = zip(*everyone)
        reached = [any(flags) for flags in zip(*reached_by_rank)]
        return Usage(reached, [max(uses) for uses in zip(*uses_by_rank)])

    def _factor(self, size: int, norm_uses: list[int], like: Tensor) -> Tensor:
        """Return the share of this rank's change of each running statistic that is left.

        It is what is left after the parts of the ranks that follow.

        A part takes a statistic r to ``(1 - m) r + m s``; parts of several ranks, all from the same
        r, change it together by the sum over ranks of their own change times ``(1 - m)`` to the
        power of the uses that come after them.
        """
        after = 0
        if not self._first_only:
            after = sum(len(parts) for parts in self._shares(size)[self.ranks.rank + 1 :])
        key = (after, *norm_uses)
        if key not in self._factors:
            factors = [
                like.new_full(
                    (2 * m.running_mean.numel(),), (1 - m.momentum) ** (after * (uses or 1))
                )
                for m, uses in zip(self._norms, norm_uses, strict=True)
            ]
            self._factors[key] = torch.cat([like[:0], *factors])
        return self._factors[key]


def _flat(
    tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """A copy of tensors in one, in a dtype; None: float32 unless one of them is float64."""
    if dtype is None:
        wide = any(t.dtype == torch.float64 for t in tensors)
        dtype = torch.float64 if wide else torch.float32
    nothing = torch.empty(0, dtype=dtype, device=device)
    return torch.cat([nothing, *(t.detach().reshape(-1).to(dtype) for t in tensors)])


def _copy_from(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy into tensors what `_flat` made of their like."""
    for t, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        t.copy_(values.view(t.shape))
