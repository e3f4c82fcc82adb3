"""Tasks from an image store: pairs of classes, prefetching, normalisation, the embedded data."""

import hashlib
import sys
import threading
import time
from collections import Counter
from functools import partial

import numpy as np
import torch
from expected import needs_gpu, refused
from pytest import fixture, importorskip, mark, raises
from torchvision import transforms

from fastlr.errors import InputError
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.continual.options import ContinualOptions
from fastlr.experiments.data import (
    ClassPairs,
    FreshDigits,
    ImageStore,
    PermutedDigits,
    Prefetcher,
    RandomLabels,
    load_task,
    normalise,
    pairs,
    synthetic_store,
)
from fastlr.experiments.data.synthetic import texture_images


@fixture(scope="module")
def store():
    return synthetic_store(classes=5, size=16, train=6, test=3)


def unordered(drawn):
    return [tuple(sorted(pair[:2])) for pair in drawn]


def chi_square(counts):
    """(statistic - degrees of freedom) in standard deviations."""
    expected, degrees = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5)


def test_pairs_rounds():
    drawn = pairs(12, 200, seed=3)
    rounds = [drawn[i : i + 66] for i in range(0, 200, 66)]
    for turn, part in enumerate(rounds):
        assert len(set(unordered(part))) == len(part)
        assert {pair.round for pair in part} == {turn}
        assert all(
            pair.first != pair.second and 0 <= min(pair[:2]) and max(pair[:2]) < 12 for pair in part
        )
    assert set(unordered(rounds[0])) == set(unordered(rounds[1]))
    assert len(rounds[0]) == 66
    assert unordered(rounds[0]) != unordered(rounds[1])


def test_pairs_are_a_function_of_seed_and_position():
    drawn = pairs(12, 200, seed=3)
    assert pairs(12, 50, seed=3) == drawn[:50]
    assert pairs(12, 90, seed=3, start=60) == drawn[60:150]
    assert all(pairs(12, 1, seed=3, start=k) == [drawn[k]] for k in (0, 65, 66, 131, 132, 199))
    assert pairs(12, 200, seed=4) != drawn
    assert pairs(12, 0) == []
    # These bytes hold on every machine.
    digest = hashlib.sha256(
        repr([tuple(pair) for pair in pairs(1000, 3000, seed=0)]).encode()
    ).hexdigest()
    assert digest == "9a12743a3fa5701910de0df7b0d64602d1bd9f8bf58aad8c7c24123a1b63f0f5"


def test_pairs_are_uniform():
    """At each position every pair is as likely as any other, and either class may have label 0."""
    first, last, label = np.zeros((6, 6)), np.zeros((6, 6)), 0
    seeds = 1000
    for seed in range(seeds):
        drawn = pairs(6, 15, seed=seed)
        first[drawn[0][:2]] += 1
        last[drawn[14][:2]] += 1
        label += drawn[7].first < drawn[7].second
    off = ~np.eye(6, dtype=bool)
    assert abs(chi_square(first[off])) < 4
    assert abs(chi_square(last[off])) < 4
    assert abs(label - seeds / 2) < 4 * (seeds / 4) ** 0.5
    counts = Counter(c for pair in pairs(1000, 20000, seed=1) for c in pair[:2])
    assert abs(chi_square(np.array([counts[c] for c in range(1000)]))) < 4


@mark.parametrize("arguments", [(1, 5), (0, 1), (5, -1), (5, 1, -1), (5, 1, 0, -1), (1 << 20, 1)])
def test_pairs_refuse(arguments):
    with raises(InputError):
        pairs(*arguments)


def test_load_task(store):
    task = load_task(store, (3, 1))
    assert task.train_x.shape == (12, 3, 16, 16)
    assert task.test_x.shape == (6, 3, 16, 16)
    assert task.train_y.tolist() == [0] * 6 + [1] * 6
    assert task.test_y.tolist() == [0] * 3 + [1] * 3
    assert torch.equal(task.train_x[:6], texture_images(3, 0, 6, size=16))
    assert torch.equal(task.test_x[3:], texture_images(1, 6, 9, size=16))
    with refused("two different"):
        load_task(store, (1, 1))


@mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@mark.parametrize("channels_last", [True, False])
def test_normalise(store, dtype, channels_last):
    images = torch.arange(256, dtype=torch.uint8).repeat(2, 3, 1).view(2, 3, 16, 16)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    wanted = transforms.Normalize(mean, std)(images.double() / 255)
    for layout in (torch.contiguous_format, torch.channels_last):
        got = normalise(images.contiguous(memory_format=layout), dtype, channels_last=channels_last)
        torch.testing.assert_close(
            got.double(), wanted, rtol=max(torch.finfo(dtype).eps, 1e-14), atol=1e-6
        )
        assert got.dtype == dtype
        assert got.is_contiguous(
            memory_format=torch.channels_last if channels_last else torch.contiguous_format
        )
        assert torch.equal(got, normalise(images, dtype))
    if dtype == torch.float32:  # one rounding after each of two steps, and no other
        constants = np.float32([255 * m for m in mean]), np.float32([1 / (255 * s) for s in std])
        shift, scale = (c[:, None, None] for c in constants)
        assert np.array_equal(got.numpy(), (images.numpy().astype(np.float32) - shift) * scale)


