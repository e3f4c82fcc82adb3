"""Estimates pair where inputs and predictive are the same; what cannot be told is named."""

import json
import warnings

import torch
from exact import seeded
from expected import warned
from torch import nn
from torch.utils.data import TensorDataset

import fastlr
from fastlr.errors import FastlrWarning, InputError
from fastlr.estimator.result import Estimate, paired_difference

N = 12


def measured(inputs, seed=0, outputs=3, **options):
    torch.manual_seed(5)
    return fastlr.estimate(nn.Linear(6, outputs).double(), inputs, N, seed=seed, **options)


def rows(change=None):
    x = torch.randn(N, 6, generator=seeded(0))
    if change is not None:
        x[change] += 1
    return x


def pairs(a, b):
    """True if they pair and nothing is in doubt."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FastlrWarning)
        try:
            paired_difference(a, b)
        except InputError as error:
            assert "not paired" in str(error)
            return False
    return True


def test_inputs_that_differ_in_the_middle_do_not_pair():
    first = measured(fastlr.TensorInputs(rows()))
    assert not pairs(first, measured(fastlr.TensorInputs(rows(6))))
    same = [
        fastlr.TensorInputs(rows()),
        fastlr.TensorInputs(rows().double()),
        fastlr.TensorInputs(torch.cat([rows(), torch.ones(3, 6)])),  # as far as they are used
        fastlr.TensorInputs(TensorDataset(rows(), torch.arange(N)), item=0),
    ]
    for inputs in same:
        assert pairs(first, measured(inputs))
    dataset = TensorDataset(rows(6), torch.arange(N))
    assert not pairs(first, measured(fastlr.TensorInputs(dataset, item=0)))


def test_a_tensor_that_is_written_to_is_other_inputs():
    x = rows()
    meter = fastlr.LocalRedundancy(nn.Linear(6, 3), fastlr.TensorInputs(x), N)
    first, again = meter.measure(), meter.measure()
    assert pairs(first, again)
    x[6] += 1
    third = meter.measure()
    assert not pairs(first, third)
    assert pairs(third, meter.measure())
    x.data = rows()
    assert pairs(first, meter.measure())
    x[0] += 1
    fresh = fastlr.estimate(nn.Linear(6, 3), fastlr.TensorInputs(x), N)
    assert pairs(meter.measure(), fresh)
    assert not pairs(third, fresh)


def test_tensors_are_hashed_once_for_a_version(monkeypatch):
    inputs, hashed = fastlr.TensorInputs(rows()), []
    plain = fastlr.TensorInputs._hash
    monkeypatch.setattr(
        fastlr.TensorInputs, "_hash", lambda self, *given: hashed.append(1) or plain(self, *given)
    )
    meter = fastlr.LocalRedundancy(nn.Linear(6, 3), inputs, N)
    meter.measure(), meter.measure(), measured(inputs)
    assert len(hashed) == 1
    inputs.tensors[3] = 0
    meter.measure()
    assert len(hashed) == 2


def test_every_tensor_counts():
    def of(mask, ids=0, scale=1.0):
        x, m = rows(), torch.ones(N, 6, dtype=torch.bool)
        m[6, mask] = False
        positions = torch.arange(6)[None] + ids
        held = {"x": x, "mask": m, "position_ids": positions, "scale": scale}
        return fastlr.TensorInputs(held).identity(N, 0)

    assert of(0) == of(0)
    assert len({of(0), of(1), of(0, 1), of(0, 0, 2.0)}) == 4
    time_first = fastlr.TensorInputs(torch.zeros(5, N, 6), in_dim=1)
    before = time_first.identity(N - 1, 0)
    time_first.tensors[2, 6, 3] = 1
    assert before
    assert time_first.identity(N - 1, 0) != before
    assert fastlr.TensorInputs((rows(), object())).identity(N, 0) == ""


def test_generated_inputs_are_their_arguments_and_seed():
    def images(seed=0, **options):
        return fastlr.ShapeImages((3, 8, 8), **options).identity(N, seed)

    assert images() == images() == images(channels_last=True)
    assert images() == images(normalize=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    kinds = {
        images(),
        images(1),
        images(circles=4),
        images(normalize=None),
        fastlr.NoiseImages((3, 8, 8)).identity(N, 0),
        fastlr.GaussianSeries(8, 2).identity(N, 0),
        fastlr.TokenInputs(9, 4).identity(N, 0),
        fastlr.TokenInputs(9, 4, attention_mask=True).identity(N, 0),
    }
    assert len(kinds) == 8
    assert "" not in kinds

    class Mirrored(fastlr.GaussianSeries):
        def _make(self, *given):
            return -super()._make(*given)

    assert Mirrored(8, 2).identity(N, 0) == ""


class Own:
    """Inputs of the user's own, whose middle nothing tells."""

    def __init__(self, x):
        self.x = x

    def batch(self, start, stop, *, seed, device, dtype):
        return self.x[start:stop].to(device, dtype)


