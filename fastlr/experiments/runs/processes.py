"""Run a queue of processes on this machine, each with a log and a channel for messages.

So many run at a time, and none outlives this process.

Both ends are here: `run_jobs` for the parent, `attach` for the process. Only the standard library
is imported, so that a process that needs no torch loads this file by itself and starts in a tenth
of a second.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

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
        log: A file that stdout and stderr are appended to; its folder exists. None: they are this
            process's.
        work: A line that the process reads from stdin before it calls `attach`, for what is too
            long for an argument.
    """

    name: str
    command: Sequence[str]
    log: Path | None
    work: str = ""


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
    ``{"event": "ended", "error": a line or None, "code": exit code, "killed": True if a signal
    ended it}``. The line is what the process sent as "error", or the last line of its log.
    """
    waiting, free = deque(jobs), deque(slots)
    running: list[_Process] = []
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and free:
                    process = _Process(waiting.popleft(), free.popleft())
                    running.append(process)
                    selector.register(process.pipe, selectors.EVENT_READ, process)
                    yield process.job.name, {"event": "started"}
                for key, _ in selector.select(_POLL):
                    yield from key.data.messages()
                    if key.data.silent:
                        selector.unregister(key.fileobj)
                for process in [process for process in running if process.popen.poll() is not None]:
                    yield from process.messages()  # what it sent last
                    if process.pipe in selector.get_map():
                        selector.unregister(process.pipe)
                    running.remove(process)
                    process.close()
                    free.append(process.slot)
                    code = process.popen.returncode
                    ended = {
                        "event": "ended",
                        "error": process.failure(),
                        "code": code,
                        "killed": code < 0,
                    }
                    yield process.job.name, ended
        finally:
            for process in running:
                process.close()


class _Process:
    """A process that was started for a job, its slot, and the pipe of its messages."""

    def __init__(self, job: Job, slot: Mapping[str, str]) -> None:
        self.job, self.slot = job, slot
        self.silent = False  # the pipe has come to its end
        self._error: str | None = None  # the one that it sent
        self._incomplete = b""  # a line that has not come to its end
        self.pipe, write_end = os.pipe()
        os.set_blocking(self.pipe, False)
        try:
            with open(job.log or os.devnull, "ab") as log:
                log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} {job.name}\n".encode())
                log.flush()
                output = None if job.log is None else log
                self.popen = subprocess.Popen(
                    job.command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **slot, _MESSAGES: str(write_end)},
                    pass_fds=[write_end],
                    # Ctrl-C comes to this process alone, which ends the others.
                    start_new_session=True,
                )
        except OSError as error:
            from fastlr.errors import FastlrError

            os.close(self.pipe)
            raise FastlrError(f"{job.name} cannot be started: {error}") from error
        finally:
            os.close(write_end)
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its exit code tells
            self.popen.stdin.write(job.work.encode())
            self.popen.stdin.flush()

    def messages(self) -> list[tuple[str, Message]]:
        """Return the job's name with each message that has come since the last call."""
        data = self._incomplete
        with suppress(BlockingIOError):
            while new := os.read(self.pipe, 65536):
                data += new
            self.silent = True
        *lines, self._incomplete = data.split(b"\n")
        messages = [json.loads(line) for line in lines]
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
        text = "" if self.job.log is None else self.job.log.read_text(errors="replace")
        lines = [line.strip() for line in text.split("\n--- ")[-1].splitlines()[1:] if line.strip()]
        return lines[-1] if lines else f"ended with code {code}"

    def close(self) -> None:
        """End the process and those that it has started, if they run."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):
            self.popen.stdin.close()
        os.close(self.pipe)


def attach() -> Callable[[Message], None]:
    """Tie this process to the parent that started it by `run_jobs`.

    Returns a function that sends the parent a message.

    Stdin is a pipe that the parent holds open: its end is the parent's, also after kill -9. Then
    this process and those that it has started (its process group) are killed. Stdin is empty from
    here on.
    """
    watched, pipe = os.dup(0), int(os.environ.pop(_MESSAGES))
    os.set_inheritable(pipe, False)
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
        line = (json.dumps(message) + "\n").encode()
        with suppress(BrokenPipeError):  # the parent has gone: so shall we, at once
            while line:
                line = line[os.write(pipe, line) :]

    return send
