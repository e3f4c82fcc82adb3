"""How much memory there is, and how much of it is free."""

from __future__ import annotations

import os

import torch


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that can be had on the device now.

    The allocator's cache is included; on the CPU it is the available RAM.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return total_bytes(device) // 2


def total_bytes(device: torch.device) -> int:
    """Return the bytes of the device's memory, free or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 << 30
