"""Losses that mix samples are refused; those of each sample's own row give what a loop gives."""

from functools import cache

import torch
import torch.nn.functional as F
from exact import seeded
from expected import refused
from pytest import approx, mark
from single_samples import Written
from torch import nn

import fastlr
from fastlr import metrics

CLASSES = 6
KEYS = torch.randn(9, CLASSES, generator=seeded(3))
WEIGHTS = torch.rand(8, generator=seeded(4)) + 0.5


@cache
def network(dtype, seed):
    """A network that several tests share, so that it is checked once."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES)).to(dtype)


def made(samples=8, dtype=torch.float64, seed=0):
    """A network, inputs and classes."""
    model = network(dtype, seed)
    torch.manual_seed(10 + seed)
    return model, torch.randn(samples, 5, dtype=dtype), torch.randint(0, CLASSES, (samples,))


def entropy(z, y):
    return F.cross_entropy(z, y, reduction="none")


def info_nce(z, _):
    units = F.normalize(z, dim=1)
    other = units.flip(1)
    return F.cross_entropy(
        units @ other.T / 0.5, torch.arange(len(z), device=z.device), reduction="none"
    )


def triplet(z, _):
    distance = torch.cdist(z, z)
    return (1 + distance.roll(1, 0).diagonal() - distance.roll(2, 0).diagonal()).relu()


def hard_negatives(z, y):
    distance = torch.cdist(z, z) + 1e3 * torch.eye(len(z), dtype=z.dtype)
    return (5 - distance.amin(1)).relu() + entropy(z, y)


def supervised_contrast(z, y):
    units = F.normalize(z, dim=1)
    same = (y[:, None] == y).to(z.dtype)
    return -((units @ units.T).log_softmax(1) * same).sum(1) / same.sum(1)


def over(scale):
    """A loss divided by a number of the batch."""
    return lambda z, y: entropy(z, y) / scale(entropy(z, y))


def hardest_half(z, y):
    return entropy(z, y).topk(len(z) // 2).values


def trimmed(z, y):
    losses = entropy(z, y)
    return losses * (losses.detach() <= losses.detach().median())


def by_rank(z, y):
    losses = entropy(z, y)
    return losses * losses.detach().argsort().argsort()


def of_neighbours(z, y):
    return entropy(z, y) + (z - z.roll(1, 0)).square().sum(1)


def of_one_pair(z, y):
    return entropy(z, y) + (z[0] - z[-1]).square().sum() / len(z)


def weighted_by_classes_of_the_batch(z, y):
    weights = torch.arange(1.0, 1 + CLASSES, dtype=z.dtype)[y]
    return weights / weights.sum() * entropy(z, y)


MIXING = {
    "InfoNCE": info_nce,
    "triplet": triplet,
    "hard negatives": hard_negatives,
    "supervised contrast": supervised_contrast,
    "variance": lambda z, _: (10 - (z.var(0) + 1e-4).sqrt()).relu(),
    "by its mean, detached": over(lambda losses: losses.detach().mean()),
    "by its mean": over(lambda losses: losses.mean()),
    "by its largest": over(lambda losses: losses.detach().max()),
    "softmax over the samples": lambda z, y: -z.log_softmax(0).gather(1, y[:, None])[:, 0],
    "batch norm": lambda z, y: entropy(F.batch_norm(z, None, None, training=True), y),
    "centred": lambda z, y: entropy(z - z.detach().mean(0), y),
    "hardest half": hardest_half,
    "trimmed": trimmed,
    "rank": by_rank,
    "pairwise": lambda z, _: F.softplus(z[:, :1].T - z[:, :1]).sum(1),
    "neighbours": of_neighbours,
    "one pair": of_one_pair,
    "weights of the batch": weighted_by_classes_of_the_batch,
    "labels broadcast": lambda z, y: F.mse_loss(z[:, :1], y.to(z.dtype), reduction="none"),
    "mixup": lambda z, y: (entropy(z, y) + entropy(z, y.flip(0))) / 2,
}


@mark.filterwarnings("ignore:Using a target size")
@mark.parametrize("name", MIXING)
def test_losses_that_mix_samples_are_refused(name):
    for dtype, samples, size in (
        (torch.float64, 8, None),
        (torch.float32, 64, None),
        (torch.float64, 8, 4),
    ):
        model, x, y = made(samples, dtype)
        with refused("mixes samples.*a gradient of its own.*closed over"):
            metrics.train_grad_norm(model, x, y, MIXING[name], batch_size=size)


@mark.parametrize(
    "loss",
    [
        lambda z, y: F.cross_entropy(z, y).expand(len(z)),
        lambda z, y: (entropy(z, y) + entropy(z, y).roll(1)) / 2,
    ],
)
def test_losses_of_several_samples_whose_sum_is_theirs_are_measured(loss):
    model, x, y = made()
    wanted = metrics.train_grad_norm(model, x, y, entropy)
    assert metrics.train_grad_norm(model, x, y, loss) == approx(wanted, rel=1e-9)


def one_hot(place, losses):
    return F.one_hot(place, len(losses)).to(losses)


# What one number for all samples, or a weight by rank, makes of the losses of a few: with two
# samples it may fall on the same place for them and for copies of one.
OF_FEW = {
    "smallest": lambda losses, y: losses.min(0).values.expand(len(y)),
    "largest": lambda losses, y: losses.max(0).values.expand(len(y)),
    "second": lambda losses, y: losses.kthvalue(min(2, len(y))).values.expand(len(y)),
    "last": lambda losses, y: losses.kthvalue(len(y)).values.expand(len(y)),
    "median": lambda losses, y: losses.median(0).values.expand(len(y)),
    "sorted, one": lambda losses, y: losses.sort(stable=True).values[len(y) // 2].expand(len(y)),
    "of the largest label": lambda losses, y: losses[y.argmax()].expand(len(y)),
    "of the smallest label": lambda losses, y: losses[y.argmin()].expand(len(y)),
    "smallest so far": lambda losses, y: losses.cummin(0).values,
    "largest so far": lambda losses, y: losses.cummax(0).values,
    "smallest alone": lambda losses, y: losses * one_hot(losses.detach().argmin(), losses),
    "largest alone": lambda losses, y: losses * one_hot(losses.detach().argmax(), losses),
    "largest label alone": lambda losses, y: losses * one_hot(y.argmax(), losses),
    "by rank": lambda losses, y: losses * (1 + losses.detach().argsort(stable=True).argsort()),
    "by rank of label": lambda losses, y: losses * (1 + y.argsort(stable=True).argsort()),
    "sorted, weighted": lambda losses, y: losses.sort().values * torch.arange(1, 1 + len(y)),
}


@mark.parametrize("name", OF_FEW)
@mark.parametrize("samples", [2, 3, 4])
def test_losses_of_a_few_samples_that_choose_among_them_are_refused(name, samples):
    for seed in range(3):
        model, x, _ = made(samples, seed=seed)
        y = torch.randperm(CLASSES)[:samples]
        for size in (None, 2):
            with refused("mixes samples"):
                metrics.train_grad_norm(
                    model, x, y, lambda z, t: OF_FEW[name](entropy(z, t), t), batch_size=size
                )


@mark.parametrize("samples", [2, 3, 4])
def test_weights_by_place_of_a_few_samples_stay_accepted(samples):
    model, x, y = made(samples)
    for weights in (WEIGHTS[:samples], torch.arange(float(samples)), torch.ones(samples)):
        value = metrics.train_grad_norm(model, x, y, lambda z, t, w=weights: w * entropy(z, t))
        looped_over = looped(model, x, lambda z, w=weights: w * entropy(z, y), samples)
        assert value == approx(looped_over, rel=1e-9)


def test_elements_that_a_loss_keeps_may_be_as_many_as_the_samples():
    """All of one sample: they go with it to its other places."""
    torch.manual_seed(0)
    model, x = logits_along(0), torch.randn(2, 3, 3).double()
    y = torch.tensor([[1, 2, -100], [-100, -100, -100]])
    wanted = looped(model, x, lambda z: entropy(z.mT, y), samples=2)
    assert metrics.train_grad_norm(model, x, y, of_some_tokens) == approx(wanted, rel=1e-9)


def changed(change):
    """A loss of torch, with a hook or a forward of the user's."""
    loss = nn.CrossEntropyLoss()
    change(loss)
    return loss


