"""Replay and EWC follow their papers; with any intervention a resumed run is an unbroken one."""

import copy
import math

import torch
import torch.nn.functional as F
from continual_cases import (
    EVERY_INTERVENTION,
    Watching,
    assert_same,
    begin,
    checkpoint,
    comparable,
    net,
    trainer,
)
from expected import refused
from pytest import approx, fixture, mark
from torch.testing import assert_close
from untouched import untouched

import fastlr
from fastlr.errors import ModelError, NonFiniteError
from fastlr.experiments.continual import experiment as continual
from fastlr.experiments.continual.interventions import asked_for
from fastlr.experiments.continual.interventions import replay as replay_module
from fastlr.experiments.continual.interventions.ewc import diagonal_fisher
from fastlr.experiments.continual.options import PRESETS, ContinualOptions
from fastlr.experiments.data import (
    ClassPairs,
    ImageStore,
    load_task,
    normalise,
    pairs,
    synthetic_store,
)
from fastlr.experiments.runs.folder import stream_seed
from fastlr.experiments.runs.options import resolve
from fastlr.experiments.training.optim import spans


@fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "store"
    synthetic_store(path, classes=4, size=8, train=11, test=5)
    return str(path)


@fixture(scope="module")
def store(images):
    return ImageStore.open(images)


def started(store, network=None, **settings):
    learner = trainer(*([network] if network else []), **settings)
    learner.started_at(
        copy.deepcopy(learner.model.state_dict()), ClassPairs(store, learner.options.seed)
    )
    return learner


# -- every intervention
# -------------------------------------------------------------------------------------------------


@mark.parametrize(
    "settings",
    [
        EVERY_INTERVENTION,
        {
            "cbp_rate": 0.1,
            "cbp_maturity": 2,
            "optimiser": "sgd",
            "momentum": 0.9,
            "optimiser_state": "reset",
        },
        {"reset_every": 1, "reset_layers": 0, "optimiser_state": "reset"},
        {
            "replay_images": 9,
            "ewc": 3.0,
            "head_reset": True,
            "measures": ("local_redundancy_next_task",),
        },
        {"redo_every": 3, "redo_threshold": 0.95},
        {"redundancy_floor": 1e6, "floor_images": 3},
        {"redundancy_floor": 1e6, "floor_images": 3, "dtype": "bf16-weights"},
    ],
)
def test_a_resumed_run_is_an_uninterrupted_one(tmp_path, images, settings):
    records = begin(tmp_path / "long", images, **{"measures": (), **settings, "tasks": 3})
    begin(tmp_path / "short", images, **{"measures": (), **settings, "tasks": 1})
    for tasks in (2, 3):
        torch.rand(7)
        continual.resume(tmp_path / "short", {"tasks": tasks})
    assert comparable(tmp_path / "short") == comparable(tmp_path / "long")
    assert_same(checkpoint(tmp_path / "short"), checkpoint(tmp_path / "long"))
    for line in records[1:]:
        assert set(line["interventions"]) <= {
            "continual_backprop",
            "redo",
            "replay",
            "ewc",
            "reset",
            "redundancy_floor",
        }
        assert all(line["interventions"].values())
    if "redo_threshold" in settings:
        assert any(line["interventions"]["redo"]["replaced"] for line in records[1:])


def test_a_skipped_task_leaves_no_trace_in_them(store):
    learner = started(store, **{**EVERY_INTERVENTION, "on_nan": "skip"})
    first, second = (load_task(store, pair) for pair in pairs(4, 2))
    assert learner.learn(first, 0) is not None
    before = copy.deepcopy(learner.state())
    image = learner.replay.images.clone()
    broken = second._replace(train_y=second.train_y.clone())
    learner.model.register_forward_hook(
        lambda module, args, z: z * math.nan if module.training else z
    )
    assert learner.learn(broken, 1) is None
    assert_same(before, learner.state())
    assert torch.equal(image, learner.replay.images)


