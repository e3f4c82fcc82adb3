"""An input with a row for each sample: is it the samples' own, or shared by all of them?"""

import torch
from exact import truth
from pytest import mark, param, raises, warns
from torch import nn

import fastlr
from fastlr.errors import FastlrWarning, InteractionError

BATCH = 16


class Trimmed(nn.Module):
    """Cuts the padding that no sample needs, by the largest of their lengths."""

    def __init__(self, bidirectional):
        super().__init__()
        self.rnn = nn.LSTM(5, 6, batch_first=True, bidirectional=bidirectional)
        self.out = nn.Linear(6 * (1 + bidirectional), 3)

    def forward(self, x, lengths):
        return self.out(self.rnn(x[:, : int(lengths.max())])[0].mean(1))


class Attending(nn.Module):
    """Attends to a memory, which is one more input."""

    def __init__(self):
        super().__init__()
        self.ask, self.out = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x, memory):
        scores = (self.ask(x) @ memory.T).softmax(-1)
        return self.out(scores @ memory)


@mark.parametrize("bidirectional", [False, True])
@mark.parametrize("seed", [0, 1, *(param(seed, marks=mark.long) for seed in (2, 3))])
def test_lengths_of_the_samples_are_no_shared_input(seed, bidirectional, double):
    torch.manual_seed(seed)
    model = Trimmed(bidirectional).eval()
    x, lengths = torch.randn(BATCH, 8, 5), torch.randint(1, 9, (BATCH,))
    for _ in range(2):
        with raises(InteractionError):
            fastlr.per_sample_grad_sq_norms(model, (x, lengths), torch.randn(BATCH, 3))


def test_a_memory_with_as_many_rows_as_samples_is_shared_and_said_to_be(double):
    torch.manual_seed(0)
    model = Attending().eval()
    x, memory, v = torch.randn(BATCH, 5), torch.randn(BATCH, 4), torch.randn(BATCH, 3)
    with warns(FastlrWarning, match=r"shape \(16, 4\) has as many rows as there are samples"):
        found = fastlr.per_sample_grad_sq_norms(model, (x, memory), v)
    alone = truth(model, (x, memory), v, shared=(1,)).total
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=0.0)
