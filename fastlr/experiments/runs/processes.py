"""Run a queue of processes on this machine, each with a log and a channel for messages.

So many run at a time, and none outlives this process.

Both ends are here: `run_jobs` for the parent, `attach` for the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fastlr.errors import FastlrError

_MESSAGES = (
    "FASTLR_REPORT"  # environment variable: the descriptor that a process writes its messages to
)
_POLL = 0.2  # seconds between two looks at processes that send nothing

Message = dict[str, Any]
Listen = Callable[[str, Message], Any]


@dataclass(frozen=True)
class Job:
    """A process to run. It calls `attach` first.

    Attributes:
        name: For people.
        command: With its arguments.
        log: A file that stdout and stderr are appended to; its folder exists.
    """

    name: str
    command: Sequence[str]
    log: Path


def run_jobs(
    jobs: Iterable[Job], slots: Sequence[Mapping[str, str]], listen: Listen
) -> dict[str, str]:
    """Run jobs, as many at a time as there are slots; one that fails does not stop the others.

    Args:
        jobs: In the order in which they begin.
        slots: The environment variables to set for what runs in each.
        listen: Called with a job's name and each message of `job_messages`. What it raises ends all
            jobs.

    Returns:
        Name -> a line that says what went wrong, for the jobs that failed.

    Raises:
        FastlrError: A process cannot be started.
    """
    failed: dict[str, str] = {}
    with closing(job_messages(jobs, slots)) as messages:
        for name, message in messages:
            if message.get("event") == "ended" and message["error"] is not None:
                failed[name] = message["error"]
            listen(name, message)
    return failed


def job_messages(
    jobs: Iterable[Job], slots: Sequence[Mapping[str, str]]
) -> Generator[tuple[str, Message], None, None]:
    """Run jobs as `run_jobs` does, and yield ``(name of the job, message)``.

    Closing the generator ends all jobs.

    The messages of a job are ``{"event": "started"}``, what its process sends, and at last
    ``{"event": "ended", "error": a line or None}``. The line is what the process sent as "error",
    or the last line of its log.
    """
    waiting, free = deque(jobs), deque(slots)
    running: dict[Any, _Process] = {}  # by the pipe of each
    try:
        while waiting or running:
            while waiting and free:
                process = _Process(waiting.popleft(), free.popleft())
                running[process.pipe] = process
                yield process.job.name, {"event": "started"}
            for pipe in wait([*running], _POLL):
                yield from running[pipe].messages()
            for process in [each for each in running.values() if each.popen.poll() is not None]:
                yield from process.messages()  # what it sent last
                del running[process.pipe]
                process.close()
                free.append(process.slot)
                yield process.job.name, {"event": "ended", "error": process.failure()}
    finally:
        for process in running.values():
            process.close()


class _Process:
    """A process that was started for a job, its slot, and the pipe of its messages."""

    def __init__(self, job: Job, slot: Mapping[str, str]) -> None:
        self.job, self.slot = job, slot
        self._error: str | None = None  # the one that it sent
        self.pipe, write_end = Pipe(duplex=False)
        try:
            with open(job.log, "ab") as log:
                log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} {job.name}\n".encode())
                log.flush()
                self.popen = subprocess.Popen(
                    job.command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **slot, _MESSAGES: str(write_end.fileno())},
                    pass_fds=[write_end.fileno()],
                    # Ctrl-C comes to this process alone, which ends the others.
                    start_new_session=True,
                )
        except OSError as error:
            self.pipe.close()
            raise FastlrError(f"{job.name} cannot be started: {error}") from error
        finally:
            write_end.close()

    def messages(self) -> list[tuple[str, Message]]:
        """Return the job's name with each message that has come since the last call."""
        messages: list[Message] = []
        try:
            while self.pipe.poll():
                messages.append(self.pipe.recv())
        except (EOFError, OSError):  # it has ended, perhaps in the midst of a message
            self.popen.wait()
        for message in messages:
            self._error = message.get("error", self._error)
        return [(self.job.name, message) for message in messages]

    def failure(self) -> str | None:
        """Return a line that says why the process, which has ended, failed; None if it did not."""
        code = self.popen.returncode
        if code == 0:
            return None
        if self._error is not None:
            return self._error
        if code < 0:
            why = ", often for lack of memory" if code == -signal.SIGKILL else ""
            return f"ended by signal {-code} ({signal.Signals(-code).name}){why}"
        text = self.job.log.read_text(errors="replace")
        lines = [line.strip() for line in text.split("\n--- ")[-1].splitlines()[1:] if line.strip()]
        return lines[-1] if lines else f"ended with code {code}"

    def close(self) -> None:
        """End the process and those that it has started, if they run."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.pipe.close()


def attach() -> Callable[[Message], None]:
    """Tie this process to the parent that started it by `run_jobs`.

    Returns a function that sends the parent a message.

    Stdin is a pipe that the parent holds open: its end is the parent's, also after kill -9. Then
    this process and those that it has started (its process group) are killed. Stdin is empty from
    here on.
    """
    watched, pipe = os.dup(0), Connection(int(os.environ.pop(_MESSAGES)), readable=False)
    os.set_inheritable(pipe.fileno(), False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        os.read(watched, 1)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="fastlr-watch").start()

    def send(message: Message) -> None:
        with suppress(BrokenPipeError):  # the parent has gone: so shall we, at once
            pipe.send(message)

    return send
