"""Autocast on a device: its dtype, its regions, and how to switch it off."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device; None where autocast is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def in_autocast_region() -> bool:
    """Return True within a region of autocast, of any device and also where it is disabled.

    The cache of cast weights lasts until the outermost region ends.
    """
    regions = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return regions > 0


def full_precision(device: torch.device) -> AbstractContextManager:
    """Return a context without autocast.

    A backward pass has the precision of its forward pass, and norms are not for autocast to round.
    """
    return (
        torch.autocast(device.type, enabled=False)
        if torch.is_autocast_enabled(device.type)
        else nullcontext()
    )
