"""Ranks and training gradient norms equal numpy and plain loops.

The representation is found, or asked for by name.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from exact import gradients, seeded
from expected import refused
from metrics_models import MODELS, PlainCNN, Residual, data, entropy_loss, labels, made, plain_ranks
from pytest import approx, mark
from single_samples import Written
from torch import nn

from fastlr import metrics
from fastlr.errors import ModelError

# -- ranks
# --------------------------------------------------------------------------------------------------


@mark.parametrize("layout", ["plain", "bfloat16", "batches", "one sample"])
@mark.parametrize("kind", MODELS)
def test_ranks_equal_numpy(kind, layout):
    dtype = torch.bfloat16 if layout == "bfloat16" else torch.float32
    model = made(kind, dtype)
    x = data(kind, 1 if layout == "one sample" else 40, dtype)
    with torch.no_grad():
        wanted = plain_ranks(model.by_hand(x)[1], delta=0.05, epsilon=0.1)
    given = iter(x.split(9)) if layout == "batches" else x
    found = metrics.activation_measures(
        model, given, delta=0.05, epsilon=0.1, measures=list(wanted)
    )
    assert {name: float(value) for name, value in found.items()} == approx(
        wanted, rel=5e-3 if layout == "bfloat16" else 1e-5
    )
    if layout == "plain":
        assert metrics.effective_rank(model, x, delta=0.05) == wanted["effective_rank"]
        assert metrics.effective_rank(model, x, kind="entropy") == approx(
            wanted["effective_rank_entropy"]
        )
        assert metrics.feature_rank(model, x, epsilon=0.1) == wanted["feature_rank"]


@mark.parametrize("rows", [3, 30, 300])
def test_ranks_of_known_spectra(rows):
    """Rank-deficient features, in pieces of any size: singular values 4, 2, 1 and zeros."""
    generator = seeded(0)
    left = torch.linalg.qr(torch.randn(rows, 3, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(6, 3, generator=generator, dtype=torch.float64)).Q
    x = left @ torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)) @ right.T
    model = nn.Linear(6, 2).double()
    for given in (lambda: x, lambda: iter(x.split(1)), lambda: iter(x.split(97))):
        assert metrics.effective_rank(model, given()) == 3
        assert metrics.effective_rank(model, given(), delta=0.2) == 2  # 6/7 = 0.857
        entropy = -sum(p * math.log(p) for p in (4 / 7, 2 / 7, 1 / 7))
        assert metrics.effective_rank(model, given(), kind="entropy") == approx(
            math.exp(entropy), rel=1e-9
        )
        assert metrics.feature_rank(model, given(), epsilon=1.5 / math.sqrt(rows)) == 2
    tie = torch.eye(6, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0, 0, 0, 0])
    assert metrics.effective_rank(model, tie, delta=0.25) == 1  # at least 1 - delta, not more
    assert metrics.effective_rank(model, torch.zeros(4, 6).double()) == 0
    assert metrics.effective_rank(model, torch.zeros(4, 6).double(), kind="entropy") == 0


def headed(head):
    """A backbone and a head that is a function."""
    parts = {"a": nn.Linear(4, 5), "b": nn.Linear(4, 5), "w": nn.Parameter(torch.randn(5, 3))}
    parts |= {"rnn": nn.LSTM(5, 3, batch_first=True), "last": nn.Conv2d(5, 3, 1)}
    return Written(lambda m, x: head(m, m.a(x).relu()), **parts)


FOUND = {
    "matmul": lambda m, h: h @ m.w,
    "matmul of a view": lambda m, h: torch.matmul(h[:, None], m.w.view(5, 3))[:, 0],
    "linear, then elementwise": lambda m, h: (
        30 * torch.tanh(F.linear(h, m.w.T) / 30).log_softmax(-1)
    ),
    "linear, then rearranged": lambda m, h: torch.stack(F.linear(h, m.w.T).unbind(1), 1)[
        :, None
    ].squeeze(1),
    "addmm": lambda m, h: torch.addmm(torch.zeros(3), h, m.w),
}
REFUSED = {
    "sum of two layers": (lambda m, h: h + m.b(torch.ones(4)), "comes from a and b"),
    "convolution": (
        lambda m, h: m.last(h[..., None, None]).flatten(1),
        r"comes from last \(conv2d\)",
    ),
    "lstm": (lambda m, h: m.rnn(h[:, None])[0], r"comes from rnn \(lstm\)"),
    "attention": (lambda m, h: h @ h.T, "matmul"),
    "no layer": (lambda m, h: torch.ones(len(h), 3), "no layer was found"),
    "features changed": (lambda m, h: (F.linear(h, m.w.T), h.zero_())[0], "changed in place"),
}


@mark.parametrize("name", FOUND)
def test_the_last_linear_layer_is_found(name):
    model, x = headed(FOUND[name]), torch.randn(9, 4)
    with torch.no_grad():
        wanted = plain_ranks(model.a(x).relu())["effective_rank_entropy"]
    assert metrics.effective_rank(model, x, kind="entropy") == approx(wanted, rel=1e-5)


@mark.parametrize("name", REFUSED)
def test_without_a_last_linear_layer_the_error_says_what_there_is(name):
    head, message = REFUSED[name]
    model, x = headed(head), torch.randn(9, 4)
    with refused(f"{message}.*pass layer=", ModelError):
        metrics.effective_rank(model, x)
    with torch.no_grad():
        wanted = plain_ranks(x)["effective_rank_entropy"]
    assert metrics.effective_rank(model, x, layer="a", kind="entropy") == approx(wanted, rel=1e-5)
    metrics.dormant_ratio(model, x)  # which needs no last layer


def test_layer_by_name():
    model, x = made(Residual), data(Residual)
    with torch.no_grad():
        wanted = plain_ranks(model.norm1(model.first(x)).relu().movedim(1, -1))
    found = metrics.effective_rank(model, x, layer="second", kind="entropy")
    assert found == approx(wanted["effective_rank_entropy"], rel=1e-5)
    assert found.details == {"n": 24 * 64, "d": 8, "layer": "second"}
    plain, x2 = made(PlainCNN), data(PlainCNN)
    with torch.no_grad():
        wanted = plain_ranks(plain.hidden(plain.body(x2).flatten(1)))
    # Which works in place.
    before_the_change = metrics.effective_rank(plain, x2, layer="act", kind="entropy")
    assert before_the_change == approx(wanted["effective_rank_entropy"], rel=1e-5)
    with refused("no module of the model; its linear layers: fc"):
        metrics.feature_rank(model, x, layer="classifier")
    model.spare = nn.Linear(2, 2)
    with refused("'spare' was not called", ModelError):
        metrics.feature_rank(model, x, layer="spare")


# -- training gradient
# --------------------------------------------------------------------------------------------------


def plain_gradients(model, x, y, loss):
    """One backward pass a sample, and one for the mean over samples."""
    losses = [loss(model(x[i : i + 1]), y[i : i + 1]).sum() for i in range(len(x))]
    *samples, batch = (
        gradients(model, [*losses, loss(model(x), y).sum() / len(x)]).square().sum(1).tolist()
    )
    return samples, batch


@mark.parametrize("kind", MODELS)
def test_training_gradient_norms_equal_plain_loops(kind):
    model = made(kind, torch.float64)
    x = data(kind, 7, torch.float64)
    y = labels(kind, 7)
    samples, batch = plain_gradients(model, x, y, entropy_loss)
    model.train()  # measured in eval mode all the same
    for size in (None, 3):
        found = metrics.gradient_measures(model, x, y, entropy_loss, batch_size=size)
        assert found["train_grad_norm"] == approx(np.mean(samples), rel=1e-9)
        assert found["train_grad_norm"].details["stderr"] == approx(
            np.std(samples, ddof=1) / 7**0.5, rel=1e-9
        )
        assert found["train_grad_norm_batch"] == approx(batch, rel=1e-9)
        assert {m.details["n"] for m in found.values()} == {7}
    assert metrics.train_grad_norm(model, x, y, entropy_loss) == approx(np.mean(samples), rel=1e-9)


def test_losses_of_torch_are_taken_unreduced():
    model = made(PlainCNN, torch.float64)
    x = data(PlainCNN, 5, torch.float64)
    y = labels(PlainCNN, 5)
    wanted = approx(np.mean(plain_gradients(model, x, y, entropy_loss)[0]), rel=1e-9)
    module = nn.CrossEntropyLoss()
    for loss in (
        F.cross_entropy,
        module,
        lambda z, t: F.nll_loss(z.log_softmax(1), t, reduction="none"),
    ):
        assert metrics.train_grad_norm(model, x, y, loss) == wanted
    assert module.reduction == "mean"
    target = torch.randn(5, 3, dtype=torch.float64)
    squares = plain_gradients(model, x, target, lambda z, t: (z - t).square())
    found = metrics.gradient_measures(model, x, target, nn.MSELoss())
    assert found["train_grad_norm"] == approx(np.mean(squares[0]), rel=1e-9)
    assert found["train_grad_norm_batch"] == approx(squares[1], rel=1e-9)


def test_training_gradient_norm_in_half_precision():
    exact, x, y = made(PlainCNN), data(PlainCNN, 6), labels(PlainCNN, 6)
    wanted = metrics.gradient_measures(exact, x, y, F.cross_entropy)
    found = metrics.gradient_measures(exact.bfloat16(), x.bfloat16(), y, F.cross_entropy)
    for name in wanted:
        assert found[name] == approx(wanted[name], rel=0.1)
    metrics.train_grad_norm(exact, x.bfloat16(), torch.ones(6, 3, dtype=torch.bfloat16), F.mse_loss)
    # a loss so confident that its gradient squared is below the smallest bfloat16
    exact.head.bias.data[:] = torch.tensor([100.0, 0.0, 0.0])
    tiny = metrics.gradient_measures(
        exact, x.bfloat16(), torch.zeros(6, dtype=torch.long), F.cross_entropy
    )
    assert 0 < tiny["train_grad_norm_batch"] <= tiny["train_grad_norm"] < 1e-60
