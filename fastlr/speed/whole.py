"""The whole estimate: by mode and by stage, interleaved with plain passes of the same network over the same images."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlr import ops
from fastlr.errors import ModelError
from fastlr.estimate import LocalRedundancy
from fastlr.ghost import execute
from fastlr.ghost.fuse import unfolded
from fastlr.ghost.graph import walk
from fastlr.replay import CudaRecorder
from fastlr.result import Estimate
from fastlr.speed.clock import interleaved, peak_bytes, release, spread, waiter
from fastlr.speed.networks import Network, Traffic, folded_model, largest_divisor, plain_pass, traffic
from fastlr.speed.record import Record, Say

FEWEST_ROUNDS = 3
AGREE_LOW, AGREE_FULL = 2e-2, 1e-4  # relative differences of the estimates of two modes


@dataclass(frozen=True)
class Mode:
    """A way of running the estimate.

    Attributes:
        name: in tables.
        backend: of ops (``None``: as usual); images are made by their kernel in every mode.
        folded: whether convolutions are folded with their batch norms.
        graph: whether chunks are replayed as a CUDA graph.
    """

    name: str
    backend: str | None
    folded: bool
    graph: bool


DEFAULT = Mode("folded, CUDA graph (default)", None, True, True)
GPU_MODES = (
    DEFAULT,
    Mode("folded, launched", None, True, False),
    Mode("unfolded, launched", None, False, False),
    Mode("unfolded, torch ops", "torch", False, False),
)
CPU_DEFAULT = Mode("folded (default)", None, True, False)
CPU_MODES = (CPU_DEFAULT, Mode("unfolded", None, False, False))


class Measured:
    """An estimator that is run in one mode.

    Attributes:
        last: what it found last.
    """

    def __init__(self, network: Network, mode: Mode, n: int, chunk: int | None = None) -> None:
        self.network, self.mode = network, mode
        self.estimator = LocalRedundancy(network.model, network.images, n, dtype=network.dtype, batch_size=chunk)
        self.last: Estimate | None = None

    @contextmanager
    def context(self) -> Iterator[None]:
        """What makes it run in its mode."""
        replays = self.estimator._replays
        with ops.using(self.mode.backend), nullcontext() if self.mode.folded else unfolded():
            with nullcontext() if self.mode.graph else replays.pause():
                yield

    def __call__(self) -> Estimate:
        """Measure."""
        with self.context():
            self.last = self.estimator.measure()
        return self.last

    def twice(self) -> Estimate:
        """Measure twice: where all images are one chunk, it is the second time that captures."""
        self()
        return self()

    def problems(self) -> list[str]:
        """What did not run as the mode says, in words."""
        assert self.last is not None
        found = [note for note in self.last.notes if "CUDA graph" not in note]
        estimator = self.estimator
        if self.mode.graph and not estimator._replays.held:
            found.append(estimator._replays.note or "no chunk was captured as a CUDA graph")
        norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.network.model.modules())
        if self.mode.folded and norms and not estimator.engine.folding.folded:
            found.append(f"nothing was folded: {estimator.engine.folding.disabled or estimator.engine.folding.refused}")
        slow = sorted({name for name, route in self.last.routes.items() if route in ("loop", "node")})
        if slow:
            found.append(f"{len(slow)} parameters by a slow route, first {slow[0]}")
        if self.network.device.type == "cuda" and self.mode.backend is None and not ops.has_triton():
            found.append("Triton is not installed: no kernel ran")
        return found

    def about(self) -> dict[str, Any]:
        """Facts for the record: the value, the chunk, what was folded and what was not."""
        assert self.last is not None
        folding = self.estimator.engine.folding
        facts = {"value": self.last.value, "stderr": self.last.stderr, "chunk": self.last.batch_size}
        return facts | {"folded": len(folding.folded), "refused": dict(folding.refused)}


def default_chunk(network: Network, n: int) -> int:
    """The chunk that the estimator takes by itself, for these images and this memory."""
    estimator = LocalRedundancy(network.model, network.images, n, dtype=network.dtype)
    with torch.enable_grad():
        return estimator._first_chunk()


# --------------------------------------------------------------------------------------------------------------- stages
class Stage:
    """A part of the estimate over ``n`` images, chunk by chunk; on a GPU as a CUDA graph, as the estimate itself."""

    def __init__(self, function: Callable[[Tensor], Any], device: torch.device, n: int, chunk: int) -> None:
        self.n, self.chunk = n, chunk
        self.first = torch.zeros(1, dtype=torch.int64, device=device)
        self.again: Callable[[], Any] = lambda: function(self.first)
        if device.type == "cuda":
            recorder = CudaRecorder(device)
            self.kept = recorder.capture(lambda: function(self.first))
            self.again = recorder.replay

    def __call__(self) -> None:
        """Run it."""
        for start in range(0, self.n, self.chunk):
            self.first.fill_(start)
            self.again()


def stages(measured: Measured, n: int, chunk: int) -> dict[str, Callable[[], Stage]]:
    """Makers of the stages, each including the one before; ``measured`` measures in chunks of this size."""
    measured()  # other modes have used the model's engine since
    network, engine = measured.network, measured.estimator.engine
    device = network.device
    plan = engine.plan(chunk)
    if plan is None:
        raise ModelError(f"there is no plan for chunks of {chunk}: not every parameter went by a rule")
    state = plan[0]
    made = network.images.from_device(seed=0, device=device, dtype=network.weights)

    def images(first: Tensor) -> Tensor:
        return network.batch(chunk, int(first)) if made is None else made(first, chunk)

    def forward(first: Tensor) -> Tensor:
        x = images(first)
        with torch.enable_grad(), network.autocast():
            return engine._forward(x)

    v = torch.randn_like(forward(torch.zeros(1, dtype=torch.int64, device=device)).detach())

    def backward(first: Tensor) -> None:
        z = forward(first)
        graph = walk(z, engine.parameters)
        graph.side, graph.keys = state.side, state.keys
        execute.backward(graph, state.structure, z, v, lambda node, gradients: None, retain=False)

    return {
        "images": lambda: Stage(images, device, n, chunk),
        "images, forward": lambda: Stage(lambda first: forward(first).detach(), device, n, chunk),
        "images, forward, backward without norms": lambda: Stage(backward, device, n, chunk),
    }


def floors(
    network: Network, counted: Traffic, n: int, ceilings: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Least bytes, operations and seconds of each stage and of the whole, everything fused: see networks.Traffic."""
    element = 4 if network.dtype is None and network.weights == torch.float32 else 2
    pixels = 3 * network.images.size[1] * network.images.size[2] * network.weights.itemsize
    forward, backward = counted.bytes("forward", element), counted.bytes("backward", element)
    each = {
        "images": (pixels, 0),
        "images, forward": (pixels + forward, counted.operations),
        "images, forward, backward without norms": (pixels + forward + backward, 2 * counted.operations),
        "estimate": (pixels + counted.estimate_bytes(element), 3 * counted.operations),
    }
    bandwidth = ceilings["copy"]["bytes_per_second"]
    rate = ceilings["matmul"]["operations_per_second"]
    return {
        name: {
            "bytes": n * moved,
            "operations": n * operations,
            "floor_seconds": max(n * moved / bandwidth, n * operations / rate),
        }
        for name, (moved, operations) in each.items()
    }


