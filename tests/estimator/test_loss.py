"""The redundancy loss: its mean, its gradient by finite differences, and what it refuses.

The finite differences are of the exact value.
"""

import copy

import torch
from exact import redundancy
from expected import refused, warned
from fisher import (
    bernoulli_fisher,
    categorical_fisher,
    diagonal_gaussian_fisher,
    gaussian_fisher,
)
from pytest import fixture, mark, param, raises
from single_samples import Written
from torch import nn
from torch.testing import assert_close
from untouched import untouched

import fastlr
from fastlr.errors import InputError, InteractionError, ModelError


def attending():
    """Tokens [B, 3, 4] -> logits [B, 3]."""
    parts = {"attention": nn.MultiheadAttention(4, 2, batch_first=True), "head": nn.Linear(4, 3)}
    return Written(
        lambda m, x: m.head(m.attention(x, x, x, need_weights=False)[0].mean(1)), **parts
    )


def recurrent():
    return Written(
        lambda m, x: m.head(m.lstm(x)[0][:, -1]),
        lstm=nn.LSTM(4, 5, batch_first=True),
        head=nn.Linear(5, 2),
    )


def mlp(act=nn.GELU, outputs=3):
    return nn.Sequential(nn.Linear(4, 6), act(), nn.Linear(6, outputs))


CASES = {
    "classes": (mlp, (5, 4), None),
    "two-classes": (lambda: mlp(outputs=2), (5, 4), fastlr.Categorical()),
    "gaussian": (lambda: mlp(nn.Tanh), (5, 4), fastlr.Gaussian(0.5)),
    "bernoulli": (lambda: mlp(nn.SiLU), (5, 4), fastlr.Bernoulli()),
    "diagonal": (lambda: mlp(nn.Tanh, 4), (5, 4), fastlr.DiagonalGaussian()),
    "batch-norm": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.GELU(), nn.Flatten(), nn.Linear(12, 3)
        ),
        (4, 2, 3, 3),
        None,
    ),
    "attention": (attending, (4, 3, 4), None),
    "recurrent": (recurrent, (4, 3, 4), None),
}


FISHER = {
    fastlr.Bernoulli: bernoulli_fisher,
    fastlr.DiagonalGaussian: diagonal_gaussian_fisher,
    fastlr.Gaussian: lambda z: gaussian_fisher(len(z), 0.5),
}


def definition(model, x, predictive):
    """Mean over x of the trace of J^T F J."""
    fisher = FISHER.get(type(predictive), categorical_fisher)
    model = copy.deepcopy(model).eval()
    return sum(redundancy(model, z, fisher) for z in model(x)) / len(x)


@fixture(params=CASES)
def case(request, double):
    build, shape, predictive = CASES[request.param]
    model = build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model, torch.randn(shape), predictive


def test_its_value_and_its_gradient_are_those_of_the_mean_over_the_inputs(case):
    """The mean of the exact values is the definition's, its gradient that of finite differences."""
    model, x, predictive = case
    options = {"predictive": predictive, "probe": "exact", "seed": 3}
    each = fastlr.redundancy_loss(model, x, reduction="none", **options)
    want = definition(model, x, predictive)
    assert_close(each.mean(), want, rtol=1e-9, atol=0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(each.mean(), parameters, materialize_grads=True)
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
    moved = []
    for step in (1e-5, -1e-5):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p, d in zip(other.parameters(), direction, strict=True):
                p.add_(d, alpha=step)
        moved.append(definition(other, x, predictive))
    assert_close(slope, (moved[0] - moved[1]) / 2e-5, rtol=1e-5, atol=1e-7)


@mark.parametrize(
    "probe, seeds",
    [("rademacher", 40), ("exact", 20), param("rademacher", 100, marks=mark.long)],
)
def test_on_average_value_and_gradient_are_exact(case, probe, seeds):
    model, x, predictive = case
    options = {"predictive": predictive, "probe": probe}
    parameters = list(model.parameters())
    want = fastlr.redundancy_loss(
        model, x, reduction="none", seed=0, predictive=predictive, probe="exact"
    ).mean()
    wanted = [g.flatten() for g in torch.autograd.grad(want, parameters, materialize_grads=True)]
    values, slopes = [], []
    for seed in range(seeds):
        value = fastlr.redundancy_loss(model, x, seed=seed, **options)
        values.append(value.detach())
        grads = torch.autograd.grad(value, parameters, materialize_grads=True)
        slopes.append(sum((g.flatten() * w).sum() for g, w in zip(grads, wanted, strict=True)))
    for found, expected in ((values, want.detach()), (slopes, sum((w * w).sum() for w in wanted))):
        found = torch.stack(found)
        assert abs(found.mean() - expected) < 4 * found.std() / len(found) ** 0.5, (
            found.mean(),
            expected,
        )


def test_small_and_large_cotangents_keep_their_bits(double):
    model = mlp(outputs=2).float()
    with torch.no_grad():
        # P = 1e-52: its square vanishes in float32.
        model[2].bias.copy_(torch.tensor([60.0, -60.0]))
    x = torch.randn(4, 4, dtype=torch.float32)
    assert fastlr.redundancy_loss(model, x, reduction="none", seed=0).dtype == torch.float32
    model.double()
    for options in ({"seed": 0}, {"probe": "exact"}):  # two classes: no noise in the signs
        each = fastlr.redundancy_loss(model, x.double(), reduction="none", **options)
        assert 0 < float(each.detach().mean()) < 1e-45
        want = fastlr.per_sample_grad_sq_norms(
            model,
            x.double(),
            fastlr.Categorical().cotangent(model(x.double()), "rademacher", range(4), 0),
        )
        assert_close(each.detach(), want, rtol=1e-9, atol=0)


def test_the_model_is_left_alone_and_draws_are_its_callers(double):
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)
    ).train()
    x = torch.randn(8, 4)
    with untouched(model):
        loss = fastlr.redundancy_loss(model, x, seed=1)
    want = torch.autograd.grad(fastlr.redundancy_loss(model, x, seed=1), list(model.parameters()))
    # In train mode: batch norm writes its statistics, between the forward pass and the backward
    # pass.
    model(x)
    got = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol=1e-12, atol=0)
    torch.manual_seed(0)
    first, second = (float(fastlr.redundancy_loss(model, x).detach()) for _ in range(2))
    torch.manual_seed(0)
    assert first != second
    assert first == float(fastlr.redundancy_loss(model, x).detach())


