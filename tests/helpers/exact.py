"""The truth of per-sample norms and redundancies, by float64 passes of one sample.

Also what tests hold results to.
"""

import copy
from typing import NamedTuple

import torch
from fisher import categorical_fisher
from torch import Tensor

from fastlr.ghost.engine import Engine


class Truth(NamedTuple):
    """Squared norms [samples] by parameter, and how far batching moves them and the outputs.

    ``apart`` is the distance of those within the batch.
    """

    norms: dict[str, Tensor]
    apart: float

    @property
    def interact(self):
        """Tell if samples interact, so that norms mean nothing: rounding alone is 1e-12 apart."""
        return self.apart > 1e-9

    @property
    def total(self):
        """Squared norms of all parameters together."""
        return torch.stack(list(self.norms.values())).sum(0)


def output_of(model, xs):
    """Output and trainable parameters of a fresh float64 copy of the model."""
    model = copy.deepcopy(model).double()
    doubled = (
        t.detach().double() if torch.is_tensor(t) and t.is_floating_point() else t for t in xs
    )
    return model(*doubled), {name: p for name, p in model.named_parameters() if p.requires_grad}


def _sq_norms(z, parameters, v, row):
    """Return the squared norm of each parameter's gradient [parameters].

    The cotangent is v in one row of z and zero in the others.
    """
    cotangent = torch.zeros_like(z)
    cotangent[row] = v
    grads = torch.autograd.grad(
        z, list(parameters.values()), cotangent, retain_graph=True, materialize_grads=True
    )
    return torch.stack([g.square().sum() for g in grads])


def truth(model, xs, v, shared=(), samples=None):
    """Measure each sample beside a copy of itself, and compare it with itself in the batch.

    The cotangent of the copy is zero.

    Args:
        model: any module; float64 copies of it are used.
        xs: positional inputs, samples along axis 0 of the tensors that are not shared.
        v: cotangents, shaped like the output.
        shared: which inputs have no samples.
        samples: which of them are looked at; default all.
    """
    samples = list(range(len(v)) if samples is None else samples)
    whole, parameters = output_of(model, xs)
    alone, norms = [], []
    for j in samples:
        twice = (
            t[[j, j]] if torch.is_tensor(t) and k not in shared else t for k, t in enumerate(xs)
        )
        z, own = output_of(model, twice)
        alone.append(z.detach()[0])
        norms.append(_sq_norms(z, own, v[j], 0))
    norms, apart = torch.stack(norms), 0.0
    if len(v) > 1:
        beside_others = torch.stack([_sq_norms(whole, parameters, v[j], j) for j in samples])
        gaps = (beside_others - norms).abs() / norms.sum(1, keepdim=True)
        outputs = whole.detach()[samples]
        moved = (outputs - torch.stack(alone)).abs() / (outputs.abs() + 0.01)
        apart = float(torch.cat([gaps.flatten(), moved.flatten()]).max())  # NaN if one is
    return Truth(dict(zip(parameters, norms.T)), apart)


def gradients(model, values):
    """The gradient of each value by the trainable parameters, [values, parameters]."""
    own = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for value in values:
        grads = torch.autograd.grad(value, own, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def sq_norms_in_batch(model, z, v):
    """Squared norms [B] in float64: a backward pass for each sample of the batch's output z."""
    return gradients(model, (z * v).flatten(1).sum(1)).double().square().sum(1)


def redundancy(model, z, fisher=categorical_fisher):
    """Return tr(J^T F J) of one output z [outputs], by a backward pass for each of its elements."""
    jacobian = gradients(model, z)
    return torch.einsum("ip,ij,jp->", jacobian, fisher(z.detach()), jacobian)


def assert_norms(got, want, relative, of_total, samples=slice(None), context=""):
    """Hold each value within ``relative`` of the truth plus ``of_total`` of its sample's total.

    Args:
        got: squared norms [B] by parameter.
        want: the truth for all of these parameters, of the samples compared.
        relative: to the value itself.
        of_total: in parts of the sum over all parameters.
        samples: those of ``got`` that are compared.
        context: ends the message.
    """
    total = torch.stack(list(want.values())).sum(0)
    for name, value in want.items():
        result = got[name][samples]
        right = (result - value).abs() <= relative * value + of_total * total
        assert right.all(), (
            f"{name}: {result.tolist()} is not {value.tolist()} (total {total.tolist()}) {context}"
        )


def assert_same_function(got, want, inputs, **tolerances):
    """Require the same values, and the same gradients by ``inputs`` for a random cotangent."""
    torch.testing.assert_close(got, want)
    if inputs:
        v = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(
            torch.autograd.grad(got, inputs, v), torch.autograd.grad(want, inputs, v), **tolerances
        )


def seeded(seed=3):
    """A generator that gives the same draws in every call."""
    return torch.Generator().manual_seed(seed)


def holds(model, x, *, rtol=1e-10, route="rule"):
    """Require every parameter's norms to be the truth; return the engine.

    They go by this route or, if None, by any.
    """
    z = model(x)
    v = torch.randn(z.shape, dtype=z.dtype, generator=seeded())
    engine = Engine(model)
    got = engine.run(x, v)
    assert_norms(got.per_parameter, truth(model, (x,), v).norms, rtol, 1e-3 * rtol)
    assert route is None or set(got.routes.values()) == {route}
    return engine
