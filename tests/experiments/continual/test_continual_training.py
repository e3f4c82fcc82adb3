"""Training in the continual-learning driver: plain torch's, interventions, non-finite losses."""

import copy

import torch
import torch.nn.functional as F
from continual_cases import Watching, assert_same, begin, checkpoint, lines, trainer
from exact import seeded
from expected import refused
from pytest import approx, fixture, mark
from torch import nn
from torch.testing import assert_close

from fastlr.errors import ModelError, NonFiniteError
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.continual.interventions import plain
from fastlr.experiments.continual.options import MEASURES
from fastlr.experiments.data import ImageStore, load_task, normalise
from fastlr.experiments.runs.folder import stream_seed


@fixture(scope="module")
def task(images):
    return load_task(ImageStore.open(images), (0, 1))


# -- training
# --------------------------------------------------------------------------------------------------


@mark.parametrize(("optimiser", "updates"), [("adamw", "every-part"), ("sgd", "first-part")])
def test_training_is_what_a_plain_loop_does(task, optimiser, updates):
    """A step on a batch of 12 is two passes of 6, whose BatchNorm statistics are over 6 images.

    The step takes the mean gradient over the 12.
    """
    settings = {
        "optimiser": optimiser,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "learning_rate": 0.003,
    }
    learner = trainer(flip=False, batch_norm_updates=updates, **settings)
    model = copy.deepcopy(learner.model)
    kind, more = (
        (torch.optim.AdamW, {}) if optimiser == "adamw" else (torch.optim.SGD, {"momentum": 0.9})
    )
    steps = kind(model.parameters(), lr=0.003, weight_decay=0.1, **more)
    generator = seeded(stream_seed(0, "order", 5))
    mean, std = (
        torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    x = (task.train_x.float() / 255 - mean) / std
    for _ in range(2):
        order = torch.randperm(22, generator=generator)
        total = 0.0
        for batch, halves in ((order[:12], (6, 6)), (order[12:], (5, 5))):
            losses = []
            for half in batch.split(halves):
                aside = {name: t.clone() for name, t in model.named_buffers()}
                used = aside if losses and updates == "first-part" else {}
                losses.append(
                    F.cross_entropy(
                        torch.func.functional_call(model, used, (x[half],)), task.train_y[half]
                    )
                )
            steps.zero_grad()
            (sum(losses) / 2).backward()
            steps.step()
            total += sum(losses).item() / 2 * len(batch)
    assert learner.learn(task, 5) == approx(total / 22, rel=1e-4)
    for (name, a), b in zip(learner.model.state_dict().items(), model.state_dict().values()):
        assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_the_layout_is_that_of_the_run_everywhere(task, tmp_path, images):
    """A contiguous run agrees with a channels-last one up to rounding, and stays contiguous.

    Measures and losses are compared.
    """
    seen = []

    def look(module, args):
        seen.append((module.weight.is_contiguous(), args[0].is_contiguous()))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: look(module, args) if isinstance(module, nn.Conv2d) else None
    )
    settings = {
        "tasks": 2,
        "ewc": 3.0,
        "measures": tuple(MEASURES),
        "redundancy_probe": "exact",
        "learning_rate": 1e-3,
    }
    contiguous = begin(tmp_path / "contiguous", images, layout="contiguous", **settings)
    hook.remove()
    assert len(seen) > 20 and all(map(all, seen)), "weights and images"
    start, *tasks = begin(tmp_path / "channels-last", images, **settings)
    for name in MEASURES:
        wanted = start["measures"][name]["value"]
        assert contiguous[0]["measures"][name]["value"] == approx(wanted, rel=1e-4, abs=1e-6), name
    for a, b in zip(contiguous[1:], tasks, strict=True):
        assert a["train_loss"] == approx(b["train_loss"], rel=1e-2)
    with refused("was begun with layout=contiguous, not channels-last"):
        DRIVER.resume(tmp_path / "contiguous", {"layout": "channels-last"})


