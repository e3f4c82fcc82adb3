"""How often each loop of a kernel is gone through by one program, from the arguments of its launch.

A function here is called as a kernel, and gives the trips of its loops by the name of the variable
that the source counts with; a list for several loops of one name, in the order of the code. A loop
of a disassembly is found by the line of the source of its branch back, or of the comparison that
decides it. Where programs of one launch differ, the number is their mean, and may be a fraction.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.compile_kernels import KERNELS
from bench.sass import Code, Instruction

Trips = dict[str, float | list[float]]
# A loop of compute capability 10.0 that asks whether a product is done, or memory for it free: the
# source has none there, and one trip is counted.
WAITING, ASKING = "waiting", ("SYNCS", "UTCATOMSWS")
_PREDICATE = re.compile(r"U?P\d")
_HEADER = re.compile(r"(?:for (\w+) in|while (\w+) <)")


def ceil_div(n: int, step: int) -> int:
    """The steps that ``n`` takes."""
    return -(-n // step)


def depthwise_backward_kernel(launch: Any) -> Trips:
    """The rows of gradients of the first window, then rows of places."""
    return {"y": launch.HIGH_H - launch.LOW_H, "p": launch.steps}


def draw_shapes_kernel(launch: Any) -> Trips:
    """A trip a shape."""
    return {"step": launch.COUNT}


def finish_moments_kernel(launch: Any) -> Trips:
    """Blocks of the weights, and the splits of each."""
    return {"start": ceil_div(launch.weights, launch.WEIGHTS), "part": launch.splits}


def finish_norms_kernel(launch: Any) -> Trips:
    """Blocks of the tiles' squares, then of the outputs with the tiles of each."""
    starts = [ceil_div(launch.tiles, launch.BLOCK), ceil_div(launch.outputs, launch.BLOCK)]
    return {"start": starts, "tile": launch.inner_tiles}


def fold_weights_kernel(launch: Any) -> Trips:
    """Blocks of a row of weights.

    Their sizes are in a table on the device: the mean, from the 16 bits a weight that are written.
    """
    weights = launch.bytes["folded"] / 2
    return {"begin": ceil_div(weights, launch.programs * launch.BLOCK)}


def folded_depthwise_kernel(launch: Any) -> Trips:
    """Rows of the first window, then of the output: all segments together have its height."""
    return {"y": launch.WINDOW, "row": launch.out_height / launch.segments}


def folded_pointwise_backward_kernel(launch: Any) -> Trips:
    """Tiles of the outputs if positions are few, else a split's tiles of the positions."""
    return {
        "first": ceil_div(launch.outputs, launch.OUTPUTS),
        "start": ceil_div(launch.positions, launch.POSITIONS) / launch.splits,
    }


def folded_pointwise_kernel(launch: Any) -> Trips:
    """Tiles of the inputs."""
    return {"first": ceil_div(launch.inputs, launch.INPUTS)}


def gram_norms_kernel(launch: Any) -> Trips:
    """Chunks of the inputs, then of the outputs."""
    return {"start": [ceil_div(n, launch.CHUNK) for n in (launch.inputs, launch.outputs)]}


def paint_kernel(launch: Any) -> Trips:
    """A trip a shape."""
    return {"_": launch.COUNT}


def product_norms_kernel(launch: Any) -> Trips:
    """Tiles of the rows."""
    return {"start": ceil_div(launch.rows, launch.ROWS)}


def row_norms_kernel(launch: Any) -> Trips:
    """Groups, and the blocks of the inputs and of the outputs of each."""
    starts = [ceil_div(n, launch.BLOCK) for n in (launch.inputs, launch.outputs)]
    return {"group": launch.groups, "start": starts}


def sums_kernel(launch: Any) -> Trips:
    """A split's tiles of what is summed."""
    steps = launch.outer_summed * ceil_div(launch.summed, launch.SUMMED)
    return {"step": steps / launch.splits}


def loop_names(code: Code) -> list[str]:
    """Name the variable that each loop of a disassembly counts with in the source, or `WAITING`."""
    return [_name_of(code, number) for number in range(len(code.loops))]


def _name_of(code: Code, number: int) -> str:
    head, blocks = code.loops[number]
    if len(blocks) == 1 and any(i.kind in ASKING for i in code.blocks[head].instructions):
        return WAITING
    for end in sorted(blocks, reverse=True):
        if head not in code.blocks[end].next:
            continue
        # Those of inner loops are decided by others.
        own = [b for b in sorted(blocks) if b <= end and code.blocks[b].loops[-1] == number]
        for line in _deciding([i for b in own for i in code.blocks[b].instructions]):
            header = _HEADER.search(_source_line(*line))
            if header:
                return header[1] or header[2]
    raise ValueError(f"no loop of the source is at the branch back to block {head}")


def _deciding(instructions: list[Instruction]) -> Iterator[tuple[str, int]]:
    """Yield the line of the branch at the end, then those of the comparisons that decide it.

    For compute capability 10.0 a branch may carry the line of whatever stands before it, and so may
    the second of two comparisons that are one of 64 bits.
    """
    branch = instructions[-1]
    predicate = _PREDICATE.search(branch.predicate or branch.operands.partition("`")[0])
    for instruction in reversed(instructions):
        compares = instruction.kind.endswith("SETP") and predicate is not None
        decides = compares and instruction.operands.partition(",")[0] == predicate[0]
        if instruction.line and (instruction is branch or decides):
            yield instruction.line


def _source_line(file: str, line: int) -> str:
    """Return a line of a kernel's source.

    A binary from Triton's cache names the folder in which it was first compiled, which may have
    gone; the cache goes by the source itself, so the lines are those of the file of that name here.
    """
    return linecache.getline(str(KERNELS / Path(file).name), line)


def trips(kernel: str, names: list[str], arguments: dict[str, Any]) -> list[float]:
    """Return how often a program goes through each of its loops.

    Args:
        kernel: its name.
        names: of the loops, as `loop_names` gives them.
        arguments: of the launch by name, with ``programs``, and ``bytes`` of its tensors by name.

    Raises:
        KeyError: a loop has no function here that knows it.
    """
    if not names:
        return []
    of_kernel = globals().get(kernel)
    by_name = of_kernel(SimpleNamespace(**arguments)) if of_kernel else {}
    by_name = {**by_name, WAITING: 1.0}
    found = []
    for number, name in enumerate(names):
        if name not in by_name:
            raise KeyError(f"{kernel} has a loop over {name}: enter its trips in bench/trips.py")
        value = by_name[name]
        if isinstance(value, list):
            value = value[names[:number].count(name)]
        found.append(value)
    return found
