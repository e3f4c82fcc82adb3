"""Models whose next batch, or whose next state, is not like the first."""

import itertools
import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from single_samples import Written
from torch import nn
from torch.autograd import Function

# -- cases: calls on one model
# -----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call.

    Attributes:
        model: Model as it is now.
        xs: Inputs.
        refused: Whether the samples interact, so that the call is refused.
        shared: Indices of the inputs without samples.
        crowd: Whether copies of one sample in place of the batch interact, so that it may be.
        audits: Number of samples to audit; all of them where an interaction shows in some only.
    """

    model: nn.Module
    xs: tuple
    refused: bool = False
    shared: tuple[int, ...] = ()
    crowd: bool = False
    audits: int = 1


CASES = {}  # each a generator, which changes the model's state between two calls


def case(*parameters):
    """Register a generator of calls, once for each parameter if there are any.

    Parameters are names, or values with a name.
    """

    def enter(function):
        for parameter in parameters:
            label = getattr(parameter, "__name__", str(parameter))
            CASES[f"{function.__name__}-{label}"] = partial(function, parameter)
        if not parameters:
            CASES[function.__name__] = function
        return function

    return enter


class Net(Written):
    """Three linear layers and other parts, in eval mode, used as ``how(self, *inputs)`` says."""

    def __init__(self, how, width=5, hidden=6, **parts):
        layers = {
            "a": nn.Linear(width, hidden),
            "b": nn.Linear(hidden, hidden),
            "c": nn.Linear(hidden, 4),
        }
        super().__init__(how, **layers | parts)
        self.eval()


# -- A: rows belong to samples by data
# ---------------------------------------------------------------------------------


class Rows(Function):
    """Rows of x by index, each at most once: a permutation, or what is left without padding."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.count = len(x)
        return x[index]

    @staticmethod
    def backward(ctx, g):
        return g.new_zeros(ctx.count, *g.shape[1:]).index_add(0, ctx.saved_tensors[0], g), None


class SegmentSum(Function):
    """Rows of x added up by index: segment sums, or padding put back."""

    @staticmethod
    def forward(ctx, x, index, count):
        ctx.save_for_backward(index)
        return x.new_zeros(count, *x.shape[1:]).index_add(0, index, x)

    @staticmethod
    def backward(ctx, g):
        return g[ctx.saved_tensors[0]], None, None


def unpadded(net, x, mask):
    """Flash attention's way: padding taken away, layers on [tokens, width], padding put back."""
    at = mask.flatten().nonzero()[:, 0]
    rows = Rows.apply(net.a(x).tanh().flatten(0, 1), at)
    return net.c(
        SegmentSum.apply(net.b(rows).tanh(), at, mask.numel()).view(*mask.shape, -1).sum(1)
    )


def segments(net, x, mask):
    return net.c(
        SegmentSum.apply(net.b(net.a(x[mask]).tanh()).tanh(), mask.nonzero()[:, 0], len(x))
    )


def by_index(net, x, mask):
    rows = net.b(net.a(x[mask]).tanh()).tanh()
    return net.c(rows.new_zeros(len(x), 6).index_add(0, mask.nonzero()[:, 0], rows))


def owners(mask):
    """The sample of each row, as [samples, rows]."""
    return F.one_hot(mask.nonzero()[:, 0], len(mask)).T


def by_product(net, x, mask):
    return net.c(owners(mask).to(x) @ net.b(net.a(x[mask]).tanh()).tanh())


def by_product_transposed(net, x, mask):
    return net.c((net.b(net.a(x[mask]).tanh()).tanh().T @ owners(mask).T.to(x)).T)


def by_sparse_product(net, x, mask):
    return net.c(
        torch.sparse.mm(owners(mask).to(x).to_sparse(), net.b(net.a(x[mask]).tanh()).tanh())
    )


def by_segment(net, x, mask):
    rows = net.b(net.a(x[mask]).tanh()).tanh()
    return net.c(torch.segment_reduce(rows, "sum", lengths=mask.sum(1), axis=0))


def tokens(lengths, size=6, width=5):
    return torch.randn(len(lengths), size, width), torch.arange(size)[None] < torch.tensor(lengths)[
        :, None
    ]


@case(
    unpadded, segments, by_index, by_product, by_product_transposed, by_sparse_product, by_segment
)
def ragged(how):
    for first in ([3, 3, 3, 3], [2, 3, 1, 4], [3, 3, 3, 1]):
        model = Net(how)
        for lengths in (first, [1, 5, 2, 4], [4, 2, 5, 1], first):
            yield Call(model, tokens(lengths))


def sorted_by_function(net, x):
    order = x[:, 0].argsort()
    h = net.b(Rows.apply(net.a(x).tanh(), order)).tanh()
    return net.c(Rows.apply(h, order.argsort()))


