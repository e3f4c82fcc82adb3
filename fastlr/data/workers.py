"""Run the jobs of :mod:`fastlr.data.decode` in processes of their own, and turn what goes wrong into fastlr's errors."""

from __future__ import annotations

import errno
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from fastlr.data import decode
from fastlr.errors import FastlrError, InputError

AGAIN = "what is done is kept, and the same command goes on from there"
_START = "import json, runpy, sys; sys.path = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
Job = dict[str, Any]


def run_jobs(
    jobs: Sequence[tuple[int, Job]], workers: int, report: Callable[[int], None]
) -> Generator[tuple[int, dict[str, Any] | str], None, None]:
    """Yield (key, result) of jobs in the order in which they end.

    Args:
        jobs: Pairs of a key and a job of :func:`fastlr.data.decode.write_class`, or ``{"check": ...}`` for
            :func:`fastlr.data.decode.block_digest`.
        workers: How many processes; 1 does the work in this one.
        report: Called with numbers of images, in this thread.

    Raises:
        InputError: The source cannot be read.
        OSError: The store cannot be written.
        FastlrError: A process has died.
    """
    workers = min(workers, len(jobs))
    if workers > 1:
        yield from _in_processes(jobs, workers, report)
        return
    for key, job in jobs:
        try:
            if "check" in job:
                yield key, decode.block_digest(*job["check"])
            else:
                yield key, decode.write_class(job, report)
        except decode.SourceError as error:
            raise _error(["source", str(error)]) from error
        except OSError as error:
            raise _error(["store", str(error), error.errno]) from error


def disk_error(number: int | None, text: str) -> OSError:
    """Return an OSError of the store's disk that names the remedy."""
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "make room there or choose a folder on another disk" if full else "choose a folder that can be written"
    return OSError(number or errno.EIO, f"{text}: {remedy}; {AGAIN}")


def _error(told: list[Any]) -> Exception:
    kind, text = told[:2]
    if kind == "source":
        return InputError(f"{text}; mend it: {AGAIN}")
    if kind == "store":
        return disk_error(told[2], text)
    return FastlrError(f"{text}: give fewer --workers; {AGAIN}")


def _in_processes(
    jobs: Sequence[tuple[int, Job]], workers: int, report: Callable[[int], None]
) -> Generator[tuple[int, dict[str, Any] | str], None, None]:
    waiting: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    for item in jobs:
        waiting.put(item)
    command = [sys.executable, "-c", _START, json.dumps(sys.path), os.path.abspath(decode.__file__)]
    processes: list[subprocess.Popen[str]] = []

    def drive(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        while True:
            try:
                key, job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    message = json.loads(line)
                    answers.put((key, message))
                    if "done" not in message:
                        break
                else:
                    raise BrokenPipeError
            except (OSError, ValueError):
                answers.put((key, {"died": process.wait()}))
                return

    try:
        for _ in range(workers):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
            processes.append(process)
        for process in processes:
            threading.Thread(target=drive, args=(process,), daemon=True).start()
        left = len(jobs)
        while left:
            key, message = answers.get()
            if "done" in message:
                report(message["done"])
            elif "result" in message:
                left -= 1
                yield key, message["result"]
            elif "error" in message:
                raise _error(message["error"])
            else:
                raise FastlrError(
                    f"a decoding process ended with code {message['died']} (-9: killed, often for lack of memory; "
                    f"-11: an image crashed the decoder): give fewer --workers; {AGAIN}"
                )
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                try:
                    if pipe is not None:
                        pipe.close()
                except OSError:  # what was still to be written to it
                    pass
