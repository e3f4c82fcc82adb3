"""Data parallel training: the ranks of a run share each batch, and what they do together is what one process does.

A batch is done in parts, each one forward and backward pass (``norm_batch`` samples: what batch norm takes its statistics
of). The ranks share the parts, in order; their gradients are added in float32 in the order of the ranks, the same bits on
every rank, and every rank takes the same optimiser step. Running statistics of batch norms become what one process would
have made of the parts one after the other. So the number of ranks changes the last bits of a run, and which units dropout
drops: rank 0 draws as one process does, every other rank has random numbers of its own.

The ranks are those of `fastlr.distributed.sharded`, or of torchrun, for the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fastlr.distributed import all_reduce
from fastlr.distributed.sharding import fingerprint, team
from fastlr.drivers.optimising import part_sizes, split, trainable
from fastlr.drivers.runs import stream_seed
from fastlr.errors import InputError, ModelError

_ALONE = "or start one process"
_SOMETIMES = "{} has a gradient in some steps only, which processes cannot share: start one"


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
        self._met: dict[tuple[Any, ...], tuple[list[bool], list[int]]] = {}
        self._factors: dict[tuple[int, ...], Tensor] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._unreached: Tensor | int = 0  # expected parameters that no rank has reached, over all steps
        self._failure: str | None = None
        self._norms: list[Any] = []  # with running statistics
        if self.alone:
            return
        size = self.ranks.size
        normed = next((name for name, m in model.named_modules() if isinstance(m, _BatchNorm)), None)
        if normed is not None and not norm_batch:
            raise InputError(
                f"norm_batch=0: {size} processes share a batch of {batch_size}, and {normed} takes its statistics over all of "
                f"it: start one process, or a new run with norm_batch={max(1, batch_size // size)}"
            )
        if (parts := len(self.part_sizes(batch_size))) < size:
            raise InputError(
                f"{size} processes share a batch of {batch_size} in parts of {norm_batch or 1}, which is {parts}: start {parts}"
                + f", or a new run with norm_batch={batch_size // size}" * (size <= batch_size)
            )
        if any(p.is_complex() for p in model.parameters()):
            raise ModelError("gradients of complex parameters cannot be added: start one process")
        for name, m in model.named_modules():
            if isinstance(m, _NormBase) and m.track_running_stats and m.momentum is None:
                raise ModelError(f"{name} averages over all batches (momentum=None): give it a momentum, {_ALONE}")
        self._norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]

    @property
    def alone(self) -> bool:
        """Whether this process is the only one."""
        return self.ranks.size == 1

    def part_sizes(self, size: int) -> list[int]:
        """Return the sizes of the parts of a batch of ``size`` samples, of all ranks together."""
        if self.alone or self.norm_batch:
            return part_sizes(size, self.norm_batch)
        return split(size, min(size, self.ranks.size))

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

    def sum_each(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over the ranks, in one exchange."""
        if not self.alone:
            whole = self.sum(torch.cat([t.flatten() for t in tensors]))
            for t, new in zip(tensors, whole.split([t.numel() for t in tensors]), strict=True):
                t.copy_(new.view(t.shape))

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
            if int(self._unreached):
                self._failure = self._failure or _SOMETIMES.format("a parameter")
            for rank, failure in enumerate(self.ranks.share(self._failure)):
                if failure is not None:
                    raise self.ranks.everybodys(ModelError(f"rank {rank}: {failure}"))
            self.ranks.agree("the model after training", fingerprint(self.model), "start one process")

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

        def apart(size: int, *batch: Tensor) -> tuple[Tensor, list[bool]]:
            total = gradients(size, *batch)
            buffers = self._buffers()
            reached = [p.grad is not None for p in buffers]
            for p, buffer in buffers.items():  # of our own: a capture's would be held for each size of a batch
                if p.grad is not None:
                    buffer.copy_(p.grad)
                    p.grad = None
            return total, reached

        return together if self.alone else apart

    def _buffers(self) -> dict[nn.Parameter, Tensor]:
        """A tensor for the gradient of each trainable parameter."""
        found = trainable(self.model)
        self._gradients.update({p: torch.zeros_like(p) for p in found if p not in self._gradients})
        return {p: self._gradients[p] for p in found}

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
        buffers = self._buffers()
        statistics = [t for m in self._norms for t in (m.running_mean, m.running_var)]
        device = next(iter(buffers)).device
        before = _flat(statistics, device)
        first = _First(self.model, self._norms) if self._key(buffers) not in self._met else None
        if own[0] < own[1]:
            total, reached = steps(size, *samples(*own))
        else:
            total, reached = torch.zeros((), dtype=torch.float64, device=device), [False] * len(buffers)
        if first is not None:
            self._met[self._key(buffers)] = self._agreed(reached, *first.seen(len(self.own_parts(size))))
        expected, uses = self._met[self._key(buffers)]
        flags = self._flags(buffers, reached, expected, device)
        with torch.no_grad():
            used = [(p, g) for (p, g), yes in zip(buffers.items(), expected) if yes]
            for (p, g), here, yes in zip(buffers.items(), reached, expected):
                if yes and not here:
                    g.zero_()
                p.grad = None
            change = (_flat(statistics, device) - before) * self._factor(size, uses, before)
            kinds = [g.dtype for _, g in used] + [change.dtype]
            wide = torch.float64 if torch.float64 in kinds else torch.float32
            flat = torch.cat([t.reshape(-1).to(wide) for t in (*(g for _, g in used), change, flags)])
            sizes = [*(g.numel() for _, g in used), len(change), len(flags)]
            *summed, change, flags = all_reduce(flat, self.ranks.group).split(sizes)
            self._unreached += (flags == 0).sum()
            for (p, g), new in zip(used, summed, strict=True):
                g.copy_(new.view(p.shape))
                p.grad = g
            for t, new in zip(statistics, (before + change).split([t.numel() for t in statistics]), strict=True):
                t.copy_(new.view(t.shape))
            others = len(self.part_sizes(size)) - len(self.own_parts(size))
            for m, times in zip(self._norms, uses, strict=True):
                if times and m.num_batches_tracked is not None:
                    m.num_batches_tracked += others * times
        update()
        return total

    def _key(self, buffers: Mapping[nn.Parameter, Tensor]) -> tuple[Any, ...]:
        return (self.model.training, *map(id, buffers))

    def _flags(
        self, buffers: Mapping[nn.Parameter, Tensor], reached: list[bool], expected: list[bool], device: torch.device
    ) -> Tensor:
        """One for each expected parameter that this rank's samples have reached, else zero."""
        for p, here, yes in zip(buffers, reached, expected):
            if here and not yes:  # the others wait for this rank: all hear of it in `check`
                name = next(name for name, other in self.model.named_parameters() if other is p)
                self._failure = _SOMETIMES.format(name)
        mine = [here for here, yes in zip(reached, expected) if yes]
        if all(mine):
            return torch.ones(len(mine), device=device)
        return torch.tensor(mine, dtype=torch.float32, device=device)

    def _agreed(self, reached: list[bool], uses: list[int], failure: str | None) -> tuple[list[bool], list[int]]:
        """What any rank has seen in its first step: the parameters that are reached, how often a part uses each norm."""
        everyone = self.ranks.share([reached, uses])
        self._failure = self._failure or failure
        return [any(flags) for flags in zip(*(r for r, _ in everyone))], [max(u) for u in zip(*(u for _, u in everyone))]

    def _factor(self, size: int, uses: list[int], like: Tensor) -> Tensor:
        """How much of this rank's change of each running statistic is left after the parts of the ranks that follow.

        A part takes a statistic r to ``(1 - m) r + m s``; parts of several ranks, all from the same r, change it together by
        the sum over ranks of their own change times ``(1 - m)`` to the power of the uses that come after them.
        """
        after = sum(len(parts) for parts in self._shares(size)[self.ranks.rank + 1 :])
        key = (after, *uses)
        if key not in self._factors:
            left = [(1 - m.momentum) ** (after * (times or 1)) for m, times in zip(self._norms, uses, strict=True)]
            each = [like.new_full((2 * m.running_mean.numel(),), value) for m, value in zip(self._norms, left)]
            self._factors[key] = torch.cat([like[:0], *each])
        return self._factors[key]


