"""What metrics refuse: one table of the error, words of its message, and the call."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from metrics_models import PlainCNN, Residual, data, labels, made
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastlr
from fastlr.errors import InputError, ModelError, NonFiniteError
from fastlr.metrics import (
    curvature_rank,
    distance_from_init,
    dormant_ratio,
    effective_rank,
    feature_rank,
    gradient_measures,
    train_grad_norm,
    trainability,
    weight_norm,
)

MODEL, X, Y = made(PlainCNN), data(PlainCNN, 5), labels(PlainCNN, 5)
RESIDUAL = made(Residual)
SMALL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
START, ROWS = copy.deepcopy(RESIDUAL.state_dict()), torch.randn(7, 3)
WITHOUT_HEAD = {name: value for name, value in START.items() if name != "fc.weight"}
LOST, UNSTARTED = made(PlainCNN), copy.deepcopy(MODEL.state_dict())
LOST.head.weight.data[0, 0] = math.nan
DIVERGED = made(PlainCNN)
DIVERGED.hidden.bias.data[0] = math.inf
SIGMOID = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
GELU = nn.Sequential(nn.Linear(3, 3), nn.GELU())
OF_ACTIVATIONS = (dormant_ratio, effective_rank, feature_rank)

of_state = partial(distance_from_init, RESIDUAL)
of_small = partial(trainability, SMALL, ROWS)
of_losses = partial(train_grad_norm, MODEL, X, Y)
of_labels = partial(train_grad_norm, MODEL, X, loss=F.cross_entropy)
noise_scale = partial(fastlr.gradient_noise_scale, MODEL, X, loss=F.cross_entropy)
capacity = partial(fastlr.memorization_capacity, SMALL, ROWS)

CALLS = [
    (InputError, "not a copy", lambda: of_state(RESIDUAL.state_dict())),
    (InputError, r"lacks fc\.weight", lambda: of_state(WITHOUT_HEAD)),
    (InputError, r"has head\.weight, unknown", lambda: of_state({**START, "head.weight": X})),
    (
        InputError,
        r"fc\.bias.*shape \(7,\), the parameter \(4,\)",
        lambda: of_state({**START, "fc.bias": torch.zeros(7)}),
    ),
    (InputError, "state dict or a model", lambda: of_state(3)),
    (NonFiniteError, r"head\.weight", lambda: weight_norm(LOST)),
    (NonFiniteError, r"head\.weight", lambda: distance_from_init(LOST, UNSTARTED)),
    (ModelError, "no trainable", lambda: weight_norm(made(PlainCNN).requires_grad_(False))),
    (ModelError, "no activations.*also=", lambda: dormant_ratio(SIGMOID, ROWS)),
    (
        ModelError,
        "no ReLU units; its activations are gelu: pass units='all'",
        lambda: dormant_ratio(GELU, ROWS, units="relu"),
    ),
    *((InputError, "empty", partial(of, MODEL, X[:0])) for of in OF_ACTIVATIONS),
    *((InputError, "no batches", partial(of, MODEL, iter([]))) for of in OF_ACTIVATIONS),
    *((InputError, "x must be", partial(of, MODEL, 3)) for of in OF_ACTIVATIONS),
    *((InputError, "empty list", partial(of, MODEL, [])) for of in OF_ACTIVATIONS),
    (
        InputError,
        r"\(x for x, _ in loader\)",
        lambda: dormant_ratio(MODEL, DataLoader(TensorDataset(X, Y))),
    ),
    (InputError, "does not run on.*Give inputs", lambda: dormant_ratio(SMALL, torch.randn(4, 7))),
    (InputError, "float64.*convert", lambda: effective_rank(MODEL, X.double())),
    *((ModelError, "no parameters", partial(of, nn.ReLU(), ROWS)) for of in OF_ACTIVATIONS),
    (NonFiniteError, r"act \(relu\) are not finite", lambda: dormant_ratio(DIVERGED, X)),
    (NonFiniteError, "go into head", lambda: effective_rank(DIVERGED, X)),
    (InputError, "threshold", lambda: dormant_ratio(MODEL, X, threshold=-1.0)),
    (InputError, "threshold", lambda: dormant_ratio(MODEL, X, threshold=math.nan)),
    (InputError, "units", lambda: dormant_ratio(MODEL, X, units="tanh")),
    (InputError, "normalize=False", lambda: dormant_ratio(MODEL, X, signed=True)),
    (
        InputError,
        r"delta must be a finite number in \(0, 1\)",
        lambda: effective_rank(MODEL, X, delta=1.0),
    ),
    (
        InputError,
        "epsilon must be a finite number positive",
        lambda: feature_rank(MODEL, X, epsilon=0.0),
    ),
    (InputError, "kind must be", lambda: effective_rank(MODEL, X, kind="stable")),
    (
        InputError,
        "one number for 5 samples.*reduction='none'",
        lambda: of_losses(lambda z, t: z.sum()),
    ),
    (
        InputError,
        "does not depend on the output",
        lambda: of_losses(lambda z, t: z.detach().sum(1)),
    ),
    (NonFiniteError, "a loss is not finite", lambda: of_losses(lambda z, t: z.sum(1) * math.inf)),
    (InputError, "one number for 5 samples", lambda: of_losses(lambda z, t: z.mean((0, 1))[None])),
    (NonFiniteError, "square root", lambda: of_losses(lambda z, t: (z - z).sum(1).sqrt())),
    (InputError, r"y has shape \[3\] for 5", lambda: of_labels(Y[:3])),
    (InputError, r"y has shape \[10\] for 5", lambda: of_labels(Y.repeat(2))),
    (InputError, "y has length 3.*each input", lambda: of_labels(Y[:3], batch_size=2)),
    (InputError, "fails on the samples .*Long.*classes as int", lambda: of_labels(Y.float())),
    (InputError, "part of the samples .*out of bounds", lambda: of_labels(Y + 9, batch_size=2)),
    (InputError, "of type list.*torch.as_tensor", lambda: of_labels(Y.tolist())),
    (InputError, "of type ndarray.*torch.as_tensor", lambda: of_labels(Y.numpy())),
    (InputError, "of type list.*torch.as_tensor", lambda: noise_scale(Y.tolist())),
    (InputError, "loss must be a function", lambda: of_losses("mse")),
    (InputError, "instance of a loss, not MSELoss", lambda: of_losses(nn.MSELoss)),
    (InputError, "batch_size must be", lambda: of_losses(F.cross_entropy, batch_size=0)),
    (
        InputError,
        "unknown measures",
        lambda: gradient_measures(MODEL, X, Y, F.cross_entropy, measures=["gradient"]),
    ),
    (
        InputError,
        r"a list of names: \['train_grad_norm'\]",
        lambda: gradient_measures(MODEL, X, Y, F.cross_entropy, measures="train_grad_norm"),
    ),
    (InputError, "steps", lambda: of_small(steps=0)),
    (InputError, "repeats", lambda: of_small(repeats=0)),
    (InputError, "learning_rate=0", lambda: of_small(learning_rate=0.0)),
    (InputError, "give a fastlr.Categorical", lambda: of_small(predictive=fastlr.Categorical)),
    (NonFiniteError, r"learning_rate=1e\+30", lambda: of_small(learning_rate=1e30)),
    (InputError, "delta=1", lambda: curvature_rank(SMALL, ROWS, delta=1)),
    (ModelError, "is on the meta device", lambda: weight_norm(nn.Linear(2, 2, device="meta"))),
    (ModelError, "not initialised", lambda: dormant_ratio(nn.LazyLinear(2), ROWS)),
    (InputError, "delta=0", lambda: fastlr.metrics.ntk_rank(SMALL, ROWS, delta=0)),
    (InputError, "delta must be a number", lambda: curvature_rank(SMALL, ROWS, delta="1 %")),
    (InputError, "learning_rate must be a number", lambda: of_small(learning_rate=None)),
    (
        InputError,
        "Gaussian is a class",
        lambda: curvature_rank(SMALL, ROWS, predictive=fastlr.Gaussian),
    ),
    (
        InputError,
        "predictive must be",
        lambda: curvature_rank(SMALL, ROWS, predictive="gaussian"),
    ),
    (InputError, "also='tanh': give a list", lambda: dormant_ratio(SMALL, ROWS, also="tanh")),
    (InputError, "give a list", lambda: dormant_ratio(SMALL, ROWS, also=torch.tanh)),
    (InputError, "give a list", lambda: dormant_ratio(SMALL, ROWS, also=["tanh"])),
    (
        InputError,
        "more than 4096 labelings of 7 labels",
        lambda: capacity(enumerated=True, steps=1),
    ),
    (
        InputError,
        "more than 4096",
        lambda: capacity(enumerated=True, steps=1, predictive=fastlr.Gaussian()),
    ),
    (InputError, "learning_rate=-1", lambda: capacity(learning_rate=-1)),
]


@pytest.mark.parametrize("rank", [curvature_rank, fastlr.metrics.ntk_rank])
def test_inputs_that_the_model_does_not_take_are_named_where_it_was_looked_at_before(rank):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    rank(model, ROWS)
    with pytest.raises(InputError, match="float64.*convert"):
        rank(model, ROWS.double())


@pytest.mark.parametrize(("error", "words", "call"), CALLS)
def test_what_cannot_be_measured_is_named(error, words, call):
    with pytest.raises(error, match=words):
        call()