def test_what_cannot_be_told_is_named():
    own = Own(rows())
    first = measured(own)
    assert pairs(first, measured(own))
    for other in (Own(rows(6)), fastlr.TensorInputs(rows(6))):
        with warned("inputs .*Own.*first two and the last alone"):
            paired_difference(first, measured(other))
    own.x[0] += 1
    assert not pairs(first, measured(own))
    assert not pairs(first, measured(Own(rows(0))))


def on_images(predictive, channels=3):
    torch.manual_seed(5)
    model = nn.Conv2d(2, channels, 1)
    x = torch.randn(N, 2, 2, 2, generator=seeded(0))
    return fastlr.estimate(model, fastlr.TensorInputs(x), N, predictive=predictive)


def test_predictives_that_differ_do_not_pair():
    plain = measured(fastlr.TensorInputs(rows()))
    for other in (fastlr.Gaussian(), fastlr.Bernoulli()):
        assert not pairs(plain, measured(fastlr.TensorInputs(rows()), predictive=other))
    for dim in (-1, 1):
        same = fastlr.Categorical(dim=dim)
        assert pairs(plain, measured(fastlr.TensorInputs(rows()), predictive=same))
    gaussians = [
        measured(fastlr.TensorInputs(rows()), predictive=fastlr.Gaussian(sigma))
        for sigma in (1, 1.0, 2.0)
    ]
    assert pairs(gaussians[0], gaussians[1])
    assert not pairs(gaussians[0], gaussians[2])
    kinds = (fastlr.DiagonalGaussian(), fastlr.DiagonalGaussian(dim=1), fastlr.Gaussian())
    last, first, fixed = [
        measured(fastlr.TensorInputs(rows()), outputs=4, predictive=kind) for kind in kinds
    ]
    assert pairs(last, first)
    assert not pairs(last, fixed)
    mask = torch.tensor([[True, True], [False, True]])
    plain = on_images(fastlr.Categorical(dim=1))
    masked = on_images(fastlr.Categorical(dim=-3, mask=mask))
    assert pairs(plain, on_images(fastlr.Categorical(dim=1, mask=torch.ones(2, 2).bool())))
    assert pairs(masked, on_images(fastlr.Categorical(dim=1, mask=mask.clone()[None])))
    assert not pairs(masked, on_images(fastlr.Categorical(dim=1, mask=~mask)))
    assert not pairs(masked, plain)
    assert not pairs(plain, on_images(fastlr.Categorical(dim=2)))


class Halved(fastlr.Gaussian):
    """A predictive of the user's own."""


def test_a_predictive_of_ones_own_is_known_as_an_object():
    own = Halved()
    first = measured(fastlr.TensorInputs(rows()), predictive=own)
    assert pairs(first, measured(fastlr.TensorInputs(rows()), predictive=own))
    with warned("predictive"):
        paired_difference(first, measured(fastlr.TensorInputs(rows()), predictive=Halved()))
    assert not pairs(first, measured(fastlr.TensorInputs(rows()), predictive=fastlr.Gaussian()))


def stored(estimate, *without):
    record = json.loads(json.dumps(estimate.to_dict(per_sample=True), allow_nan=False))
    return Estimate.from_dict({k: v for k, v in record.items() if k not in without})


def test_stored_estimates_pair_as_they_did():
    first = measured(fastlr.TensorInputs(rows()))
    back = stored(first)
    assert back.to_dict() == first.to_dict()
    assert pairs(back, first)
    assert not pairs(back, measured(fastlr.TensorInputs(rows(6))))
    old = stored(first, "inputs_identity", "predictive_identity")
    for other in (old, first):
        with warned("inputs .*first two and the last alone"):
            assert paired_difference(old, other) == (0.0, 0.0)
