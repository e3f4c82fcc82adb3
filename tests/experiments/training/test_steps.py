"""Training steps that are replayed or compiled train as launched ones, whatever comes between.

CUDA graphs need a GPU. Here a tape of operations stands in for one (`recorders.Tape`). With a GPU
the same tests run on real graphs too.
"""

import copy
import functools

import torch
from continual_cases import (
    EVERY_INTERVENTION,
    SMALL,
    assert_same,
    begin,
    checkpoint,
    comparable,
    net,
)
from expected import refused, warned
from pytest import approx, fixture, mark
from recorders import DEVICES, Tape
from torch import nn

from fastlr.errors import ModelError
from fastlr.experiments.continual import experiment as continual
from fastlr.experiments.continual.options import PRESETS, ContinualOptions
from fastlr.experiments.continual.trainer import Trainer
from fastlr.experiments.data import ImageStore, load_task
from fastlr.experiments.runs.folder import random_states
from fastlr.experiments.runs.options import resolve
from fastlr.experiments.training import loop, steps
from fastlr.experiments.training.optim import part_sizes
from fastlr.experiments.training.steps import HELD, Compiled, TrainingSteps, resolve_mode


@fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


class Fused(Trainer):
    """With the kind of optimiser that it has on a GPU: one that reads its step from a tensor."""

    def new_optimiser(self):
        made = super().new_optimiser()
        for group in made.param_groups:
            group["fused"] = True
        return made


def trainer(device, graph, recorder=Tape, strict=True, **settings):
    torch.manual_seed(0)
    options = resolve(ContinualOptions, PRESETS, "paper", {**SMALL, "step": "eager", **settings})
    if graph and device.type == "cuda":
        return Trainer(
            net(),
            resolve(ContinualOptions, PRESETS, "paper", {**vars(options), "step": "graph"}),
            device,
        )
    made = Fused(net(), options, device)
    made.steps = TrainingSteps(
        made.work, made.model, made.changed_tensors, device, graph, strict, recorder
    )
    return made


def learn(learner, images, numbers=range(3)):
    store = ImageStore.open(images)
    pairs = [(0, 1), (1, 2), (0, 2)]
    return [
        learner.learn(load_task(store, pairs[number % 3], learner.device), number)
        for number in numbers
    ]


def same(a, b):
    if a.device.type == "cpu":
        assert_same(a.state()["model"], b.state()["model"])
        assert_same(a.state()["optimiser"]["state"], b.state()["optimiser"]["state"])
        return
    torch.testing.assert_close(a.state()["model"], b.state()["model"], rtol=1e-4, atol=1e-5)


@mark.parametrize(
    ("settings", "captures"),
    [
        ({"l2_init": 0.1}, 2),
        ({"optimiser": "sgd", "momentum": 0.9, "optimiser_state": "reset"}, 2),
        (
            {
                "optimiser_state": "reset",
                "head_reset": True,
                "shrink": 0.8,
                "perturb": 0.01,
                "flip": False,
            },
            2,
        ),
        (EVERY_INTERVENTION, 3),
    ],
    ids=["adamw", "sgd", "resets", "interventions"],
)
def test_replayed_steps_train_as_launched_ones(device, images, settings, captures):
    """Replayed steps train as launched ones with dropout, batch norm, flips and uneven batches.

    Parts are of 6 images, last batches of 10 (and one of 8), and other work comes between two
    tasks.
    """
    graph = trainer(device, True, **settings)
    eager = trainer(device, False, **settings)
    for learner in (graph, eager):
        learner.started_at(
            {k: v.clone() for k, v in learner.model.state_dict().items()}, ImageStore.open(images)
        )
    assert learn(graph, images) == approx(
        learn(eager, images), rel=0 if device.type == "cpu" else 1e-4
    )
    same(graph, eager)
    assert_same(random_states(), random_states())
    assert graph.steps.captures == captures
    assert eager.steps.captures == 0
    assert (graph.step_mode, eager.step_mode) == ("graph", "eager")


def test_capturing_changes_nothing(device, images):
    learner = trainer(device, True)
    learn(learner, images, [0])
    before = copy.deepcopy((learner.state(), random_states()))
    task = load_task(ImageStore.open(images), (0, 1), device)
    assert (
        learner.steps._capture(
            (), (len(task.train_x), task.train_x, task.train_y, task.train_y > 0)
        )
        is not None
    )
    assert_same((learner.state(), random_states()), before)
    with steps.unchanged(learner.changed_tensors):  # also before there is a state of the optimiser
        learner.optimiser.state.clear()
        learner.work(len(task.train_x), task.train_x, task.train_y)
    assert all(
        not value.any() for state in learner.optimiser.state.values() for value in state.values()
    )


def test_captures_are_dropped_when_the_state_is_another(device, images):
    graph, eager = trainer(device, True), trainer(device, False)
    for learner in (graph, eager):
        learn(learner, images, [0])
        state = copy.deepcopy(learner.state())
        learn(learner, images, [1])
        learner.load(state)  # as after a loss that is not finite
        learn(learner, images, [2])
        learner.model[0].weight.data = learner.model[
            0
        ].weight.data.clone()  # the same numbers elsewhere
        learn(learner, images, [3])
        learner.optimiser = learner.new_optimiser()
        learn(learner, images, [4])
    same(graph, eager)
    assert graph.steps.captures == 2 * 4


