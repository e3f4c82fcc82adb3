"""Two records side by side: what got slower or faster by more than the spread of its rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastlr.speed.record import Record

SAME_MACHINE = ("gpu", "cpu", "threads", "platform")
SAME_SETTINGS = ("device", "dtype", "size", "n", "batch", "shrink")


class Pair(NamedTuple):
    """One row of two records; ``verdict``: "slower", "faster", "same", "only in A", "only in B", or a status in B."""

    section: str
    name: str
    a: dict[str, Any] | None
    b: dict[str, Any] | None
    ratio: float | None
    verdict: str


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["section"], row["name"]


def verdict(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Slower if the 20 % quantile of ``b`` is above the 80 % quantile of ``a``; faster the other way round; else same."""
    if b["seconds_p20"] > a["seconds_p80"] and b["seconds"] > a["seconds"]:
        return "slower"
    if b["seconds_p80"] < a["seconds_p20"] and b["seconds"] < a["seconds"]:
        return "faster"
    return "same"


def compare(a: Record, b: Record) -> list[Pair]:
    """Match the timed rows of two records by section and name, in the order of ``a``, then what only ``b`` has."""
    timed = [
        {_key(r): r for r in record.rows if "seconds" in r or r["status"] in ("wrong", "error")} for record in (a, b)
    ]
    found = []
    for key, row in timed[0].items():
        other = timed[1].get(key)
        if other is None:
            found.append(Pair(*key, row, None, None, "only in A"))
        elif "seconds" not in other:
            found.append(Pair(*key, row, other, None, other["status"]))
        elif "seconds" not in row:
            found.append(Pair(*key, row, other, None, "only in B"))
        else:
            found.append(Pair(*key, row, other, other["seconds"] / row["seconds"], verdict(row, other)))
    return found + [Pair(*key, None, row, None, "only in B") for key, row in timed[1].items() if key not in timed[0]]


def differences(a: Record, b: Record) -> list[str]:
    """In what machine and settings differ, in words: then a ratio says less."""
    found = []
    for kind, keys in (("environment", SAME_MACHINE), ("settings", SAME_SETTINGS)):
        old, new = getattr(a, kind), getattr(b, kind)
        found += [f"{key}: {old.get(key)} and {new.get(key)}" for key in keys if old.get(key) != new.get(key)]
    versions = [record.environment.get("versions", {}) for record in (a, b)]
    for name in versions[0]:
        if versions[0][name] != versions[1].get(name):
            found.append(f"{name}: {versions[0][name]} and {versions[1].get(name)}")
    return found
