"""Bags of embeddings and bilinear layers by rule, against one backward pass a sample."""

import pytest
import torch
from exact import holds, seeded
from torch import nn

from fastlr.errors import FastlrWarning
from fastlr.ghost.engine import Engine

B = 4


@pytest.fixture(autouse=True)
def _same_draws():
    torch.manual_seed(0)


class Bags(nn.Module):
    """Embedding bags of three and one of a sample's four rows by offsets, or all by a matrix."""

    def __init__(
        self,
        mode,
        *,
        offsets,
        closed=False,
        weighted=False,
        **options,
    ):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, mode=mode, include_last_offset=closed, **options)
        self.head = nn.Linear(4, 2)
        self.offsets = offsets
        self.closed = closed
        self.weighted = weighted

    def forward(self, ids):
        """A sample's bags one after another."""
        ids = ids.long()
        weights = torch.cos(ids).to(self.head.weight) if self.weighted else None
        if not self.offsets:
            return self.head(self.bag(ids, per_sample_weights=weights))
        starts = (4 * torch.arange(len(ids))[:, None] + torch.tensor([0, 3])).flatten()
        starts = torch.cat([starts, torch.tensor([ids.numel()])]) if self.closed else starts
        flat = None if weights is None else weights.flatten()
        return self.head(self.bag(ids.flatten(), starts, flat)).view(len(ids), -1)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode, offsets, padding):
    ids = torch.tensor([[2, 2, 2, 2], [0, 1, 0, 1], [5, 2, 5, 7], [8, 8, 8, 2], [1, 2, 3, 4]])
    if (
        padding is None
        and len(nn.EmbeddingBag(9, 4, include_last_offset=True)(ids)) < len(ids)
        and not offsets
    ):
        pytest.skip(
            "this torch loses the last row of a matrix under include_last_offset, as 2.7.1 does"
        )
    holds(Bags(mode, offsets=offsets, closed=padding is None, padding_idx=padding).double(), ids)
    if mode == "sum":
        holds(Bags(mode, offsets=offsets, weighted=True, padding_idx=padding).double(), ids)


def test_bags_that_share_a_table():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, 4))

        def forward(self, ids):
            largest = nn.functional.embedding_bag(ids, self.table, mode="max")
            mean = nn.functional.embedding_bag(ids, self.table, mode="mean")
            return torch.cat([largest, mean, self.table[ids[:, 0]]], 1)

    holds(Both().double(), torch.randint(9, (5, 4), generator=seeded()))


def test_bags_scaled_by_frequency_are_warned_of():
    model = Bags("sum", offsets=False, scale_grad_by_freq=True).double()
    with pytest.warns(FastlrWarning, match="scale_grad_by_freq"):
        Engine(model).run(
            torch.randint(9, (5, 4), generator=seeded()), lambda z: torch.ones_like(z)
        )


@pytest.mark.parametrize("rows", [(), (6,), (2, 3)])
def test_bilinear(rows):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.pair = nn.Linear(3, 4), nn.Bilinear(4, 3, 2)

        def forward(self, x):
            return self.pair(self.a(x), x.sin()).reshape(len(x), -1, 2).sum(1)

    x = torch.randn(B, *rows, 3, dtype=torch.float64, generator=seeded())
    holds(Pair().double(), x)
    holds(Pair(), x.float(), rtol=1e-4)