@mark.parametrize("optimiser", ["adamw", "sgd"])
def test_fused_steps_are_the_same_but_for_rounding(task, optimiser):
    a, b = (
        trainer(fused=fused, optimiser=optimiser, learning_rate=1e-3) for fused in (True, False)
    )
    assert a.optimiser.param_groups[0]["fused"]
    assert not b.optimiser.param_groups[0]["fused"]
    assert a.learn(task, 0) == approx(b.learn(task, 0), rel=1e-4)


def test_the_whole_batch_when_norm_batch_is_zero(task):
    a = trainer(norm_batch=0, flip=False)
    b = trainer(norm_batch=12, flip=False)
    assert a.learn(task, 0) == b.learn(task, 0)


def test_every_image_once_an_epoch_half_of_them_mirrored(task):
    learner = trainer(network=Watching, epochs=20)
    learner.learn(task, 0)
    seen = torch.cat(learner.model.seen)
    assert len(seen) == 20 * 22
    assert max(map(len, learner.model.seen)) == 6
    originals, mirrored = normalise(task.train_x), 0
    for epoch in seen.split(22):
        as_they_are = (epoch[:, None] == originals).flatten(2).all(2)
        flipped = (epoch[:, None] == originals.flip(3)).flatten(2).all(2)
        assert ((as_they_are | flipped).sum(0) == 1).all()
        mirrored += int(flipped.sum())
    assert abs(mirrored - 220) < 4 * 440**0.5 / 2
    assert not torch.equal(seen[:22], seen[22:44])


def test_optimiser_state_is_kept_or_reset(tmp_path, images):
    for option, steps in (("kept", 3 * 4), ("reset", 4)):
        records = begin(tmp_path / option, images, measures=(), optimiser_state=option)
        state = checkpoint(tmp_path / option)["optimiser"]["state"]
        assert {int(moments["step"]) for moments in state.values()} == {steps}
        assert {line["optimiser_state"] for line in records[1:]} == {option}


def test_the_head_is_reset_at_each_task(task):
    for reset in (True, False):
        learner = trainer(head_reset=reset, learning_rate=1e-9, optimiser="sgd", weight_decay=0.0)
        before = copy.deepcopy(learner.model.state_dict())
        learner.learn(task, 0)
        after = learner.model.state_dict()
        assert (after["4.weight"].abs().max() < 1e-6) == reset
        assert torch.allclose(after["0.weight"], before["0.weight"], atol=1e-6)
    with refused("head_reset wants", ModelError):
        trainer(head_reset=True, network=lambda: nn.Conv2d(3, 2, 1))


def test_bfloat16(tmp_path, images):
    bf16, fp32 = (
        begin(tmp_path / dtype, images, dtype=dtype, tasks=1, measures=tuple(MEASURES))[0][
            "measures"
        ]["local_redundancy"]
        for dtype in ("bf16", "fp32")
    )
    assert bf16["value"] == approx(fp32["value"], rel=0.03)
    assert bf16["value"] != fp32["value"]
    assert all(
        v.dtype == torch.float32
        for k, v in checkpoint(tmp_path / "bf16")["model"].items()
        if "num" not in k
    )


# -- interventions
# --------------------------------------------------------------------------------------------------


def test_shrink_and_perturb_moves_every_parameter():
    model = nn.Linear(200, 300)
    model.bias.requires_grad_(False)
    before = copy.deepcopy(model)
    plain.shrink_and_perturb(model, 0.4, 0.01, seed=7)
    noise = model.weight - 0.4 * before.weight
    assert abs(noise.std().item() - 0.01) < 1e-4 and abs(noise.mean().item()) < 2e-4  # 60,000 draws
    assert torch.equal(model.bias, before.bias), "frozen"
    again, other = copy.deepcopy(before), copy.deepcopy(before)
    plain.shrink_and_perturb(again, 0.4, 0.01, seed=7)
    plain.shrink_and_perturb(other, 0.4, 0.01, seed=8)
    assert torch.equal(again.weight, model.weight)
    assert not torch.equal(other.weight, model.weight)
    plain.shrink_and_perturb(before, 0.0, 0.0, seed=7)
    assert not before.weight.any()