def of_its_mean(_, __, losses):
    return losses / losses.detach().mean()


@mark.parametrize(
    "change",
    [
        lambda loss: loss.register_forward_hook(of_its_mean),
        lambda loss: loss.register_forward_pre_hook(lambda _, x: (x[0] - x[0].mean(0), x[1])),
        lambda loss: loss.register_full_backward_hook(lambda _, g, __: (g[0] / g[0].norm(), None)),
        lambda loss: setattr(loss, "forward", over(lambda losses: losses.detach().mean())),
    ],
)
def test_losses_of_torch_with_a_hook_or_a_forward_of_the_users_are_asked(change):
    model, x, y = made()
    with refused("mixes samples"):
        metrics.train_grad_norm(model, x, y, changed(change))


def test_losses_of_torch_are_asked_under_a_hook_of_all_modules():
    model, x, y = made()

    def of_losses(module, given, out):
        return of_its_mean(module, given, out) if isinstance(module, nn.CrossEntropyLoss) else None

    hook = nn.modules.module.register_module_forward_hook(of_losses)
    try:
        with refused("mixes samples"):
            metrics.train_grad_norm(model, x, y, nn.CrossEntropyLoss())
    finally:
        hook.remove()


def test_a_sample_that_any_other_moves_is_met_alone():
    """The last one's label is the largest so far, and all before it are large."""
    model, x, _ = made(16)
    y = torch.tensor([CLASSES - 1] * 15 + [0])
    with refused("mixes samples"):
        metrics.train_grad_norm(model, x, y, lambda z, y: entropy(z, y.cummax(0).values))


