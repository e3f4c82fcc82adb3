"""Options of a driver: a dataclass, presets, and ``key=value`` settings checked against it."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from fastlr.errors import InputError

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What the options of every driver begin with.

    Attributes:
        seed: Of all that is random in a run.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``.
        threads: Of torch on the CPU, set for the whole process; 0: as it is (``OMP_NUM_THREADS``). Their number changes
            the last bits of sums.
    """

    seed: int = 0
    device: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        at_least(self, threads=0)
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"seed={self.seed}: give a number in [0, 2**64)")


def at_least(options: Any, **low: float) -> None:
    """Check options against the least values that they may have.

    Raises:
        InputError: One is smaller (or NaN).
    """
    for name, least in low.items():
        if not getattr(options, name) >= least:
            raise InputError(f"{name}={getattr(options, name)}: give at least {least}")


def choices(name: str, values: tuple[str, ...], known: Iterable[str]) -> None:
    """Check an option that names several things.

    Raises:
        InputError: One is unknown (with the nearest one), or named twice.
    """
    names = list(known)
    for value in values:
        if value not in names:
            raise InputError(f"{name}: {unknown(value, names)}")
    if len(set(values)) < len(values):
        raise InputError(f"{name}={','.join(values)}: one is named twice")


def resolve(
    kind: type[Options], presets: Mapping[str, Mapping[str, Any]], preset: str, settings: Mapping[str, Any]
) -> Options:
    """Return the options of a preset with some settings changed.

    Raises:
        InputError: Unknown preset or option (with the nearest one), or a value that does not fit.
    """
    if preset not in presets:
        raise InputError(f"preset {unknown(preset, presets)}")
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in settings:
        if key not in known:
            raise InputError(f"option {unknown(key, known)}")
    return kind(**{**presets[preset], **settings})


def parse_settings(kind: type, settings: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """Turn ``key=value`` texts into values of the types that a dataclass of options says.

    Args:
        kind: The dataclass.
        settings: The texts.
        option: Of the command line, for messages.

    Raises:
        InputError: No ``=``, an unknown key (with the nearest one), a value of another type, or a key given twice.

    Example:
        >>> parse_settings(RunOptions, ["seed=3", "device=cuda:1"])
        {'seed': 3, 'device': 'cuda:1'}
    """
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals:
            raise InputError(f"{option} {setting}: write key=value")
        if key not in hints:
            raise InputError(f"{option} {setting}: {unknown(key, hints)}")
        if key in values:
            raise InputError(f"{option} {setting}: {key} is given twice")
        try:
            values[key] = _value(hints[key], text.strip())
        except ValueError as error:
            raise InputError(f"{option} {setting}: {key} wants {error}") from None
    return values


def from_record(kind: type[Options], record: Mapping[str, Any]) -> Options:
    """Return the options that ``dataclasses.asdict`` and JSON made a record of; missing ones have their defaults.

    Raises:
        InputError: An option that this version of fastlr does not have.
    """
    hints = typing.get_type_hints(kind)
    for key in record:
        if key not in hints:
            raise InputError(f"the run's option {unknown(key, hints)}; use the version of fastlr that made it")
    return kind(**from_json(record))


def from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of options as they were before JSON made lists of tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def unknown(name: str, known: Iterable[str]) -> str:
    """Return "NAME is unknown: did you mean ...?", or with all that are known where none is near."""
    names = list(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{name} is unknown: " + (f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}")


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object; ValueError says what is wanted."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f'a JSON object such as {{"width": 2}}, not {text!r}')
    return found


def _value(hint: Any, text: str) -> Any:
    """Read a text as a type; ValueError says what is wanted."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        return _value(next(each for each in inner if each is not type(None)), text)
    if origin is Literal:
        if text not in inner:
            raise ValueError(f"one of {', '.join(inner)}, not {text!r}")
        return text
    if origin is tuple:
        return tuple(_value(inner[0], part.strip()) for part in text.split(",") if part.strip())
    if origin is dict:
        return json_object(text)
    if hint is bool:
        known = {
            "true": True,
            "yes": True,
            "1": True,
            "on": True,
            "false": False,
            "no": False,
            "0": False,
            "off": False,
        }
        if text.lower() not in known:
            raise ValueError(f"true or false, not {text!r}")
        return known[text.lower()]
    if hint in (int, float):
        try:
            number = hint(text)
        except ValueError:
            raise ValueError(f"{'a whole number' if hint is int else 'a number'}, not {text!r}") from None
        if number - number != 0:
            raise ValueError(f"a finite number, not {text!r}")
        return number
    return text
