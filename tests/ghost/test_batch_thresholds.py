"""Samples that interact through a number of the whole batch are found in its first batch."""

import torch
import torch.nn.functional as F
from exact import truth
from pytest import mark, raises
from single_samples import Written
from torch import nn

import fastlr
from fastlr.errors import InteractionError

BATCH = 16


class FixedPoint(nn.Module):
    """A loop that stops by the residual of the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(6, 6), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        z = x.new_zeros(len(x), 6)
        for _ in range(60):
            new = (0.2 * self.a(z) + self.b(x)).tanh()
            if (new - z).norm() < 1e-2 * new.norm():
                break
            z = new
        return self.o(new)


class Autoencoder(nn.Module):
    """Keeps the units that ``keep`` leaves of all samples' together."""

    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(5, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.dec(self.keep(self.enc(x).relu()))


class BatchTopK(Autoencoder):
    """Two units a sample, but chosen in the batch."""

    def keep(self, h):
        flat = h.flatten()
        top = flat.topk(2 * len(h))
        return torch.zeros_like(flat).scatter(0, top.indices, top.values).view_as(h)


class Median(Autoencoder):
    """Half the units of the batch."""

    def keep(self, h):
        return h * (h > h.flatten().kthvalue(h.numel() // 2).values)


@mark.parametrize("kind", [FixedPoint, BatchTopK, Median])
@mark.parametrize("seed", range(8))
def test_every_call_is_right_or_refused(kind, seed, double):
    torch.manual_seed(seed)
    model = kind().eval()
    x, v = torch.randn(BATCH, 5), torch.randn(BATCH, 3)
    alone = truth(model, (x,), v).total
    for _ in range(3):
        try:
            found = fastlr.per_sample_grad_sq_norms(model, x, v)
        except InteractionError:
            continue
        torch.testing.assert_close(found, alone, rtol=1e-12, atol=0.0)


def test_a_capacity_that_longer_sequences_exceed_is_found():
    """The same graph with longer sequences is compared in halves, too."""

    def dropped(model, x):
        scores = model.gate(x)
        chosen = F.one_hot(scores.argmax(-1), 2).flatten(0, 1)
        place = (chosen.cumsum(0) * chosen).sum(-1).view(x.shape[:2])
        return (model.expert(x) * (place <= 90)[..., None]).sum(1)

    torch.manual_seed(0)
    model = Written(dropped, gate=nn.Linear(4, 2), expert=nn.Linear(4, 3))
    fastlr.per_sample_grad_sq_norms(model, torch.randn(8, 4, 4), torch.ones(8, 3))
    with raises(InteractionError):
        fastlr.per_sample_grad_sq_norms(model, torch.randn(8, 40, 4), torch.ones(8, 3))