@mark.parametrize("on_nan", ["skip", "stop"])
def test_a_floor_that_sees_first_that_a_network_is_ruined_skips_its_task_or_names_it(store, on_nan):
    learner = started(
        store,
        redundancy_floor=1.0,
        floor_images=4,
        learning_rate=1e25,
        optimiser="sgd",
        on_nan=on_nan,
    )
    before = copy.deepcopy(learner.state())
    task = load_task(store, pairs(4, 1)[0])
    if on_nan == "skip":
        assert learner.learn(task, 0) is None
        assert_same(before, learner.state())
    else:
        with refused("task 0: .*lower learning_rate, or choose on_nan=skip", NonFiniteError):
            learner.learn(task, 0)


def test_off_by_default(store):
    for preset in PRESETS:
        assert asked_for(resolve(ContinualOptions, PRESETS, preset, {})) == []
    learner = started(store)
    assert learner.interventions == []
    assert type(learner.optimiser) is torch.optim.AdamW


# -- a floor under local redundancy
# ------------------------------------------------------------------------------------


@mark.filterwarnings("ignore:the local redundancy of this model jumps")
@mark.parametrize("floor", [1e-9, 1e9])
def test_below_the_floor_the_penalty_has_its_gradient(store, floor):
    learner = started(store, redundancy_floor=floor, floor_strength=0.5, floor_images=4, seed=3)
    (intervention,) = learner.interventions
    parameters = list(learner.model.parameters())
    values = []
    for step in range(3):
        for p in parameters:
            p.grad = torch.zeros_like(p)
        intervention.add_gradients()
        x = fastlr.ShapeImages(size=(3, 8, 8)).batch(
            4 * step, 4 * step + 4, seed=stream_seed(3, "redundancy_floor")
        )
        value = fastlr.redundancy_loss(
            learner.model, x, seed=stream_seed(3, "redundancy_floor") + step
        )
        values.append(float(value.detach()))
        weights = [0.99 ** (step - k) for k in range(step + 1)]
        running = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        assert intervention.running == approx(running, rel=1e-6)
        assert running > 0
        wanted = torch.autograd.grad(-0.5 * value / running, parameters, allow_unused=True)
        for p, want in zip(parameters, wanted, strict=True):
            want = torch.zeros_like(p) if want is None or floor < 1 else want
            assert_close(p.grad, want, rtol=1e-4, atol=1e-6 * (1 + float(want.abs().max())))
    assert intervention.record() == {"running": intervention.running, "below": float(floor > 1)}
    assert intervention.record()["below"] == 0


def test_a_floor_needs_eager_steps(store):
    with refused("redundancy_floor needs step=eager, not compile"):
        started(store, redundancy_floor=1.0, step="compile")


# -- periodic resets
# --------------------------------------------------------------------------------------------------


def test_resets_are_periodic_and_of_the_last_layers(store):
    learner = started(store, reset_every=2, reset_layers=1, dtype="fp32")
    (reset,) = learner.interventions
    assert reset.about() == {"layers": ["4"], "every": 2}
    initial = copy.deepcopy(learner.model.state_dict())
    tasks = [load_task(store, pair) for pair in pairs(4, 3)]
    for number, task in enumerate(tasks[:2]):
        learner.learn(task, number)
        assert reset.record() == {}
    before = copy.deepcopy(learner.model.state_dict())
    reset.before_task(tasks[2], 2)
    after = learner.model.state_dict()
    assert reset.record() == {"reset": True}
    for name, value in after.items():
        if name.startswith("4."):
            assert not torch.equal(value, before[name])
            # Not the same network again.
            assert name == "4.bias" or not torch.equal(value, initial[name])
            assert torch.isin(value, initial[name]).all(), "drawn from the values at initialisation"
        else:
            assert torch.equal(value, before[name]), "what comes before goes on"
    for name, p in learner.model.named_parameters():
        zeros = [not value.any() for value in learner.optimiser.state[p].values()]
        assert all(zeros) == name.startswith("4.")
        assert all(zeros) or not any(zeros)
    again = started(store, reset_every=2, reset_layers=1, dtype="fp32")
    again.interventions[0].before_task(tasks[2], 2)
    # A pure function of seed and task.
    assert torch.equal(again.model.state_dict()["4.weight"], after["4.weight"])


