"""Do the work of ``fastlr data prepare`` on several classes at a time, and say why it fails."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from fastlr.errors import FastlrError, InputError

AGAIN = "what is done is kept, and the same command goes on from there"


def results(
    work: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each job, as soon as it is done, with its result.

    Decoders, hashes and files let other threads run while they work.

    Args:
        work: Does a job.
        jobs: Its arguments, for each job.
        workers: How many threads.

    Raises:
        InputError: The source cannot be read.
        OSError: The store cannot be written.
        FastlrError: Memory is short.
    """
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(work, *job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], _result(future)
        finally:
            pool.shutdown(cancel_futures=True)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except InputError as error:
        raise InputError(f"{error}; mend it: {AGAIN}") from error
    except OSError as error:
        raise disk_error(error.errno, str(error)) from error
    except MemoryError as error:
        text = "no memory left to decode an image: give fewer --workers"
        raise FastlrError(f"{text}; {AGAIN}") from error


def disk_error(number: int | None, text: str) -> OSError:
    """Return an OSError of the store's disk that names the remedy."""
    full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = (
        "make room there or choose a folder on another disk"
        if full
        else "choose a folder that can be written"
    )
    return OSError(number or errno.EIO, f"{text}: {remedy}; {AGAIN}")