@mark.long
def test_normalise_compiled_gives_the_same_bits(store):
    images = load_task(store, (0, 1)).train_x
    compiled = torch.compile(normalise, fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(compiled(images, dtype), normalise(images, dtype))


def test_normalise_refuses(store):
    images = load_task(store, (0, 1)).train_x
    for bad in (images.float(), images[0], images[:, :1]):
        with raises(InputError):
            normalise(bad)


class NotedStore:
    """A store that records which pairs were loaded, and fails or waits on demand."""

    def __init__(self, store, fail_at=None):
        self.store = store
        self.fail_at = fail_at
        self.loaded = []
        self.threads = set()
        self.gate = threading.Event()
        self.gate.set()

    def load(self, classes, split, **options):
        if split == "train":
            assert self.gate.wait(10)
            self.loaded.append(tuple(classes))
            self.threads.add(threading.current_thread())
        if len(self.loaded) - 1 == self.fail_at:
            raise OSError("the disk is gone")
        return self.store.load(classes, split, **options)


def settle(condition):
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_prefetcher_order_and_depth(store):
    watched, drawn = NotedStore(store), pairs(5, 14, seed=2)
    with Prefetcher(partial(load_task, watched), drawn) as tasks:
        for k, task in enumerate(tasks):
            wanted = load_task(store, drawn[k])
            assert all(torch.equal(a, b) for a, b in zip(task, wanted, strict=True))
            ahead = min(k + 2, 14)  # this one and the next, no more
            assert settle(lambda ahead=ahead: len(watched.loaded) == ahead)
            time.sleep(0.005)
            assert len(watched.loaded) == ahead
    assert k == 13
    assert watched.loaded == [pair[:2] for pair in drawn]
    assert threading.main_thread() not in watched.threads
    assert not any(thread.is_alive() for thread in watched.threads)


def test_prefetcher_raises_where_the_task_is_asked_for(store):
    watched = NotedStore(store, fail_at=2)
    tasks = Prefetcher(partial(load_task, watched), pairs(5, 6))
    next(tasks)
    next(tasks)
    assert settle(lambda: len(watched.loaded) == 3)
    with refused("the disk is gone", OSError):
        next(tasks)
    assert not any(thread.is_alive() for thread in watched.threads)
    assert len(watched.loaded) == 3
    assert next(tasks, None) is None
    tasks.close()


def test_prefetcher_close_joins(store):
    watched = NotedStore(store)
    tasks = Prefetcher(partial(load_task, watched), pairs(5, 6))
    next(tasks)
    watched.gate.clear()
    closing = threading.Thread(target=tasks.close)
    closing.start()
    watched.gate.set()
    closing.join(5)
    assert not closing.is_alive()
    assert not any(thread.is_alive() for thread in watched.threads)
    tasks.close()
    assert next(tasks, None) is None
    with Prefetcher(partial(load_task, store), []) as none:
        assert list(none) == []


@needs_gpu
def test_prefetcher_on_a_gpu(store):
    drawn = pairs(5, 10, seed=1)
    with Prefetcher(partial(load_task, store), drawn, device="cuda") as tasks:
        for task, pair in zip(tasks, drawn, strict=True):
            wanted = load_task(store, pair)
            assert task.train_x.is_cuda
            assert task.train_x.is_contiguous(memory_format=torch.channels_last)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(task, wanted, strict=True))
            assert torch.equal(
                normalise(task.test_x, torch.bfloat16).cpu(),
                normalise(wanted.test_x, torch.bfloat16),
            )


def test_synthetic_store_is_the_same_everywhere(store, tmp_path):
    assert store.digest == "5521eff419a06b7b3cf24ab692f56cdf11f428442c83fd7f5d609e454319147a"
    larger = synthetic_store(classes=6, size=16, train=9, test=1)
    assert torch.equal(larger.load([2])[0][:6], store.load([2])[0])  # whatever the numbers
    assert torch.equal(texture_images(2, 4, 6, size=16), store.load([2])[0][4:])
    other = synthetic_store(classes=5, size=16, train=6, test=3, seed=1)
    assert other.digest != store.digest
    assert not torch.equal(other.load([0])[0], store.load([0])[0])
    written = synthetic_store(tmp_path / "store", classes=5, size=16, train=6, test=3)
    assert written.digest == store.digest
    assert written.damaged() == store.damaged() == []
    assert ImageStore.open(tmp_path / "store").digest == store.digest
    with refused("is there already"):
        synthetic_store(tmp_path / "store")
    with refused("size must lie in"):
        synthetic_store(size=4)


