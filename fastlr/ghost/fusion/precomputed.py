"""What a rule has computed for a node of ours before the backward pass reaches that node."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor


class Precomputed(NamedTuple):
    """What a rule has computed for a node of ours before the backward pass reaches it.

    Attributes:
        at_outputs: the gradients at the node's outputs of which it was computed.
        found: what was.
    """

    at_outputs: Sequence[Tensor | None]
    found: Any


def take_precomputed(node: Any, gradients: Sequence[Tensor | None]) -> Any:
    """Return, once, what a rule has computed of these very gradients; None if it has not."""
    ready, node.ready = node.ready, None
    if ready is None or not all(map(is_, ready.at_outputs, gradients)):
        return None
    return ready.found
