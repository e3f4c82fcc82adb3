"""Messages between the ranks of a group through its store.

Every wait has a time limit, and all ranks share errors.

The store is that of torch.distributed (a small key-value server): this needs no GPU, no NCCL and no
collective that could hang. Messages are small, as every rank reads those of all.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

import fastlr.errors
from fastlr.errors import DistributedError, FastlrError, InputError, one_line, warn
from fastlr.ops.model_lock import unlocked

PATIENCE = 15.0  # seconds of waiting after which a rank says for whom it waits
_POLLS = (0.0002, 0.02)  # seconds between two looks: the first, and the longest


class Board:
    """Where the ranks of a group post messages for each other, in the same order on every rank.

    Args:
        store: a torch.distributed store that all ranks share.
        prefix: Prefix of the keys; the same on all ranks and used for nothing else.
        rank: Rank of this process.
        size: number of ranks.
        timeout: seconds to wait for the others.
        what: what the ranks do here, for errors: "every rank must ...".
    """

    def __init__(
        self, store: Any, prefix: str, rank: int, size: int, timeout: float, what: str
    ) -> None:
        self.store: Any = dist.PrefixStore(f"fastlr/{prefix}", store)  # its stubs have no bytes
        self.rank, self.size, self.timeout, self.what = rank, size, check_timeout(timeout), what
        self.count = 0
        self.failure: Exception | None = None

    def share(self, message: Any) -> list[Any]:
        """Post a message (what JSON can hold) and return those of all ranks, in their order.

        Raises:
            DistributedError: a rank did not post within the time limit, left, or cannot be reached.
            FastlrError: what another rank has failed with.
        """
        return [json.loads(text) for text in self.share_bytes(json.dumps(message).encode())]

    def share_bytes(self, message: bytes) -> list[bytes]:
        """As :meth:`share`, for bytes."""
        if self.failure is not None:
            raise self.failure
        if self.size == 1:
            return [message]
        self.count += 1
        keys = [f"{self.count}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], message)
            with unlocked():
                self._wait(keys)
            messages = [self.store.get(key) for key in keys]
            if self.count > 1:
                # Everyone who has posted this time has read what was posted last time.
                self.store.delete_key(f"{self.count - 1}/{self.rank}")
        except FastlrError as error:
            raise self.fail(error) from None
        except RuntimeError as error:
            lost = (
                f"the store of the group was lost ({one_line(error)}): the process that holds it "
                "has ended"
            )
            raise self.fail(DistributedError(lost)) from error
        return messages

    def _wait(self, keys: list[str]) -> None:
        start, pause, warned = time.monotonic(), _POLLS[0], False
        while not self.store.check(keys):
            if self.store.check(["failed"]):
                raise rebuilt(json.loads(self.store.get("failed")))
            waited = time.monotonic() - start
            late, slow = waited > self.timeout, waited > PATIENCE and not warned
            if late or slow or self.store.check(["left"]):
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                gone = [rank for rank in missing if self.store.check([f"left/{rank}"])]
                if gone:
                    raise DistributedError(
                        f"{_ranks(gone)} left before the others were done: {self.what}"
                    )
                if missing and late:
                    raise DistributedError(
                        f"{_ranks(missing)} did not arrive within {self.timeout:g} s: {self.what}"
                    )
                if missing and slow:
                    warned = True
                    text = (
                        f"waiting for {_ranks(missing)}, for {self.timeout:g} s at most: "
                        f"{self.what}"
                    )
                    warn(text)
            time.sleep(pause)
            pause = min(pause * 1.5, _POLLS[1])

    def fail(self, error: BaseException) -> Exception:
        """Tell the others that this rank has failed, and return the error that all of them raise.

        It is that of the first rank to fail.
        """
        if self.failure is not None:
            return self.failure
        failure = {"rank": self.rank, "kind": type(error).__name__, "text": one_line(error)}
        try:
            failure = json.loads(self.store.compare_set("failed", "", json.dumps(failure)))
        except RuntimeError:  # the store is gone: nobody can be told
            pass
        self.failure = rebuilt(failure)
        return self.failure

    def leave(self) -> None:
        """Tell the others that no message of this rank will follow."""
        if self.size > 1 and self.failure is None:
            try:
                self.store.set(f"left/{self.rank}", b"1")
                self.store.set("left", b"1")
            except RuntimeError:  # the others are done, and the store with them
                pass


def rebuilt(failure: dict[str, Any]) -> FastlrError:
    """Return the error of a rank that has failed.

    It is of its own class if that is fastlr's, else a DistributedError.
    """
    kind = getattr(fastlr.errors, failure["kind"], None)
    text = f"rank {failure['rank']}: {failure['text']}"
    error = (
        kind(text)
        if isinstance(kind, type) and issubclass(kind, FastlrError)
        else DistributedError(text)
    )
    error.told_by = failure["rank"]
    return error


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def check_timeout(timeout: float) -> float:
    """Return a time limit in seconds, or raise InputError unless it is positive and below 10^9."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise InputError(
            f"timeout must be a positive number of seconds, such as 600, not {timeout!r}"
        )
    return float(timeout)