# ------------------------------------------------------------------------------------------------------------ the section
def fastest_chunk(network: Network, images: Tensor, sizes: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The chunk at which an eager plain pass takes least, and the seconds of each: one warm-up, one timed."""
    found = {}
    wait = waiter(network.device)
    for chunk in sizes:
        run = plain_pass(network, network.model, images, chunk)
        run()
        wait()
        start = time.perf_counter()
        run()
        wait()
        found[chunk] = time.perf_counter() - start
    return min(found, key=lambda size: found[size]), found


def section(
    record: Record,
    name: str,
    network: Network,
    *,
    n: int,
    modes: Sequence[Mode],
    rounds: int,
    compiled: bool,
    folded_plain: bool,
    by_stage: bool,
    seconds_for_rounds: float = 60.0,
    chunk: int | None = None,
    say: Say = lambda text: None,
) -> None:
    """Measure one network into rows of section ``name``.

    Args:
        record: where rows go; its ceilings have been measured.
        name: of the section.
        network: what is measured.
        n: images.
        modes: of the estimate, the default first.
        rounds: timed rounds, fewer where they would take longer than ``seconds_for_rounds``, three at least.
        compiled: also plain passes through torch.compile.
        folded_plain: also plain passes of the network with batch norms folded by torch.fx.
        by_stage: also the stages of the first mode.
        seconds_for_rounds: see ``rounds``.
        chunk: images at once; default: the estimator's own choice, made a divisor of ``n``.
        say: told what is being done.
    """
    device = network.device
    own = default_chunk(network, n)
    chunk = chunk or largest_divisor(n, own)
    counted = traffic(network.model, network.batch(1))
    floor = floors(network, counted, n, record.ceilings)
    facts: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], Any]] = {}
    measured: dict[str, Measured] = {}
    common = {"n": n, "size": network.images.size[1], "precision": network.precision}

    for mode in modes:
        title = f"estimate, {mode.name}"
        say(f"{name}: {title}")
        with record.attempt(name, title):
            made = Measured(network, mode, n, chunk)
            _, peak = peak_bytes(made.twice if mode.graph else made, device)
            problems = made.problems()
            if problems:
                raise ModelError("; ".join(problems))
            measured[title] = runs[title] = made
            facts[title] = (
                {"kind": "estimate", "peak_bytes": peak, "chunk_by_itself": own} | made.about() | floor["estimate"]
            )
    _agree(record, name, network, measured)

    if by_stage:
        with record.attempt(name, "stages"):
            source = measured.get(f"estimate, {modes[0].name}")
            if source is None:
                raise ModelError("the estimate itself failed")
            for title, prepare in stages(source, n, chunk).items():
                with record.attempt(name, title):
                    runs[title], peak = peak_bytes(prepare, device)
                    facts[title] = {"kind": "stage", "chunk": chunk, "peak_bytes": peak} | floor[title]

    images = network.batch(n)
    say(f"{name}: plain passes")
    with record.attempt(name, "plain, eager"):
        sizes = sorted({largest_divisor(n, chunk * k) for k in (1, 2, 4)})
        best, tried = fastest_chunk(network, images, sizes)
        for title, kind, make in _plain(network, compiled, folded_plain):
            say(f"{name}: {title}")
            with record.attempt(name, title):
                _hold(network, make, images, runs, facts, title, kind, best, tried)

    del images
    _time(record, name, network, runs, facts, common, rounds, seconds_for_rounds, say)


def _plain(network: Network, compiled: bool, folded: bool) -> list[tuple[str, str, Callable[[], nn.Module]]]:
    """(title, kind, what makes the model) of each plain pass."""

    def compile_(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: torch.compile(make(), dynamic=False)  # type: ignore[return-value]

    found: list[tuple[str, str, Callable[[], nn.Module]]] = [("plain, eager", "plain", lambda: network.model)]
    if compiled:
        found.append(("plain, torch.compile", "plain", compile_(lambda: network.model)))
    if folded:
        found.append(("plain, folded by torch.fx, eager", "folded plain", lambda: folded_model(network)))
        if compiled:
            title = "plain, folded by torch.fx, torch.compile"
            found.append((title, "folded plain", compile_(lambda: folded_model(network))))
    return found


def _hold(
    network: Network, make: Callable[[], nn.Module], images: Tensor, runs: dict[str, Callable[[], Any]],
    facts: dict[str, dict[str, Any]], title: str, kind: str, chunk: int, tried: dict[int, float],
) -> None:  # fmt: skip
    """Make a plain pass, see that its outputs are the network's, take its peak memory."""
    start = time.perf_counter()
    model = make()
    with torch.no_grad(), network.autocast():
        few = images[:chunk]
        want, got = network.model(few).double(), model(few).double()
    off = float((want - got).norm() / want.norm())
    close = 5e-2 if network.dtype or network.weights != torch.float32 else 1e-3
    if not off <= close:
        raise ModelError(f"its outputs are off by {off:.2g} of the network's own")
    run = plain_pass(network, model, images, chunk)
    _, peak = peak_bytes(run, network.device)
    facts[title] = {"kind": kind, "chunk": chunk, "peak_bytes": peak, "output_deviation": off}
    facts[title]["first_seconds"] = round(time.perf_counter() - start, 2)
    facts[title]["eager_seconds_by_chunk"] = {str(size): seconds for size, seconds in tried.items()}
    runs[title] = run


def _agree(record: Record, name: str, network: Network, measured: dict[str, Measured]) -> None:
    """Check that the modes give the same estimate."""
    limit = AGREE_LOW if network.dtype or network.weights != torch.float32 else AGREE_FULL
    values = {title: made.last.value for title, made in measured.items() if made.last is not None}
    for title in list(values)[1:]:
        first = values[next(iter(values))]
        record.check(name, f"{title}: difference from the default", abs(values[title] / first - 1), limit)


def _time(
    record: Record, name: str, network: Network, runs: dict[str, Callable[[], Any]], facts: dict[str, dict[str, Any]],
    common: dict[str, Any], rounds: int, seconds_for_rounds: float, say: Say,
) -> None:  # fmt: skip
    """Interleaved rounds of everything that runs; ratios to the fastest plain pass of the same round."""
    wait = waiter(network.device)
    took = 0.0
    for title in list(runs):
        with record.attempt(name, title):
            runs[title]()
            wait()
            start = time.perf_counter()
            runs[title]()
            wait()
            took += time.perf_counter() - start
            continue
        del runs[title]
    if not runs:
        return
    rounds = max(FEWEST_ROUNDS, min(rounds, int(seconds_for_rounds / max(took, 1e-9))))
    say(f"{name}: {rounds} rounds of {len(runs)} contenders")
    seconds = interleaved(runs, rounds, warmup=0, synchronize=wait)
    plain = {title: seconds[title] for title in runs if facts[title]["kind"] == "plain"}
    base = min(plain, key=lambda title: statistics.median(plain[title])) if plain else None
    for title, found in seconds.items():
        row = common | facts[title] | spread(found)
        if base is not None:
            ratios = spread([a / b for a, b in zip(found, seconds[base], strict=True)], "ratio")
            row |= {**ratios, "against": base}
        record.add(name, title, **row)
    runs.clear()
    release(network.device)
