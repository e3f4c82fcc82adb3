"""Contenders of the benchmark that do little: right, wrong, failing, killed.

They are made in a process of their own.
"""

from __future__ import annotations

import os
import time

import torch

from bench.paired import Work, Wrong


def right(seconds: float = 0.02) -> Work:
    def run() -> None:
        torch.ones(64 << 20, dtype=torch.uint8)
        time.sleep(seconds)

    return Work(lambda: time.sleep(0.01), run, lambda: {"deviation": 0.0, "notes": ["a note"]})


def wrong() -> Work:
    def check() -> dict:
        raise Wrong("3.5 times the truth (conv1.weight 15 times)")

    return Work(lambda: None, lambda: None, check)


def fails() -> Work:
    raise RuntimeError("no such layer\nand more")


def killed() -> Work:
    return Work(lambda: None, lambda: os.kill(os.getpid(), 9))
