"""Options of a driver: a dataclass with limits on its fields, presets, ``key=value`` settings."""

from __future__ import annotations

import dataclasses
import json
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

from fastlr.errors import InputError, did_you_mean

Options = TypeVar("Options")
Value = TypeVar("Value")
ON_A_CORE = {"device": "cpu", "threads": 1, "dtype": "fp32"}  # of presets that a CPU carries out


# Limit -> (the test that a value passes, what a message asks for). NaN passes none.
_LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "at_least": (operator.ge, "give at least {}"),
    "at_most": (operator.le, "give at most {}"),
    "below": (operator.lt, "give less than {}"),
    "positive": (lambda value, _: value > 0, "give a positive number"),
}


def option(default: Value, **limits: Any) -> Value:
    """Declare a field of options together with what its values are held to.

    Args:
        default: Its default.
        limits: ``at_least``, ``at_most``, ``below``: a number; ``positive``: True; ``known``: the
            names that a tuple of names is chosen from; ``hint``: what else a message says;
            ``about``: what it means; ``named``: the option of a run that it is.
    """
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options that every driver has.

    Attributes:
        seed: Seed of all that is random in a run.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``.
        threads: Number of torch's threads on the CPU, set for the whole process; 0: as it is
            (``OMP_NUM_THREADS``). It changes the last bits of sums.

    Raises:
        InputError: A value is outside of what its field is declared with, names something unknown
            (with the nearest one), or names a thing twice.
    """

    seed: int = 0
    device: str = "auto"
    threads: int = option(0, at_least=0)

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"seed={self.seed}: give a number in [0, 2**64)")
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), field.metadata)


def _check(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    hint = f" ({limits['hint']})" if "hint" in limits else ""
    for limit, (passes, request) in _LIMITS.items():
        if limit in limits and not passes(value, limits[limit]):
            raise InputError(f"{name}={value}: {request.format(limits[limit])}{hint}")
    if "known" in limits:
        for item in value:
            if item not in limits["known"]:
                raise InputError(f"{name}: {unknown(item, limits['known'])}")
        if len(set(value)) < len(value):
            raise InputError(f"{name}={','.join(value)}: one is named twice")


def resolve(
    kind: type[Options],
    presets: Mapping[str, Mapping[str, Any]],
    preset: str,
    settings: Mapping[str, Any],
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
        option: Name of the option, for messages.

    Raises:
        InputError: No ``=``, an unknown key (with the nearest one), a value of another type, or a
            key given twice.

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
    """Return the options from their record: what ``dataclasses.asdict`` and JSON made of them.

    Missing options have their defaults.

    Raises:
        InputError: An option that this version of fastlr does not have.
    """
    hints = typing.get_type_hints(kind)
    for key in record:
        if key not in hints:
            raise InputError(
                f"the run's option {unknown(key, hints)}; use the version of fastlr that made it"
            )
    return kind(**from_json(record))


def from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of options as they were before JSON made lists of tuples."""
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    return {**values, **{key: tuple(value) for key, value in lists.items()}}


def unknown(name: str, known: Iterable[str]) -> str:
    """Return "NAME is unknown: did you mean ...?" for a misspelt name.

    Where no known name is near, it lists them all.
    """
    names = list(known)
    return f"{name} is unknown: {did_you_mean(name, names) or 'choose from ' + ', '.join(names)}"


def differences(
    values: Mapping[str, Any], paper: Mapping[str, Any], left_out: Collection[str]
) -> list[str]:
    """Return the options in which a run differs from the paper's, each as "NAME VALUE for PAPER'S".

    >>> one = {"n": 3, "seed": 1, "model_kwargs": {"width": 2}}
    >>> other = {"n": 5, "seed": 0, "model_kwargs": {}}
    >>> differences(one, other, {"seed"})
    ['n 3 for 5', 'model with width 2']
    """
    texts = {
        name: f"{name} {values[name]} for {paper[name]}" for name in values if name not in left_out
    }
    if "model_kwargs" in texts:
        texts["model_kwargs"] = "model with " + ", ".join(
            f"{k} {v}" for k, v in values["model_kwargs"].items()
        )
    return [text for name, text in texts.items() if values[name] != paper[name]]


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object; ValueError says what is wanted."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f'a JSON object such as {{"width": 2}}, not {text!r}')
    return value


_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


def _value(hint: Any, text: str) -> Any:
    """Read a text as a type; ValueError says what is wanted."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        return _value(next(kind for kind in inner if kind is not type(None)), text)
    if origin is Literal:
        if text not in inner:
            raise ValueError(f"one of {', '.join(inner)}, not {text!r}")
        return text
    if origin is tuple:
        return tuple(_value(inner[0], part.strip()) for part in text.split(",") if part.strip())
    if origin is dict:
        return json_object(text)
    if hint is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(f"true or false, not {text!r}")
        return text.lower() in _TRUE
    if hint in (int, float):
        try:
            number = hint(text)
        except ValueError:
            raise ValueError(
                f"{'a whole number' if hint is int else 'a number'}, not {text!r}"
            ) from None
        if number - number != 0:
            raise ValueError(f"a finite number, not {text!r}")
        return number
    return text