def test_frozen_and_unused_parameters_and_padding(double):
    parts = {"embed": nn.Embedding(9, 4), "head": nn.Linear(4, 5), "unused": nn.Linear(2, 2)}
    model = Written(
        lambda m, input_ids, attention_mask: m.head(m.embed(input_ids).tanh()).tanh(), **parts
    )
    model.embed.weight.requires_grad_(False)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    x = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "attention_mask": mask}
    options = {"predictive": fastlr.Categorical(), "reduction": "none", "seed": 0}
    first = fastlr.redundancy_loss(model, x, **options)
    x["input_ids"] = torch.tensor([[1, 2, 7], [4, 8, 8]])
    assert torch.equal(first, fastlr.redundancy_loss(model, x, **options))
    assert (first > 0).all()
    first.sum().backward()
    assert model.head.weight.grad is not None
    assert model.embed.weight.grad is model.unused.weight.grad is None


NODES = {
    nn.ReLU: "Relu",
    nn.Hardswish: "Hardswish",
    nn.LeakyReLU: "LeakyRelu",
    nn.ReLU6: "Hardtanh",
}


@mark.parametrize("act", NODES)
@mark.filterwarnings("error::fastlr.FastlrWarning")
def test_jumps_are_named(double, act):
    with warned(f"jumps where a unit of {NODES[act]}"):
        fastlr.redundancy_loss(mlp(act), torch.randn(3, 4))
    fastlr.redundancy_loss(mlp(nn.ELU), torch.randn(3, 4))


def test_what_is_refused(double):
    model, x = mlp(), torch.randn(3, 4)
    for options, error, says in (
        ({"probe": "sampled"}, InputError, "probe='sampled': the gradient would lack"),
        ({"probe": "batch"}, InputError, "choose 'rademacher' or 'exact'"),
        ({"reduction": "sum"}, InputError, "choose 'mean' or 'none'"),
        ({"predictive": fastlr.Categorical}, InputError, "give a fastlr.Categorical"),
        ({"seed": -1}, InputError, "seed"),
    ):
        with raises(error, match=says):
            fastlr.redundancy_loss(model, x, **options)
    with torch.no_grad(), refused("under torch.no_grad"):
        fastlr.redundancy_loss(model, x)

    class Later(nn.Linear):
        share = 0.0

        def forward(self, x):
            return super().forward(x) - self.share * super().forward(x).mean(0)

    later = Later(4, 3)
    assert fastlr.redundancy_loss(later, x) > 0
    for mixing in (later, Later(4, 3)):  # the first is no longer what was looked at
        mixing.share = 1.0
        with raises(InteractionError):
            fastlr.redundancy_loss(mixing, x)
    with refused("does not run on"):
        fastlr.redundancy_loss(model, torch.randn(3, 5))


def test_an_interaction_that_begins_later_is_refused_at_once():
    model = Written(
        lambda m, x: m.head(m.first(x).tanh() - m.share * m.first(x).detach().mean(0)),
        first=nn.Linear(4, 5),
        head=nn.Linear(5, 3),
    )
    x, model.share = torch.randn(6, 4), 0.0
    for seed in range(5):
        fastlr.redundancy_loss(model, x, seed=seed)
    model.share = 1.0
    with warned("audit"), raises(InteractionError):
        fastlr.redundancy_loss(model, x, seed=5)


