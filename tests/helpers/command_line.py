"""The command line in tests: networks that it loads from a file, and ranks run as by torchrun."""

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
