"""Random models [B, T, D] -> [B, ...] made of stages, and the batches that they are called with."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import trust_cases as cases
import trust_state as state
from hypothesis import strategies as st
from single_samples import Written
from torch import Tensor, nn
from torch.autograd import Function

EXPERTS = 3


class Stage(NamedTuple):
    """A layer, routing, mask, packing or toggle of ``STAGES``; added to its input if residual."""

    kind: str
    residual: bool


class Batch(NamedTuple):
    """One call: how many samples, regular or drawn (lengths, order, experts), toggles on or off."""

    count: int
    regular: bool
    on: bool


class Spec(NamedTuple):
    """All that a model and its calls are made from."""

    seed: int
    double: bool
    time: int
    width: int
    stages: tuple[Stage, ...]
    pooled: bool
    batches: tuple[Batch, ...]


class Inputs(NamedTuple):
    """What stages look at beside h [B, T, D]: the inputs x [B, T, D] and a mask [B, T].

    The mask is true up to a length.
    """

    x: Tensor
    mask: Tensor

    @property
    def order(self):
        return self.x[:, 0, 0].argsort()

    @property
    def permutation(self):
        return F.one_hot(self.order, len(self.x)).to(self.x)

    @property
    def expert(self):
        """Who serves each token [B T]."""
        return self.x[..., :EXPERTS].argmax(-1).flatten()

    @property
    def tokens(self):
        """Which of the B T tokens are not padding."""
        return self.mask.flatten().nonzero()[:, 0]


# -- stages: h [B, T, D] -> [B, T, D]
# ----------------------------------------------------------------------------------

STAGES = {}  # from (T, D)


def stage(name, how, **parts):
    """Register a stage under a name: ``how(m, h, inputs)`` is what it does with its modules m.

    ``parts`` make the modules, from T and D.
    """
    STAGES[name] = lambda t, d: Written(how, **{key: part(t, d) for key, part in parts.items()})


def dense(t, d):
    return nn.Linear(d, d)


stage("linear", lambda m, h, i: m.a(h), a=dense)
stage("perceptron", lambda m, h, i: m.b(F.gelu(m.a(h))), a=dense, b=dense)
stage(
    "over time",
    lambda m, h, i: m.a(h.transpose(1, 2)).transpose(1, 2).tanh(),
    a=lambda t, d: nn.Linear(t, t),
)
stage(
    "conv1d, batch norm",
    lambda m, h, i: m.norm(m.conv(h.transpose(1, 2))).tanh().transpose(1, 2),
    conv=lambda t, d: nn.Conv1d(d, d, 3, padding=1, groups=2),
    norm=lambda t, d: nn.BatchNorm1d(d),
)
stage(
    "conv2d, batch norm",
    lambda m, h, i: m.back(F.silu(m.norm(m.conv(h[:, None]))))[:, 0],
    conv=lambda t, d: nn.Conv2d(1, 3, 3, padding=1, bias=False),
    norm=lambda t, d: nn.BatchNorm2d(3),
    back=lambda t, d: nn.Conv2d(3, 1, 1),
)
stage("layer norm", lambda m, h, i: m.norm(h), norm=lambda t, d: nn.LayerNorm(d))
stage(
    "group norm",
    lambda m, h, i: m.norm(h.transpose(1, 2)).transpose(1, 2),
    norm=lambda t, d: nn.GroupNorm(2, d),
)
stage(
    "embedding",
    lambda m, h, i: h + m.words((i.x[..., 0] > 0).long() + 2 * i.mask) + m.places.weight,
    words=lambda t, d: nn.Embedding(4, d),
    places=lambda t, d: nn.Embedding(t, d),
)
stage(
    "attention, padding mask",
    lambda m, h, i: m.attention(h, h, h, key_padding_mask=~i.mask, need_weights=False)[0],
    attention=lambda t, d: nn.MultiheadAttention(d, 2, batch_first=True),
)
stage(
    "attention, time first",
    lambda m, h, i: m.attention(*[h.transpose(0, 1)] * 3)[0].transpose(0, 1),
    attention=lambda t, d: nn.MultiheadAttention(d, 2),
)
stage("lstm", lambda m, h, i: m.rnn(h)[0], rnn=lambda t, d: nn.LSTM(d, d, batch_first=True))

# Routings: samples and tokens in another order.


def experts_by_index_add(m, h, i):
    rows = h.flatten(0, 1)
    weights = m.router(h).softmax(-1).flatten(0, 1)
    out = torch.zeros_like(rows)
    for e, weight in enumerate(m.experts):
        at = (i.expert == e).nonzero()[:, 0]
        out = out.index_add(0, at, torch.tanh(rows[at] @ weight) * weights[at, e, None])
    return out.view_as(h)


def experts_by_einsum(m, h, i):
    """Mix experts as Switch does: places [tokens, experts, tokens], differentiable weights.

    There is room for all tokens.
    """
    chosen = F.one_hot(i.expert, EXPERTS)
    place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
    taken = (chosen[:, :, None] * F.one_hot(place, len(chosen))[:, None]).to(h)
    rows = torch.bmm(torch.einsum("nec,nd->ecd", taken, h.flatten(0, 1)), m.experts).tanh()
    weights = m.router(h).softmax(-1).flatten(0, 1)
    return torch.einsum("nec,ecd->nd", taken * weights[..., None], rows).view_as(h)


def experts_by_function(m, h, i):
    """Sort tokens by expert and back by a custom Function, with one product for each expert."""
    order = i.expert.argsort(stable=True)
    parts = cases.Rows.apply(h.flatten(0, 1), order).split(
        i.expert.bincount(minlength=EXPERTS).tolist()
    )
    rows = torch.cat([part @ weight for part, weight in zip(parts, m.experts)])
    return cases.Rows.apply(rows.tanh(), order.argsort()).view_as(h)


def experts(t, d):
    return nn.Parameter(torch.empty(EXPERTS, d, d))


def router(t, d):
    return nn.Linear(d, EXPERTS)


stage("sorted by index", lambda m, h, i: m.a(h[i.order]).tanh()[i.order.argsort()], a=dense)
stage(
    "sorted by Function",
    lambda m, h, i: cases.Rows.apply(m.a(cases.Rows.apply(h, i.order)).tanh(), i.order.argsort()),
    a=dense,
)
stage("experts by index_add", experts_by_index_add, experts=experts, router=router)
stage("experts by einsum", experts_by_einsum, experts=experts, router=router)
stage("experts by Function", experts_by_function, experts=experts)

# Masks [B, B], each a permutation, and its transpose afterwards.


def mask_by_product(m, h, i):
    rows = m.a((i.permutation @ h.flatten(1)).view_as(h)).tanh()
    return (i.permutation.T @ rows.flatten(1)).view_as(h)


def mask_by_sum(m, h, i):
    mask = i.permutation[:, :, None, None]
    return (mask.transpose(0, 1) * m.a((mask * h[None]).sum(1)).tanh()[None]).sum(1)


def mask_by_heads(m, h, i):
    mask = i.permutation.expand(h.shape[2], -1, -1)
    rows = m.a(torch.bmm(mask, h.permute(2, 0, 1)).permute(1, 2, 0)).tanh()
    return torch.bmm(mask.transpose(1, 2), rows.permute(2, 0, 1)).permute(1, 2, 0)


for _mask in (mask_by_product, mask_by_sum, mask_by_heads):
    stage(_mask.__name__.replace("_", " "), _mask, a=dense)

# Packings: tokens without padding, and rows that several samples share.


def unpadded_by_function(m, h, i):
    rows = m.a(cases.Rows.apply(h.flatten(0, 1), i.tokens)).tanh()
    return cases.SegmentSum.apply(rows, i.tokens, i.mask.numel()).view_as(h)


def segment_means(m, h, i):
    """Add each sample's mean over its tokens, a custom segment sum, to all of its positions."""
    sums = cases.SegmentSum.apply(m.a(h[i.mask]).tanh(), i.mask.nonzero()[:, 0], len(h))
    return h + (sums / i.mask.sum(1, keepdim=True))[:, None]


