"""What one program of a kernel does: instructions weighed by the trips of their loops, cycles.

Counts are of the disassembly. A block is executed as often as its loops are gone through, whatever
the conditions within; blocks that only a loop of no trips would lead to, and functions that are
called (64-bit division, slow ways of rare values), are left out. The cycles are those of a warp
that has a multiprocessor to itself: the stalls that the assembler wrote into the code, and at each
scoreboard that is waited for the rest of the latency of what sets it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.gpu_model import BARRIER, LATENCIES, LOADS, MATRIX_START, OTHER
from bench.sass import NO_SCOREBOARD, Block, Code, Instruction

# Kinds that multiply, add or look up functions of floating-point data. Integers, conversions,
# comparisons, selections, moves, addresses, loads and stores do not compute.
COMPUTING = (
    *("FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2", "DFMA", "DMUL", "DADD", "MUFU"),
    *("HMMA", "HGMMA", "IMMA", "UTCHMMA"),
)
_BYTES = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_GROUPS = "groups of asynchronous copies", "groups of asynchronous products"


class Counts(NamedTuple):
    """What a warp of a program does.

    Attributes:
        instructions: executed.
        computing: those of them that compute.
        barriers: of the whole program that it waits at.
        loaded: bytes that a thread asks of global memory.
        stored: bytes that a thread writes there.
    """

    instructions: float
    computing: float
    barriers: float
    loaded: float
    stored: float


class Alone(NamedTuple):
    """A warp that has a multiprocessor to itself.

    Attributes:
        cycles: that it takes.
        in_flight: most bytes that a thread has asked of memory when it waits for some of them.
    """

    cycles: float
    in_flight: int


def counts(code: Code, trips: list[float]) -> Counts:
    """Count what a warp does that goes ``trips`` times through each of the loops."""
    total = dict.fromkeys(Counts._fields, 0.0)
    for number, times in _often(code, trips).items():
        for instruction in code.blocks[number].instructions:
            kind = instruction.kind
            total["instructions"] += times
            total["computing"] += times * (kind in COMPUTING)
            total["barriers"] += times * (kind == "BAR")
            total["loaded"] += times * accessed(instruction) * (kind in LOADS)
            total["stored"] += times * accessed(instruction) * (kind == "STG")
    return Counts(**total)


def alone(code: Code, trips: list[float], load_latency: float) -> Alone:
    """Follow a warp through its program, with so many cycles until a load is there."""
    warp = _Warp(load_latency)
    cycles = _cycles(code, trips, list(_often(code, trips)), 0, warp)
    return Alone(cycles, warp.in_flight)


def _often(code: Code, trips: list[float]) -> dict[int, float]:
    """How often each block is executed that is executed at all."""
    left_out = _without_trips(code, trips)
    often = {n: _times(block, trips) for n, block in enumerate(code.blocks) if n not in left_out}
    return {number: times for number, times in often.items() if times}


def unrolled(code: Code, names: list[str], trips: list[float]) -> list[float]:
    """Share the trips of a loop between the copies of different width that the assembler made.

    Copies are in one loop, or in none, and are told by their loads: one with four times as many
    does four trips at once, and is gone through as often as four fit.
    """
    shared = list(trips)
    groups = defaultdict(list)
    for number, loop in enumerate(code.loops):
        outer = tuple(n for n in code.blocks[loop.head].loops if n != number)
        groups[outer, names[number], _line_of(code, number)].append(number)
    for numbers in groups.values():
        loads = {number: max(1, _loads(code, number)) for number in numbers}
        least = min(loads.values())
        if len(set(loads.values())) > 1:
            rest = trips[numbers[0]]
            for number in sorted(numbers, key=lambda n: -loads[n]):
                width = loads[number] / least
                shared[number] = rest // width
                rest -= shared[number] * width
    return shared


def _line_of(code: Code, number: int) -> tuple[str, int] | None:
    """The line of the source that a loop's branch back is of."""
    head, blocks = code.loops[number]
    ends = [block for block in sorted(blocks) if head in code.blocks[block].next]
    return code.blocks[ends[-1]].instructions[-1].line


def _loads(code: Code, number: int) -> int:
    """Loads from memory in a loop."""
    found = 0
    for block in code.loops[number].blocks:
        found += sum(i.kind in LOADS for i in code.blocks[block].instructions)
    return found


def _times(block: Block, trips: list[float]) -> float:
    """How often a block is executed."""
    product = 1.0
    for loop in block.loops:
        product *= trips[loop]
    return product


def _reachable(code: Code, start: int) -> set[int]:
    """Blocks that one leads to, itself among them."""
    found, waiting = {start}, [start]
    while waiting:
        for follower in code.blocks[waiting.pop()].next:
            if follower not in found:
                found.add(follower)
                waiting.append(follower)
    return found


