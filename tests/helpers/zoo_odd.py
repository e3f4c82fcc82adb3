"""Small models: tables, indexing, derived weights, sequences, odd code, and faults to refuse."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.utils.checkpoint import checkpoint
from zoo_registry import (
    B,
    attention,
    bag,
    conv1d,
    conv2d,
    each,
    emb,
    ids,
    lin,
    r,
    transposed2d,
    written,
    zoo,
)

from bench.cases import Case


def relative():
    """The distance of each of five positions to each other, from 0 on."""
    return torch.arange(5)[:, None] - torch.arange(5)[None] + 4


# ----------------------------------------------------------------------------------------
# embeddings, tables, indexing
written("embedding", lambda m, i: m.lin(m.emb(i)), ids(7, B, 6), emb=emb(7, 5), lin=lin(5, 3))
written("embedding_repeated_ids", lambda m, i: m.emb(i).tanh().sum(1), ids(2, B, 9), emb=emb(7, 5))
written(
    "embedding_padding_idx",
    lambda m, i: m.emb(i).tanh(),
    ids(3, B, 9),
    emb=emb(7, 5, padding_idx=1),
)
written("embedding_sparse", lambda m, i: m.emb(i).tanh(), ids(3, B, 9), emb=emb(7, 5, sparse=True))
written("embedding_one_id", lambda m, i: m.emb(i), ids(7, B), emb=emb(7, 5))
written(
    "embedding_scaled_by_frequency",
    lambda m, i: m.emb(i).tanh(),
    ids(3, B, 9),
    expected="ok|ModelError",
    emb=emb(7, 5, scale_grad_by_freq=True),
)
written(
    "embedding_tied", lambda m, i: m.emb(i).tanh() @ m.emb.weight.t(), ids(7, B, 6), emb=emb(7, 5)
)
written("embedding_bag_sum", lambda m, i: m.emb(i).tanh(), ids(4, B, 6), emb=bag(7, 5, mode="sum"))
written(
    "embedding_bag_mean",
    lambda m, i: m.emb(i).tanh(),
    ids(4, B, 6),
    emb=bag(7, 5, mode="mean", padding_idx=2),
)
written("embedding_bag_max", lambda m, i: m.emb(i).tanh(), ids(4, B, 6), emb=bag(7, 5, mode="max"))
written(
    "embedding_bag_weighted",
    lambda m, i, w: m.emb(i, per_sample_weights=w),
    each(ids(4, B, 6), partial(torch.rand, B, 6)),
    emb=bag(7, 5, mode="sum"),
)
written(
    "position_table",
    lambda m, x: m.lin(x + m.pos[:, : x.shape[1]]).tanh(),
    r(B, 6, 5),
    pos=(1, 9, 5),
    lin=lin(5, 3),
)
written(
    "position_table_length_equals_batch",
    lambda m, x: (x + m.pos[: x.shape[1]]).tanh(),
    r(B, B, 5),
    pos=(9, 5),
)
written(
    "position_ids_1_by_T",
    lambda m, x, p: m.lin(x + m.pos(p)).tanh(),
    each(r(B, 6, 5), torch.arange(6)[None]),
    pos=emb(9, 5),
    lin=lin(5, 3),
)
written(
    "position_ids_made_inside",
    lambda m, x: (x + m.pos(torch.arange(x.shape[1]))).tanh(),
    r(B, 6, 5),
    pos=emb(9, 5),
)
written(
    "class_token",
    lambda m, x: m.lin(torch.cat([m.cls.expand(len(x), -1, -1), x], 1) + m.pos)[:, 0],
    r(B, 6, 5),
    cls=(1, 1, 5),
    pos=(1, 7, 5),
    lin=lin(5, 3),
)
written(
    "class_token_repeated",
    lambda m, x: torch.cat([m.cls.repeat(len(x), 1, 1), x], 1).tanh(),
    r(B, 6, 5),
    cls=(1, 2, 5),
)
written(
    "position_bias_through_index",
    lambda m, x: (x @ x.transpose(1, 2) + m.table[m.index]).softmax(-1) @ x,
    r(B, 5, 4),
    table=(9,),
    index=relative,
)
written(
    "position_bias_per_head",
    lambda m, x: x + m.table[m.index.flatten()].view(5, 5, 2).permute(2, 0, 1)[None].tanh(),
    r(B, 2, 5, 5),
    table=(9, 2),
    index=relative,
)
written(
    "parameter_indexed_by_sample",
    lambda m, x, i: m.table[i] * x,
    each(r(B, 5), ids(3, B)),
    table=(6, 5),
)
written(
    "parameter_gathered",
    lambda m, x, i: m.t[None].expand(len(x), -1).gather(1, i) * x,
    each(r(B, 5), ids(8, B, 5)),
    t=(8,),
)
written(
    "index_select_rows",
    lambda m, x: x @ m.t.index_select(0, m.i),
    r(B, 5, 4),
    t=(6, 3),
    i=lambda: torch.tensor([0, 2, 2, 5]),
)
written("pad_and_roll", lambda m, x: x + F.pad(m.t, (1, 1)).roll(1, 0), r(B, 6, 5), t=(6, 3))
written(
    "stack_of_parameters",
    lambda m, x: x @ torch.stack([m.a, m.b, m.a * m.b], 1),
    r(B, 5),
    a=(5,),
    b=(5,),
)
written(
    "learned_queries",
    lambda m, x: F.scaled_dot_product_attention(m.q.expand(len(x), -1, -1), m.k(x), x),
    r(B, 6, 4),
    q=(3, 4),
    k=lin(4, 4),
)


def _masked(m, x, mask):
    out = torch.zeros(*x.shape[:2], 3, dtype=x.dtype)
    out[mask] = m.b(m.a(x[mask]).tanh())
    return out.sum(1)


def _mask():
    mask = torch.rand(B, 6) > 0.5
    mask[:, 0] = True
    return torch.randn(B, 6, 5), mask


written("masked_rows", _masked, _mask, a=lin(5, 4), b=lin(4, 3))
written(
    "masked_rows_inner",
    lambda m, x, mask: _masked(m, m.first(x), mask),
    _mask,
    first=lin(5, 5),
    a=lin(5, 4),
    b=lin(4, 3),
)
written(
    "rows_by_data", lambda m, x: _masked(m, x, x[..., 0] > 0), r(B, 6, 5), a=lin(5, 4), b=lin(4, 3)
)


def _experts(m, x):
    rows = m.first(x).flatten(0, 1)
    gate = m.router(rows).softmax(-1)
    weight, chosen = gate.topk(2, -1)
    out = torch.zeros_like(rows)
    for e, expert in enumerate(m.experts):
        row, slot = torch.where(chosen == e)
        out = out.index_add(0, row, expert(rows[row]) * weight[row, slot, None])
    return out.view_as(x) + x


written(
    "mixture_of_experts",
    _experts,
    r(B, 6, 5),
    first=lin(5, 5),
    router=lin(5, 3),
    experts=lambda: nn.ModuleList(
        nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(3)
    ),
)


# --------------------------------------------------------------------------------------- weights
# made of other weights
class LoRA(nn.Module):
    """W + B A as a parametrisation."""

    def __init__(self, rows, columns, rank=2):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, columns))
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, w):
        """Add the product."""
        return w + self.b @ self.a


def _parametrised(layer, change, *shape):
    change(layer)
    return Case(
        nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).eval(),
        torch.randn(B, *shape),
    )


def _lazy(case):
    with torch.no_grad():
        case.model(case.x)
    return case


def parametrised(name, layer, change, *shape):
    """Register a layer whose weight is computed from other parameters."""
    zoo(name)(lambda: _lazy(_parametrised(layer(), change, *shape)))


def _frozen_lora(layer):
    layer.requires_grad_(False)
    _lora(layer)


def _lora(layer):
    parametrize.register_parametrization(layer, "weight", LoRA(*layer.weight.shape))


parametrised("lora", lin(5, 6), _lora, 7, 5)
parametrised("lora_frozen_base", lin(5, 6), _frozen_lora, 5)
parametrised("weight_norm_old", lin(5, 6), weight_norm, 7, 5)
parametrised("weight_norm_old_conv", conv1d(4, 6, 3), weight_norm, 4, 8)
parametrised("weight_norm", lin(5, 6), parametrizations.weight_norm, 7, 5)
parametrised("weight_norm_conv", conv2d(4, 6, 3), parametrizations.weight_norm, 4, 5, 6)
parametrised(
    "weight_norm_transposed",
    transposed2d(4, 6, 3),
    partial(parametrizations.weight_norm, dim=1),
    4,
    3,
    3,
)
parametrised("spectral_norm", lin(5, 6), parametrizations.spectral_norm, 7, 5)
parametrised("orthogonal", lin(5, 5), parametrizations.orthogonal, 7, 5)
written(
    "factored_weight",
    lambda m, x: F.linear(x, (m.a @ m.b).t(), m.c.square()),
    r(B, 7, 5),
    a=(5, 2),
    b=(2, 6),
    c=(6,),
)
written(
    "hyper_scale",
    lambda m, x: F.conv2d(x, F.layer_norm(m.w.flatten(1), (12,)).view_as(m.w) * m.g),
    r(B, 3, 5, 6),
    w=(4, 3, 2, 2),
    g=(4, 1, 1, 1),
)
written(
    "weight_per_sample",
    lambda m, x: torch.bmm(m.h(x).view(len(x), 3, 5), x[:, :, None]).squeeze(2),
    r(B, 5),
    h=lin(5, 15),
)


# ------------------------------------------------------------------------------------------
# sequences, recurrent, time
def _encoder(name, length, batch_first, **options):
    def build():
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=batch_first, **options)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        if batch_first:
            return Case(model, torch.randn(B, length, 8))
        return Case(model, torch.randn(length, B, 8), {"in_dim": 1, "out_dim": 1})

    zoo(name)(build)


_encoder("encoder_batch_first", 6, True)
_encoder("encoder_batch_first_length_equals_batch", B, True)
_encoder("encoder_time_first", 6, False)
_encoder("encoder_time_first_length_equals_batch", B, False)
_encoder("encoder_norm_first_no_bias", 6, True, norm_first=True, bias=False)
written(
    "attention_kdim_vdim",
    lambda m, x, y: m.a(x, y, y.tanh())[0],
    each(r(B, 5, 8), r(B, 6, 3)),
    a=attention(kdim=3, vdim=3, batch_first=True, add_bias_kv=True),
)
written(
    "time_first_inside",
    lambda m, x: m.b(m.a(x.transpose(0, 1)).tanh()).transpose(0, 1),
    r(B, B, 5),
    a=lin(5, 6),
    b=lin(6, 3),
)
written(
    "time_first",
    lambda m, x: m.b(m.a(x).tanh() + m.t),
    r(6, B, 5),
    kwargs={"in_dim": 1, "out_dim": 1},
    a=lin(5, 6),
    t=(6,),
    b=lin(6, 3),
)
written(
    "time_first_output_reduced",
    lambda m, x: m.b(m.a(x).tanh()).mean(0),
    r(6, B, 5),
    kwargs={"in_dim": 1},
    a=lin(5, 6),
    b=lin(6, 3),
)
written(
    "folded_before_and_after",
    lambda m, x: m.b(m.a(x.flatten(0, 1)).tanh().view(*x.shape[:2], -1)).sum(1),
    r(B, 3, 5),
    a=lin(5, 6),
    b=lin(6, 2),
)
written(
    "folded_with_batch_inside",
    lambda m, x: m.a(x.transpose(0, 1).flatten(0, 1)).view(3, len(x), -1).transpose(0, 1).tanh(),
    r(B, 3, 5),
    a=lin(5, 6),
)
for _cell in ("RNN", "LSTM", "GRU"):
    _make = getattr(nn, _cell)
    written(
        f"{_cell.lower()}",
        lambda m, x: m.lin(m.rnn(x)[0]),
        r(B, 5, 4),
        rnn=partial(_make, 4, 3, batch_first=True),
        lin=lin(3, 2),
    )
    written(
        f"{_cell.lower()}_two_layers_both_ways_time_first",
        lambda m, x: m.rnn(x)[0],
        r(5, B, 4),
        kwargs={"in_dim": 1, "out_dim": 1},
        rnn=partial(_make, 4, 3, num_layers=2, bidirectional=True),
    )


def _unrolled(m, x):
    h = x.new_zeros(len(x), 3)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
    return h


written("gru_cell_unrolled", _unrolled, r(B, 5, 4), cell=partial(nn.GRUCell, 4, 3))

# ------------------------------------------------------------------------------------------------
# odd but well-defined
for _name, _reentrant, _expected in (
    ("checkpoint_non_reentrant", False, "ok|ModelError"),
    ("fault_checkpoint_reentrant", True, "HiddenParameterError"),
):
    written(
        _name,
        lambda m, x, how=_reentrant: m.b(checkpoint(m.a, m.first(x), use_reentrant=how)),
        r(B, 5),
        expected=_expected,
        first=lin(5, 5),
        a=lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh()),
        b=lin(6, 3),
    )
written(
    "unused_parameters", lambda m, x: m.a(x), r(B, 5), a=lin(5, 3), unused=lin(5, 3), extra=(4,)
)
written("dead_branch", lambda m, x: m.a(x) + 0.0 * m.b(x), r(B, 5), a=lin(5, 3), b=lin(5, 3))
written("interaction_without_effect", lambda m, x: m.a(x) + 0.0 * x.mean(), r(B, 5), a=lin(5, 3))
written(
    "complex_weights",
    lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.w), n=8, dim=1),
    r(B, 8, 3),
    w=(5, 3, 2),
)
written(
    "custom_function",
    lambda m, x: m.b(Double.apply(m.a(x), m.s)),
    r(B, 5),
    a=lin(5, 5),
    s=(5,),
    b=lin(5, 3),
)


class Double(torch.autograd.Function):
    """x * s with a hand-written backward pass."""

    @staticmethod
    def forward(ctx, x, s):
        """Multiply."""
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx, grad):
        """Sum the gradient of s over the batch."""
        x, s = ctx.saved_tensors
        return grad * s, (grad * x).sum(0)


# --------------------------------------------------------------------------------------------------
# must be refused
written(
    "fault_batchnorm_in_train_mode",
    lambda m, x: m.b(m.n(m.a(x))),
    r(B, 5),
    train=True,
    expected="InteractionError",
    a=lin(5, 6),
    n=partial(nn.BatchNorm1d, 6),
    b=lin(6, 3),
)
written(
    "fault_batch_mean",
    lambda m, x: m.b(m.a(x) - m.a(x).mean(0)),
    r(B, 5),
    expected="InteractionError",
    a=lin(5, 6),
    b=lin(6, 3),
)
written(
    "fault_detached_batch_mean",
    lambda m, x: m.b(m.a(x) - m.a(x).mean(0).detach()),
    r(B, 5),
    expected="InteractionError",
    a=lin(5, 6),
    b=lin(6, 3),
)
written(
    "fault_softmax_over_batch",
    lambda m, x: m.a(x).softmax(0),
    r(B, 5),
    expected="InteractionError",
    a=lin(5, 6),
)
written(
    "fault_attention_over_batch",
    lambda m, x: m.a(x, x, x)[0],
    r(B, 6, 8),
    expected="InteractionError",
    a=attention(),
)
written(
    "fault_rolled_batch",
    lambda m, x: m.a(x) + x.roll(1, 0).sum(1, keepdim=True),
    r(B, 5),
    expected="InteractionError",
    a=lin(5, 6),
)
written(
    "fault_dropout_in_train_mode",
    lambda m, x: m.d(m.a(x)),
    r(B, 50),
    train=True,
    expected="RandomForwardError",
    a=lin(50, 60),
    d=partial(nn.Dropout, 0.5),
)
written(
    "fault_detached_branch",
    lambda m, x: m.b(x) + m.a(x).detach(),
    r(B, 5),
    expected="HiddenParameterError",
    a=lin(5, 3),
    b=lin(5, 3),
)
written(
    "fault_output_without_graph",
    lambda m, x: m.a(x).detach(),
    r(B, 5),
    expected="ModelError",
    a=lin(5, 3),
)
written("fault_nothing_trainable", lambda m, x: x.tanh(), r(B, 5), expected="ModelError")
written(
    "fault_not_finite",
    lambda m, x: m.a(x).sub(100).log(),
    r(B, 5),
    expected="NonFiniteError",
    a=lin(5, 3),
)
written(
    "fault_gradient_not_finite",
    lambda m, x: (m.a(x) * 0).abs().sqrt(),
    r(B, 5),
    expected="NonFiniteError",
    a=lin(5, 3),
)
written(
    "fault_output_not_a_tensor",
    lambda m, x: {"first": m.a(x), "second": x},
    r(B, 5),
    expected="ModelError|InputError",
    a=lin(5, 3),
)
