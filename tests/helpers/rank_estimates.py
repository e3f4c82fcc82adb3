"""What the ranks of tests/distributed/test_sharded.py do; each returns what it found."""

import os
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
from ranks import error_of, timed_error
from single_samples import Written
from torch import nn
from untouched import untouched

import fastlr
from fastlr.distributed import messaging as board
from fastlr.distributed import sharded
from fastlr.errors import ModelError


class Drawn:
    """Inputs [n, 6] that are cheap pure functions of (seed, index)."""

    def batch(self, start, stop, *, seed, device, dtype):
        rows = [
            torch.randn(6, generator=torch.Generator().manual_seed(seed * 100_003 + i))
            for i in range(start, stop)
        ]
        return torch.stack(rows).to(device, dtype)


def mlp(dtype=torch.float64):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


class Failing(nn.Module):
    """A model that raises when it meets input 30.

    That is in the fourth round of three ranks with chunks of three: that of rank 1.
    """

    def __init__(self, error):
        super().__init__()
        self.net, self.error = mlp(), error

    def forward(self, x):
        if (
            self.error is not None
            and (x == Drawn().batch(30, 31, seed=0, device=x.device, dtype=x.dtype)).any()
        ):
            raise self.error
        return self.net(x)


CASES = {
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


def estimates(rank):
    """Each case shared by the ranks, and what progress was reported."""
    found = {}
    for name, options in CASES.items():
        seen = []
        model = mlp()
        got = shared(
            model, Drawn(), seed=3, progress=lambda *at, seen=seen: seen.append(at), **options
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
    found["kept"] = [first.value, second.value, alone.value]
    return found


def failing(rank, who, where):
    """One rank fails; what each raises, and after how many seconds. Each has its own buffers."""
    errors = {
        "model error": ModelError("the forward pass fails"),
        "other error": KeyError("absent"),
    }

    model = Failing(errors.get(where))
    model.net[1].running_mean += rank

    def work():
        with untouched(model), sharded(timeout=60):
            if where == "arguments" and rank == who:
                raise ValueError("no arguments")
            if where == "exits" and rank == who:
                sys.exit(3)
            fastlr.estimate(model, Drawn(), 60, batch_size=3)
            if where == "after" and rank == who:
                raise ModelError("too late")
            fastlr.estimate(mlp(), Drawn(), 10, batch_size=3)

    return timed_error(work)


def differing(rank):
    """Arguments, weights, shapes and inputs that are not the same on all ranks."""
    other, norm = mlp(), mlp()
    with torch.no_grad():
        other[3].bias[1] += 1e-12 * (rank == 1)
    norm[1].running_mean = torch.zeros(8 + rank)

    def said(model, inputs, n=20, **options):
        return error_of(lambda: shared(model, inputs, n, batch_size=5, **options))

    return [
        said(mlp(), Drawn(), 20 + rank),
        said(mlp(), Drawn(), seed=rank),
        said(mlp(), Drawn(), predictive=fastlr.Gaussian(1.0 + rank)),
        said(other, Drawn()),
        said(norm, Drawn()),
        said(mlp(), fastlr.TensorInputs(torch.ones(20, 6) * (1 + rank))),
    ]


def alone(rank):
    """Measure on rank 0 alone: plainly, which works, and in sharded(), which misses the others."""
    if rank != 0:
        return time.sleep(1.5)
    plain = fastlr.estimate(mlp(), Drawn(), 10).n
    board.PATIENCE = 0.2

    def work():
        with sharded(timeout=1.0):
            fastlr.estimate(mlp(), Drawn(), 10)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error, seconds = timed_error(work)
    return plain, error, seconds, [str(w.message) for w in caught]


def leaving(rank):
    """Rank 1 enters and measures nothing."""

    def work():
        with sharded(timeout=60):
            if rank != 1:
                fastlr.estimate(mlp(), Drawn(), 10)

    return timed_error(work)


HALVED = {  # who runs out of memory, from which input on, and the arguments
    "first round": (1, 0, {"n": 40, "batch_size": 8}),
    "last round, the other has none": (0, 32, {"n": 40, "batch_size": 8}),
    "own chunk": (1, 0, {"n": 40}),
    "target": (1, 0, {"n": 3000, "target_rel_stderr": 0.3, "min_n": 64, "batch_size": 16}),
}


def halved(rank):
    """Run out of memory on one rank only, above six inputs, twice with the same estimator."""
    found = {}
    for name, (who, first, options) in HALVED.items():
        marked = Drawn().batch(first, first + 1, seed=3, device="cpu", dtype=torch.float64)
        state = {"low": False, "sizes": []}

        def forward(m, x):
            met = first == 0 or bool((x == marked).all(1).any())  # noqa: B023
            state["low"] |= rank == who and met  # noqa: B023
            if state["low"] and len(x) > 6:  # noqa: B023
                raise torch.OutOfMemoryError("no more")
            return m.net(x)

        class Asked(Drawn):
            def batch(self, start, stop, **how):
                state["sizes"].append(stop - start)  # noqa: B023
                return super().batch(start, stop, **how)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            meter = fastlr.LocalRedundancy(Written(forward, net=mlp()), Asked(), seed=3, **options)
            with sharded(timeout=60):
                got = meter.measure()
                sizes, state["sizes"] = state["sizes"], []
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


def killed(rank):
    """Rank 1 kills itself between two estimates."""

    def work():
        with sharded(timeout=60) as members:
            fastlr.estimate(mlp(), Drawn(), 10, batch_size=3)
            members.board.timeout = 1.0
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            fastlr.estimate(mlp(), Drawn(), 10, batch_size=3)

    return timed_error(work)


def estimates_on_gpu(rank):
    """The same on GPUs, which the ranks may share, and by this rank alone."""
    device = f"cuda:{rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    model = mlp(torch.float32).to(device)
    return [
        measure(model, Drawn(), 50, batch_size=8).per_sample.tolist()
        for measure in (shared, fastlr.estimate)
    ]


def nested(rank):
    def work():
        with sharded(timeout=5), sharded(timeout=5):
            pass

    return error_of(work)


def command(rank, size, port, arguments, folder):
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


def in_groups(rank):
    """Two groups measure different models at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = mlp()
    with torch.no_grad():
        model[3].weight.mul_(1 + rank // 2)
    with sharded(groups[rank // 2], timeout=60):
        got = fastlr.estimate(model, Drawn(), 30, batch_size=4)
    return got.value, fastlr.estimate(model, Drawn(), 30, batch_size=4).value


def shared(model, inputs, *args, **options):
    """An estimate shared by the ranks."""
    with sharded(timeout=60):
        return fastlr.estimate(model, inputs, *args, **options)
