"""ReDo: the dormant units are those of the definition, step by step, and new ones replace them."""

import copy

import torch
from continual_cases import no_activation, plain, trainer
from expected import refused
from pytest import fixture
from test_continual_backprop import MobileBlock, batch, hidden, step
from torch.testing import assert_close

from fastlr.experiments.continual.interventions.redo import scores
from fastlr.experiments.data import synthetic_store

STORE = synthetic_store(classes=3, size=8, train=11, test=5)


def made(network=hidden, **settings):
    learner = trainer(network, flip=False, **{"redo_every": 1, "redo_threshold": 0.0, **settings})
    learner.started_at(copy.deepcopy(learner.model.state_dict()), STORE)
    (redo,) = learner.interventions
    redo.before_task(None, 0)
    return learner, redo


@fixture
def silenced():
    """A learner whose first hidden layer has two units that no image reaches."""
    learner, redo = made(learning_rate=1e-6)
    learner.model[1].bias.data[[2, 7]] = -100.0
    return learner, redo


def test_every_third_step_the_dormant_units_are_replaced():
    """Each step agrees with lists of Python numbers: scores, units replaced, all else as it was."""
    learner, redo = made(redo_every=3, redo_threshold=0.5)
    initial, follows, total = redo.trainer.initial, {"1": "3", "3": "5"}, 0
    for t in range(1, 16):
        activations = step(learner, redo, seed=t)
        named = dict(learner.model.named_parameters())
        before = {
            name: [p.detach().clone(), copy.deepcopy(learner.optimiser.state[p])]
            for name, p in named.items()
        }
        redo.after_step()
        new = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in named.items()}
        drawn = copy.deepcopy(new)
        for name, h in zip(follows, activations, strict=True):
            means = [sum(column) / len(column) for column in h.abs().T.tolist()]
            for i, mean in enumerate(means):
                if t % 3 == 0 and mean <= 0.5 * sum(means) / len(means):
                    total += 1
                    new[f"{name}.weight"][i] = new[f"{name}.bias"][i] = True
                    new[f"{follows[name]}.weight"][:, i] = True
                    drawn[f"{name}.weight"][i] = True
        drawn["3.weight"] &= new["3.weight"]
        for name, p in named.items():
            old, state = before[name]
            assert torch.equal(p[~new[name]], old[~new[name]])
            assert torch.isin(p[drawn[name]], initial[name]).all()
            assert not p[new[name] & ~drawn[name]].any()
            for key, value in learner.optimiser.state[p].items():
                assert torch.equal(value[~new[name]], state[key][~new[name]])
                assert not value[new[name]].any()
    assert 5 < total < 5 * 16
    assert sum(redo.record()["replaced"].values()) == total


def test_silent_units_are_replaced_without_any_change_of_the_outputs(silenced):
    learner, redo = silenced
    of_first, of_second = step(learner, redo)
    x, _ = batch()
    before = learner.model(x)
    redo.after_step()
    assert torch.equal(learner.model(x), before)
    silent = [int((h == 0).all(0).sum()) for h in (of_first, of_second)]
    assert silent[0] >= 2
    assert redo.record()["replaced"] == {
        name: count for name, count in zip("13", silent, strict=True) if count
    }
    assert (learner.model[1].bias[[2, 7]] == 0).all()


def test_a_layer_that_is_silent_altogether_begins_anew():
    learner, redo = made()
    learner.model[1].bias.data.fill_(-100.0)
    step(learner, redo)
    redo.after_step()
    assert redo.record()["replaced"]["1"] == 10
    assert learner.model[:3](batch()[0]).any()


def test_of_several_readers_the_one_that_hears_most_of_a_unit_counts():
    learner, redo = made(MobileBlock)
    heard = {}
    for name in ("project", "down"):
        layer = getattr(learner.model, name)
        layer.register_forward_pre_hook(
            lambda _, args, name=name: heard.update({name: args[0].abs().mean((0, 2, 3))})
        )
    with redo.watching():
        learner.model.train()(batch()[0])
    layer = next(layer for layer in redo.layers if layer.units.name == "expand")
    wanted = torch.maximum(*(means / means.mean() for means in heard.values()))
    assert_close(scores(layer), wanted.detach())


def test_the_positions_of_a_channel_that_is_flattened_are_one_unit():
    learner, redo = made(plain)
    with redo.watching():
        learner.model.train()(batch()[0])
    means = learner.model[:3](batch()[0]).mean((0, 2, 3))
    assert_close(scores(redo.layers[0]), (means / means.mean()).detach())


def test_a_model_without_replaceable_units_is_refused():
    learner = trainer(no_activation, redo_every=3)
    with refused("redo_every: no layer .*leave it out"):
        learner.started_at(learner.model.state_dict(), STORE)
