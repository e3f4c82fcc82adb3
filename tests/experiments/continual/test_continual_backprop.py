"""Continual backprop: the paper's rule step by step, new units, the function, and dead units."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from continual_cases import begin, no_activation, trainer
from exact import seeded
from expected import refused
from torch import nn
from torch.testing import assert_close

from fastlr.experiments.continual.interventions.continual_backprop import ContinualBackprop
from fastlr.experiments.continual.interventions.unit_adamw import UnitAdamW
from fastlr.experiments.data import synthetic_store

STORE = synthetic_store(classes=3, size=8, train=11, test=5)


def hidden():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 10), nn.ReLU(), nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 2)
    )


class MobileBlock(nn.Module):
    """A small MobileNetV3 block: expansion, depthwise, squeeze-and-excitation, projection.

    The projection has no bias unless ``bias`` is true.
    """

    def __init__(self, num_classes=2, bias=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.expand = nn.Conv2d(4, 6, 1, bias=False)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
        self.project = nn.Conv2d(6, 4, 1, bias=bias)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (6, 6, 4))
        self.down = nn.Conv2d(6, 3, 1)
        self.up = nn.Conv2d(3, 6, 1)
        self.head = nn.Linear(4, num_classes)

    def forward(self, x):
        x = self.stem(x)
        h = F.hardswish(self.norms[0](self.expand(x)))
        h = F.hardswish(self.norms[1](self.depthwise(h)))
        h = h * F.hardsigmoid(self.up(F.relu(self.down(h.mean((2, 3), keepdim=True)))))
        return self.head((x + self.norms[2](self.project(h))).mean((2, 3)))


def made(network=hidden, **settings):
    learner = trainer(network, flip=False, **{"cbp_rate": 0.1, "cbp_maturity": 2, **settings})
    initial = copy.deepcopy(learner.model.state_dict())
    learner.started_at(initial, STORE)
    (cbp,) = learner.interventions
    assert isinstance(cbp, ContinualBackprop)
    cbp.before_task(None, 0)
    return learner, cbp, initial


def batch(n=12, seed=0):
    generator = seeded(seed)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randint(2, (n,), generator=generator)


def step(learner, cbp, seed=0):
    """Take one optimiser step in two passes, as the trainer does; return the hidden activations."""
    x, y = batch(seed=seed)
    learner.optimiser.zero_grad()
    hidden = [[], []]
    for part in (slice(0, 7), slice(7, 12)):
        with torch.no_grad():
            first = F.relu(learner.model[1](x[part].flatten(1)))
            hidden[0].append(first), hidden[1].append(F.relu(learner.model[3](first)))
        with cbp.watching():
            (F.cross_entropy(learner.model(x[part]), y[part], reduction="sum") / 12).backward()
    learner.optimiser.step()
    return [torch.cat(h) for h in hidden]


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_the_rule_of_the_paper_in_each_step(optimiser):
    """Each step agrees with lists of Python numbers: utilities, ages, units replaced, new units."""
    learner, cbp, initial = made(optimiser=optimiser, momentum=0.9, cbp_rate=0.07, cbp_decay=0.9)
    names, follows = ("1", "3"), {"1": "3", "3": "5"}
    sizes = {"1": 10, "3": 6}
    utility, mean, age = ({name: [0.0] * sizes[name] for name in names} for _ in range(3))
    owed, total = dict.fromkeys(names, 0.0), 0
    for t in range(40):
        activations = step(learner, cbp, seed=t)
        before = copy.deepcopy(learner.model.state_dict())
        kept = {
            name: copy.deepcopy(learner.optimiser.state[p])
            for name, p in learner.model.named_parameters()
        }
        cbp.after_step()
        after = learner.model.state_dict()
        changed, drawn = (
            {name: torch.zeros_like(value, dtype=torch.bool) for name, value in before.items()}
            for _ in range(2)
        )
        shift = {name: torch.zeros_like(before[f"{name}.bias"]) for name in ("3", "5")}
        for name, h in zip(names, activations, strict=True):
            outgoing = before[f"{follows[name]}.weight"]
            for i in range(sizes[name]):
                new = sum(h[:, i].abs().mean().item() * abs(w) for w in outgoing[:, i].tolist())
                utility[name][i] = 0.9 * utility[name][i] + 0.1 * new
                mean[name][i] = 0.9 * mean[name][i] + 0.1 * h[:, i].mean().item()
                age[name][i] += 1
            mature = [i for i in range(sizes[name]) if age[name][i] > 2]
            owed[name] += 0.07 * len(mature)
            count, owed[name] = int(owed[name]), owed[name] % 1
            mature.sort(key=lambda i: utility[name][i] / (1 - 0.9 ** age[name][i]))
            for i in mature[:count]:
                total += 1
                assert set(after[f"{name}.weight"][i].tolist()) <= set(
                    initial[f"{name}.weight"].flatten().tolist()
                )
                assert len(set(after[f"{name}.weight"][i].tolist())) > 3
                shift[follows[name]] += outgoing[:, i] * mean[name][i] / (1 - 0.9 ** age[name][i])
                utility[name][i] = 0.0
                mean[name][i] = 0.0
                age[name][i] = 0
                changed[f"{name}.weight"][i] = changed[f"{name}.bias"][i] = drawn[f"{name}.weight"][
                    i
                ] = True
                changed[f"{follows[name]}.weight"][:, i] = True
        for name, p in learner.model.named_parameters():
            same = ~changed[name]
            assert not after[name][changed[name] & ~drawn[name]].any()
            wanted = before[name] + (shift[name[0]] if name in ("3.bias", "5.bias") else 0)
            assert_close(after[name][same], wanted[same], rtol=1e-5, atol=1e-7)
            for key, value in learner.optimiser.state[p].items():
                assert torch.equal(value[same], kept[name][key][same])
                assert not value[changed[name]].any()
        for layer in cbp.layers:
            name = layer.units.name
            assert_close(layer.utility.tolist(), utility[name], rtol=1e-4, atol=1e-7)
            assert_close(layer.means[0].tolist(), mean[name], rtol=1e-4, atol=1e-7)
            assert layer.ages.tolist() == age[name]
            assert layer.owed == pytest.approx(owed[name])
    assert 20 < total == sum(cbp.record()["replaced"].values())


def test_without_transfer_biases_stay():
    learner, cbp, _ = made(cbp_transfer=False)
    step(learner, cbp)
    before = learner.model[5].bias.clone()
    cbp.replace(cbp.layers[1], torch.tensor([0, 1, 2]))
    assert torch.equal(learner.model[5].bias, before)


def test_the_function_changes_by_the_deviation_from_the_mean_only():
    """Replacing a unit changes y by ``sum_i w_ik (f_i - h_i)``, nothing where the unit is constant.

    Elsewhere the change is the unit's variation around its mean.
    """
    learner, cbp, _ = made(cbp_decay=0.0)  # f is the mean over the last step's images
    h = step(learner, cbp)[1]
    x, _ = batch()
    layer = cbp.layers[1]
    with torch.no_grad():
        cbp.after_step()
        outgoing = learner.model[5].weight.clone()
        here = F.relu(learner.model[3](F.relu(learner.model[1](x.flatten(1)))))
        before = learner.model(x)
        cbp.replace(layer, torch.tensor([1, 4]))
        wanted = (h.mean(0) - here)[:, [1, 4]] @ outgoing[:, [1, 4]].T
        assert_close(learner.model(x) - before, wanted, rtol=1e-4, atol=1e-6)
        assert wanted.abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_in_a_block_of_mobilenet_new_units_are_silent(mode):
    """Units without outgoing weights are replaced, batch norms too; the outputs stay the same."""
    learner, cbp, initial = made(MobileBlock, cbp_transfer=False)
    x, y = batch(30)
    for _ in range(20):
        F.cross_entropy(learner.model(x), y).backward()
        learner.optimiser.step()
    model = getattr(learner.model, mode)()
    layer = next(layer for layer in cbp.layers if layer.units.name == "expand")
    assert set(layer.units.layers) == {"expand", "depthwise", "up"}
    with torch.no_grad():
        for reader in layer.units.readers:
            reader.layer.weight[:, [0, 3]] = 0
        before, state = model(x), copy.deepcopy(model.state_dict())
        cbp.replace(layer, torch.tensor([0, 3]))
        assert torch.equal(model(x), before)
    for name in ("expand.weight", "depthwise.weight", "up.weight"):
        new = dict(model.named_parameters())[name].detach()
        old = state[name]
        assert not (new[[0, 3]] == old[[0, 3]]).any()
        assert torch.equal(new[[1, 2, 4, 5]], old[[1, 2, 4, 5]])
        assert set(new[[0, 3]].flatten().tolist()) <= set(initial[name].flatten().tolist())
    model.load_state_dict(state)
    cbp.replace(layer, torch.tensor([0, 3]))
    for norm, old in (
        (model.norms[i], {k.split(".")[-1]: v for k, v in state.items() if f"norms.{i}" in k})
        for i in (0, 1)
    ):
        for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            assert (getattr(norm, name)[[0, 3]] == value).all()
            assert torch.equal(getattr(norm, name)[[1, 2, 4, 5]], old[name][[1, 2, 4, 5]])


def test_a_layer_without_bias_has_the_mean_taken_from_its_batch_norm():
    """In eval mode the same as with a bias of zero."""
    outputs = []
    x, y = batch(30)
    for bias in (False, True):
        learner, cbp, initial = made(partial(MobileBlock, bias=bias), cbp_decay=0.5)
        generator = seeded(0)
        for name, p in learner.model.named_parameters():
            p.data = (
                torch.zeros_like(p)
                if name == "project.bias"
                else torch.randn(p.shape, generator=generator)
            )
        with cbp.watching():
            learner.model.train()(x)
        cbp.after_step()
        layer = next(layer for layer in cbp.layers if layer.units.name == "expand")
        before = learner.model.eval()(x)
        # Silent, whatever is drawn.
        cbp.initial = {name: torch.zeros_like(value) for name, value in initial.items()}
        cbp.replace(layer, torch.tensor([1, 2, 5]))
        after = learner.model(x)
        assert (after - before).abs().max() > 0.1
        outputs.append(after)
    assert_close(*outputs)


# -- the optimiser
# --------------------------------------------------------------------------------------------------


def test_adamw_with_counters_is_adamw():
    torch.manual_seed(0)
    a = hidden()
    b = copy.deepcopy(a)
    kinds = {a: UnitAdamW, b: torch.optim.AdamW}
    optimisers = {
        model: kind(model.parameters(), lr=3e-3, weight_decay=0.1) for model, kind in kinds.items()
    }
    for t in range(60):
        x, y = batch(seed=t)
        for model, optimiser in optimisers.items():
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
    assert_close(a.state_dict(), b.state_dict(), rtol=1e-4, atol=1e-6)


def test_weights_whose_state_is_zero_begin_as_in_a_new_optimiser():
    generator = seeded(0)
    old = torch.zeros(4, 5, requires_grad=True)
    optimiser = UnitAdamW([old], lr=0.1)
    for _ in range(500):
        old.grad = torch.randn(4, 5, generator=generator)
        optimiser.step()
    for value in optimiser.state[old].values():
        value[2] = 0
    new = old.detach()[2:3].clone().requires_grad_()
    fresh = torch.optim.AdamW([new], lr=0.1)
    for _ in range(5):
        old.grad = torch.randn(4, 5, generator=generator)
        new.grad = old.grad[2:3].clone()
        optimiser.step(), fresh.step()
        assert_close(old[2:3], new, rtol=1e-5, atol=1e-6)


# -- in a run
# --------------------------------------------------------------------------------------------------


def test_the_records_say_what_was_replaced_and_what_is_left_alone(tmp_path, images):
    settings = {
        "model": "test_continual_backprop:MobileBlock",
        "measures": (),
        "cbp_rate": 0.1,
        "cbp_maturity": 2,
    }
    first, *tasks = begin(tmp_path / "run", images, tasks=2, **settings)
    about = first["interventions"]["continual_backprop"]
    assert about["units"] == {"expand": 6, "down": 3}
    assert set(about["left_alone"]) == {"stem", "project", "head"}
    for line in tasks:  # 4 steps a task, of which the last 2 of the first one find mature units
        assert 0 < sum(line["interventions"]["continual_backprop"]["replaced"].values()) <= 4


def test_a_model_without_replaceable_units_is_refused():
    learner = trainer(no_activation, cbp_rate=0.1)
    with refused(r"cbp_rate: no layer .*\(1 makes the model's output\): leave it out"):
        learner.started_at(learner.model.state_dict(), STORE)