def test_tasks_of_a_store_by_number(store):
    tasks, drawn = ClassPairs(store, seed=2), pairs(5, 14, seed=2)
    assert (tasks.classes, tasks.size, tasks.fewest, tasks.digest) == (2, 16, 12, store.digest)
    for number in (13, 0, 7):
        pair, task = drawn[number], tasks.load(number)
        assert all(torch.equal(a, b) for a, b in zip(task, load_task(store, pair), strict=True))
        names = [f"texture-00{pair.first}", f"texture-00{pair.second}"]
        assert tasks.facts(number) == {
            "round": pair.round,
            "classes": [pair.first, pair.second],
            "names": names,
        }


def two_tasks(tasks):
    """The first two tasks, of which the first is the same when it is loaded again."""
    first, again = tasks.load(0), tasks.load(0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first.train_x.is_contiguous(memory_format=torch.channels_last)
    return first, tasks.load(1)


def test_random_labels_are_all_that_changes_from_task_to_task():
    tasks = RandomLabels(images=5000, classes=10, seed=3)
    first, second = two_tasks(tasks)
    assert torch.equal(first.train_x, second.train_x)
    assert first.train_x.shape == (5000, 3, 8, 8)
    assert first.test_x is first.train_x
    assert first.test_y is first.train_y
    counts = torch.bincount(first.train_y, minlength=10).double()
    # Chi-squared of 9: 0.1 %.
    assert len(counts) == 10
    assert ((counts - 500).square() / 500).sum() < 28
    assert abs((first.train_y == second.train_y).double().mean() - 0.1) < 0.02
    values = torch.bincount(first.train_x.flatten().long(), minlength=256).double()
    assert ((values - values.mean()).square() / values.mean()).sum() < 330  # of 255
    fewer = RandomLabels(images=9, classes=10, seed=3)
    assert torch.equal(fewer.images, tasks.images[:9])
    assert torch.equal(fewer.labels(7), tasks.labels(7)[:9])
    assert (
        len(
            {
                tasks.digest,
                fewer.digest,
                RandomLabels(9, 3, 3).digest,
                RandomLabels(9, 10, 4).digest,
            }
        )
        == 4
    )
    for images, classes in ((1, 10), (10, 1)):
        with refused("at least two"):
            RandomLabels(images, classes)


def test_digits_have_random_labels_or_pixels_in_another_order():
    importorskip("sklearn")
    tasks = PermutedDigits(images=1000, seed=3)
    first, second = two_tasks(tasks)
    assert torch.equal(first.test_y, second.test_y)
    assert first.train_x.shape == (1000, 3, 8, 8)
    assert first.test_x.shape == (797, 3, 8, 8)
    assert first.train_x.dtype == torch.uint8
    digits = tasks.x.flatten(2)
    for task in (first, second):
        order = torch.cat([task.train_x, task.test_x]).flatten(2)
        assert not torch.equal(order, digits)
        assert torch.equal(order.sort(2).values, digits.sort(2).values)
        columns = [set(map(tuple, x[:, 0].T.tolist())) for x in (order, digits)]
        assert columns[0] == columns[1], "the same order for all digits"
    assert not torch.equal(first.train_x, second.train_x)
    assert tasks.facts(1)["classes"] == list(range(10))
    assert not torch.equal(first.train_x, PermutedDigits(1000, 4).load(0).train_x)
    nearest = torch.cdist(
        first.test_x[:, 0].flatten(1).float(), first.train_x[:, 0].flatten(1).float()
    ).argmin(1)
    assert (first.train_y[nearest] == first.test_y).float().mean() > 0.9, (
        "labels belong to their digits"
    )
    labelled = RandomLabels(50, 10, 3, digits=True)
    assert torch.equal(labelled.images, tasks.x[:50])
    assert torch.equal(labelled.labels(2), RandomLabels(50, 10, 3).labels(2))
    assert (
        labelled.digest
        == RandomLabels(50, 10, 4, digits=True).digest
        != RandomLabels(50, 10, 3).digest
    )
    for wrong in (1, 1797):
        with refused("there are 1797 digits"):
            PermutedDigits(wrong - (wrong == 1))


def test_fresh_digits_are_one_task_drawn_anew():
    importorskip("sklearn")
    tasks = FreshDigits(images=1000, seed=3)
    first, second = two_tasks(tasks)
    assert not torch.equal(first.train_x, second.train_x)
    for task in (first, second):
        x = torch.cat([task.train_x, task.test_x])
        y = torch.cat([task.train_y, task.test_y])
        drawn = {(*image.flatten().tolist(), label.item()) for image, label in zip(x, y)}
        known = {(*i.flatten().tolist(), label.item()) for i, label in zip(tasks.x, tasks.y)}
        assert drawn == known, "the same digits with their own labels"
        assert len(task.train_y) == 1000
    assert not torch.equal(first.train_x, FreshDigits(1000, 4).load(0).train_x)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with refused("pip install scikit-learn"):
        PermutedDigits(10)
    tasks, about = DRIVER.open_data(ContinualOptions(data="random-labels", random_images=8))
    assert len(tasks.load(0).train_y) == 8 and about["classes"] == 10, "noise wants none"