def test_every_measure_asks():
    model, x, y = made(16)
    with refused("mixes samples"):
        metrics.gradient_measures(model, x, y, info_nce)
    with refused("mixes samples"):
        metrics.measures(model, ["train_grad_norm"], x=x, y=y, loss=info_nce)
    with refused("mixes samples"):
        fastlr.gradient_noise_scale(model, x, y, info_nce, groups=2)
    with refused("mixes samples"):  # of a part the mean loss is another
        metrics.gradient_measures(
            model, x, y, info_nce, measures=["train_grad_norm_batch"], batch_size=4
        )


def test_the_whole_batch_has_a_gradient_where_samples_mix():
    model, x, y = made()
    got = metrics.gradient_measures(model, x, y, info_nce, measures=["train_grad_norm_batch"])
    grads = torch.autograd.grad(info_nce(model(x), y).mean(), list(model.parameters()))
    assert got["train_grad_norm_batch"] == approx(
        float(sum(g.square().sum() for g in grads)), rel=1e-9
    )


def test_losses_that_are_no_real_numbers_in_a_dense_tensor_are_refused():
    model, x, y = made()
    with refused("the loss gave a complex tensor"):
        metrics.train_grad_norm(model, x, y, lambda z, y: torch.complex(z, z))
    with refused("the loss gave a sparse tensor"):
        metrics.train_grad_norm(model, x, y, lambda z, y: z.sum(1).to_sparse())


def test_the_loss_of_the_whole_batch_may_not_be_random():
    model, x, y = made()

    def dropped(z, y):
        return entropy(nn.functional.dropout(z), y)

    with refused("draws random numbers"):
        metrics.gradient_measures(model, x, y, dropped, measures=["train_grad_norm_batch"])
    with refused("draws random numbers"):
        metrics.measures(model, ["train_grad_norm_batch"], x=x, y=y, loss=dropped)


