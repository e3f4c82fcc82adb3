"""Tasks: their sequence, binary tasks from an image store, loading the next one ahead.

A task's images stay on the device as uint8, as long as the task lasts; batches are gathered by
index and normalised there::

    with Prefetcher(ClassPairs(store, seed=0).load, range(3000), device="cuda") as tasks:
        for task in tasks:
            x = normalise(take(task.train_x, index), torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fastlr.errors import InputError
from fastlr.experiments.data.store import ImageStore
from fastlr.ops.philox import STREAMS, check_seed, indices, random_words, uniform_integers

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ROUND_BITS = 40  # a round uses the words of the indices round * 2**40 and following


class Pair(NamedTuple):
    """Two classes, of which the first has label 0, and the round in which they were drawn.

    Rounds are counted from 0.
    """

    first: int
    second: int
    round: int


class Task(NamedTuple):
    """A task on the device.

    Attributes:
        train_x: uint8 ``[n, 3, H, W]`` with channels_last strides.
        train_y: int64 ``[n]``; of a pair of classes, 0 for the first and 1 for the second.
        test_x: as ``train_x``.
        test_y: as ``train_y``.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


class TaskSequence(Protocol):
    """Tasks, each a pure function of a seed and its number.

    Attributes:
        classes: Number of classes of a task.
        size: Height and width of the images.
        fewest: Training images that every task has.
        digest: SHA-256 of the content.
    """

    classes: int
    size: int
    fewest: int

    @property
    def digest(self) -> str: ...  # noqa: D102
    def load(self, number: int, device: torch.device | str | None = None) -> Task: ...  # noqa: D102
    def facts(self, number: int) -> dict[str, Any]:
        """Return what the record of a task says of it."""


class ClassPairs:
    """The binary tasks of a store: the pairs of its classes in random order, round after round.

    It is a `TaskSequence`.

    Args:
        store: Where the images come from.
        seed: Seed of `pairs`.
    """

    classes = 2

    def __init__(self, store: ImageStore, seed: int = 0) -> None:
        self.store, self.seed, self.size, self.digest = store, seed, store.size, store.digest
        ranges = [store.range(i, "train") for i in range(len(store.classes))]
        self.fewest = 2 * min(stop - start for start, stop in ranges)

    def pair(self, number: int) -> Pair:
        """Return the pair of classes of a task."""
        return pairs(len(self.store.classes), 1, self.seed, start=number)[0]

    def load(self, number: int, device: torch.device | str | None = None) -> Task:
        """Load a task to the device; errors as `load_task`."""
        return load_task(self.store, self.pair(number), device)

    def facts(self, number: int) -> dict[str, Any]:
        """Return the round of a task, and the indices and names of its classes."""
        first, second, turn = self.pair(number)
        names = [self.store.classes[first], self.store.classes[second]]
        return {"round": turn, "classes": [first, second], "names": names}


def pairs(classes: int, count: int, seed: int = 0, start: int = 0) -> list[Pair]:
    """Draw pairs of classes uniformly without replacement, in rounds.

    A new round begins when all n (n - 1) / 2 pairs are used up.

    Within a round, ordered pairs of two different classes are drawn independently and uniformly,
    and one whose two classes were together before in this round is passed over. So each round is a
    uniformly random permutation of the pairs, and which of the two classes has label 0 is a fair
    coin. (The probabilities of two classes differ by at most 2**-32, see
    :func:`fastlr.ops.philox.uniform_integers`.)

    The words are fastlr's Philox4x32-10 (:mod:`fastlr.ops.philox`), integers throughout: pair k is
    a function of the number of classes, the seed and k alone, on any platform, so a resumed run
    needs no state. The work grows with the position in the round: for 1000 classes, 3000 pairs take
    milliseconds, the whole round seconds.

    Args:
        classes: Their number n.
        count: How many pairs.
        seed: In ``[0, 2**64)``.
        start: Position of the first.

    Returns:
        The pairs of indices at the positions ``start .. start + count - 1``.

    Raises:
        InputError: Fewer than two classes, or an argument out of range.

    Example:
        >>> [pair.round for pair in pairs(3, 5)]
        [0, 0, 0, 1, 1]
        >>> pairs(1000, 3000)[2000:] == pairs(1000, 1000, start=2000)
        True
    """
    check_seed(seed)
    if not 2 <= classes < 1 << 20:
        raise InputError(f"pairs need 2 to {(1 << 20) - 1} classes, got {classes}")
    if count < 0 or start < 0:
        raise InputError(f"count and start must not be negative, got {count} and {start}")
    size = classes * (classes - 1) // 2
    drawn: list[Pair] = []
    while len(drawn) < count:
        turn, offset = divmod(start + len(drawn), size)
        stop = min(size, offset + count - len(drawn))
        drawn += [Pair(a, b, turn) for a, b in _round(classes, seed, turn, stop)[offset:]]
    return drawn


