"""Data parallel training: the ranks of a run share each batch, and what they do together is what one process does.

A batch is done in parts, each one forward and backward pass (``norm_batch`` samples: what batch norm takes its statistics
of). The ranks share the parts, in order; their gradients are added in float32 in the order of the ranks, the same bits on
every rank, and every rank takes the same optimiser step. Running statistics of batch norms become what one process would
have made of the parts one after the other. So the number of ranks changes the last bits of a run, and which units dropout
drops: rank 0 draws as one process does, every other rank has random numbers of its own.

The ranks are those of `fastlr.distributed.sharded`, or of torchrun, for the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fastlr.distributed import all_reduce
from fastlr.distributed.sharding import fingerprint, team
from fastlr.drivers.optimising import part_sizes, trainable
from fastlr.drivers.runs import stream_seed
from fastlr.errors import InputError, ModelError

_ALONE = "or start one process"


class Parallel:
    """How the ranks share a batch, and bring together what they found; one process alone does it all.

    Args:
        model: Trained on every rank, from the same parameters.
        batch_size: Samples of a full batch.
        norm_batch: Samples of a part, at most; 0: the whole batch, or, for a model without batch norm, a part a rank.

    Attributes:
        ranks: Who takes part.

    Raises:
        InputError: A batch has fewer parts than there are ranks.
        ModelError: A running statistic cannot be brought together.
    """

    def __init__(self, model: nn.Module, batch_size: int, norm_batch: int) -> None:
        self.ranks, self.model, self.norm_batch = team(), model, norm_batch
        self._met: dict[tuple[int, ...], tuple[list[bool], list[bool]]] = {}
        self._factors: dict[int, Tensor] = {}
        self._failure: str | None = None
        if self.alone:
            return
        size = self.ranks.size
        normed = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm)), None)
        if normed is not None and not norm_batch:
            raise InputError(
                f"norm_batch=0: {size} processes share a batch of {batch_size}, and {normed} takes its statistics over all of "
                f"it: set norm_batch={max(1, batch_size // size)}, {_ALONE}"
            )
        if (parts := len(self.part_sizes(batch_size))) < size:
            raise InputError(
                f"{size} processes share a batch of {batch_size} in parts of at most {norm_batch or 1}, which is {parts}: "
                f"start {parts}, or set norm_batch={max(1, batch_size // size)} or less"
            )
        for name, m in model.named_modules():
            if isinstance(m, _NormBase) and m.track_running_stats and m.momentum is None:
                raise ModelError(f"{name} averages over all batches (momentum=None): give it a momentum, {_ALONE}")

    @property
    def alone(self) -> bool:
        """Whether this process is the only one."""
        return self.ranks.size == 1

    def part_sizes(self, size: int) -> list[int]:
        """Return the sizes of the parts of a batch of ``size`` samples, of all ranks together."""
        if self.alone or self.norm_batch:
            return part_sizes(size, self.norm_batch)
        return part_sizes(size, -(-size // min(size, self.ranks.size)))

    def own_parts(self, size: int) -> list[int]:
        """Return the sizes of this rank's parts of a batch; they may be none."""
        return self._shares(size)[self.ranks.rank]

    def own(self, start: int, stop: int) -> tuple[int, int]:
        """Return where this rank's share of the batch ``start`` to ``stop`` begins and ends."""
        shares = self._shares(stop - start)
        start += sum(map(sum, shares[: self.ranks.rank]))
        return start, start + sum(shares[self.ranks.rank])

    def _shares(self, size: int) -> list[list[int]]:
        sizes, ranks = self.part_sizes(size), self.ranks.size
        bounds = [len(sizes) * rank // ranks for rank in range(ranks + 1)]
        return [sizes[start:stop] for start, stop in zip(bounds, bounds[1:])]

    def stream_seed(self, seed: int, *use: int | str) -> int:
        """Return `fastlr.drivers.runs.stream_seed` for randomness that every rank has of its own."""
        return stream_seed(seed, *use, *(("rank", self.ranks.rank) if self.ranks.rank else ()))

    def sum(self, t: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks, and return it."""
        return t if self.alone else all_reduce(t, self.ranks.group)

    def turns(self, parts: Sequence[Any]) -> Iterator[Any]:
        """Yield every R-th part, for a sum over parts without gradients that the R ranks share."""
        yield from parts[self.ranks.rank :: self.ranks.size]

    def check(self) -> None:
        """Compare the models of all ranks after some steps, before what they came to is kept.

        Raises:
            InputError: They differ (the first difference is named).
            ModelError: What the steps did cannot be shared.
        """
        if not self.alone:
            for rank, failure in enumerate(self.ranks.share(self._failure)):
                if failure is not None:
                    raise self.ranks.everybodys(ModelError(f"rank {rank}: {failure}"))
            why = f"buffers other than those of batch norms must not change in training, {_ALONE}"
            self.ranks.agree("the model after training", fingerprint(self.model), why)

    def work(self, gradients: Callable[..., Tensor], update: Callable[[], None]) -> Callable[..., Any]:
        """Return what `step` repeats on each batch, to be captured or called as it is.

        Args:
            gradients: (size of the batch, own samples...) -> the sum of their losses; it sets ``.grad`` to what they add
                to the gradient of the batch's mean loss.
            update: Takes the optimiser's step.
        """

        def together(size: int, *batch: Tensor) -> Tensor:
            total = gradients(size, *batch)
            update()
            return total

        def apart(size: int, *batch: Tensor) -> list[Tensor | None]:
            return [gradients(size, *batch), *(p.grad for p in trainable(self.model))]

        return together if self.alone else apart

    def step(
        self,
        steps: Callable[..., Any],
        update: Callable[[], None],
        span: tuple[int, int],
        samples: Callable[[int, int], Sequence[Tensor]],
    ) -> Tensor:
        """Do an optimiser step on a batch.

        Args:
            steps: What `work` returned, or what repeats it.
            update: As for `work`.
            span: Where the batch begins and ends in the order of samples.
            samples: (where they begin, where they end) -> the samples, as ``steps`` takes them.

        Returns:
            The sum of the losses of this rank's samples, float64, on the device; valid until the next step.
        """
        size, own = span[1] - span[0], self.own(*span)
        if self.alone:
            alone: Tensor = steps(size, *samples(*own))
            return alone
        parameters = trainable(self.model)
        norms: list[Any] = [m for m in self.model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
        statistics = [t for m in norms for t in (m.running_mean, m.running_var)]
        counts = [m.num_batches_tracked for m in norms]
        before = _flat(statistics, parameters[0].device)
        counted = None if tuple(map(id, parameters)) in self._met else [c.item() for c in counts]
        result: list[Any] = steps(size, *samples(*own)) if own[0] < own[1] else self._nothing(parameters)
        total, grads = result[0], result[1:]
        reached, ran = self._first(parameters, grads, counts, counted)
        for p, grad, expected in zip(parameters, grads, reached):
            if grad is not None and not expected:  # the others wait for this rank: all hear of it in `check`
                name = next(name for name, other in self.model.named_parameters() if other is p)
                self._failure = f"{name} has a gradient in some steps only, which processes cannot share: start one"
        used = [p for p, yes in zip(parameters, reached) if yes]
        grads = [torch.zeros_like(p) if g is None else g for p, g, yes in zip(parameters, grads, reached) if yes]
        with torch.no_grad():
            change = (_flat(statistics, before.device) - before) * self._factor(size, norms, before)
            kinds = [t.dtype for t in (*grads, change)]
            wide = torch.float64 if torch.float64 in kinds else torch.float32
            flat = torch.cat([t.reshape(-1).to(wide) for t in (*grads, change)])
            *summed, change = all_reduce(flat, self.ranks.group).split([*(p.numel() for p in used), len(change)])
            for p in parameters:
                p.grad = None
            for p, grad, new in zip(used, grads, summed, strict=True):
                grad.copy_(new.view(p.shape))
                p.grad = grad
            for t, new in zip(statistics, (before + change).split([t.numel() for t in statistics]), strict=True):
                t.copy_(new.view(t.shape))
            others = len(self.part_sizes(size)) - len(self.own_parts(size))
            for m, yes in zip(norms, ran, strict=True):
                if yes:
                    m.num_batches_tracked += others
        update()
        return total

    def _nothing(self, parameters: list[nn.Parameter]) -> list[Any]:
        """What `work` returns for no samples."""
        return [torch.zeros((), dtype=torch.float64, device=parameters[0].device), *[None] * len(parameters)]

    def _first(
        self, parameters: list[nn.Parameter], grads: list[Any], counts: list[Any], counted: list[int] | None
    ) -> tuple[list[bool], list[bool]]:
        """Which of the parameters have gradients, and which norms ran: what any rank has seen in the first step."""
        key = tuple(map(id, parameters))
        if counted is not None:
            reached = [g is not None for g in grads]
            ran = [count.item() != c for count, c in zip(counts, counted, strict=True)]
            everyone = self.ranks.share([reached, ran])
            reached, ran = ([any(flags) for flags in zip(*each)] for each in zip(*everyone))
            self._met[key] = reached, ran
        return self._met[key]

    def _factor(self, size: int, norms: list[Any], like: Tensor) -> Tensor:
        """How much of this rank's change of each running statistic is left after the parts of the ranks that follow.

        A part takes a statistic r to ``(1 - m) r + m s``; parts of several ranks, all from the same r, change it together by
        the sum over ranks of their own change times ``(1 - m)`` to the power of the parts that come after them.
        """
        after = sum(len(parts) for parts in self._shares(size)[self.ranks.rank + 1 :])
        if after not in self._factors:
            each = [like.new_full((2 * m.running_mean.numel(),), (1 - m.momentum) ** after) for m in norms]
            self._factors[after] = torch.cat([like[:0], *each])
        return self._factors[after]


def _flat(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A copy of tensors in one, float32 unless one of them is float64."""
    kind = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return torch.cat([torch.empty(0, dtype=kind, device=device), *(t.detach().reshape(-1).to(kind) for t in tensors)])
