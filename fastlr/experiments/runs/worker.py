"""Begin or resume one run in a process of `fastlr.experiments.runs.queue`.

The process reports to the queue.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastlr.errors import one_line
from fastlr.experiments.runs.experiment import Driver, Progress
from fastlr.experiments.runs.folder import CONFIG
from fastlr.experiments.runs.options import from_json
from fastlr.experiments.runs.processes import attach
from fastlr.experiments.runs.tensorboard import mirrored

_START = (
    "import json, sys; sys.path = json.loads(sys.argv[1]); "
    "from fastlr.experiments.runs.worker import main; main(sys.argv[2])"
)
_EVERY = 0.2  # seconds between two reports within a step


def command(
    driver: Driver,
    path: Path,
    preset: str,
    settings: dict[str, Any],
    changed: dict[str, Any],
    tensorboard: bool,
) -> list[str]:
    """Return the command of a process that begins or resumes a run.

    It begins one with ``settings``, and resumes one with the ``changed`` settings.
    """
    work = {
        "driver": driver.module,
        "path": str(path),
        "preset": preset,
        "settings": settings,
        "changed": changed,
        "tensorboard": tensorboard,
        "command": sys.argv,
    }
    return [sys.executable, "-c", _START, json.dumps(sys.path), json.dumps(work)]


def here(command: Sequence[str]) -> list[str]:
    """Return what `command` returned on another machine, for this Python and its path."""
    return [sys.executable, *command[1:-2], json.dumps(sys.path), command[-1]]


def main(text: str) -> None:
    """Do the work that `command` describes.

    After an error the exit code is 1, the error's line is reported and its traceback printed.
    """
    send = attach()
    work = json.loads(text)
    sys.argv = work["command"]  # what made this run, for its config.json
    driver: Driver = importlib.import_module(work["driver"]).DRIVER
    last = 0.0

    def show(at: Progress) -> None:
        nonlocal last
        if at.record is None and time.monotonic() - last < _EVERY:
            return
        last = time.monotonic()
        shown = None if at.record is None else driver.shown(at.record)
        send({"done": at.done, "total": at.total, "part": at.epoch / at.epochs, "shown": shown})

    try:
        path = Path(work["path"])
        with mirrored(path, work["tensorboard"], show) as report:
            if (path / CONFIG).exists():
                driver.resume(path, from_json(work["changed"]), None, report)
            else:
                driver.begin(path, work["preset"], from_json(work["settings"]), report)
    except Exception as error:
        traceback.print_exc()
        send({"error": one_line(error)})
        sys.exit(1)