def permutation(x):
    return F.one_hot(x[:, 0].argsort(), len(x)).to(x)


def by_mul_and_sum(net, x):
    """The [B, B] mask of a permutation, and its transpose afterwards."""
    mask = permutation(x)
    h = net.b((mask[:, :, None] * net.a(x).tanh()[None]).sum(1)).tanh()
    return net.c((mask.T[:, :, None] * h[None]).sum(1))


def by_where_and_sum(net, x):
    mask = permutation(x)[:, :, None] > 0
    h = net.b(torch.where(mask, net.a(x).tanh()[None], 0.0).sum(1)).tanh()
    return net.c(torch.where(mask.transpose(0, 1), h[None], 0.0).sum(1))


def by_masked_fill(net, x):
    """Attention over the samples of a batch, in which each sees one only."""
    mask = permutation(x)
    h = net.a(x).tanh()
    weights = (h @ h.T).masked_fill(mask == 0, -math.inf).softmax(-1)
    return net.c(mask.T @ net.b(weights @ h).tanh())


def by_matmul(net, x):
    mask = permutation(x)
    return net.c(mask.T @ net.b(mask @ net.a(x).tanh()).tanh())


def looked_up(net, x):
    order = x[:, 0].argsort()
    return net.c(F.embedding(order.argsort(), net.b(net.a(x[order]).tanh()).tanh()))


@case(sorted_by_function, by_mul_and_sum, by_where_and_sum, by_masked_fill, by_matmul, looked_up)
def permuted(how):
    for first in (torch.arange(6), torch.randperm(6)):
        model = Net(how)
        for order in (first, torch.randperm(6), torch.randperm(6)):
            x = torch.randn(6, 5)
            x[:, 0] = order
            yield Call(model, (x,))


@case()
def bmm_of_as_many_heads_as_samples():
    """B = heads = T = C = 4: the product's first axis is heads; a permutation contracts samples."""

    def how(net, x):
        mask = permutation(x[:, 0]).expand(4, len(x), len(x))
        # Heads first, then [B, T, heads].
        h = torch.bmm(mask, net.a(x).tanh().permute(2, 0, 1)).permute(1, 2, 0)
        h = torch.bmm(mask.transpose(1, 2), net.b(h).tanh().permute(2, 0, 1)).permute(1, 2, 0)
        return net.c(h.sum(1))

    model = Net(how, width=4, hidden=4)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [1, 3, 2, 0]):
        x = torch.randn(4, 4, 4)
        x[:, 0, 0] = torch.tensor(order).argsort()
        yield Call(model, (x,))


class Switch(nn.Module):
    """A top-1 mixture of experts by einsum: slots [experts, capacity], differentiable weights."""

    def __init__(self, experts, capacity):
        super().__init__()
        self.router, self.head = nn.Linear(5, experts), nn.Linear(6, 4)
        self.w1 = nn.Parameter(torch.randn(experts, 5, 7))
        self.w2 = nn.Parameter(torch.randn(experts, 7, 6))
        self.capacity, self.experts = capacity, experts
        self.eval()

    def forward(self, x):
        chosen = x[:, : self.experts].argmax(-1)  # so that a test says who goes where
        onehot = F.one_hot(chosen, self.experts).to(x)
        position = (onehot.cumsum(0) * onehot).sum(-1).long() - 1
        size = self.capacity(len(x))
        fits = F.one_hot(position.clamp(max=size), size + 1)[:, :size].to(x)
        dispatch = onehot[:, :, None] * fits[:, None]
        weights = self.router(x).softmax(-1)
        slots = torch.einsum("bec,bd->ecd", dispatch, x)
        slots = torch.bmm(torch.bmm(slots, self.w1).tanh(), self.w2)
        return self.head(torch.einsum("bec,ecd->bd", dispatch * weights[:, :, None], slots))


def routed(to):
    x = torch.rand(len(to), 5)
    x[torch.arange(len(to)), to] += 2
    return x


@case()
def gradients_permuted_by_a_hook():
    """A hook on a tensor, which no graph shows, sends gradients from sample to sample.

    At first it sends each gradient to its own sample.
    """

    def how(net, x):
        h = net.a(x).tanh()
        h.register_hook(lambda g: g[x[:, 0].argsort()])
        return net.c(net.b(h).tanh())

    model = Net(how)
    for call in range(4):
        x = torch.randn(6, 5)
        x[:, 0] = torch.arange(6) if call == 0 else torch.randperm(6).roll(1)
        yield Call(model, (x,), refused=call > 0)


@case()
def scaled_by_the_largest_of_the_batch():
    """Without a gradient, and only where values are large."""
    model = Net(lambda net, x: net.c(net.a(x).tanh() * x.abs().max().clamp(min=10.0)))
    for size in (1.0, 30.0, 1.0):
        yield Call(model, (size * torch.randn(6, 5),), refused=size > 1)


