"""Replay and EWC: what their papers say, on small cases; every intervention: a resumed run is an uninterrupted one."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from continual_cases import (
    EVERY_INTERVENTION,
    SMALL,
    Watching,
    assert_same,
    checkpoint,
    comparable,
    lines,
    net,
    trainer,
)
from torch import nn

from fastlr.data import ImageStore, Task, load_task, normalise, pairs, synthetic_store
from fastlr.drivers import continual
from fastlr.drivers.batches import mixed_order, spans
from fastlr.drivers.config import resolve
from fastlr.drivers.continual_config import PRESETS, ContinualOptions
from fastlr.drivers.interventions import diagonal_fisher
from fastlr.drivers.interventions import replay as replay_module
from fastlr.errors import InputError, ModelError


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "store"
    synthetic_store(path, classes=4, size=8, train=11, test=5)
    return str(path)


@pytest.fixture(scope="module")
def store(images) -> ImageStore:
    return ImageStore.open(images)


def started(store, network=None, **settings):
    mine = trainer(*([network] if network else []), **settings)
    mine.started_at(copy.deepcopy(mine.model.state_dict()), store)
    return mine


# -- every intervention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        EVERY_INTERVENTION,
        {"cbp_rate": 0.1, "cbp_maturity": 2, "optimiser": "sgd", "momentum": 0.9, "optimiser_state": "reset"},
        {"replay_images": 9, "ewc": 3.0, "head_reset": True, "measures": ("local_redundancy_next_task",)},
    ],
)
def test_a_resumed_run_is_an_uninterrupted_one(tmp_path, images, settings):
    settings = {**SMALL, "data": images, "measures": (), **settings}
    continual.begin(tmp_path / "long", "paper", {**settings, "tasks": 4})
    continual.begin(tmp_path / "short", "paper", {**settings, "tasks": 1})
    for tasks in (3, 4):
        torch.rand(7)
        continual.resume(tmp_path / "short", {"tasks": tasks})
    assert comparable(tmp_path / "short") == comparable(tmp_path / "long")
    assert_same(checkpoint(tmp_path / "short"), checkpoint(tmp_path / "long"))
    for line in lines(tmp_path / "long")[1:]:
        assert set(line["interventions"]) <= {"continual_backprop", "replay", "ewc"}
        assert all(line["interventions"].values())


def test_a_skipped_task_leaves_no_trace_in_them(store):
    mine = started(store, **{**EVERY_INTERVENTION, "on_nan": "skip"})
    first, second = (load_task(store, pair) for pair in pairs(4, 2))
    assert mine.learn(first, 0) is not None
    before, image = copy.deepcopy(mine.state()), mine.replay.images.clone()
    broken = second._replace(train_y=second.train_y.clone())
    mine.model.register_forward_hook(lambda module, args, z: z * math.nan if module.training else z)
    assert mine.learn(broken, 1) is None
    assert_same(before, mine.state())
    assert torch.equal(image, mine.replay.images)


def test_off_by_default(store):
    for preset in PRESETS:
        options = resolve(ContinualOptions, PRESETS, preset, {})
        assert not (options.cbp_rate or options.replay_images or options.ewc or options.l2_init or options.perturb)
    mine = started(store)
    assert mine.interventions == [] and type(mine.optimiser) is torch.optim.AdamW


def test_options_out_of_range():
    for settings, message in (
        ({"cbp_rate": 1.5}, "cbp_rate=1.5: give at most 1"),
        ({"cbp_decay": 1.0}, "cbp_decay=1.0: give less than 1"),
        ({"replay_share": 1.0}, "replay_share=1.0: give less than 1"),
        ({"replay_share": 0.0}, "replay_share=0.0: give a positive number"),
        ({"ewc_decay": 1.01}, "ewc_decay=1.01: give at most 1"),
        ({"ewc": -1.0}, "ewc=-1.0: give at least 0"),
        ({"ewc_images": 0}, "ewc_images=0: give at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            resolve(ContinualOptions, PRESETS, "paper", settings)


# -- replay -------------------------------------------------------------------------------------------------------------


def test_the_memory_is_a_uniform_sample_of_all_earlier_images(store):
    """300 memories of 12 after 3 tasks of 22: every image equally often, with the label of its task, and none twice."""
    tasks = [load_task(store, pair) for pair in pairs(4, 3)]
    counts = torch.zeros(3, 22)
    for seed in range(300):
        mine = started(store, replay_images=12, seed=seed)
        (memory,) = mine.interventions
        for number, task in enumerate(tasks):
            memory.after_task(task, number)
            assert memory.record() == {"images": 12, "tasks": len(memory.origin[:, 0].unique())}
        for image, label, (number, row) in zip(memory.images, memory.labels, memory.origin.tolist()):
            counts[number, row] += 1
            assert torch.equal(image, tasks[number].train_x[row]) and label == tasks[number].train_y[row]
    wanted = 300 * 12 / 66
    assert ((counts - wanted).square() / (wanted * (1 - 12 / 66))).sum() < 66 + 4 * (2 * 66) ** 0.5  # chi-squared
    assert abs(counts.sum(1) - 1200).max() < 4 * (300 * 12 / 3 * 2 / 3) ** 0.5


def test_the_memory_takes_all_while_there_is_room(store):
    mine = started(store, replay_images=1000)
    (memory,) = mine.interventions
    tasks = [load_task(store, pair) for pair in pairs(4, 2)]
    for number, task in enumerate(tasks):
        memory.after_task(task, number)
    assert torch.equal(memory.images, torch.cat([task.train_x for task in tasks]))
    assert torch.equal(memory.labels, torch.cat([task.train_y for task in tasks]))


def test_a_resumed_memory_is_read_from_the_store(store):
    mine, other = started(store, replay_images=9, seed=3), started(store, replay_images=9, seed=3)
    for number, pair in enumerate(pairs(4, 4, seed=3)):
        mine.interventions[0].after_task(load_task(store, pair), number)
    state = mine.interventions[0].state()
    assert not any(value.dtype == torch.uint8 for value in state.values()), "checkpoints hold no images"
    other.interventions[0].load(state)
    for name in ("images", "labels", "draws", "origin"):
        assert torch.equal(getattr(mine.interventions[0], name), getattr(other.interventions[0], name))
    assert other.interventions[0].images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("share", "counts"), [(0.5, (6, 6)), (0.25, (9, 3)), (0.9, (1, 11))])
def test_every_batch_has_its_share_of_the_memory(store, share, counts):
    mine = started(store, lambda: Watching(), replay_images=30, replay_share=share, norm_batch=0, flip=False, epochs=2)
    tasks = [load_task(store, pair) for pair in ((0, 1), (2, 3))]
    mine.learn(tasks[0], 0)
    assert [len(x) for x in mine.model.seen] == [12, 10] * 2, "nothing to replay in the first task"
    mine.model.seen.clear()
    mine.learn(tasks[1], 1)
    own, memory = normalise(tasks[1].train_x), normalise(tasks[0].train_x)  # all of it is in the memory

    def matches(x, of):
        return (x[:, None] == of).flatten(2).all(2)

    batches = mine.model.seen
    of_epoch = [stop - start for start, stop in spans(22, counts[0])]
    assert [matches(x, own).sum().item() for x in batches] == of_epoch * 2
    assert [matches(x, memory).sum().item() for x in batches] == [
        round(n * counts[1] / counts[0]) for n in of_epoch
    ] * 2
    assert max(map(len, batches)) <= 12 or counts[0] == 1
    epoch = torch.cat(batches[: len(of_epoch)])
    assert matches(epoch, own).sum(0).tolist() == [1] * 22
    times = matches(epoch, memory).sum(0)
    assert times.max() - times.min() <= 1, "all of the memory before any of it again"
    first = torch.stack([matches(x[:1], own).any() for x in batches])
    assert first.any() and not first.all(), "new and old in random order"


def test_mixed_order():
    generator = torch.Generator().manual_seed(0)
    index, bounds = mixed_order([(0, 5), (5, 8)], 7, 1.0, generator)
    assert bounds == [(0, 10), (10, 16)]
    assert sorted(i for i in index.tolist() if i < 8) == list(range(8))
    old = [i for i in index.tolist() if i >= 8]
    assert set(old) == set(range(8, 15)) and len(old) == 8
    assert index[:10].tolist() != sorted(index[:10].tolist())


def test_a_memory_that_does_not_fit_is_refused(store, monkeypatch):
    monkeypatch.setattr(replay_module, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(InputError, match=r"replay_images=100000: .* GiB do not fit on cpu; choose fewer"):
        started(store, replay_images=100_000)


# -- EWC ----------------------------------------------------------------------------------------------------------------


def test_the_fisher_diagonal_is_that_of_a_loop_over_images_and_labels():
    """In float64: sum over both labels of p(y) (d log p(y) / d theta)^2, one image at a time."""
    torch.manual_seed(0)
    model = net().double()
    model[1].running_mean.normal_(), model[1].running_var.uniform_(0.5, 2)
    x = torch.randn(7, 3, 8, 8).double()
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    model.eval()
    for image in x:
        for y in (0, 1):
            log_p = F.log_softmax(model(image[None]), 1)[0]
            for total, g in zip(wanted, torch.autograd.grad(log_p[y], list(model.parameters()))):
                total += log_p[y].exp().detach() * g.square() / 7
    model.train()
    before = copy.deepcopy(model.state_dict())
    found = diagonal_fisher(model, list(model.parameters()), x)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-15)
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    single = diagonal_fisher(model.float(), list(model.parameters()), x.float())
    for a, b in zip(single, wanted):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-6 * b.max().item())
    with pytest.raises(ModelError, match="logits"):
        diagonal_fisher(model[0], list(model[0].parameters()), x.float())


def test_the_penalty_is_what_autograd_says(store):
    mine = started(store, ewc=3.0, ewc_decay=0.5, ewc_images=5)
    (ewc,) = mine.interventions
    tasks = [load_task(store, pair) for pair in pairs(4, 2)]
    fishers = []
    for number, task in enumerate(tasks):
        assert mine.learn(task, number) is not None
        fishers.append([fisher.clone() for fisher in ewc.fisher])
        anchors = [p.detach().clone() for p in mine.model.parameters()]
    generator = torch.Generator().manual_seed(replay_module.stream_seed(0, "ewc", 1))
    of_second = diagonal_fisher(
        mine.model,
        list(mine.model.parameters()),
        normalise(tasks[1].train_x[torch.randperm(22, generator=generator)[:5]]),
    )
    for first, second, sum_ in zip(fishers[0], of_second, ewc.fisher):
        torch.testing.assert_close(sum_, 0.5 * first + second)
        assert sum_.any()
    with torch.no_grad():
        for p in mine.model.parameters():
            p += 0.1 * torch.randn_like(p)
    penalty = 1.5 * sum((f * (p - a).square()).sum() for f, p, a in zip(ewc.fisher, mine.model.parameters(), anchors))
    wanted = torch.autograd.grad(penalty, list(mine.model.parameters()))
    for p in mine.model.parameters():
        p.grad = torch.ones_like(p)
    ewc.add_gradients()
    for p, g in zip(mine.model.parameters(), wanted):
        torch.testing.assert_close(p.grad, 1 + g)
    assert ewc.penalty() == pytest.approx(penalty.item(), rel=1e-5) and ewc.record()["penalty"] < ewc.penalty()


def test_a_head_that_is_reset_is_not_held(store):
    mine = started(store, ewc=1.0, head_reset=True)
    (ewc,) = mine.interventions
    assert len(ewc.parameters) == len(list(mine.model.parameters())) - 2
    assert not {id(p) for p in mine.head().parameters()} & {id(p) for p in ewc.parameters}


def test_ewc_does_nothing_in_the_first_task(store):
    task = load_task(store, (0, 1))
    a, b = started(store, ewc=100.0), started(store)
    assert a.learn(task, 0) == b.learn(task, 0)
    assert_same(a.model.state_dict(), b.model.state_dict())


# -- what they are for --------------------------------------------------------------------------------------------------


def conflicting() -> list[Task]:
    """Two tasks of telling a pattern in noise from its negative; the second pattern is partly the negative of the first."""
    first, other = torch.randn(2, 3, 8, 8)
    tasks = []
    for pattern in (first, 0.75**0.5 * other - 0.5 * first):
        parts: list[torch.Tensor] = []
        for n in (300, 200):
            y = torch.arange(n) % 2
            values = 128 + 8 * (2 * y - 1)[:, None, None, None] * pattern + 40 * torch.randn(n, 3, 8, 8)
            parts += [values.clamp(0, 255).byte().contiguous(memory_format=torch.channels_last), y]
        tasks.append(Task(*parts))
    return tasks


def small(num_classes: int = 2) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, num_classes))


def test_replay_and_ewc_keep_an_earlier_task(store):
    """Accuracy on the first of two tasks that pull in different directions, after the second; and on the second."""
    found = {}
    for name, settings in (("plain", {}), ("replay", {"replay_images": 100}), ("ewc", {"ewc": 150.0})):
        mine = started(store, small, batch_size=20, norm_batch=0, learning_rate=1e-3, epochs=10, flip=False, **settings)
        torch.manual_seed(0)
        tasks = conflicting()
        for number, task in enumerate(tasks):
            mine.learn(task, number)
            assert mine.accuracy(task.test_x, task.test_y) > 0.85
        found[name] = mine.accuracy(tasks[0].test_x, tasks[0].test_y)
    assert found["plain"] < 0.7 and found["replay"] > found["plain"] + 0.15 and found["ewc"] > found["plain"] + 0.15, (
        found
    )
