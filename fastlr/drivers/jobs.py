"""A local queue of processes: so many at a time, each with a log, its reports heard; none outlives this process."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fastlr.drivers.child import REPORT
from fastlr.errors import FastlrError

_POLL = 0.2  # seconds between two looks at processes that say nothing


@dataclass(frozen=True)
class Job:
    """A process to run. It calls `fastlr.drivers.child.attach` first.

    Attributes:
        name: For people.
        command: With its arguments.
        log: A file that stdout and stderr are appended to; its folder exists.
    """

    name: str
    command: Sequence[str]
    log: Path


Listen = Callable[[str, dict[str, Any]], Any]


def run_jobs(jobs: Iterable[Job], slots: Sequence[Mapping[str, str]], listen: Listen) -> dict[str, str]:
    """Run jobs, as many at a time as there are slots; one that fails does not stop the others.

    Args:
        jobs: In the order in which they begin.
        slots: The environment variables to set for what runs in each.
        listen: Called with a job's name and a message: ``{"event": "started"}``, what the process sends, and at last
            ``{"event": "ended", "error": a line or None, "killed": whether a signal ended it}``.

    Returns:
        Name -> a line that says what went wrong, for the jobs that failed: what the process sent as "error", or the last
        line of its log.

    Raises:
        FastlrError: A process cannot be started.
    """
    waiting, free = deque(jobs), deque(slots)
    running: list[_Running] = []
    failed: dict[str, str] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and free:
                    job = waiting.popleft()
                    process = _Running.start(job, free.popleft())
                    running.append(process)
                    selector.register(process.reports, selectors.EVENT_READ, process)
                    listen(job.name, {"event": "started"})
                for key, _ in selector.select(_POLL):
                    heard = key.data.hear()
                    for message in heard or ():
                        listen(key.data.job.name, message)
                    if heard is None:
                        selector.unregister(key.fileobj)
                for process in [each for each in running if each.ended()]:
                    for message in process.hear() or ():  # what it sent last
                        listen(process.job.name, message)
                    if process.reports in selector.get_map():
                        selector.unregister(process.reports)
                    running.remove(process)
                    process.close()
                    free.append(process.slot)
                    error = process.error()
                    if error is not None:
                        failed[process.job.name] = error
                    killed = process.process.returncode < 0
                    listen(process.job.name, {"event": "ended", "error": error, "killed": killed})
        finally:
            for process in running:
                process.close()
    return failed


@dataclass(eq=False)
class _Running:
    """A process, its slot, and the pipe of its reports."""

    job: Job
    slot: Mapping[str, str]
    process: subprocess.Popen[bytes]
    reports: int
    told: str | None = None  # the error that it sent
    _rest: bytes = field(default=b"")

    @classmethod
    def start(cls, job: Job, slot: Mapping[str, str]) -> _Running:
        reports, theirs = os.pipe()
        os.set_blocking(reports, False)
        try:
            with open(job.log, "ab") as log:
                log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} {job.name}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    job.command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **slot, REPORT: str(theirs)},
                    pass_fds=[theirs],
                    start_new_session=True,  # Ctrl-C comes to this process alone, which ends the others
                )
        except OSError as error:
            os.close(reports)
            raise FastlrError(f"{job.name} cannot be started: {error}") from error
        finally:
            os.close(theirs)
        return cls(job, slot, process, reports)

    def hear(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come; None at the pipe's end."""
        data = b""
        ended = False
        try:
            while not ended:
                new = os.read(self.reports, 65536)
                data, ended = data + new, not new
        except BlockingIOError:
            pass
        if ended and not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            self.told = message.get("error", self.told)
        return messages

    def ended(self) -> bool:
        return self.process.poll() is not None

    def error(self) -> str | None:
        """Say in a line why the process, which has ended, failed; None if it did not."""
        code = self.process.returncode
        if code == 0:
            return None
        if self.told is not None:
            return self.told
        if code < 0:
            why = ", often for lack of memory" if code == -signal.SIGKILL else ""
            return f"ended by signal {-code} ({signal.Signals(-code).name}){why}"
        lines = self.job.log.read_text(errors="replace").split("\n--- ")[-1].splitlines()[1:]
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last or f"ended with code {code}"

    def close(self) -> None:
        """End the process and those that it has started, if they run."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self.reports)