class Focal(nn.Module):
    """A loss with a reduction of its own."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, z, y):
        losses = entropy(z, y)
        losses = (1 - (-losses).exp()) ** 2 * losses
        return losses if self.reduction == "none" else losses.mean()


def of_prototypes(z, y):
    return -(-torch.cdist(z.float(), KEYS)).log_softmax(1).gather(1, y[:, None])[:, 0]


def with_class_weights(z, y):
    return F.cross_entropy(
        z, y, weight=torch.arange(1.0, 1 + CLASSES, dtype=z.dtype), reduction="none"
    )


def with_a_seed(z, y):
    noise = torch.randn(len(z), CLASSES, generator=seeded(0)).to(z.dtype)
    return entropy(z + noise, y)


OWN = {
    "plain": entropy,
    "scaled": lambda z, y: 0.3 * entropy(z, y),
    "focal": Focal(),
    "scripted": torch.jit.script(nn.CrossEntropyLoss(reduction="none")),
    "class weights": with_class_weights,
    "in float32": lambda z, y: entropy(z.float(), y),
    "in bfloat16": lambda z, y: entropy(z.bfloat16(), y),
    "confident": lambda z, y: entropy(50 * z, y),
    "prototypes": of_prototypes,
    "keys": lambda z, y: entropy(30 * z.float() @ KEYS.T, y),
    "margin": lambda z, y: F.multi_margin_loss(z, y, reduction="none"),
    "elements": lambda z, y: (z - F.one_hot(y, CLASSES)).square(),
    "baseline": lambda z, y: entropy(z, y) - entropy(z, y).detach().mean(),
    "sorted": lambda z, y: entropy(z, y).sort().values,
    "some": lambda z, y: entropy(z[y > 0], y[y > 0]),
}


def of_tokens(z, y):
    return entropy(z.flatten(0, 1), y.flatten())


def of_some_tokens(z, y):
    return entropy(z[y >= 0], y[y >= 0])


def looped(model, x, losses, samples=8):
    """The mean squared norm of the samples' gradients, from the losses of a batch, a row each."""
    total = 0.0
    for own in losses(model(x)).reshape(samples, -1).sum(1):
        grads = torch.autograd.grad(own, list(model.parameters()), retain_graph=True)
        total += float(sum(g.double().square().sum() for g in grads))
    return total / samples


@mark.parametrize("name", OWN)
def test_losses_of_each_sample_stay_accepted(name):
    loss = OWN[name]
    for dtype, size in (
        (torch.float64, None),
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float64, 4),
    ):
        model, x, y = made(8, dtype)
        value = metrics.train_grad_norm(model, x, y, loss, batch_size=size)
        if dtype == torch.float64 and name not in ("sorted", "some", "in bfloat16"):
            plain = Focal("none") if name == "focal" else loss
            assert value == approx(
                looped(model, x, lambda z, y=y, plain=plain: plain(z, y)), rel=1e-4
            )


def test_constants_of_a_place_go_with_the_whole_batch():
    """Weights that a loss closes over, the number of samples, keys of all, a seed of its own."""
    model, x, y = made()
    of_places = [
        lambda z, y: WEIGHTS * entropy(z, y),
        lambda z, y: WEIGHTS[: len(z)] * entropy(z, y),
        lambda z, y: entropy(z, y) / len(z),
        lambda z, y: entropy(z @ KEYS.to(z.dtype).T, torch.arange(len(z))),
        with_a_seed,
    ]
    for loss in of_places:
        value = metrics.train_grad_norm(model, x, y, loss)
        assert value == approx(looped(model, x, lambda z, loss=loss: loss(z, y)), rel=1e-9)
    with refused("fails on a part of the samples .*as a part of y"):
        metrics.train_grad_norm(model, x, y, of_places[0], batch_size=4)
    for loss in of_places[1:]:
        with refused("depends on its place or on the number of samples"):
            metrics.train_grad_norm(model, x, y, loss, batch_size=4)