def packed_rows(m, h, i):
    """Attend in rows of T into which samples are packed greedily, each token to its own sample."""
    count, time, width = h.shape
    own, owner = cases.pack(
        torch.arange(count * time).view(count, time, 1), i.mask.sum(1), count, time
    )
    place = (owner.flatten() >= 0).nonzero()[:, 0]
    token = own.flatten()[place]
    rows = cases.SegmentSum.apply(cases.Rows.apply(h.flatten(0, 1), token), place, count * time)
    rows = m.a(rows.view(count, time, width)).tanh()
    other = owner[:, :, None] != owner[:, None]
    rows = (rows @ rows.transpose(1, 2)).masked_fill(other, -1e9).softmax(-1) @ rows
    return cases.SegmentSum.apply(rows.flatten(0, 1)[place], token, count * time).view_as(h)


stage(
    "unpadded by index",
    lambda m, h, i: torch.zeros_like(h).index_put((i.mask,), m.a(h[i.mask]).tanh()),
    a=dense,
)
stage("unpadded by Function", unpadded_by_function, a=dense)
stage("segment means", segment_means, a=dense)
stage("packed rows", packed_rows, a=dense)

# Custom Functions within a sample.


class Cubed(Function):
    """x + x^3 / 3, elementwise."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + x**3 / 3

    @staticmethod
    def backward(ctx, g):
        return g * (1 + ctx.saved_tensors[0] ** 2)


def reversed_by_function(m, h, i):
    positions = torch.arange(h.shape[1]).flip(0)
    return m.a(cases.Rows.apply(h.transpose(0, 1), positions).transpose(0, 1)).tanh()


stage("elementwise Function", lambda m, h, i: Cubed.apply(m.a(h).tanh()), a=dense)
stage("reversed by Function", reversed_by_function, a=dense)
PLAIN = list(STAGES)

# Toggles: what is done to h [B, T, D] with a number that is 0 or 1, and where that is kept.

GLOBAL = {"on": 0.0}
TOGGLES = {
    "with grad": state.with_grad,
    "detached": state.detached,
    "gradient only": state.gradient_only,
    "flip features": lambda h, on: h.flip(int(1 + on)),
    "flip samples": lambda h, on: h.flip(int(1 - on)),
    "scale": lambda h, on: h * (1 + on),
}
PLACES = ("attribute", "buffer", "dict", "global")


class Toggle(nn.Module):
    """One linear layer, and then what the toggle does."""

    def __init__(self, what, where, width):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.what = what
        self.where = where
        self.on = 0.0
        self.options = {"on": 0.0}
        self.register_buffer("flag", torch.zeros(()))

    def set(self, on):
        """Change the number, in its place alone."""
        if self.where == "buffer":
            self.flag.fill_(on)
        elif self.where == "attribute":
            self.on = float(on)
        else:
            (GLOBAL if self.where == "global" else self.options)["on"] = float(on)

    def forward(self, h, inputs):
        on = dict(zip(PLACES, (self.on, self.flag, self.options["on"], GLOBAL["on"])))[self.where]
        return TOGGLES[self.what](self.a(h).tanh(), on)


for _what in TOGGLES:
    for _where in PLACES:
        STAGES[f"{_what}, {_where}"] = lambda t, d, of=(_what, _where): Toggle(*of, d)

# -- models and batches
# ------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """The stages in a row between two linear layers; in eval mode, all of its tensors random."""

    def __init__(self, spec):
        super().__init__()
        self.first = nn.Linear(spec.width, spec.width)
        self.last = nn.Linear(spec.width, 3)
        self.pooled = spec.pooled
        self.stages = nn.ModuleList(STAGES[kind](spec.time, spec.width) for kind, _ in spec.stages)
        self.residual = [residual for _, residual in spec.stages]
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)
        for name, buffer in self.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                nn.init.uniform_(buffer, 0.5, 1.5)
        self.eval()

    def set(self, on):
        """Turn all toggles on or off."""
        for toggle in self.stages:
            if isinstance(toggle, Toggle):
                toggle.set(on)

    def forward(self, x, mask):
        h, inputs = self.first(x), Inputs(x, mask)
        for layer, residual in zip(self.stages, self.residual):
            h = h + layer(h, inputs) if residual else layer(h, inputs)
        if self.pooled:
            h = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.last(h.tanh())


def inputs_of(spec, batch):
    """Inputs in the default dtype; regular: no padding, samples in order, one expert for all."""
    x = torch.randn(batch.count, spec.time, spec.width)
    lengths = torch.full((batch.count,), spec.time)
    if batch.regular:
        x[:, 0, 0] = torch.arange(batch.count) / batch.count
        x[:, :, 1] += 4
    else:
        lengths = torch.randint(1, spec.time + 1, (batch.count,))
    return Inputs(x, torch.arange(spec.time) < lengths[:, None])


@st.composite
def specs(draw):
    """Draw models of one to four stages with three or four batches of two sizes.

    The first batch is more regular than the others.
    """
    kinds = st.one_of(st.sampled_from(PLAIN), st.sampled_from(PLAIN), st.sampled_from(list(STAGES)))
    often = draw(st.sampled_from([4, 3, 6, 8]))
    once = draw(st.sampled_from([4, 2, 3, 6, 8, 1]))
    seldom = st.sampled_from([False, False, True])
    mostly = st.sampled_from([True, True, False])
    later = st.builds(Batch, st.sampled_from([often, often, once]), seldom, st.booleans())
    return Spec(
        seed=draw(st.integers(0, 2**16)),
        double=draw(st.booleans()),
        time=draw(st.sampled_from([4, 2, 3, 6])),
        width=draw(st.sampled_from([4, 6, 8])),
        stages=tuple(
            draw(st.lists(st.builds(Stage, kinds, st.booleans()), min_size=1, max_size=4))
        ),
        pooled=draw(st.booleans()),
        batches=(
            Batch(often, draw(mostly), draw(seldom)),
            *draw(st.lists(later, min_size=2, max_size=3)),
        ),
    )
