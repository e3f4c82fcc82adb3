"""The command line in tests: networks from a file, ranks run as by torchrun, and a terminal."""

import os
import pty
import signal
import sys
from contextlib import suppress

import rank_estimates as work
import torch.distributed as dist
from ranks import good, run_ranks

NETS = """
import torch
from torch import nn

import fastlr


def net(num_classes=3):
    features = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(4, num_classes))


class MeanOfBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        z = self.net(x)
        return z - z.mean(0, keepdim=True) / 2


def interacting():
    return MeanOfBatch()


def broken():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise RuntimeError("the forward pass\\nfails")

    return Broken()


def regression():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))


def small_noise():
    return fastlr.NoiseImages(size=(3, 12, 12))
"""


def as_torchrun(ranks, folder, arguments):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return good(
        run_ranks(ranks, work.command, ranks, store.port, arguments, str(folder), backend=None)
    )


def interrupted_at(shown, arguments):
    """Run a command at a terminal, and press Ctrl-C once it shows something.

    Returns:
        Its exit code, and all that it printed.
    """
    return good(run_ranks(1, _interrupted_at, shown, arguments, backend=None))[0]


def _interrupted_at(rank, shown, arguments):
    process, terminal = pty.fork()
    if not process:
        _be_fastlr(arguments)
    text = b""
    with suppress(OSError):  # Linux's way to say that the other end is closed
        while part := os.read(terminal, 4096):
            if shown in text + part and shown not in text:
                os.write(terminal, b"\x03")
            text += part
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text


def _be_fastlr(arguments):
    """Run the command line, and end with its exit code."""
    from fastlr.__main__ import run

    try:
        # ignored, and inherited so, where the tests run in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["fastlr", *arguments]
        os._exit(run())
    finally:
        os._exit(1)
