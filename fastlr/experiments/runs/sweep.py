"""Make the settings of many runs from ``key=v1,v2`` texts and a number of seeds.

The runs have names such as ``learning_rate=0.001,seed-0``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastlr.errors import InputError
from fastlr.experiments.runs.experiment import Driver
from fastlr.experiments.runs.options import parse_settings

Grids = Mapping[str, Sequence[Any]]
_LONGEST_VALUE, _LONGEST = 32, 120  # characters of a value in a name, and of a name
_NOT_IN_GRIDS = {
    "seed": "say --seeds K, and --set seed=N for the first",
    "device": "all runs of a sweep have the same: --set device=",
    "threads": "all runs of a sweep have the same: --set threads=",
}


def parse_grids(kind: type, grids: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Turn ``key=v1,v2`` texts into values of the types that a dataclass of options says.

    Commas inside braces or brackets belong to a value: ``model_kwargs={"width": 2, "size":
    64},{"size": 32}``, and ``measures=[weight_norm,srank],[srank]`` for options that are lists.

    Raises:
        InputError: An unknown key or value, one that is given twice, or an option that all runs of
            a sweep share.

    Example:
        >>> from fastlr.experiments.continual.options import ContinualOptions
        >>> grids = ["learning_rate=1e-3,0.01", "measures=[srank,weight_norm],[srank]"]
        >>> parse_grids(ContinualOptions, grids)
        {'learning_rate': (0.001, 0.01), 'measures': (('srank', 'weight_norm'), ('srank',))}
    """
    values_by_key: dict[str, tuple[Any, ...]] = {}
    for grid in grids:
        key, equals, text = grid.partition("=")
        key = key.strip()
        parts = [part.strip() for part in _split(text)]
        if not equals or not all(parts):
            raise InputError(f"--grid {grid}: write key=value,value,...")
        if key in values_by_key:
            raise InputError(
                f"--grid {grid}: {key} is given twice; write all its values in one --grid"
            )
        if key in _NOT_IN_GRIDS:
            raise InputError(f"--grid {grid}: {_NOT_IN_GRIDS[key]}")
        values = []
        for part in parts:
            plain = part[1:-1] if part.startswith("[") and part.endswith("]") else part
            value = parse_settings(kind, [f"{key}={plain}"], "--grid")[key]
            if value in values:
                raise InputError(f"--grid {grid}: the value {part} is given twice")
            values.append(value)
        values_by_key[key] = tuple(values)
    return values_by_key


def product(
    driver: Driver, preset: str | None, settings: Mapping[str, Any], grids: Grids, count: int
) -> dict[str, dict[str, Any]]:
    """Return settings by name: every combination of the grids' values, each with ``count`` seeds.

    Names are file names of at most 120 letters, digits and ``. _ + - = ,``; what does not fit is
    shortened, with a hash.

    Args:
        driver: Driver of the runs.
        preset: None: the driver's first.
        settings: Settings of all runs; ``seed`` is the first of the seeds.
        grids: Values by option; the last one varies fastest.
        count: Seeds of each configuration.

    Raises:
        InputError: Fewer than one seed, or settings that do not fit.
    """
    if count < 1:
        raise InputError(f"--seeds {count}: give at least 1")
    first_seed = driver.options_from(preset, settings).seed
    made = []
    for values in itertools.product(*grids.values()):
        chosen = dict(zip(grids, values))
        made += [
            (chosen, {**settings, **chosen, "seed": seed})
            for seed in range(first_seed, first_seed + count)
        ]
    names = [_name(chosen, whole["seed"]) for chosen, whole in made]
    times = Counter(name.casefold() for name in names)
    for i, (chosen, whole) in enumerate(made):
        if times[names[i].casefold()] > 1:
            names[i] = _name(chosen, whole["seed"], hashed=True)
    return {name: whole for name, (_, whole) in zip(names, made)}


def _split(text: str) -> list[str]:
    """Split at commas that are in no braces, brackets or double quotes."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        if character == '"':
            quoted = not quoted
        elif not quoted and character in "{[":
            depth += 1
        elif not quoted and character in "}]":
            depth -= 1
        if character == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _name(chosen: Mapping[str, Any], seed: int, hashed: bool = False) -> str:
    head = ",".join(f"{key}={_value(value)}" for key, value in chosen.items())
    tail = f"seed-{seed}"
    if hashed or len(head) + len(tail) + 1 > _LONGEST:
        head = f"{head[: _LONGEST - len(tail) - 10]}-{_hash(chosen)}"
    return f"{head},{tail}" if head else tail


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        text = "+".join(map(str, value))
    elif isinstance(value, dict):
        text = json.dumps(value, sort_keys=True)
    else:
        text = str(value)
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("_")
    if safe == text and len(text) <= _LONGEST_VALUE:
        return safe
    return f"{safe[-_LONGEST_VALUE + 9 :]}-{_hash(value)}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
