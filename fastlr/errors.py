"""Errors and warnings of fastlr: each names the thing that is wrong, the reason and the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches


class FastlrError(Exception):
    """Base of every error that fastlr raises on purpose.

    Attributes:
        told_by: where all ranks of a group raise it, the one that was first; else None.
    """

    told_by: int | None = None


class InputError(FastlrError, ValueError):
    """An argument or an input tensor is wrong: empty batch, n < 1, wrong dtype, device or shape."""


class MissingExtraError(FastlrError, ImportError):
    """A framework that an integration is for is not installed.

    The message names the extra of fastlr that brings it.
    """


class ModelError(FastlrError, RuntimeError):
    """The model cannot be measured as it is.

    The message names the module, the reason and the remedy.
    """


class InteractionError(ModelError):
    """Samples of a batch influence each other, so no per-sample gradient exists."""


class RandomForwardError(ModelError):
    """Two forward passes on the same input differ (dropout in train mode, sampling)."""


class HiddenParameterError(ModelError):
    """A parameter moves the output but is not in its autograd graph."""


class NonlinearBackwardError(ModelError):
    """A gradient does not scale as the one at the output does.

    An example is a hook that clips it. The norm of such a gradient has no meaning by itself.
    """


class NonFiniteError(ModelError):
    """An output or a gradient is infinite or not a number."""


class DistributedError(FastlrError, RuntimeError):
    """The ranks of a group did not work together.

    One failed, ended, did not arrive in time, or called something else.
    """


class Interrupted(FastlrError):
    """The user has ended a run by Ctrl-C; the message says how far it is and how it goes on."""


class FastlrWarning(UserWarning):
    """Something a user should know, such as a slower exact route being taken."""


# Their frames may lie between a user's line and the code of fastlr that it has called.
_NOT_THE_USERS = {"fastlr", "torch", "contextlib"}


def warn(text: str) -> None:
    """Warn with a `FastlrWarning` that names the user's line, however deep in fastlr this is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, FastlrWarning, stacklevel=level)


def one_line(error: BaseException) -> str:
    """Return an error's text in one line, with its type where it is not fastlr's own."""
    text = " ".join(_text(error).split())
    return (
        text
        if text and type(error).__module__.startswith("fastlr")
        else f"{type(error).__name__}: {text}"
    )


def few(names: Iterable[str], most: int = 4, separator: str = ", ") -> str:
    """Return the first of some names, and how many more there are.

    >>> few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + rest


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    lines = _text(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _text(error: BaseException) -> str:
    """Return an error's text without torch's advice to run code that a file may contain.

    Torch gives that advice for files of tensors.
    """
    text = str(error)
    return "it is no file of plain tensors, numbers and texts" if "weights_only" in text else text


def install(extra: str) -> str:
    """Return the command that installs one of fastlr's extras; no index has fastlr.

    Example:
        >>> install("models")
        "pip install --no-build-isolation '.[models]' in a clone of fastlr"
    """
    return f"pip install --no-build-isolation '.[{extra}]' in a clone of fastlr"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the known name nearest to a misspelt one.

    Returns the empty string if none is near.

    Example:
        >>> did_you_mean("epoch", ["tasks", "epochs"]), did_you_mean("x", ["tasks", "epochs"])
        ('did you mean epochs?', '')
    """
    nearest = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else ""