def test_weights_of_samples_may_be_a_part_of_y():
    model, x, y = made()
    weights = WEIGHTS.double()
    given = [
        ((y, weights), lambda z, t: t[1] * entropy(z, t[0])),
        ({"y": y, "w": weights}, lambda z, t: t["w"] * entropy(z, t["y"])),
        (
            {"y": y, "of_classes": torch.rand(CLASSES).double()},
            lambda z, t: t["of_classes"][t["y"]] * entropy(z, t["y"]),
        ),
    ]
    for target, loss in given:
        wanted = approx(looped(model, x, lambda z, t=target, loss=loss: loss(z, t)), rel=1e-9)
        assert metrics.train_grad_norm(model, x, target, loss) == wanted
        assert metrics.train_grad_norm(model, x, target, loss, batch_size=4) == wanted
    with refused("mixes samples"):
        metrics.train_grad_norm(
            model, x, (y, weights), lambda z, t: t[1] / t[1].mean() * entropy(z, t[0])
        )


def logits_along(axis):
    """Logits at several positions, samples along axis 0 or 1."""
    return Written(
        lambda m, x: (
            m.linear(x.transpose(0, axis)).cumsum(1 - axis).transpose(0, axis).contiguous()
        ),
        linear=nn.Linear(3, CLASSES).double(),
    )


@mark.parametrize("length", [5, 4])  # 4 as many as there are samples
def test_losses_of_tokens(length):
    torch.manual_seed(0)
    x = torch.randn(4, length, 3, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (4, length))
    model = logits_along(0)
    wanted = approx(looped(model, x, lambda z: entropy(z.mT, y), samples=4), rel=1e-9)
    assert metrics.train_grad_norm(model, x, y, of_tokens) == wanted
    assert metrics.train_grad_norm(model, x, y, of_tokens, batch_size=2) == wanted
    assert metrics.train_grad_norm(model, x, y, lambda z, t: entropy(z.mT, t)) == wanted
    kept = y.clone()
    kept[:, ::2] = -100
    wanted = approx(looped(model, x, lambda z: entropy(z.mT, kept), samples=4), rel=1e-9)
    assert metrics.train_grad_norm(model, x, kept, of_some_tokens) == wanted
    with refused("mixes samples"):
        metrics.train_grad_norm(
            model, x, kept, lambda z, t: of_some_tokens(z, t) / of_some_tokens(z, t).detach().mean()
        )


@mark.parametrize("length", [5, 4])
def test_losses_of_samples_along_another_axis(length):
    torch.manual_seed(0)
    x = torch.randn(length, 4, 3, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (length, 4))

    model = Written(lambda m, x: m.linear(x).cumsum(0), linear=nn.Linear(3, CLASSES).double())
    axes = {"in_dim": 1, "out_dim": 1}
    value = metrics.train_grad_norm(model, x, y, of_tokens, **axes)
    assert value == approx(
        looped(model, x, lambda z: of_tokens(z, y).view(y.shape).T, samples=4), rel=1e-9
    )
    with refused("mixes samples"):
        # Its classes are on axis 1, where the samples are.
        metrics.train_grad_norm(
            model, x, torch.randint(0, 4, (length, CLASSES)), F.cross_entropy, **axes
        )


def test_targets_that_are_not_by_sample():
    """Connectionist temporal classification, its targets one after the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, CLASSES), nn.LogSoftmax(-1)).double()
    x = torch.randn(7, 4, 3).double()
    targets = torch.randint(1, CLASSES, (9,))
    lengths = torch.tensor([2, 3, 1, 3])
    y = {"targets": targets, "lengths": lengths}

    def loss(z, t):
        steps = torch.full((z.shape[1],), len(z))
        return F.ctc_loss(z, t["targets"], steps, t["lengths"], reduction="none")

    assert metrics.train_grad_norm(model, x, y, loss, in_dim=1, out_dim=1) > 0


def test_losses_that_are_random_are_refused():
    for dtype in (torch.float64, torch.float32):
        model, x, y = made(8, dtype)
        for loss in (
            lambda z, t: entropy(F.dropout(z), t),
            lambda z, t: entropy(z + 0.1 * torch.randn_like(z), t),
        ):
            state = torch.random.get_rng_state()
            with refused("draws random numbers"):
                metrics.train_grad_norm(model, x, y, loss)
            assert torch.equal(torch.random.get_rng_state(), state)


class Centred(nn.Module):
    """A loss with a state that moves at each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, z, y):
        losses = entropy(z - self.centre, y)
        self.centre.add_(z.detach().mean(0))
        return losses


