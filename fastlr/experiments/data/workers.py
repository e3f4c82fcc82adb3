"""Run the jobs of `fastlr.experiments.data.decode`, in this process or in others.

Their failures become fastlr's errors.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fastlr.errors import FastlrError, InputError
from fastlr.experiments.data import decode
from fastlr.experiments.runs import processes

AGAIN = "what is done is kept, and the same command goes on from there"
_START = (
    "import json, runpy, sys; sys.path = json.loads(sys.argv[1]); "
    "runpy.run_path(sys.argv[2])['main'](sys.argv[3])"
)
_PARTS = 4  # that the jobs are cut into for each process, so that all end at about the same time


def run_jobs(
    jobs: Sequence[tuple[int, decode.Job]],
    workers: int,
    report: Callable[[int], None],
    keep: Callable[[int, Any], None],
) -> None:
    """Do jobs.

    Args:
        jobs: Pairs of a key and a job of `fastlr.experiments.data.decode.do`.
        workers: How many processes; 1 does the work in this one.
        report: Called with numbers of images.
        keep: Called with the key of a job that is done and its result.

    Raises:
        InputError: The source cannot be read.
        OSError: The store cannot be written.
        FastlrError: A process has died, or memory is short.
    """
    if min(workers, len(jobs)) <= 1:
        for key, job in jobs:
            try:
                result = decode.do(job, report)
            except decode.FAILURES as error:
                raise _error(*decode.failure(error)) from error
            keep(key, result)
        return

    def listen(name: str, message: processes.Message) -> None:
        if "done" in message:
            report(message["done"])
        elif "result" in message:
            keep(message["key"], message["result"])
        elif "failure" in message:
            raise _error(*message["failure"])
        elif message.get("code"):
            raise FastlrError(
                f"a decoding process ended with code {message['code']} (-9: killed, often for lack "
                f"of memory; -11: an image crashed the decoder): give fewer --workers; {AGAIN}"
            )

    parts = min(len(jobs), _PARTS * workers)
    command = [
        sys.executable,
        "-c",
        _START,
        json.dumps(sys.path),
        decode.__file__,
        processes.__file__,
    ]
    queue = [
        processes.Job(
            f"decoding process {part}", command, None, json.dumps(jobs[part::parts]) + "\n"
        )
        for part in range(parts)
    ]
    processes.run_jobs(queue, [{}] * workers, listen)


def disk_error(number: int | None, text: str) -> OSError:
    """Return an OSError of the store's disk that names the remedy."""
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = (
        "make room there or choose a folder on another disk"
        if full
        else "choose a folder that can be written"
    )
    return OSError(number or errno.EIO, f"{text}: {remedy}; {AGAIN}")


def _error(kind: str, text: str, number: int | None) -> Exception:
    if kind == "source":
        return InputError(f"{text}; mend it: {AGAIN}")
    if kind == "store":
        return disk_error(number, text)
    return FastlrError(f"{text}: give fewer --workers; {AGAIN}")
