"""What the ranks of tests/test_parallel_runs.py do: runs that several processes do together."""

from __future__ import annotations

import importlib
import os
import signal
import warnings
from typing import Any

import torch
from continual_cases import net
from recorders import Tape
from torch import Tensor, nn

from fastlr.distributed import sharded
from fastlr.drivers.launch import Driver
from fastlr.drivers.parallel import Parallel
from fastlr.drivers.steps import Steps
from fastlr.errors import FastlrError, FastlrWarning


def without_dropout(num_classes: int = 2) -> nn.Module:
    """As `continual_cases.net` without dropout: every rank count gives the same but for rounding.

    And without the bias before batch norm, whose gradient is nothing but rounding, which Adam makes large.
    """
    layers = [m for m in net(num_classes) if not isinstance(m, nn.Dropout)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), *layers[1:])


def without_norm(num_classes: int = 2) -> nn.Module:
    """Nothing of a batch but the sum of its gradients."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes))


class Strange(nn.Module):
    """A buffer that every training pass changes, on every rank alike, which is not that of a batch norm."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.net = without_norm(num_classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.net(x)


class Sometimes(nn.Module):
    """A layer that takes part only where the first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + (self.sometimes(x) if x[0, 0] > 0 else 0)


class NoNoise(nn.Module):
    """Gives no number for images of noise, which have values that others have not."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.net = without_norm(num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + torch.where(x.abs().amax((1, 2, 3)) > 3.5, torch.nan, 0.0)[:, None]


class Twice(nn.Module):
    """A batch norm that is used twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.norm(self.first(x)).tanh() * 2))


def network(kind: str) -> nn.Module:
    """A network of five inputs for `steps`; "usual" has a norm that no pass uses."""
    if kind == "twice":
        return Twice()
    if kind == "instance":
        layers = [nn.Linear(5, 8), nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 1))
    layers = [nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4, momentum=0.3), nn.Linear(4, 1)]
    model = nn.Sequential(*layers)
    model.unused = nn.BatchNorm1d(4)
    model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))))  # type: ignore[method-assign]
    return model


def averaging(num_classes: int = 2) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(144, num_classes))


def run(rank: int, module: str, path: str, settings: dict[str, Any], changed: dict[str, Any]) -> str:
    """Begin a run together, or go on with it; the error, if there was one."""
    driver: Driver = importlib.import_module(module).DRIVER
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastlrWarning)
        try:
            with sharded(timeout=60):
                if os.path.exists(f"{path}/config.json"):
                    driver.resume(path, changed)
                else:
                    driver.begin(path, None, settings)
        except FastlrError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def killed(rank: int, module: str, path: str, settings: dict[str, Any], records: int) -> str:
    """As `run`; rank 1 kills itself once there are so many records."""

    def report(at: Any) -> None:
        if rank == 1 and at.record is not None and at.done >= records:
            os.kill(os.getpid(), signal.SIGKILL)

    driver: Driver = importlib.import_module(module).DRIVER
    try:
        with sharded(timeout=5):
            driver.begin(path, None, settings, report)
    except FastlrError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def steps(rank: int, kind: str, captured: bool) -> dict[str, Any]:
    """Steps on batches of several sizes, captured or not; parameters, statistics and losses afterwards."""
    torch.manual_seed(3)
    model = network(kind).double().train()
    x = torch.randn(40, 5, dtype=torch.float64)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with sharded(timeout=60):
        parallel = Parallel(model, 12, 3)

        def gradients(whole: int, part: Tensor) -> Tensor:
            optimiser.zero_grad(set_to_none=True)
            total = torch.zeros((), dtype=torch.float64)
            for piece in part.split(parallel.own_parts(whole)):
                loss = model(piece).square().sum()
                (loss / whole).backward()
                total = total + loss.detach()
            return total

        work = parallel.work(gradients, optimiser.step)
        if captured:
            changed = [*model.parameters(), *model.buffers()]
            work = Steps(work, model, lambda: changed, torch.device("cpu"), True, True, Tape)
        losses = []
        for start, stop in [(0, 12), (12, 24), (24, 36), (36, 40), (0, 12), (20, 24)]:
            loss = parallel.step(work, optimiser.step, (start, stop), lambda a, b: (x[a:b],))
            losses.append(parallel.sum(loss.clone()).item())
        parallel.check()
    state = {name: t.tolist() for name, t in model.state_dict().items()}
    return {"state": state, "losses": losses, "captures": work.captures if captured else None}


def sometimes(rank: int) -> list[Any]:
    """What becomes of a layer that only one rank's samples reach in the first step, and of one that is reached later."""
    found: list[Any] = []
    for signs in ([1.0, -1.0], [-1.0, 1.0]), ([-1.0, -1.0], [1.0, -1.0]), ([1.0, 1.0], [-1.0, -1.0]):
        torch.manual_seed(0)
        model = Sometimes()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with sharded(timeout=60):
                parallel = Parallel(model, 2, 1)

                def gradients(size: int, x: Tensor, model: Any = model, optimiser: Any = optimiser) -> Tensor:
                    optimiser.zero_grad(set_to_none=True)
                    loss = model(x).square().sum()
                    (loss / size).backward()
                    return loss.detach().double()

                for pair in signs:
                    x = torch.tensor([[pair[rank], 2.0, 3.0]])
                    parallel.step(parallel.work(gradients, optimiser.step), optimiser.step, (0, 2), lambda a, b, x=x: (x,))
                parallel.check()
            found.append([model.never.weight.grad is None, *(p.grad.flatten().tolist() for p in model.sometimes.parameters())])
        except FastlrError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
