"""Block sizes of kernels by measurement on this GPU: ``python -m bench.tune [NETWORK ...]``.

One planned chunk of each network (bf16, channels_last) gives the shapes that its kernels' rules are
asked for (127 for the two networks of the default). For each of them the rule's block sizes and
those around it, at most eight in all, are compiled side by side, and timed one after the other.
Those that are right (against the rule's own) and faster by `GAIN` go into ``fastlr/ops/tuned.json``
under this architecture, which the kernels read: commit it. ``--table FILE`` names another table,
for `bench.launch_times`. The table is written after every shape, so that a killed run keeps what it
has found. Exits with 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.progress import track
from torch import Tensor

import fastlr
from bench.cases import calibrate, image_network
from fastlr import ops
from fastlr.estimator.compilation import side_by_side
from fastlr.files import write_text
from fastlr.ops import dispatch, tuning
from fastlr.ops.block import changed

CONFIGURATIONS = 8  # of a shape, the rule's among them
GAIN = 0.05  # the part of the time that a change must save
MOST_CALLS = 3  # of one shape that are timed
ALLOWED = {
    "num_warps": (1, 8),
    "num_stages": (1, 4),
    "places": (1, 256),
    "run": (1, 8),
    "channels": (1, 256),
}  # else from 16 on
# Shape -> calls of ops in which its rule was asked: (op, arguments).
Calls = dict[str, list[tuple[str, tuple]]]


class Asked(NamedTuple):
    """One question to a rule: the block sizes that it gave, and which of them may differ.

    The kernel may have other values of those that are ``free``.
    """

    tile: Any
    free: tuple[str, ...]


@contextmanager
def noting() -> Iterator[dict[str, Asked]]:
    """Note what rules are asked inside."""
    asked = dict[str, Asked]()

    def note(key: str, tile: Any, free: tuple[str, ...]) -> dict[str, int]:
        asked[key] = Asked(tile, free)
        return {}

    with patch.object(tuning, "observer", note):
        yield asked


def forcing(key: str, fields: dict[str, int]) -> Any:
    """Give these fields for one rule and its arguments, and the rules' own for all others."""
    return patch.object(tuning, "observer", lambda asked, *_: fields if asked == key else {})


def candidates(asked: Asked) -> list[dict[str, int]]:
    """Return changes of the rule's block sizes to try, none first.

    Then each free field is halved or doubled (num_stages changes by one, a flag is switched), then
    two of them in turn.
    """
    tile, found = asked.tile, [{}]
    for field in asked.free:
        found += [{field: other} for other in _others(field, getattr(tile, field))]
    for i, first in enumerate(found[1:], 1):
        found += [
            first | second
            for second in found[i + 1 :]
            if len(second) == 1 and not first.keys() & second
        ]
    return found[:CONFIGURATIONS]


