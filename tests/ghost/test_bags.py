"""Bags of embeddings and bilinear layers by rule, against one backward pass a sample."""

import torch
from exact import holds, seeded
from expected import warned
from pytest import fixture, mark, skip
from single_samples import Written
from torch import nn

from fastlr.ghost.engine import Engine

B = 4


@fixture(autouse=True)
def _same_draws():
    torch.manual_seed(0)


def bags(mode, *, offsets, closed=False, weighted=False, **options):
    """Embedding bags of three and one of a sample's four rows by offsets, or all by a matrix."""

    def forward(m, ids):
        """A sample's bags one after another."""
        ids = ids.long()
        weights = torch.cos(ids).to(m.head.weight) if weighted else None
        if not offsets:
            return m.head(m.bag(ids, per_sample_weights=weights))
        starts = (4 * torch.arange(len(ids))[:, None] + torch.tensor([0, 3])).flatten()
        starts = torch.cat([starts, torch.tensor([ids.numel()])]) if closed else starts
        flat = None if weights is None else weights.flatten()
        return m.head(m.bag(ids.flatten(), starts, flat)).view(len(ids), -1)

    bag = nn.EmbeddingBag(9, 4, mode=mode, include_last_offset=closed, **options)
    return Written(forward, bag=bag, head=nn.Linear(4, 2)).double()


@mark.parametrize("padding", [None, 2])
@mark.parametrize("offsets", [False, True])
@mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode, offsets, padding):
    ids = torch.tensor([[2, 2, 2, 2], [0, 1, 0, 1], [5, 2, 5, 7], [8, 8, 8, 2], [1, 2, 3, 4]])
    if (
        padding is None
        and len(nn.EmbeddingBag(9, 4, include_last_offset=True)(ids)) < len(ids)
        and not offsets
    ):
        skip("this torch loses the last row of a matrix under include_last_offset, as 2.7.1 does")
    holds(bags(mode, offsets=offsets, closed=padding is None, padding_idx=padding), ids)
    if mode == "sum":
        holds(bags(mode, offsets=offsets, weighted=True, padding_idx=padding), ids)


def test_bags_that_share_a_table():
    def forward(m, ids):
        largest = nn.functional.embedding_bag(ids, m.table, mode="max")
        mean = nn.functional.embedding_bag(ids, m.table, mode="mean")
        return torch.cat([largest, mean, m.table[ids[:, 0]]], 1)

    model = Written(forward, table=nn.Parameter(torch.randn(9, 4)))
    holds(model.double(), torch.randint(9, (5, 4), generator=seeded()))


def test_bags_scaled_by_frequency_are_warned_of():
    model = bags("sum", offsets=False, scale_grad_by_freq=True)
    with warned("scale_grad_by_freq"):
        Engine(model).run(torch.randint(9, (5, 4), generator=seeded()), torch.ones_like)


@mark.parametrize("rows", [(), (6,), (2, 3)])
def test_bilinear(rows):
    model = Written(
        lambda m, x: m.pair(m.a(x), x.sin()).reshape(len(x), -1, 2).sum(1),
        a=nn.Linear(3, 4),
        pair=nn.Bilinear(4, 3, 2),
    )
    x = torch.randn(B, *rows, 3, dtype=torch.float64, generator=seeded())
    holds(model, x.float(), rtol=1e-4)
    holds(model.double(), x)
