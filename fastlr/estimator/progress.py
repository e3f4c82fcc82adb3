"""Progress of a measurement, shown where somebody may see it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

OnProgress = Callable[[int, int, float, float], Any]

PATIENCE = 3.0  # seconds before a progress bar that nobody has asked for


@contextmanager
def reporter(progress: bool | OnProgress | None, total: int) -> Iterator[OnProgress | None]:
    """Yield a function to call as (done, total, value, stderr).

    It is a progress bar's, the user's, or None.

    For ``progress=None`` the bar comes after `PATIENCE` seconds, where somebody may see it.
    """
    if progress is True:
        with _bar(total) as update:
            yield update
    elif progress is not None or not _watched():
        yield None if progress is False else progress
    else:
        with ExitStack() as late:
            begun, shown = time.monotonic(), list[OnProgress]()

            def report(done: int, total: int, value: float, stderr: float) -> None:
                if not shown and done < total and time.monotonic() - begun >= PATIENCE:
                    shown.append(late.enter_context(_bar(total)))
                for update in shown:
                    update(done, total, value, stderr)

            yield report


def _bar(total: int) -> AbstractContextManager[OnProgress]:
    from fastlr.display.record import progress_bar

    return progress_bar("local redundancy", total)


def _watched() -> bool:
    """Return True if stderr is a terminal, or this is a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell" or (
        sys.stderr is not None and sys.stderr.isatty()
    )