def test_a_reset_of_the_whole_network_takes_its_statistics_back(store):
    learner = started(store, reset_every=1, reset_layers=0)
    (reset,) = learner.interventions
    assert reset.layers == ["0", "4"]
    learner.learn(load_task(store, (0, 1)), 0)
    reset.before_task(load_task(store, (2, 3)), 1)
    norm = learner.model[1]
    assert not norm.running_mean.any()
    assert (norm.running_var == 1).all()
    assert (norm.weight == 1).all()
    with refused("reset_layers=3: the model has 2 layers; 0 resets them all"):
        started(store, reset_every=1, reset_layers=3)


# -- replay
# --------------------------------------------------------------------------------------------------


def test_the_memory_is_a_uniform_sample_of_all_earlier_images(store):
    """Replay memory holds every earlier image equally often, with its task's label, and none twice.

    300 memories of 12 images are drawn after 3 tasks of 22.
    """
    tasks = [load_task(store, pair) for pair in pairs(4, 3)]
    counts = torch.zeros(3, 22)
    for seed in range(300):
        learner = started(store, replay_images=12, seed=seed)
        (memory,) = learner.interventions
        for number, task in enumerate(tasks):
            memory.after_task(task, number)
            assert memory.record() == {"images": 12, "tasks": len(memory.origin[:, 0].unique())}
        for image, label, (number, row) in zip(
            memory.images, memory.labels, memory.origin.tolist()
        ):
            counts[number, row] += 1
            assert torch.equal(image, tasks[number].train_x[row])
            assert label == tasks[number].train_y[row]
    wanted = 300 * 12 / 66
    assert ((counts - wanted).square() / (wanted * (1 - 12 / 66))).sum() < 66 + 4 * (
        2 * 66
    ) ** 0.5  # chi-squared
    assert abs(counts.sum(1) - 1200).max() < 4 * (300 * 12 / 3 * 2 / 3) ** 0.5


def test_the_memory_takes_all_while_there_is_room(store):
    (memory,) = started(store, replay_images=1000).interventions
    tasks = [load_task(store, pair) for pair in pairs(4, 2)]
    for number, task in enumerate(tasks):
        memory.after_task(task, number)
    assert torch.equal(memory.images, torch.cat([task.train_x for task in tasks]))
    assert torch.equal(memory.labels, torch.cat([task.train_y for task in tasks]))
    assert memory.images.is_contiguous(memory_format=torch.channels_last)
    dtypes = {value.dtype for value in memory.state().values()}
    assert torch.uint8 not in dtypes, "checkpoints hold no images"


@mark.parametrize(("share", "counts"), [(0.5, (6, 6)), (0.25, (9, 3)), (0.9, (1, 11))])
def test_every_batch_has_its_share_of_the_memory(store, share, counts):
    learner = started(
        store,
        lambda: Watching(),
        replay_images=30,
        replay_share=share,
        norm_batch=0,
        flip=False,
        epochs=2,
    )
    tasks = [load_task(store, pair) for pair in ((0, 1), (2, 3))]
    learner.learn(tasks[0], 0)
    # Nothing to replay in the first task.
    assert [len(x) for x in learner.model.seen] == [12, 10] * 2
    learner.model.seen.clear()
    learner.learn(tasks[1], 1)
    # All of it is in the memory.
    own = normalise(tasks[1].train_x)
    memory = normalise(tasks[0].train_x)

    def matches(x, of):
        return (x[:, None] == of).flatten(2).all(2)

    batches = learner.model.seen
    of_epoch = [stop - start for start, stop in spans(22, counts[0])]
    assert [matches(x, own).sum().item() for x in batches] == of_epoch * 2
    remembered = [round(n * counts[1] / counts[0]) for n in of_epoch]
    assert [matches(x, memory).sum().item() for x in batches] == remembered * 2
    assert max(map(len, batches)) <= 12 or counts[0] == 1
    epoch = torch.cat(batches[: len(of_epoch)])
    assert matches(epoch, own).sum(0).tolist() == [1] * 22
    times = matches(epoch, memory).sum(0)
    assert times.max() - times.min() <= 1, "all of the memory before any of it again"
    first = torch.stack([matches(x[:1], own).any() for x in batches])
    assert first.any() and not first.all(), "new and old in random order"