def test_shrink_and_perturb_comes_before_every_task_but_the_first(tmp_path, images):
    settings = {
        "shrink": 0.5,
        "learning_rate": 1e-12,
        "weight_decay": 0.0,
        "measures": ("weight_norm",),
    }
    norms = [
        line["measures"]["weight_norm"]["value"]
        for line in begin(tmp_path / "run", images, tasks=2, **settings)
    ]
    assert norms == approx([norms[0], norms[0], norms[0] / 2], rel=1e-6)


def test_towards_init_is_the_penalty_in_the_loss(task, images):
    learner = trainer(
        l2_init=0.3,
        flip=False,
        optimiser="sgd",
        weight_decay=0.0,
        batch_size=22,
        norm_batch=0,
        epochs=1,
    )
    initial = {name: value + 0.1 for name, value in learner.model.state_dict().items()}
    learner.started_at(initial, ImageStore.open(images))
    model = copy.deepcopy(learner.model)
    order = torch.randperm(22, generator=seeded(stream_seed(0, "order", 0)))
    loss = F.cross_entropy(model(normalise(task.train_x[order])), task.train_y[order])
    penalty = sum((p - initial[name]).square().sum() for name, p in model.named_parameters())
    (loss + 0.3 * penalty).backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    assert learner.learn(task, 0) == approx(loss.item(), rel=1e-5)
    for a, b in zip(learner.model.parameters(), model.parameters()):
        assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_layer_norm_in_place_of_batch_norm(tmp_path, images):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4, eps=1e-3)))
    assert plain.layer_norm_for_batch_norm(model) == 1
    x = torch.randn(5, 3, 8, 8)
    h = model[0](x)
    wanted = F.layer_norm(h, h.shape[1:], eps=1e-3)
    assert_close(model.train()(x), wanted)
    assert_close(model(x[:1]), wanted[:1])  # no sample sees another
    settings = {"measures": ("local_redundancy",), "norm": "layer", "tasks": 1}
    begin(tmp_path / "run", images, **settings)
    assert not any("running" in name for name in checkpoint(tmp_path / "run")["model"])
    with refused("no batch norm to replace"):
        begin(tmp_path / "none", images, **settings, model="continual_cases:no_activation")


# -- losses that are not finite
# ----------------------------------------------------------------------------------------


@mark.parametrize(
    ("settings", "epoch"),
    [({}, 2), ({"epochs": 1, "batch_size": 22}, 1)],
    ids=["a loss", "the outputs after the last step"],
)
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, images, settings, epoch):
    settings = {"optimiser": "sgd", "learning_rate": 1e30, "measures": ("weight_norm",), **settings}
    with refused(
        f"task 0: the loss is not finite in epoch {epoch}; lower learning_rate", NonFiniteError
    ):
        begin(tmp_path / "run", images, **settings)
    assert len(lines(tmp_path / "run")) == 1
    assert checkpoint(tmp_path / "run")["position"] == 0


def test_or_the_task_is_skipped(tmp_path, images):
    settings = {"optimiser": "sgd", "momentum": 0.9, "learning_rate": 1e30, "on_nan": "skip"}
    records = begin(tmp_path / "run", images, measures=("distance_from_init",), **settings)[1:]
    for line in records:
        assert line["skipped"] == "nan loss"
        assert line["measures"]["distance_from_init"]["value"] == 0
        assert line["accuracy"] is line["previous_accuracy"] is line["train_loss"] is None
    state = checkpoint(tmp_path / "run")
    initial = torch.load(tmp_path / "run/checkpoints/initial.pt")
    assert_same(dict(state["model"]), dict(initial))
    assert len(records) == 3
    assert not state["optimiser"]["state"]
