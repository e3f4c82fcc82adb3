"""What the ranks of test_parallel_runs.py (tests/experiments/training) do: runs done together."""

import os
import signal
import warnings

import torch
from continual_cases import net
from ranks import error_of
from recorders import Tape
from single_samples import Written
from torch import nn

from fastlr.distributed import all_reduce, sharded
from fastlr.errors import FastlrError, FastlrWarning
from fastlr.experiments.runs.experiment import find_driver
from fastlr.experiments.training import data_parallel
from fastlr.experiments.training.loop import TrainingLoop
from fastlr.experiments.training.options import TrainingOptions
from fastlr.experiments.training.steps import TrainingSteps


def without_dropout(num_classes=2):
    """As `continual_cases.net` without dropout: every rank count gives the same but for rounding.

    And without the bias before batch norm, whose gradient is nothing but rounding, which Adam makes
    large.
    """
    layers = [m for m in net(num_classes) if not isinstance(m, nn.Dropout)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), *layers[1:])


def without_norm(num_classes=2):
    """Nothing of a batch but the sum of its gradients."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes))


def counting(m, x):
    if m.training:
        m.seen += 1
    return m.net(x)


def strange(num_classes=2):
    """A model with a buffer, not batch norm's, that training passes change alike on every rank."""
    return Written(counting, net=without_norm(num_classes), seen=nn.Buffer(torch.zeros(())))


def sometimes_reached():
    """A layer that takes part only where the first number is positive."""

    def forward(m, x):
        return m.always(x) + (m.sometimes(x) if x[0, 0] > 0 else 0)

    layers = {name: nn.Linear(3, 2) for name in ("always", "sometimes", "never")}
    return Written(forward, **layers)


def no_noise(num_classes=2):
    """Gives no number for images of noise, which have values that others have not."""
    return Written(
        lambda m, x: m.net(x) + torch.where(x.abs().amax((1, 2, 3)) > 3.5, torch.nan, 0.0)[:, None],
        net=without_norm(num_classes),
    )


def network(kind):
    """A network of five inputs for `steps`; "usual" has a norm that no pass uses.

    "twice": a batch norm is used twice in a pass.
    """
    if kind == "twice":
        return Written(
            lambda m, x: m.last(m.norm(m.norm(m.first(x)).tanh() * 2)),
            first=nn.Linear(5, 4),
            norm=nn.BatchNorm1d(4),
            last=nn.Linear(4, 1),
        )
    if kind == "instance":
        layers = [
            nn.Linear(5, 8),
            nn.Unflatten(1, (2, 4)),
            nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        ]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 1))
    layers = [
        nn.Linear(5, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.BatchNorm1d(4, momentum=0.3),
        nn.Linear(4, 1),
    ]
    model = nn.Sequential(*layers)
    model.unused = nn.BatchNorm1d(4)
    model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))))
    return model


def averaging(num_classes=2):
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(144, num_classes))


class Squares(TrainingLoop):
    """Brings the squares of a network's outputs down by SGD."""

    def __init__(self, model, batch_size, norm_batch, momentum=0.0, **settings):
        options = TrainingOptions(
            dtype="fp32", batch_size=batch_size, norm_batch=norm_batch, **settings
        )
        super().__init__(model, torch.device("cpu"), options)
        self.optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def loss(self, *part):
        return self.model(*part).square().sum()


def run(rank, module, path, settings, changed):
    """Begin a run together, or go on with it; the error, if there was one."""
    driver = find_driver(module)

    def work():
        with sharded(timeout=60):
            if os.path.exists(f"{path}/config.json"):
                driver.resume(path, changed)
            else:
                driver.begin(path, None, settings)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastlrWarning)
        return error_of(work)


def killed(rank, module, path, settings, records):
    """As `run`; rank 1 kills itself once there are so many records."""

    def report(at):
        if rank == 1 and at.record is not None and at.done >= records:
            os.kill(os.getpid(), signal.SIGKILL)

    def work():
        with sharded(timeout=5):
            find_driver(module).begin(path, None, settings, report)

    return error_of(work)


def steps(rank, kind, captured, updates="every-part"):
    """Take steps on batches of several sizes, captured or not.

    Returned are the parameters, statistics and losses afterwards.
    """
    torch.manual_seed(3)
    model = network(kind).double().train()
    x = torch.randn(40, 5, dtype=torch.float64)
    with sharded(timeout=60):
        loop = Squares(model, 12, 3, momentum=0.9, batch_norm_updates=updates)
        loop.steps = TrainingSteps(
            loop.work, model, loop.changed_tensors, loop.device, captured, True, Tape
        )
        losses = []
        for span in [(0, 12), (12, 24), (24, 36), (36, 40), (0, 12), (20, 24)]:
            loss = loop.train_batch(span, lambda start, stop: (x[start:stop],))
            losses.append(loop.parallel.sum(loss.clone()).item())
        loop.parallel.check()
    state = {name: t.tolist() for name, t in model.state_dict().items()}
    return {"state": state, "losses": losses, "captures": loop.steps.captures}


def reduced(rank, reduce_dtype):
    """Take a float32 step; return own gradients, those of the optimiser, and what was sent."""
    torch.manual_seed(3)
    model, sent = network("usual").train(), []
    x = torch.randn(12, 5)
    with sharded(timeout=60):
        loop = Squares(model, 12, 3, reduce_dtype=reduce_dtype)
        own = {}

        def noted(t, group):
            sent.append((str(t.dtype), t.numel()))
            return all_reduce(t, group)

        def work(size, *batch):
            loss, reached = loop.work(size, *batch)
            own.update(
                {name: loop.parallel._gradients[p].clone() for name, p in model.named_parameters()}
            )
            return loss, reached

        loop.steps, data_parallel.all_reduce = work, noted
        loop.train_batch((0, 12), lambda start, stop: (x[start:stop],))
        loop.parallel.check()
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    tensors = {"own": own, "given": given, "statistics": dict(model.named_buffers())}
    lists = {key: {name: t.tolist() for name, t in named.items()} for key, named in tensors.items()}
    return {**lists, "sent": sent}


def sometimes(rank):
    """Return what becomes of a layer that one rank's samples reach in the first step, or later."""
    results = []
    for signs in (
        ([1.0, -1.0], [-1.0, 1.0]),
        ([-1.0, -1.0], [1.0, -1.0]),
        ([1.0, 1.0], [-1.0, -1.0]),
    ):
        torch.manual_seed(0)
        model = sometimes_reached()
        try:
            with sharded(timeout=60):
                loop = Squares(model, 2, 1)
                for pair in signs:
                    x = torch.tensor([[pair[rank], 2.0, 3.0]])
                    loop.train_batch((0, 2), lambda start, stop, x=x: (x,))
                loop.parallel.check()
            gradients = [p.grad.flatten().tolist() for p in model.sometimes.parameters()]
            results.append([model.never.weight.grad is None, *gradients])
        except FastlrError as error:
            results.append(f"{type(error).__name__}: {error}")
    return results