def test_a_memory_that_does_not_fit_is_refused(store, monkeypatch):
    monkeypatch.setattr(replay_module, "free_bytes", lambda device: 1 << 20)
    with refused(r"replay_images=100000: .* GiB do not fit on cpu; choose fewer"):
        started(store, replay_images=100_000)


# -- EWC
# --------------------------------------------------------------------------------------------------


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
    with untouched(model.train()):
        fisher = diagonal_fisher(model, list(model.parameters()), x)
    assert_close(fisher, wanted, rtol=1e-9, atol=1e-15)
    single = diagonal_fisher(model.float(), list(model.parameters()), x.float())
    for a, b in zip(single, wanted):
        assert_close(a.double(), b, rtol=1e-3, atol=1e-6 * b.max().item())
    with refused("logits", ModelError):
        diagonal_fisher(model[0], list(model[0].parameters()), x.float())


def test_the_penalty_is_what_autograd_says(store):
    learner = started(store, ewc=3.0, ewc_decay=0.5, ewc_images=5)
    (ewc,) = learner.interventions
    tasks = [load_task(store, pair) for pair in pairs(4, 2)]
    fishers = []
    for number, task in enumerate(tasks):
        assert learner.learn(task, number) is not None
        fishers.append([fisher.clone() for fisher in ewc.fisher])
        anchors = [p.detach().clone() for p in learner.model.parameters()]
    generator = torch.Generator().manual_seed(stream_seed(0, "ewc", 1))
    x = normalise(tasks[1].train_x[torch.randperm(22, generator=generator)[:5]])
    of_second = diagonal_fisher(learner.model, list(learner.model.parameters()), x)
    for first, second, sum_ in zip(fishers[0], of_second, ewc.fisher):
        assert_close(sum_, 0.5 * first + second)
        assert sum_.any()
    with torch.no_grad():
        for p in learner.model.parameters():
            p += 0.1 * torch.randn_like(p)
    penalty = 1.5 * sum(
        (f * (p - a).square()).sum()
        for f, p, a in zip(ewc.fisher, learner.model.parameters(), anchors)
    )
    wanted = torch.autograd.grad(penalty, list(learner.model.parameters()))
    for p in learner.model.parameters():
        p.grad = torch.ones_like(p)
    ewc.add_gradients()
    for p, g in zip(learner.model.parameters(), wanted):
        assert_close(p.grad, 1 + g)
    assert ewc.penalty() == approx(penalty.item(), rel=1e-5)
    assert ewc.record()["penalty"] < ewc.penalty()


def test_a_head_that_is_reset_is_not_held(store):
    learner = started(store, ewc=1.0, head_reset=True)
    (ewc,) = learner.interventions
    assert len(ewc.parameters) == len(list(learner.model.parameters())) - 2
    assert not set(map(id, learner.head().parameters())) & set(map(id, ewc.parameters))


def test_ewc_does_nothing_in_the_first_task(store):
    task = load_task(store, (0, 1))
    a, b = started(store, ewc=100.0), started(store)
    assert a.learn(task, 0) == b.learn(task, 0)
    assert_same(a.model.state_dict(), b.model.state_dict())
