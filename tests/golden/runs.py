"""Five small runs of the drivers whose records must not change, and how records are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Arguments of each run: what it does, its length, and a shorter length with the same first records.
# The learning rate of transfer depends on the number of epochs, so it has only one length.
RUNS = {
    "continual": ("continual demo --seed 1", "--tasks 12", "--tasks 1"),
    "shrink-and-perturb": (
        "continual demo --seed 1 --set shrink=0.8 --set perturb=0.01",
        "--tasks 12",
        "--tasks 1",
    ),
    "transfer": ("transfer demo --seed 1 --set epochs=2 --set finetune_runs=1", "", ""),
    "memorize-vision": (
        "memorize vision-small --seed 1 --set n=256",
        "--set epochs=12",
        "--set epochs=4",
    ),
    "memorize-series": (
        "memorize series-small --seed 1",
        "--set epochs=100",
        "--set epochs=20",
    ),
}
GOLDEN_RECORDS = 2
# Keys that are not compared: those that differ between equal runs, and prose.
SKIPPED = {"seconds", "digest", "definition", "substitutions"}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run, without the keys that are not compared."""
    return [_without_skipped(json.loads(line)) for line in path.read_text().splitlines()]


def _without_skipped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_skipped(item) for key, item in value.items() if key not in SKIPPED}
    return value


def differences(old: Any, new: Any, rtol: float = 0.0, where: str = "") -> Iterator[str]:
    """List where two values of JSON differ.

    Args:
        old: Expected value.
        new: Actual value.
        rtol: Largest relative difference of two numbers that are considered equal.
        where: Name of the values in the list.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key in old and key in new:
                yield from differences(old[key], new[key], rtol, f"{where}.{key}")
            else:
                yield f"{where}.{key}: only in the {'old' if key in old else 'new'} record"
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{where}: {len(old)} items, now {len(new)}"
        for place, (before, now) in enumerate(zip(old, new)):
            yield from differences(before, now, rtol, f"{where}[{place}]")
    elif not _equal(old, new, rtol):
        yield f"{where}: {old!r}, now {new!r}"


def _equal(old: Any, new: Any, rtol: float) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return old == new or abs(old - new) <= rtol * abs(old) or (old != old and new != new)
    return type(old) is type(new) and old == new