@case()
def chosen_by_the_mean_of_the_batch():
    """One of two branches for all samples, both in the graph."""
    model = Net(
        lambda net, x: net.c(torch.where(x.mean() > 0, net.a(x).tanh(), net.b(net.a(x)).tanh()))
    )
    for shift in (3.0, 0.0, -3.0):
        x = torch.randn(6, 5)
        x[:3] += shift
        x[3:] += 2 if shift else -0.2
        yield Call(model, (x,), refused=shift == 0 or shift < 0, audits=6)


@case()
def dropped_for_lack_of_places():
    """A rank among those that go the same way, without a gradient; at first nobody is dropped."""

    def how(net, x):
        way = F.one_hot(x.argmax(-1), 5)
        place = (way.cumsum(0) * way).sum(-1)
        return net.c(net.a(x).tanh() * (place <= 2).to(x)[:, None])

    model = Net(how)
    for to in ([0, 1, 2, 3, 4, 0], [1, 1, 1, 1, 1, 0], [4, 3, 2, 1, 0, 0]):
        yield Call(model, (routed(to),), refused=to[2] == 1, crowd=True)


@case([0] * 6, [0, 0, 0, 1, 1, 1])
def switch(first):
    """Places of two experts that have room for all, first in the samples' order."""
    model = Switch(2, lambda count: count)
    for to in (first, [1, 0, 1, 0, 0, 1], [1, 1, 1, 0, 0, 0]):
        yield Call(model, (routed(to),))


@case()
def capacity_that_overflows_later():
    """Sixteen samples fit four experts of four places at first; later twelve are dropped.

    They are dropped because of others.
    """
    model = Switch(4, lambda count: 4)
    yield Call(model, (routed([0, 1, 2, 3] * 4),), crowd=True)
    yield Call(model, (routed([2] * 16),), refused=True)
    yield Call(model, (routed([3, 1, 2, 0] * 4),), crowd=True)


def pack(x, lengths, rows, size):
    """Pack samples greedily, first fit: tokens [rows, size, width] and their samples, or -1."""
    packed = x.new_zeros(rows, size, x.shape[-1])
    owner = torch.full((rows, size), -1)
    used = [0] * rows
    for j, length in enumerate(lengths.tolist()):
        row = next(r for r in range(rows) if used[r] + length <= size)
        at = slice(used[row], used[row] + length)
        packed[row, at], owner[row, at] = x[j, :length], j
        used[row] += length
    return packed, owner


def navit(net, x, lengths):
    """Attend by a block mask within packed rows, as many as samples, then pool by attention.

    The pooling is by sample.
    """
    packed, owner = pack(x, lengths, len(x), x.shape[1])
    h = net.a(packed).tanh()
    other = owner[:, :, None] != owner[:, None]
    h = h + net.b((h @ h.transpose(1, 2)).masked_fill(other, -math.inf).softmax(-1) @ h).tanh()
    h = h.flatten(0, 1)
    own = owner.flatten()[None] == torch.arange(len(x))[:, None]
    return net.c((h @ net.b.weight[0])[None].masked_fill(~own, -math.inf).softmax(-1) @ h)


def navit_in_order(net, x, lengths):
    """Attend within two samples a row, one after the other, and pool each by products in rows."""
    count, lengths = len(x), F.pad(lengths, (0, len(x) % 2))
    ends = lengths.view(-1, 2).cumsum(1)[..., None]
    at, starts = torch.arange(8), ends - lengths.view(-1, 2, 1)
    own = (at >= starts) & (at < ends)  # [rows, 2, tokens]
    tokens = x.new_zeros(len(ends), 8, x.shape[-1])
    tokens[own.any(1)] = x[torch.arange(x.shape[1]) < lengths[:count, None]]
    same = own.transpose(1, 2).to(x) @ own.to(x) > 0
    h = net.a(tokens).tanh()
    h = h + net.b((h @ h.transpose(1, 2)).masked_fill(~same, -1e9).softmax(-1) @ h).tanh()
    scores = (h @ net.b.weight[0])[:, None].masked_fill(~own, -1e9)
    return net.c(scores.softmax(-1) @ h).flatten(0, 1)[:count]


def navit_calls(batches):
    for lengths in batches:
        yield torch.randn(len(lengths), 4, 5), torch.tensor(lengths)


REGULAR_THEN_NOT = [[4, 4, 4, 4], [3, 4, 2, 4], [1, 4, 3, 2], [4, 4, 1, 3], [2, 2, 2, 2]]
FULL_THEN_NOT = [[4] * 8, [1, 2, 3, 4, 1, 2, 3, 4], [4, 1, 4, 1, 4, 1, 4, 1], [2] * 8]