def _round(n: int, seed: int, turn: int, stop: int) -> list[tuple[int, int]]:
    """Return the first ``stop`` pairs of a round."""
    position, block = turn << _ROUND_BITS, max(64, stop + stop // 4)
    # Key, class 0, class 1 of the pairs in the order of their first draw.
    drawn = torch.empty(0, 3, dtype=torch.int64)
    while len(drawn) < stop:
        words = random_words(seed, indices(position, position + block), STREAMS["pairs"], 2)
        zero, one = uniform_integers(words[:, 0], n), uniform_integers(words[:, 1], n - 1)
        one = one + (one >= zero).long()  # uniform over the classes that are not class 0
        key = torch.minimum(zero, one) * n + torch.maximum(zero, one)
        rows = torch.cat([drawn, torch.stack([key, zero, one], dim=1)])
        _, places = np.unique(rows[:, 0].numpy(), return_index=True)
        drawn = rows[torch.from_numpy(np.sort(places))]
        position, block = position + block, min(block, 1 << 20)
    return [(a, b) for _, a, b in drawn[:stop].tolist()]


def load_task(
    store: ImageStore, pair: Sequence[int], device: torch.device | str | None = None
) -> Task:
    """Load the images of two classes to the device.

    Args:
        store: Where from.
        pair: Two classes by index (more items, such as a :class:`Pair`'s round, are not looked at).
        device: None: the CPU.

    Raises:
        InputError: An unknown class, one class twice, or an unreadable store.
    """
    classes = pair[:2]
    if classes[0] == classes[1]:
        raise InputError(f"a task needs two different classes, got {classes[0]} twice")
    train_x, train_y = store.load(classes, "train", device=device)
    test_x, test_y = store.load(classes, "test", device=device)
    return Task(train_x, train_y, test_x, test_y)


class Prefetcher:
    """Iterate over tasks; while one is in use, a background thread loads the next one.

    It loads only that one.

    So two tasks are in memory at most, while the caller holds one; a task that is handed out is
    moved to the device then. An exception of the thread is raised where the task is asked for, and
    ends the iteration. Use it in a ``with`` block, or call :meth:`close`, which waits for the
    thread.

    Args:
        load: A task's name -> the task on the CPU, such as the ``load`` of a `TaskSequence`.
        names: Names of the tasks, in order: numbers.
        device: None: the CPU.
    """

    def __init__(
        self,
        load: Callable[[Any], Task],
        names: Iterable[Any],
        device: torch.device | str | None = None,
    ) -> None:
        self._tasks = _one_ahead(load, names, device or "cpu")

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        return next(self._tasks)

    def close(self) -> None:
        """Wait for the thread and drop the task it has loaded; may be called more than once."""
        self._tasks.close()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _one_ahead(
    load: Callable[[Any], Task], names: Iterable[Any], device: torch.device | str
) -> Generator[Task, None, None]:
    """Yield tasks on a device; `Prefetcher` says how."""
    following = iter(names)
    with ThreadPoolExecutor(1, thread_name_prefix="fastlr-prefetch") as thread:

        def begun() -> list[Future[Task]]:
            return [thread.submit(load, name) for name in islice(following, 1)]

        coming = begun()
        while coming:
            task = coming[0].result()
            coming = begun()
            yield Task(*(t.to(device) for t in task))


def take(
    images: Tensor,  # [n, 3, H, W]
    index: Tensor,  # [k] int64
) -> Tensor:
    """Gather images ``[k, 3, H, W]`` by index: ``images[index]``, with channels_last strides.

    Whole rows are copied at a time.

    Args:
        images: With channels_last strides, as a task's are, nothing else is copied.
        index: On the same device.
    """
    return images.permute(0, 2, 3, 1).index_select(0, index).permute(0, 3, 1, 2)


def normalise(
    images: Tensor,  # [n, 3, H, W] uint8
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
) -> Tensor:
    """Return ``(images / 255 - mean) / std`` of ImageNet on the images' device.

    Computed in float32 as ``(byte - 255 mean) * (1 / (255 std))`` and rounded to ``dtype`` once. A
    subtraction before a multiplication cannot be fused into one rounding, so every device and
    compiler gives the same bits.

    Args:
        images: With any strides.
        dtype: float32, bfloat16, float16 or float64 (then computed in float64).
        channels_last: Strides of the result; False: contiguous.

    Raises:
        InputError: The images are not uint8 ``[n, 3, H, W]``.
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
        raise InputError(
            f"images must be uint8 [n, 3, H, W], got {images.dtype} {list(images.shape)}"
        )
    working = torch.float64 if dtype == torch.float64 else torch.float32
    # Compiled: part of the code.
    constants = _constants if torch.compiler.is_compiling() else _cached_constants
    shift, scale = constants(working, images.device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return images.to(working, memory_format=layout).sub_(shift).mul_(scale).to(dtype)


def _constants(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    shift = torch.tensor([255 * m for m in IMAGENET_MEAN], dtype=dtype, device=device)
    scale = torch.tensor([1 / (255 * s) for s in IMAGENET_STD], dtype=dtype, device=device)
    return shift[:, None, None], scale[:, None, None]


# Made once: a copy to the device in each step would stall it, and no CUDA graph can hold it.
_cached_constants = lru_cache(maxsize=None)(_constants)
