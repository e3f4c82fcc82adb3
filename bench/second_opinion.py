"""What cuxray says of kernels, beside what is counted here.

``pip install cuxray``, then ``python -m bench.second_opinion mobilenet_v3_large``. For every
variant that a chunk launches both say how many warps a multiprocessor holds, and of each loop how
many instructions a trip has and how many cycles its stalls take. Printed is where they differ by
more than 1.5. Only cuxray knows conflicts of banks of shared memory: printed are the kernels that
have some in a loop, and the most cycles that one access takes for one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton

from bench import compile_kernels, predicted, traffic
from bench.gpu_model import GPUS

APART = 1.5


class Opinion(NamedTuple):
    """What is said of a variant.

    Attributes:
        resident: warps on a multiprocessor.
        loops: of each, by the label that it begins with, instructions and cycles of stalls a trip.
    """

    resident: int
    loops: dict[str, tuple[int, int]]


def own(variant: predicted.Variant, arch: int) -> Opinion:
    """What is counted here."""
    usage, loops = variant.usage, {}
    for head, members in variant.code.loops:
        inside = [i for n in sorted(members) for i in variant.code.blocks[n].instructions]
        stalls = sum(max(1, i.stall) for i in inside)
        loops[variant.code.blocks[head].label] = len(inside), stalls
    resident = compile_kernels.resident_warps(
        arch, usage["warps"], usage["registers"], usage["shared"]
    )
    return Opinion(resident, loops)


def cuxrays(cubin: bytes, usage: dict[str, Any], arch: int) -> tuple[Opinion, list[int]]:
    """What cuxray says, and the cycles that each access of shared memory in a loop takes."""
    from cuxray import occupancy, toolchain
    from cuxray.analyze.access import analyze_accesses
    from cuxray.analyze.schedule import loop_schedule
    from cuxray.archspec import lookup
    from cuxray.parse import cfgdot, ctrl
    from cuxray.parse import sass as cuxray_sass

    tools = toolchain.resolve(allow_fetch=False, quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = tools.run("nvdisasm", ["-c", "-gi", str(path)])
        graph = tools.run("nvdisasm", ["-cfg", str(path)])
        schedule = tools.run("cuobjdump", ["-sass", str(path)])
    ((name, function),) = cuxray_sass.parse_gi(text).functions.items()
    threads = 32 * usage["warps"]
    blocks = cfgdot.parse(graph)[name]
    loops = {}
    for row in loop_schedule(function, blocks, ctrl.parse_sass_controls(schedule)[name]):
        loops[row["header"]] = row["instructions"], row["est_issue_stall_cycles_per_iter"]
    fits = occupancy.compute(
        lookup(f"sm_{arch}"), usage["registers"], threads, smem_dynamic=usage["shared"]
    )
    ways = []
    for access in analyze_accesses(function, (threads, 1, 1), blocks.loop_depth)["accesses"]:
        if access["space"] == "shared" and access["loop_depth"]:
            ways.append(access["conflict_ways"])
    return Opinion(fits.active_warps, loops), ways


def apart(ours: Opinion, theirs: Opinion) -> Iterator[str]:
    """Say where two opinions differ by more than `APART`."""
    pairs = {"resident warps": (ours.resident, theirs.resident)}
    for label in ours.loops.keys() | theirs.loops.keys():
        both = ours.loops.get(label, (0, 0)), theirs.loops.get(label, (0, 0))
        for what, pair in zip(("instructions", "stalls"), zip(*both, strict=True), strict=True):
            pairs[f"{what} of {label}"] = pair
    for what, pair in pairs.items():
        if max(pair) > APART * min(pair):
            yield f"{what}: {pair[0]} here, {pair[1]} cuxray's"


def main() -> None:
    """Compare what a network launches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="a torchvision or timm name")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    given = parser.parse_args()
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    os.environ["CUXRAY_TOOLCHAIN"] = str(tools)
    arch = GPUS[given.gpu].architecture
    made = traffic.of_network(given.network).made
    cases = {launch.case[0]: launch.case for launch in made if launch.case}
    for label, case in cases.items():
        binary = compile_kernels.compiled(case, arch)
        variant = predicted.variant_of(case, arch, binary)
        theirs, ways = cuxrays(binary.asm["cubin"], variant.usage, arch)
        ours = own(variant, arch)
        found = [*apart(ours, theirs)]
        if ways and max(ways) > 1:
            found.append(f"an access of shared memory takes {max(ways)} cycles for one")
        print(f"{label}: {len(ours.loops)} loops; {'; '.join(found) or 'alike'}")


if __name__ == "__main__":
    main()