def test_a_state_of_the_loss_is_left_unchanged():
    model, x, y = made()
    loss = Centred()
    value = metrics.train_grad_norm(model, x, y, loss)
    assert value == metrics.train_grad_norm(model, x, y, F.cross_entropy)
    assert not loss.centre.any()


def test_a_single_sample_has_no_company():
    """A loss that is a mean, given one sample at a time."""
    model, x, y = made()
    wanted = metrics.train_grad_norm(model, x, y, F.cross_entropy)
    got = metrics.train_grad_norm(
        model, x, y, lambda z, t: -z.log_softmax(1)[0, t[0]], batch_size=1
    )
    assert got == approx(wanted, rel=1e-9)


@mark.parametrize("samples", [2, 5, 9])
@mark.parametrize("name", ["InfoNCE", "by its mean, detached", "softmax over the samples"])
def test_the_loss_of_parts_of_one_is_asked_for_some_together(name, samples):
    model, x, y = made(samples)
    for measure in ("train_grad_norm", "train_grad_norm_batch"):
        with refused("mixes samples"):
            metrics.gradient_measures(model, x, y, MIXING[name], measures=[measure], batch_size=1)


def test_single_samples_with_a_loss_of_their_own():
    """Labels of all of them that are no samples', and losses of their places."""
    model, x, y = made()
    target = y, torch.rand(CLASSES).double()

    def weighted(z, t):
        return t[1][t[0]] * entropy(z, t[0])

    wanted = metrics.train_grad_norm(model, x, target, weighted)
    assert metrics.train_grad_norm(model, x, target, weighted, batch_size=1) == approx(wanted)
    with refused("depends on its place"):
        metrics.train_grad_norm(
            model, x, y, lambda z, t: WEIGHTS[: len(z)] * entropy(z, t), batch_size=1
        )


@mark.parametrize("size", [None, 1])
def test_the_loss_of_a_single_sample_is_asked_again(size):
    calls = iter(range(1, 100))
    for samples in (1, 3):
        model, x, y = made(samples)
        for loss in (
            lambda z, t: entropy(z + 0.1 * torch.randn_like(z), t),
            lambda z, t: entropy(z, t) * next(calls),
        ):
            with refused("draws random numbers, or keeps something"):
                metrics.train_grad_norm(model, x, y, loss, batch_size=size)


@mark.parametrize("size", [None, 1, 2, 3, 8])
def test_a_loss_may_keep_one_sample_of_a_part_or_none(size):
    model, x, _ = made()
    y = torch.tensor([-100, -100, 1, 2, -100, -100, -100, 3])
    wanted = metrics.train_grad_norm(model, x, y, F.cross_entropy)
    assert metrics.train_grad_norm(model, x, y, of_some_tokens, batch_size=size) == approx(wanted)


def test_a_loss_of_its_own_parameters_alone():
    model, x, y = made()
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
    with refused("does not depend on the output"):
        metrics.train_grad_norm(model, x, y, lambda z, t: weight * z.detach().sum(1))


def test_a_loss_may_write_to_the_output():
    model, x, y = made()
    allowed = torch.rand(8, CLASSES) > 0.3
    allowed[torch.arange(8), y] = True

    def masked(z, t):
        return entropy(z.masked_fill(~t[1], -1e9), t[0])

    def masked_in_place(z, t):
        z[~t[1]] = -1e9
        return entropy(z, t[0])

    wanted = metrics.gradient_measures(model, x, (y, allowed), masked)
    assert metrics.gradient_measures(model, x, (y, allowed), masked_in_place) == wanted


def test_a_loss_may_be_a_constant_of_samples_that_it_ignores():
    model, x, _ = made()
    y = torch.tensor([-100, -100, 1, 2, -100, -100, -100, 3])

    def loss(z, t):
        return entropy(z, t) if (t >= 0).any() else z.new_zeros(len(z))

    wanted = metrics.train_grad_norm(model, x, y, F.cross_entropy)
    assert metrics.train_grad_norm(model, x, y, loss) == approx(wanted)
