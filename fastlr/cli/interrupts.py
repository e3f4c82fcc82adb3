"""Signals that end the command line: one line on stderr, and 128 + their number as exit code.

An import is ended at once: Python and the libraries that are imported swallow a KeyboardInterrupt
there, or make another error of it. Elsewhere it is raised, so that what is under way can say where
it stands. This module imports nothing large, since it guards the imports.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from types import FrameType

_OF_IMPORTS = "<frozen importlib._bootstrap>"
_SHOW_CURSOR = "\x1b[?25h"  # which a progress bar hides


def end_at_once(number: int, _: FrameType | None = None) -> None:
    """Say that a signal has ended this process, and end it."""
    with suppress(OSError, RuntimeError, ValueError):  # closed, or being written to
        sys.stdout.flush()
    cursor = _SHOW_CURSOR if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{cursor}interrupted\n".encode())
    os._exit(128 + number)


def guard_imports() -> None:
    """End this process at once on Ctrl-C, unless that is ignored, as in the background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt where Ctrl-C or SIGTERM comes, but end an import at once.

    Yields the numbers of the signals that came. Handlers of others stay, and within other threads
    than the main one all do.
    """
    came: list[int] = []
    outside = _imports(sys._getframe())

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _imports(frame) > outside:
            end_at_once(number)
        came.append(number)
        raise KeyboardInterrupt

    before = {}
    if current_thread() is main_thread():
        before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
        if "RANK" not in os.environ:
            # Ranks keep the default: one that waits for others within torch would not end by an
            # exception of Python's.
            before[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
    taken = [
        number
        for number, handler in before.items()
        if handler in (signal.default_int_handler, signal.SIG_DFL, end_at_once)
    ]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _imports(frame: FrameType | None) -> int:
    """Count the frames of imports among a frame and its callers."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == _OF_IMPORTS
        frame = frame.f_back
    return count
