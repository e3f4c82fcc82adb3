"""The side of a process that `fastlr.drivers.jobs` has started: it reports, and ends when its parent does."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

REPORT = "FASTLR_REPORT"  # environment variable: the descriptor that reports go to


def attach() -> Callable[[dict[str, Any]], None]:
    """Watch for the parent's end; return a function that sends it a message.

    Stdin is a pipe that the parent holds open and never writes to: its end is the parent's, also after kill -9. Then this
    process and those that it has started (its process group) are killed.
    """
    watched, file = os.dup(0), int(os.environ.pop(REPORT))
    os.set_inheritable(file, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        os.read(watched, 1)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="fastlr-watch").start()

    def send(message: dict[str, Any]) -> None:
        line = (json.dumps(message) + "\n").encode()
        try:
            while line:
                line = line[os.write(file, line) :]
        except BrokenPipeError:
            pass  # the parent has gone: so shall we, at once

    return send