def packed(how, batches):
    model = Net(how)
    for xs in navit_calls(batches):
        yield Call(model, xs)


for _how in (navit, navit_in_order):
    CASES[f"packed-{_how.__name__}-regular_first"] = partial(packed, _how, REGULAR_THEN_NOT)
    CASES[f"packed-{_how.__name__}-full_first"] = partial(packed, _how, FULL_THEN_NOT)


# -- C and D: what outputs are compared with, and which samples
# --------------------------------------------------------


def masked_constantly(net, x, mask):
    return blended(net, x).masked_fill(torch.arange(4) == 2, net.value)


def masked_by_sample(net, x, mask):
    return blended(net, x).masked_fill(mask, net.value)


def scaled_column(net, x, mask):
    return blended(net, x) * torch.tensor([1.0, 1e10, 1.0, 1.0])


def blended(net, x):
    """Columns 0, 2 and 3 of four less a tenth of their mean over the samples."""
    z = net.c(net.a(x).tanh())
    return z - 0.1 * z.detach().mean(0) * (torch.arange(4) != 1) if net.interact else z


def actions(count):
    mask = torch.zeros(count, 4, dtype=torch.bool)
    mask[torch.arange(count), torch.randint(0, 4, (count,))] = True
    return torch.randn(count, 5), mask


# Samples interact by a detached mean, small beside the largest output: (how many samples, whether
# they do).
WHEN = {
    "right": ((6, False), (6, False), (9, False)),
    "interacting": ((6, True), (6, True), (9, True)),
    "later": ((6, False), (6, True), (6, False)),
}


def large(how, value, when):
    least = torch.finfo(torch.get_default_dtype()).min
    model = Net(how, value=least if value == "min" else float(value))
    for count, model.interact in WHEN[when]:
        yield Call(model, actions(count), refused=model.interact)


LARGE = {}  # in both precisions
for _when in WHEN:
    LARGE[f"scaled_column-{_when}"] = partial(large, scaled_column, "0", _when)
    for _how, _value in itertools.product(
        (masked_constantly, masked_by_sample), ("-1e4", "-1e9", "min")
    ):
        LARGE[f"{_how.__name__}-{_value}-{_when}"] = partial(large, _how, _value, _when)


def cancelled():
    """One column is the difference of two equal sums, added up in another order."""

    def how(net, x):
        h = net.a(x)
        other = F.linear(x.flip(-1), net.a.weight.flip(-1), net.a.bias)
        return torch.cat([net.c(h.tanh()), (h - other)[:, :2]], 1)

    model = Net(how, width=33)
    for count in (8, 8, 5, 16):
        yield Call(model, (10 * torch.randn(count, 33),))


LARGE["cancellation_noise"] = cancelled


@case()
def exchanged_from_eight_on():
    def how(net, x):
        h = net.a(x).tanh()
        if len(x) >= 8:
            h = h[[0, 3, 2, 1, *range(4, len(x))]]
        return net.c(h)

    model = Net(how)
    yield Call(model, (torch.randn(4, 5),))
    yield Call(model, (torch.randn(8, 5),), refused=True)
    yield Call(model, (torch.randn(6, 5),))
    yield Call(model, (torch.randn(12, 5),), refused=True)


# -- G: torch is wrong for a batch of one
# ------------------------------------------------------------------------------


class Positions(nn.Module):
    """Convolution, batch norm, then positions [B, T, C], as they are or in attention (iFormer).

    The attention is that of timm's iFormer.
    """

    def __init__(self, attention, channels=4):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 1)
        self.norm = nn.BatchNorm2d(channels)
        self.attention = attention
        self.proj = nn.Linear(channels, channels)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)
        self.eval()

    def forward(self, x):
        h = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return self.proj((h @ h.transpose(1, 2)).softmax(-1) @ h) if self.attention else h


def positions(attention, sizes):
    model = Positions(attention)
    for count in sizes:
        yield Call(model, (torch.randn(count, 3, 2, 3),))


for _attention, _sizes in itertools.product((False, True), ((1, 2, 5, 1), (2, 1), (5, 1, 2))):
    _name = f"one_sample-{'attention' if _attention else 'plain'}-{'_'.join(map(str, _sizes))}"
    CASES[_name] = partial(positions, _attention, _sizes)


class Experts(nn.Module):
    """Two experts a sample, of four, by index_add; the choice is read off the input."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 4)
        self.eval()

    def forward(self, x):
        weights, chosen = x[:, :4].softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            sample, place = (chosen == e).nonzero(as_tuple=True)
            out = out.index_add(
                0, sample, (expert(x[sample]) * weights[sample, place, None]).to(out.dtype)
            )
        return self.head(out.tanh())