def _without_trips(code: Code, trips: list[float]) -> set[int]:
    """Blocks that are not executed: beside a loop that has trips, or reached by a call alone."""
    leads_to = [_reachable(code, number) for number in range(len(code.blocks))]
    left_out = set(range(len(code.blocks))) - leads_to[0]
    for number, loop in enumerate(code.loops):
        outer = set(code.blocks[loop.head].loops) - {number}
        for block in range(len(code.blocks)):
            inside = outer <= set(code.blocks[block].loops)
            beside = loop.head not in leads_to[block] and block not in leads_to[loop.head]
            if trips[number] >= 1 and inside and beside:
                left_out.add(block)
    return left_out


@dataclass
class _Warp:
    """A warp on its way: the cycle it is at, and what it has asked for.

    Attributes:
        load_latency: cycles until what is asked of memory is there.
        now: cycle.
        ready: by scoreboard, when what sets it is there.
        asked: by scoreboard, bytes a thread asked of memory that were not waited for.
        group: when the asynchronous copies, or products, of the group under way are done.
        group_bytes: of its copies.
        in_flight: most bytes asked for when first waited for.
    """

    load_latency: float
    now: float = 0.0
    ready: dict[object, list[float]] = field(default_factory=lambda: defaultdict(list))
    asked: dict[object, list[int]] = field(default_factory=lambda: defaultdict(list))
    group: float = 0.0
    group_bytes: int = 0
    in_flight: int = 0

    def wait(self, scoreboard: object, but: int = 0) -> None:
        """Go on when what sets a scoreboard is there, but for the last ``but`` of it."""
        ready, asked = self.ready[scoreboard], self.asked[scoreboard]
        awaited = len(ready) - but
        if awaited <= 0:
            return
        if any(asked[:awaited]):
            everything = sum(map(sum, self.asked.values())) + self.group_bytes
            self.in_flight = max(self.in_flight, everything)
        self.now = max(self.now, *ready[:awaited])
        del ready[:awaited], asked[:awaited]

    def ask(self, scoreboard: object, ready: float, asked: int) -> None:
        """Enter what will set a scoreboard."""
        self.ready[scoreboard].append(ready)
        self.asked[scoreboard].append(asked)

    def execute(self, instruction: Instruction) -> None:
        """Issue one instruction, and go on to when the next may."""
        for scoreboard in instruction.waits:
            self.wait(scoreboard)
        kind = instruction.kind
        asked = accessed(instruction) if kind in LOADS else 0
        done = self.now + (self.load_latency if asked else LATENCIES.get(kind, OTHER))
        if kind == "LDGSTS":
            self.group = max(self.group, done)
            self.group_bytes += asked
        elif kind == "LDGDEPBAR":
            self.ask(_GROUPS[0], self.group, self.group_bytes)
            self.group_bytes = 0
        elif kind == "HGMMA":
            columns = re.search(r"64x(\d+)x", instruction.opcode)
            work = int(columns[1]) / 2 if columns else 0.0
            self.group = max(self.group, self.now) + work
            self.ready[_GROUPS[1]] = [self.group + MATRIX_START]
            self.asked[_GROUPS[1]] = [0]
        elif kind in ("DEPBAR", "WARPGROUP") and "DEPBAR" in instruction.opcode:
            which = _GROUPS[kind == "WARPGROUP"]
            self.wait(which, but=int(instruction.operands.rpartition("0x")[2] or "0", 16))
        elif kind == "BAR":
            self.now += BARRIER
        if instruction.sets != NO_SCOREBOARD and kind != "LDGSTS":
            self.ask(instruction.sets, done, asked)
        if instruction.reads != NO_SCOREBOARD:
            self.ask(instruction.reads, self.now + OTHER, 0)
        self.now += max(1, instruction.stall)


def accessed(instruction: Instruction) -> int:
    """Bytes that a thread moves with a load or a store."""
    widths = [_BYTES[part] for part in instruction.opcode.split(".") if part in _BYTES]
    return widths[-1] if widths else 4


def _cycles(code: Code, trips: list[float], executed: list[int], depth: int, warp: _Warp) -> float:
    """Cycles of a warp through blocks in order; loops at ``depth`` are gone through twice.

    All trips of a loop after the first take as long as the second.
    """
    total, done = 0.0, set()
    for number in executed:
        loops = code.blocks[number].loops
        if number in done:
            continue
        if len(loops) <= depth:
            start = warp.now
            for instruction in code.blocks[number].instructions:
                warp.execute(instruction)
            total += warp.now - start
            continue
        loop = loops[depth]
        inside = [n for n in executed if n in code.loops[loop].blocks]
        first = _cycles(code, trips, inside, depth + 1, warp)
        again = _cycles(code, trips, inside, depth + 1, warp)
        total += min(trips[loop], 1.0) * first + max(trips[loop] - 1.0, 0.0) * again
        done.update(inside)
    return total
