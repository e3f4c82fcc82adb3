"""Contenders of the benchmark that do little: right, wrong, failing, killed.

They are made in a process of their own.
"""

import os
import time

import torch

from bench.paired import Work, Wrong


def nothing():
    pass


def right(seconds=0.02):
    def run():
        torch.ones(64 << 20, dtype=torch.uint8)
        time.sleep(seconds)

    def check():
        return {"deviation": 0.0, "notes": ["a note"]}

    return Work(lambda: time.sleep(0.01), run, check)


def wrong():
    def check():
        raise Wrong("3.5 times the truth (conv1.weight 15 times)")

    return Work(nothing, nothing, check)


def fails():
    raise RuntimeError("no such layer\nand more")


def killed():
    return Work(nothing, lambda: os.kill(os.getpid(), 9))
