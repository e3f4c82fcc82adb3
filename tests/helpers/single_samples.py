"""Modules written as functions, and squared gradient norms by one backward pass per sample."""

import torch
from torch import nn


class Written(nn.Module):
    """A module whose forward is a function of itself and its inputs.

    An example: ``Written(lambda m, x: m.a(x), a=nn.Linear(2, 3))``.
    """

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **named):
        assert self.function is not None
        return self.function(self, *inputs, **named)


def truth(model, inputs, v, shared=()):
    """Return squared norms [B], each by a pass over the sample alone.

    ``shared``: which of the inputs have no samples.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for j in range(len(v)):
        sample = [
            t if not torch.is_tensor(t) else t.clone() if k in shared else t[j : j + 1].clone()
            for k, t in enumerate(inputs)
        ]
        z = model(*sample)
        grads = torch.autograd.grad(z, parameters, v[j : j + 1].to(z.dtype), allow_unused=True)
        norms.append(sum(g.double().square().sum() for g in grads if g is not None))
    return torch.stack(norms)
