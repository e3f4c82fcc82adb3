"""Time on a device."""

from __future__ import annotations

import time

import torch


def clock(device: torch.device) -> float:
    """Return the time in seconds once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
