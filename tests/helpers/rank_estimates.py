"""What the ranks of tests/distributed/test_sharded.py do; each returns what it found."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastlr
from fastlr.distributed import messaging as board
from fastlr.distributed import sharded
from fastlr.errors import FastlrError, ModelError


class Drawn:
    """Inputs [n, 6] that are cheap pure functions of (seed, index)."""

    def batch(self, start: int, stop: int, *, seed: int, device: Any, dtype: Any) -> Tensor:
        rows = [
            torch.randn(6, generator=torch.Generator().manual_seed(seed * 100_003 + i))
            for i in range(start, stop)
        ]
        return torch.stack(rows).to(device, dtype)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


class Failing(nn.Module):
    """A model that raises when it meets input 30.

    That is in the fourth round of three ranks with chunks of three: that of rank 1.
    """

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.net, self.error = mlp(), error

    def forward(self, x: Tensor) -> Tensor:
        if (
            self.error is not None
            and (x == Drawn().batch(30, 31, seed=0, device=x.device, dtype=x.dtype)).any()
        ):
            raise self.error
        return self.net(x)


CASES: dict[str, dict[str, Any]] = {
    "even": {"n": 24, "batch_size": 4},
    "uneven": {"n": 23, "batch_size": 4},
    "fewer than ranks": {"n": 2, "batch_size": 1},
    "own chunk": {"n": 50},
    "target": {"n": 3000, "target_rel_stderr": 0.08, "min_n": 256, "batch_size": 100},
    "target, own chunk": {"n": 3000, "target_rel_stderr": 0.08, "min_n": 256},
    "batch": {"n": 70, "probe": "batch", "batch_size": 10},
    "batch, target": {
        "n": 2000,
        "probe": "batch",
        "batch_size": 10,
        "target_rel_stderr": 0.2,
        "min_n": 100,
    },
    "exact": {"n": 7, "probe": "exact", "batch_size": 2},
}


def estimates(rank: int) -> dict[str, dict[str, Any]]:
    """Each case shared by the ranks, and what progress was reported."""
    found = {}
    for name, options in CASES.items():
        seen: list[tuple[int, int]] = []
        model = mlp().train()
        with sharded(timeout=60):
            got = fastlr.estimate(
                model,
                Drawn(),
                seed=3,
                progress=lambda a, b, v, e, s=seen: s.append((a, b)),
                **options,
            )
        found[name] = {
            **got.to_dict(per_sample=True),
            "seen": seen,
            "training": model.training,
            "rank": rank,
        }
    # Made outside, shared and not, the model changed.
    estimator = fastlr.LocalRedundancy(mlp(), Drawn(), 40, seed=1)
    with sharded(timeout=60):
        first = estimator.measure()
        with torch.no_grad():
            estimator.model[3].weight.mul_(2)
        second = estimator.measure()
    alone = estimator.measure() if rank == 0 else second
    found["kept"] = {
        "values": [first.value, second.value, alone.value],
        "notes": [first.notes, alone.notes],
    }
    return found


def failing(rank: int, who: int, where: str) -> tuple[str, float]:
    """One rank fails; what each rank raises, and after how many seconds."""
    start = time.perf_counter()
    errors = {
        "model error": ModelError("the forward pass fails"),
        "other error": KeyError("absent"),
    }
    try:
        with sharded(timeout=60):
            if where == "arguments" and rank == who:
                raise ValueError("no arguments")
            if where == "exits" and rank == who:
                sys.exit(3)
            fastlr.estimate(Failing(errors.get(where)), Drawn(), 60, batch_size=3)
            if where == "after" and rank == who:
                raise ModelError("too late")
            fastlr.estimate(mlp(), Drawn(), 10, batch_size=3)
    except (FastlrError, SystemExit) as caught:
        return f"{type(caught).__name__}: {caught}", time.perf_counter() - start
    return "no error", time.perf_counter() - start


def differing(rank: int) -> list[str]:
    """Arguments, weights, buffers and inputs that are not the same on all ranks."""
    found = []
    other = mlp()
    with torch.no_grad():
        other[3].bias[1] += 1e-12 * (rank == 1)
    norm = mlp()
    norm[1].running_mean += rank
    inputs = fastlr.TensorInputs(torch.ones(20, 6) * (1 + rank))
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (mlp(), Drawn(), {"n": 20 + rank}),
        (mlp(), Drawn(), {"seed": rank}),
        (mlp(), Drawn(), {"predictive": fastlr.Gaussian(1.0 + rank)}),
        (other, Drawn(), {}),
        (norm, Drawn(), {}),
        (mlp(), inputs, {}),
    ]
    for model, source, options in cases:
        try:
            with sharded(timeout=60):
                fastlr.estimate(model, source, **{"n": 20, "batch_size": 5, **options})
            found.append("no error")
        except FastlrError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def alone(rank: int) -> dict[str, Any]:
    """Measure on rank 0 alone: plainly, which works, and in sharded(), which misses the others."""
    found: dict[str, Any] = {}
    if rank == 0:
        found["plain"] = fastlr.estimate(mlp(), Drawn(), 10).n
        board.PATIENCE = 0.2
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with sharded(timeout=1.0):
                    fastlr.estimate(mlp(), Drawn(), 10)
            except FastlrError as error:
                found["error"] = str(error)
        found["seconds"] = time.perf_counter() - start
        found["warned"] = [str(w.message) for w in caught]
        return found
    time.sleep(1.5)
    return found


def leaving(rank: int) -> tuple[str, float]:
    """Rank 1 enters and measures nothing."""
    start = time.perf_counter()
    try:
        with sharded(timeout=60):
            if rank != 1:
                fastlr.estimate(mlp(), Drawn(), 10)
    except FastlrError as error:
        return str(error), time.perf_counter() - start
    return "no error", time.perf_counter() - start


HALVED: dict[
    str, dict[str, Any]
] = {  # who runs out of memory, from which input on, and the arguments
    "first round": {"who": 1, "first": 0, "n": 40, "batch_size": 8},
    "last round, the other has none": {"who": 0, "first": 32, "n": 40, "batch_size": 8},
    "own chunk": {"who": 1, "first": 0, "n": 40},
    "target": {
        "who": 1,
        "first": 0,
        "n": 3000,
        "target_rel_stderr": 0.08,
        "min_n": 256,
        "batch_size": 100,
    },
}


def halved(rank: int) -> dict[str, dict[str, Any]]:
    """Run out of memory on one rank only, above six inputs, twice with the same estimator."""
    found: dict[str, dict[str, Any]] = {}
    for name, case in HALVED.items():
        who = case["who"]
        first = case["first"]
        options = {k: v for k, v in case.items() if k not in ("who", "first")}
        marked = Drawn().batch(first, first + 1, seed=3, device="cpu", dtype=torch.float64)
        state: dict[str, Any] = {"low": False, "sizes": []}

        class Small(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = mlp()

            def forward(self, x: Tensor) -> Tensor:
                met = first == 0 or bool((x == marked).all(1).any())  # noqa: B023
                state["low"] |= rank == who and met  # noqa: B023
                if state["low"] and len(x) > 6:  # noqa: B023
                    raise torch.OutOfMemoryError("no more")
                return self.net(x)

        class Asked(Drawn):
            def batch(self, start: int, stop: int, **how: Any) -> Tensor:
                state["sizes"].append(stop - start)  # noqa: B023
                return super().batch(start, stop, **how)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            meter = fastlr.LocalRedundancy(Small(), Asked(), seed=3, **options)
            with sharded(timeout=60):
                got = meter.measure()
                sizes = state["sizes"]
                state["sizes"] = []
                again = meter.measure()
        found[name] = {
            "values": got.per_sample.tolist(),
            "value": got.value,
            "notes": got.notes,
            "chunk": got.batch_size,
            "sizes": sizes,
            "again": [again.value, again.notes, again.batch_size],
            "sizes again": state["sizes"],
        }
    return found


def killed(rank: int, timeout: float) -> tuple[str, float]:
    """Rank 1 kills itself between two estimates."""
    start = time.perf_counter()
    try:
        with sharded(timeout=60) as members:
            fastlr.estimate(mlp(), Drawn(), 10, batch_size=3)
            members.board.timeout = timeout
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.perf_counter()
            fastlr.estimate(mlp(), Drawn(), 10, batch_size=3)
    except FastlrError as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - start
    return "no error", 0.0


def estimates_on_gpu(rank: int) -> dict[str, list[float]]:
    """The same on GPUs, which the ranks may share, and by this rank alone."""
    device = f"cuda:{rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    model = mlp(torch.float32).to(device)
    with sharded(timeout=120):
        got = fastlr.estimate(model, Drawn(), 50, batch_size=8)
    return {
        "got": got.per_sample.tolist(),
        "want": fastlr.estimate(model, Drawn(), 50, batch_size=8).per_sample.tolist(),
    }


def nested(rank: int) -> str:
    try:
        with sharded(timeout=5), sharded(timeout=5):
            pass
    except FastlrError as error:
        return str(error)
    return "no error"


def command(
    rank: int, size: int, port: int, arguments: list[str], folder: str
) -> tuple[int, str, str]:
    """The command line, or a script, as torchrun starts it: (exit code, stdout, stderr)."""
    import contextlib
    import io
    import runpy

    from fastlr.cli.main import main

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="test",
    )
    os.chdir(folder)
    sys.path.insert(0, folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if arguments[0].endswith(".py"):
            runpy.run_path(arguments[0], run_name="__main__")
            code = 0
        else:
            code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def in_groups(rank: int) -> tuple[float, float]:
    """Two groups measure different models at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = mlp()
    with torch.no_grad():
        model[3].weight.mul_(1 + rank // 2)
    with sharded(groups[rank // 2], timeout=60):
        got = fastlr.estimate(model, Drawn(), 30, batch_size=4)
    return got.value, fastlr.estimate(model, Drawn(), 30, batch_size=4).value
