"""What a compiled kernel executes: instructions, basic blocks and loops of its disassembly.

``disassembly`` runs the nvdisasm that comes with Triton, which needs no GPU; ``parsed`` reads what
it prints. From Volta on the upper half of an instruction holds how the assembler scheduled it: the
cycles until the next may issue, the scoreboard that is set when its result is there, and the
scoreboards that it waits for. The bits are the same for compute capability 8.0 and 9.0; for 10.0
they are taken to be.

A loop is a natural loop: a backward branch to a block that dominates it, and all blocks from which
the branch is reached without passing that block.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

NO_SCOREBOARD = 7
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_LABEL = re.compile(r"^([.$\w]+):")
_INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s*/\* 0x[0-9a-f]+ \*/"
)
_UPPER_HALF = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\(([.$\w]+)\)")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        opcode: with its modifiers, such as ``LDG.E.128``.
        operands: as printed.
        predicate: under which it executes, such as ``!P0``; "" for always.
        line: of the source, (file, line), or None.
        stall: cycles until the next instruction of the warp may issue.
        sets: the scoreboard that is set until its result is there, or `NO_SCOREBOARD`.
        reads: the scoreboard that is set until its operands were read, or `NO_SCOREBOARD`.
        waits: the scoreboards that must be clear before it issues.
    """

    opcode: str
    operands: str = ""
    predicate: str = ""
    line: tuple[str, int] | None = None
    stall: int = 1
    sets: int = NO_SCOREBOARD
    reads: int = NO_SCOREBOARD
    waits: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]


@dataclass
class Block:
    """Instructions that are executed one after the other.

    Attributes:
        label: by which branches name it, or "".
        instructions: in order.
        next: numbers of the blocks that may follow.
        loops: numbers of the loops that it is in, the outermost first.
    """

    label: str
    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)


class Loop(NamedTuple):
    """A natural loop.

    Attributes:
        head: number of the block that the backward branches go to.
        blocks: numbers of all its blocks, the head included.
    """

    head: int
    blocks: frozenset[int]


class Code(NamedTuple):
    """A kernel's blocks in the order of their addresses, and its loops, outer before inner."""

    blocks: list[Block]
    loops: list[Loop]


def disassembly(cubin: bytes) -> str:
    """Return what nvdisasm prints of a cubin: code, lines of the source, encodings."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "--print-code", "--print-line-info", "--print-instruction-encoding"]
        return subprocess.run(
            [*command, str(path)], check=True, capture_output=True, text=True
        ).stdout


def parsed(text: str) -> Code:
    """Read the kernel in what `disassembly` returns."""
    blocks = _blocks(text)
    _link(blocks)
    loops = _loops(blocks)
    for number, loop in enumerate(loops):
        for block in loop.blocks:
            blocks[block].loops.append(number)
    return Code(blocks, loops)


def _blocks(text: str) -> list[Block]:
    """Cut the instructions into blocks: at labels and after branches."""
    blocks = [Block("")]
    line = None
    found = None
    for row in text.splitlines():
        if at := _LINE.search(row):
            line = at[1], int(at[2])
        elif label := _LABEL.match(row):
            if blocks[-1].instructions or blocks[-1].label:
                blocks.append(Block(label[1]))
            blocks[-1].label = label[1]
        elif instruction := _INSTRUCTION.search(row):
            found = instruction
        elif found and (upper := _UPPER_HALF.match(row)):
            blocks[-1].instructions.append(_decoded(found, line, int(upper[1], 16)))
            if _ends(blocks[-1].instructions[-1]):
                blocks.append(Block(""))
            found = None
    return [block for block in blocks if block.instructions]


def _decoded(found: re.Match, line: tuple[str, int] | None, upper: int) -> Instruction:
    """An instruction from its text and the upper half of its encoding."""
    control = upper >> 41
    waits = tuple(number for number in range(6) if control >> 11 + number & 1)
    _, predicate, opcode, operands = found.groups()
    return Instruction(
        opcode,
        operands,
        predicate or "",
        line,
        stall=control & 15,
        sets=control >> 5 & 7,
        reads=control >> 8 & 7,
        waits=waits,
    )


def _ends(instruction: Instruction) -> bool:
    """Whether another instruction than the next may follow."""
    return instruction.kind in ("BRA", "EXIT", "RET", "BRX", "JMP")


def _link(blocks: list[Block]) -> None:
    """Enter which blocks may follow each; a call comes back, so what is called is no follower."""
    places = {block.label: number for number, block in enumerate(blocks) if block.label}
    for number, block in enumerate(blocks):
        last = block.instructions[-1]
        target = _TARGET.search(last.operands)
        if last.kind == "BRA" and target:
            block.next.append(places[target[1]])
        always = not last.predicate and "P" not in last.operands.partition("`")[0]
        if not (_ends(last) and always) and number + 1 < len(blocks):
            block.next.append(number + 1)


def _loops(blocks: list[Block]) -> list[Loop]:
    """Find the natural loops; those of one head are one."""
    before: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for follower in block.next:
            before[follower].append(number)
    dominators = _dominators(blocks, before)
    bodies: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for head in block.next:
            if head in dominators[number]:
                bodies.setdefault(head, {head}).update(_body(head, number, before))
    found = [Loop(head, frozenset(body)) for head, body in bodies.items()]
    # A block that branches to itself alone pads the end of the code.
    real = [loop for loop in found if 0 in dominators[loop.head]]
    return sorted(real, key=lambda loop: (loop.head, -len(loop.blocks)))


def _dominators(blocks: list[Block], before: list[list[int]]) -> list[set[int]]:
    """For each block those through which every way from the first one goes."""
    everything = set(range(len(blocks)))
    found = [{0}, *(set(everything) for _ in blocks[1:])]
    reached = _reached(blocks)
    changed = True
    while changed:
        changed = False
        for number in sorted(reached - {0}):
            of_all = [found[n] for n in before[number] if n in reached]
            new = set.intersection(*of_all) | {number}
            changed |= new != found[number]
            found[number] = new
    for number in set(range(len(blocks))) - reached:
        found[number] = {number}
    return found


def _reached(blocks: list[Block]) -> set[int]:
    """Numbers of the blocks that the first one leads to."""
    reached, waiting = {0}, [0]
    while waiting:
        for follower in blocks[waiting.pop()].next:
            if follower not in reached:
                reached.add(follower)
                waiting.append(follower)
    return reached


def _body(head: int, end: int, before: list[list[int]]) -> Iterator[int]:
    """Blocks from which ``end`` is reached without passing ``head``."""
    seen, waiting = {head}, [end]
    while waiting:
        number = waiting.pop()
        if number not in seen:
            seen.add(number)
            yield number
            waiting += before[number]