def test_a_run_with_replayed_steps_is_resumed(tmp_path, images, monkeypatch):
    make = functools.partial(TrainingSteps, recorder=Tape)
    monkeypatch.setattr(loop, "TrainingSteps", lambda *a, strict: make(*a[:4], True, True))
    monkeypatch.setattr(continual, "Trainer", Fused)
    settings = {"measures": ("weight_norm",), "epochs": 3}
    whole = begin(tmp_path / "whole", images, **settings, tasks=4)
    begin(tmp_path / "parts", images, **settings, tasks=2)
    continual.resume(tmp_path / "parts", {"tasks": 4})
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    assert_same(checkpoint(tmp_path / "parts"), checkpoint(tmp_path / "whole"))
    assert [line["step"] for line in whole[1:]] == ["graph"] * 4
    monkeypatch.setattr(loop, "TrainingSteps", TrainingSteps)
    eager = begin(tmp_path / "eager", images, **settings, tasks=4)
    assert_same(checkpoint(tmp_path / "eager"), checkpoint(tmp_path / "whole"))
    assert [line["step"] for line in eager[1:]] == ["eager"] * 4


class Broken(Tape):
    """Fails after it has changed everything."""

    def capture(self, function):
        super().capture(function)
        raise RuntimeError("operation not permitted\nwhen capturing")


@mark.filterwarnings("error")
def test_a_capture_that_fails(images):
    cpu = torch.device("cpu")
    learner = trainer(cpu, True, Broken, strict=False)
    eager = trainer(cpu, False)
    with warned("run without a CUDA graph: operation not permitted$"):
        learn(learner, images, [0])
    learn(eager, images, [0])
    same(learner, eager)
    assert learner.step_mode == "eager"
    learn(learner, images, [1])
    with refused(
        "step=graph: a step cannot be captured .operation not permitted.; choose", ModelError
    ):
        learn(trainer(cpu, True, Broken), images, [0])


def test_one_capture_for_each_shape_and_not_too_many():
    state = torch.zeros(1)

    def work(x, y):
        state.add_(1)
        return (x * y).sum()

    made = TrainingSteps(
        work, nn.Identity(), lambda: [state], torch.device("cpu"), True, True, Tape
    )
    sizes = [n % (HELD + 2) + 1 for n in range(HELD + 2)] * 3
    for count, n in enumerate(sizes, 1):
        assert made(torch.ones(n), torch.full((n,), count)) == count * n
        assert state == count
    # The least recently used is dropped: here always the next.
    assert made.captures == 2 * (HELD + 2)
    for count in range(5):
        assert made(torch.ones(sizes[-1]), torch.full((sizes[-1],), count)) == count * sizes[-1]
    assert made.captures == 2 * (HELD + 2)
    assert len(made._captures) == HELD


def test_modes(tmp_path, images):
    cpu, gpu = torch.device("cpu"), torch.device("cuda:1")
    assert (resolve_mode("auto", cpu), resolve_mode("auto", gpu)) == ("eager", "graph")
    assert resolve_mode("compile", cpu) == "compile"
    assert resolve_mode("eager", gpu) == "eager"
    with refused("step=graph: cpu has no CUDA graphs; choose step=eager or step=compile"):
        begin(tmp_path / "run", images, step="graph")
    # The folder is free.
    assert begin(tmp_path / "run", images, step="eager", tasks=1)[-1]["step"] == "eager"


def test_only_the_usual_sizes_are_compiled(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch, "compile", lambda model, **how: asked.append(how) or (lambda x: -model(x))
    )
    model = Compiled(nn.Identity(), part_sizes(1024, 300))
    assert asked == [{"dynamic": False}]
    assert model.sizes == {256}
    assert model(torch.ones(256)).sum() == -256
    assert model(torch.ones(255)).sum() == 255


@mark.long
def test_compiled_steps(tmp_path, images):
    settings = {
        "measures": ("weight_norm",),
        "batch_size": 11,
        "norm_batch": 0,
        "flip": False,
        "optimiser": "sgd",
    }
    settings |= {"model": "continual_cases:plain", "learning_rate": 1e-3}
    begin(tmp_path / "eager", images, **settings)
    compiled = begin(tmp_path / "compiled", images, **settings, step="compile")
    assert [line["step"] for line in compiled[1:]] == ["compile"] * 3
    a, b = (checkpoint(tmp_path / name)["model"] for name in ("eager", "compiled"))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    dropout = {**settings, "model": "continual_cases:net", "step": "compile"}
    begin(tmp_path / "whole", images, **dropout, tasks=2)
    begin(tmp_path / "parts", images, **dropout, tasks=1)
    continual.resume(tmp_path / "parts", {"tasks": 2})
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    torch._dynamo.reset()
    # Monkeypatch would leave it broken.
    missing = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with missing, refused("step=compile: .*; choose step=eager", ModelError):
        begin(tmp_path / "none", images, **settings, tasks=1, step="compile", dtype="bf16")