def test_samples_whose_gradients_mix_in_the_backward_pass_are_refused(double):
    """Value and slope are those of the batch's graph, where the counts are the batch's."""
    model = Written(
        lambda m, x: m.head(m.table(x).sum(1)),
        table=nn.Embedding(5, 4, scale_grad_by_freq=True),
        head=nn.Linear(4, 3),
    )
    for ids in (torch.tensor([[0, 1], [2, 3]]), torch.randint(5, (4, 3))):
        for measure in (fastlr.redundancy_loss, fastlr.metrics.ntk_rank):
            with raises(InteractionError, match="of parameter table.weight is another within"):
                measure(model, ids)

    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g - g.mean(0)

    mixed = Written(
        lambda m, x: m.head(Centred.apply(m.first(x))), first=nn.Linear(4, 5), head=nn.Linear(5, 3)
    )
    x = torch.randn(6, 4)
    for measure in (fastlr.redundancy_loss, fastlr.metrics.ntk_rank):
        with raises(InteractionError, match="a backward formula or a hook mixes samples"):
            measure(mixed, x)
    y = torch.randint(3, (6,))
    with raises(InteractionError, match="a backward formula or a hook mixes samples"):
        fastlr.gradient_noise_scale(mixed, x, y, nn.functional.cross_entropy, groups=2)
    with raises(InteractionError, match="a backward formula or a hook mixes samples"):
        fastlr.estimate(mixed, fastlr.TensorInputs(x), 6, probe="batch", batch_size=3)


@mark.parametrize("reduction", ["mean", "none"])
@mark.parametrize(
    "layers",
    [
        [nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 3)],
        [nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3)],
        [nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(6, 3), dim=None)],
    ],
    ids=["group norm", "weight norm", "norm of a whole weight"],
)
def test_second_derivatives_that_torch_lacks_or_has_wrong(reduction, layers, double):
    """By vmap group norm has none; weight norm's is wrong."""
    model, x = nn.Sequential(*copy.deepcopy(layers), nn.Tanh()).double(), torch.randn(4, 2, 3)
    options = {"probe": "exact", "reduction": reduction, "seed": 0}

    def value():
        return fastlr.redundancy_loss(model, x, **options).mean()

    parameters = list(model.parameters())
    assert reduction == "mean" or abs(value() - definition(model, x, None)) < 1e-9
    grads = torch.autograd.grad(value(), parameters, materialize_grads=True)
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
    moved = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=step)
        moved.append(value())
    assert_close(slope, (moved[0] - moved[1]) / 2e-5, rtol=1e-5, atol=1e-7)


@mark.parametrize("reduction", ["mean", "none"])
def test_sparse_gradients_are_taken(reduction, double):
    model = Written(lambda m, x: m.e(x).sum(1).tanh(), e=nn.Embedding(5, 3))
    ids = torch.randint(5, (4, 2))
    values, slopes, kernels = [], [], []
    for sparse in (False, True):
        model.e.sparse = sparse
        value = fastlr.redundancy_loss(model, ids, seed=0, reduction=reduction).sum()
        (slope,) = torch.autograd.grad(value, [model.e.weight])
        values.append(value)
        slopes.append(slope.to_dense())
        kernels.append(fastlr.metrics.ntk_rank(model, ids).details["trace"])
    assert_close(values[1], values[0])
    assert_close(slopes[1], slopes[0])
    assert_close(kernels[1], kernels[0])


def test_an_operation_that_cannot_be_differentiated_twice_is_named(double):
    model = Written(
        lambda m, x: torch.cdist(m.a(x), m.c), a=nn.Linear(4, 3), c=nn.Parameter(torch.randn(5, 3))
    )
    for _ in range(2):
        with refused("cannot be differentiated twice .*_cdist_backward", ModelError):
            fastlr.redundancy_loss(model, torch.randn(3, 4))


@mark.parametrize("rank", [fastlr.metrics.ntk_rank, fastlr.metrics.curvature_rank])
def test_a_second_derivative_is_tried_though_a_rank_has_looked_at_the_model(rank, double):
    model = Written(lambda m, x: m.head(m.bag(x)), bag=nn.EmbeddingBag(5, 4), head=nn.Linear(4, 3))
    ids = torch.randint(5, (3, 4))
    rank(model, ids)
    with refused("cannot be differentiated twice .*_embedding_bag_backward", ModelError):
        fastlr.redundancy_loss(model, ids)


def test_scripted_modules_are_named(double):
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 3)), nn.Tanh())
    with refused("module 0 is scripted or traced by torch.jit", ModelError):
        fastlr.redundancy_loss(model, torch.randn(3, 4))


def test_nodes_without_a_second_derivative_are_named(double, monkeypatch):
    """A node without a second derivative is named in the error.

    On a GPU fused recurrent layers are such nodes; here the step-by-step mode is taken away.
    """
    from fastlr.estimator import loss

    model, x = recurrent(), torch.randn(4, 3, 4)
    fastlr.redundancy_loss(model, x)
    monkeypatch.setattr(loss, "_ONCE", ["Tanh", "Addmm"])
    with refused("Addmm, Tanh cannot be differentiated twice", ModelError):
        fastlr.redundancy_loss(mlp(nn.Tanh), torch.randn(3, 4))