class _First:
    """What the first step of a kind shows of a model: how it uses its norms, what else it changes.

    Args:
        model: Before the step.
        norms: Its layers with running statistics.
    """

    def __init__(self, model: nn.Module, norms: list[Any]) -> None:
        known = {id(t) for m in norms for t in (m.running_mean, m.running_var, m.num_batches_tracked)}
        self._others = {name: (t, t.clone()) for name, t in model.named_buffers() if id(t) not in known}
        self._norms, self._names = norms, {id(m): name for name, m in model.named_modules()}
        self._counts = [_count(m) for m in norms]

    def seen(self, parts: int) -> tuple[list[int], str | None]:
        """Return, after the step: how often each of the own parts used each norm, and what cannot be shared."""
        failure, uses = None, []
        for m, count in zip(self._norms, self._counts, strict=True):
            more = _count(m) - count
            uses.append(more // parts if parts else 0)
            if parts and more % parts:
                failure = f"{self._names[id(m)]} takes part in some passes only, which processes cannot share: start one"
        for name, (t, before) in self._others.items():
            if not torch.equal(t, before):
                failure = f"training changes the buffer {name}, which processes cannot share: start one"
        return uses, failure


def _count(norm: Any) -> int:
    """Passes that a layer has seen in training; 0 for one that does not count (it updates once a pass)."""
    return 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)


def _flat(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A copy of tensors in one, float32 unless one of them is float64."""
    kind = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return torch.cat([torch.empty(0, dtype=kind, device=device), *(t.detach().reshape(-1).to(kind) for t in tensors)])
