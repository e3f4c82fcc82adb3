"""Ranks that share an estimate.

They measure the same, change together what runs, and merge what they have measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fastlr.distributed.sharding import Team, digests_of
from fastlr.estimator.chunks import Chunks
from fastlr.estimator.identity import describe
from fastlr.estimator.options import EstimateOptions
from fastlr.ghost.engine import Engine

_COMPARED = (
    "total",
    "target_rel_stderr",
    "min_n",
    "probe",
    "seed",
    "batch_size",
    "in_dim",
    "out_dim",
)


def agree(members: Team, options: EstimateOptions, inputs_digest: str) -> None:
    """Raise InputError unless all ranks have the same arguments."""
    arguments = {name: getattr(options, name) for name in _COMPARED}
    arguments["dtype"] = str(options.dtype)
    arguments["predictive"] = None if options.predictive is None else describe(options.predictive)
    remedy, inputs = "pass the same arguments on every rank", {"inputs": inputs_digest}
    members.agree("what they measure", arguments, remedy, inputs)


@contextmanager
def buffers_of_rank_0(members: Team, model: nn.Module) -> Iterator[None]:
    """Give all ranks the buffers of rank 0 inside, as DistributedDataParallel does.

    Own values are put back in place: addresses and autograd versions stay.

    Raises:
        InputError: The ranks differ in parameters, or in shapes or dtypes of buffers.
    """
    if members.size == 1:
        yield
        return
    buffers = sorted(model.named_buffers())
    named = [*model.named_parameters(), *buffers]
    shapes = {name: f"{t.dtype} {list(t.shape)}" for name, t in named}
    remedy = "load the same weights on every rank, or broadcast them"
    members.agree("the model", shapes, remedy, digests_of(model.named_parameters()))
    sums = zip(*(each.values() for each in members.share(digests_of(buffers))))
    differ = [b for (_, b), given in zip(buffers, sums) if given.count(given[0]) < len(given)]
    own = [b.detach().clone() for b in differ]
    try:
        for b, values in zip(differ, members.broadcast(own) if differ else own):
            b.data.copy_(values)
        yield
    finally:
        for b, values in zip(differ, own):
            b.data.copy_(values)


def holds_on_all(members: Team, engine: Engine, chunks: Chunks, failed: int) -> bool:
    """Return True if the measurement holds for all ranks.

    Otherwise all ranks change together what runs, to measure again.

    Args:
        members: Ranks.
        engine: Engine of this rank.
        chunks: Chunks of this rank.
        failed: Number of audits that had failed before.
    """
    rung = engine.ladder.rung
    states = members.share([chunks.replays.hold(), engine.audits.failed > failed, int(rung)])
    hold, outdated, rungs = zip(*states, strict=True)
    if all(hold) and not any(outdated) and len(set(rungs)) == 1:
        return True
    if any(outdated):  # by one rank's sample, but the model has changed on all
        chunks.note(
            "an audit found that the model had changed: it was checked again and measured again"
        )
        engine.audits.failed = max(1, engine.audits.failed)
        engine.forget_plans()
    engine.ladder.step_down(max(rungs), "so on another rank")
    return False


def merged(
    members: Team, sums: dict[str, float], routes: dict[str, str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return each parameter's sum over the values of all ranks, and the routes on any of them."""
    (all_sums, all_routes), *others = members.share([sums, routes])
    for more_sums, more_routes in others:
        all_routes.update(more_routes)
        for name, value in more_sums.items():
            all_sums[name] += value
    return all_sums, all_routes
