"""Work done by several threads at once, and small models for it."""

import sys
import threading
from contextlib import contextmanager

import torch
from torch import nn


class Recurrent(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        """Logits of the last step."""
        return self.head(self.layer(x)[0][:, -1])


def small_models():
    """Name -> model in train mode, shape of a sample."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return {
        "mlp": (
            nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3)
            ),
            (8,),
        ),
        "convolution": (
            nn.Sequential(
                nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)
            ),
            (3, 6, 6),
        ),
        "transformer": (nn.Sequential(encoder, nn.Flatten(), nn.Linear(40, 3)), (5, 8)),
        "recurrent": (Recurrent(), (6, 4)),
        "weight norm": (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 2)),
            (4,),
        ),
    }


def together(*work, timeout=120.0):
    """Return the results of functions that threads call at once, in their order.

    The first error of them is raised.
    """
    results = [None] * len(work)
    errors = []
    start = threading.Barrier(len(work))

    def run(place):
        try:
            start.wait()
            results[place] = work[place]()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(work))
    ]
    with switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "threads wait for ever"
    for error in errors:
        raise error
    return results


@contextmanager
def switching_often():
    """Let Python switch between threads fifty times as often as it does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def meanwhile(work):
    """Let another thread do work again and again within this context; yields its errors."""
    stop = threading.Event()
    begun = threading.Event()
    errors = list[BaseException]()

    def run():
        while not stop.is_set():
            try:
                work()
            except BaseException as error:
                errors.append(error)
            begun.set()

    thread = threading.Thread(target=run, daemon=True)
    with switching_often():
        thread.start()
        begun.wait()
        try:
            yield errors
        finally:
            stop.set()
            thread.join()
