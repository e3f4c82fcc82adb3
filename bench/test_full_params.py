"""A GPT-2 under fully_shard on two processes: an estimate beside a forward and backward pass.

The processes are of this machine, and the pass is plain.

Time: an estimate that the ranks share, its plan made before, over a plain pass of as many inputs
under the same sharding; they take turns. Memory: the most that a rank holds, beyond what it held
before there was a model, in a training step with AdamW, in the first measurement, and in a later
one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from ranks import good, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import fastlr
from bench.paired import in_use, peak_bytes

VOCABULARY, RANKS = 512, 2
CPU = torch.device("cpu")
Sizes = tuple[int, int, int, int]  # layers, width, inputs of all ranks, tokens of each
# Minutes and 8 GB of memory for each of two processes: not for make bench.
pytestmark = pytest.mark.peer
Made = tuple[nn.Module, Callable[[], Any], fastlr.LocalRedundancy]


def made(rank: int, layers: int, width: int, batch: int, length: int) -> Made:
    """Return a model sharded block by block, a plain pass of this rank's inputs, and an estimator.

    The plain pass is forward and backward; the estimator measures the inputs of all ranks.
    """
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "n_positions": length}
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes)).eval()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    tokens, own = fastlr.TokenInputs(VOCABULARY, length), batch // RANKS
    x: Tensor = tokens.batch(rank * own, (rank + 1) * own)["input_ids"]

    def plain() -> None:
        F.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()

    how = {"predictive": fastlr.Categorical(), "batch_size": own, "progress": False}
    return model, plain, fastlr.LocalRedundancy(model, tokens, batch, **how)


def timed(rank: int, sizes: Sizes, rounds: int) -> dict[str, list[float]]:
    """Return seconds and processor seconds of a plain pass and of an estimate in every round.

    The first round, which makes the plan, is left out.
    """
    model, plain, estimator = made(rank, *sizes)
    seconds: dict[str, list[float]] = {
        "plain": [],
        "estimate": [],
        "plain, processor": [],
        "estimate, processor": [],
    }
    for _ in range(rounds + 1):
        for name, run in (("plain", plain), ("estimate", estimator.measure)):
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            run()
            seconds[name].append(time.perf_counter() - start)
            seconds[f"{name}, processor"].append(time.process_time() - busy)
        model.zero_grad()
    return {name: values[1:] for name, values in seconds.items()}


def held(rank: int, sizes: Sizes) -> dict[str, int]:
    """Return bytes of this rank: at rest, at most in each work, of gradients and parameters."""
    before = in_use(CPU)
    model, plain, estimator = made(rank, *sizes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        plain()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's state
    peaks = {"at rest": in_use(CPU) - before}
    measure = estimator.measure
    for name, run in (("training step", step), ("first estimate", measure), ("estimate", measure)):
        peaks[name] = peak_bytes(run, CPU, before)
    shards = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    return {
        **peaks,
        "gradients": shards,
        "whole parameters": sum(p.nbytes for p in model.parameters()),
    }


def median_ratio(plain: list[float], own: list[float]) -> float:
    """Return the median over rounds of what ours takes, in parts of what plain takes."""
    return statistics.median(b / a for a, b in zip(plain, own, strict=True))


@pytest.mark.benchmark(group="fully_shard")
def test_time(benchmark: BenchmarkFixture, quick: bool, rounds: int) -> None:
    """Time six layers of width 512.

    The ratio is that of the slowest ranks of a round, the median of the rounds.
    """
    sizes = (2, 64, 4, 16) if quick else (6, 512, 16, 128)
    results = benchmark.pedantic(
        lambda: good(run_ranks(RANKS, timed, sizes, rounds, limit=3000)), rounds=1
    )
    slowest = {}
    for name in results[0]:
        of_ranks = [each[name] for each in results]
        slowest[name] = [*map(max, zip(*of_ranks, strict=True))]
    plain, own, plain_busy, own_busy = slowest.values()
    ratio, share = median_ratio(plain, own), median_ratio(plain_busy, own_busy)
    benchmark.extra_info |= {
        "contender": "estimate",
        "ratio": ratio,
        "processor_ratio": share,
        **slowest,
    }
    assert quick or ratio <= 1.0


@pytest.mark.benchmark(group="fully_shard")
def test_memory(benchmark: BenchmarkFixture, quick: bool) -> None:
    """Measure memory at 200 million parameters, as the most of the two ranks."""
    sizes = (2, 64, 4, 16) if quick else (16, 1024, 4, 32)
    results = benchmark.pedantic(lambda: good(run_ranks(RANKS, held, sizes, limit=3000)), rounds=1)
    most = {name: max(each[name] for each in results) for name in results[0]}
    benchmark.extra_info |= {"contender": "memory", **most}