def _others(field: str, value: int) -> list[int]:
    """Return the values of a field to try in place of a rule's."""
    if isinstance(value, bool):
        return [not value]
    least, most = ALLOWED.get(field, (16, 256))
    others = (value + 1, value - 1) if field == "num_stages" else (value * 2, value // 2)
    return [other for other in others if least <= other <= most]


def choose(
    asked: dict[str, Asked],
    clock: Callable[[str, dict[str, int]], float | None],
    enter: Callable[[str, dict[str, int]], None] | None = None,
) -> dict[str, dict]:
    """Return, by shape, the fields of the fastest block sizes where they save more than `GAIN`.

    Args:
        asked: the rules' answers.
        clock: of a shape and its changed fields: seconds, or None where they do not compile or give
            other results.
        enter: function called after every shape with its fields, empty for the rule's own.
    """
    table = {}
    for key in track(sorted(asked), "shapes"):
        (own, _), *others = [(clock(key, fields), fields) for fields in candidates(asked[key])]
        right = [(time, fields) for time, fields in others if time is not None]
        if own is not None and right:
            best, fields = min(right, key=lambda found: found[0])
            if best < (1 - GAIN) * own:
                table[key] = fields
        if enter is not None:
            enter(key, table.get(key, {}))
    return table


def write_entry(path: Path, architecture: str, key: str, fields: dict[str, int]) -> None:
    """Enter a shape's fields into a table on disk, whole or not at all; without fields remove it.

    A table that does not exist begins as fastlr's own.
    """
    table = copy.deepcopy(tuning.table())
    if path.exists():
        table = json.loads(path.read_text(encoding="utf-8"))
    entries = table.setdefault(architecture, {})
    entries.pop(key, None)
    if fields:
        entries[key] = fields
    table[architecture] = dict(sorted(entries.items()))
    write_text(path, json.dumps(dict(sorted(table.items())), indent=1) + "\n")


@contextmanager
def recording(asked: dict[str, Asked], calls: Calls) -> Iterator[None]:
    """Enter what rules are asked by the calls of ops within, also where plain torch serves."""
    from fastlr.kernels import launching

    by_kernel = dispatch._by_kernel

    def noted(name: str, args: tuple, checked: bool) -> Any:
        with noting() as here, launching.noting(lambda *launch: None):
            ops.get(name, "triton")(*args)
        asked.update(here)
        for key in here:
            if len(calls.setdefault(key, [])) < MOST_CALLS:
                detached = changed(lambda a, _: a.detach() if isinstance(a, Tensor) else a, args)
                calls[key].append((name, tuple(detached)))
        return by_kernel(name, args, checked)

    with patch.object(dispatch, "_by_kernel", noted):
        yield


def recorded(networks: list[str], batch: int) -> tuple[dict[str, Asked], Calls]:
    """Return what rules are asked in a chunk of each network, and the calls that ask them."""
    asked, calls = dict[str, Asked](), Calls()
    for network in networks:
        torch.manual_seed(0)
        images = fastlr.ShapeImages((3, 224, 224), channels_last=True)
        model: Any = image_network(network, 224)
        model = model.to("cuda", memory_format=torch.channels_last)
        calibrate(model, images.batch(0, 8, seed=1, device="cuda"))
        estimator = fastlr.LocalRedundancy(
            model, images, batch, batch_size=batch, dtype=torch.bfloat16, progress=False
        )
        estimator.measure()
        # No tensors of a graph's.
        replays = estimator.chunks.replays
        with recording(asked, calls), patch.object(replays, "recorder", None):
            estimator.measure()
    return asked, calls


def results(op: str, args: tuple) -> list[Tensor]:
    """Return the tensors that an op's kernel gives, or plain torch where the kernel declines."""
    found = ops.get(op, "triton")(*args)
    if found is NotImplemented:
        found = ops.get(op, "torch")(*args)
    several = found if isinstance(found, tuple) else (found,)
    return [t for t in several if isinstance(t, Tensor)]


def on_gpu(calls: Calls) -> Callable[[str, dict[str, int]], float | None]:
    """Return the clock of `choose`: median seconds of a shape's calls, one after the other."""
    from triton.testing import do_bench

    def clock(key: str, fields: dict[str, int]) -> float | None:
        total = 0.0
        for call in calls[key]:
            with forcing(key, {}):
                want = results(*call)
            try:
                with forcing(key, fields):
                    got = zip(want, results(*call), strict=True)
                    if not all(
                        torch.allclose(b.float(), a.float(), 2e-2, 1e-3 * float(a.abs().max()))
                        for a, b in got
                    ):
                        return None
                    milliseconds = do_bench(
                        partial(results, *call), warmup=5, rep=30, return_mode="median"
                    )
                    total += 1e-3 * milliseconds
            except Exception as error:  # of the compiler, or too much memory asked for
                print(f"{key} with {fields}: {type(error).__name__}", file=sys.stderr)
                return None
        return total

    return clock


def compile_all(asked: dict[str, Asked], calls: Calls) -> None:
    """Compile all that will be timed, side by side.

    What does not compile here is compiled as it is timed.
    """
    from fastlr.kernels import launching

    def launch(note: Callable[..., None]) -> None:
        for key in asked:
            for fields in candidates(asked[key]):
                with forcing(key, fields), launching.noting(note), suppress(Exception):
                    for op, args in calls[key]:
                        ops.get(op, "triton")(*args)

    with suppress(ImportError):  # Triton before 3.5
        side_by_side(launch, torch.device("cuda"))


def main(arguments: list[str] | None = None) -> int:
    """Tune, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", default=["mobilenet_v3_large", "resnet50"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--table", type=Path, default=tuning.TABLE, help="file for the result")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "bench.tune times kernels on a GPU, and torch finds none here: run it on the machine "
            "to be tuned"
        )
        return 2
    asked, calls = recorded(given.networks, given.batch)
    compile_all(asked, calls)
    enter = partial(write_entry, given.table, tuning.architecture())
    found = choose(asked, on_gpu(calls), enter)
    print(
        f"{len(found)} of {len(asked)} shapes have faster block sizes than the rules': "
        f"{given.table}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
