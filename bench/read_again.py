"""Bytes that a launch reads more than once: what programs share comes again, from the second cache.

`AGAIN` has a kernel's bytes by the arguments of its launch and the bytes of its tensors: gradients
that are read once for each tile of the inputs, inputs once for each tile of the outputs, weights
once for each program, rows and columns that neighbouring programs share. Kernels that are not in it
read nothing that another program reads, or little.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def _pointwise(launch: Any) -> float:
    """Inputs once a tile of the outputs, weights once a tile of the positions."""
    of_weight = launch.programs / launch.output_tiles - 1
    return (launch.output_tiles - 1) * launch.bytes["x"] + of_weight * launch.bytes["weight"]


def _pointwise_backward(launch: Any) -> float:
    """Gradients once a tile of the inputs, both weights once a sample and a split."""
    of_output = launch.bytes["grad"]
    weights = 0 if launch.SPLIT else launch.bytes["weight"]
    if launch.ACT != "none":
        of_output += launch.bytes["kept"]
    if launch.WANT_INPUT:
        weights += launch.bytes["folded"]
    of_weights = launch.programs / launch.input_tiles - 1
    return (launch.input_tiles - 1) * of_output + of_weights * weights


def _depthwise(launch: Any) -> float:
    """Rows between segments, columns between strips, and the taps for each program."""
    rows = (launch.KERNEL_H - launch.STRIDE_H) / (launch.steps * launch.STRIDE_H)
    columns = (launch.KERNEL_W - launch.STRIDE_W) / (launch.COLUMNS * launch.STRIDE_W)
    shared = rows * (launch.segments > 1) + columns * (launch.strips > 1)
    of_weight = launch.programs / launch.channel_tiles - 1
    return shared * launch.bytes["x"] + of_weight * launch.bytes["weight"]


def _depthwise_backward(launch: Any) -> float:
    """Columns of the gradients between strips, rows between segments, the taps for each program."""
    of_output = launch.bytes["grad"]
    if launch.ACT != "none":
        of_output += launch.bytes["kept"]
    columns = (launch.HIGH_W - launch.LOW_W - launch.RUN) / launch.COLUMNS * (launch.strips > 1)
    rows = (launch.HIGH_H - launch.LOW_H - 1) / launch.steps * (launch.segments > 1)
    taps = launch.bytes["folded"] if launch.WANT_INPUT else 0
    of_taps = launch.programs / launch.channel_tiles - 1
    return (columns + rows) * of_output + of_taps * taps


def _product_norms(launch: Any) -> float:
    """Gradients once a tile of the weight's columns, inputs once a tile of its rows and a tap."""
    taps = 1 if launch.X_PLAIN or launch.PACKED else launch.taps
    of_inputs = launch.output_tiles * taps - 1
    return (launch.column_tiles - 1) * launch.bytes["g"] + of_inputs * launch.bytes["x"]


def _gram_norms(launch: Any) -> float:
    """Both sides twice for each pair of blocks of rows."""
    return launch.blocks * (launch.bytes["a"] + launch.bytes["g"])


AGAIN: dict[str, Callable[[Any], float]] = {
    "depthwise_backward_kernel": _depthwise_backward,
    "folded_depthwise_kernel": _depthwise,
    "folded_pointwise_backward_kernel": _pointwise_backward,
    "folded_pointwise_kernel": _pointwise,
    "gram_norms_kernel": _gram_norms,
    "product_norms_kernel": _product_norms,
}


def read_again(kernel: str, arguments: dict[str, Any]) -> float:
    """Return the bytes that a launch reads again.

    Args:
        kernel: its name.
        arguments: of the launch by name, with ``programs``, and ``bytes`` of its tensors by name.
    """
    return AGAIN[kernel](SimpleNamespace(**arguments)) if kernel in AGAIN else 0.0
