"""Small factors whose norms are taken together have the norms that each has alone."""

import torch

from fastlr import ops
from fastlr.ghost import small_factors
from fastlr.ghost.factors import Dense, Outer
from fastlr.ghost.small_factors import SmallFactors

COUNT = 3


def outer(rows, inputs, outputs, dtype=torch.float32):
    a, g = torch.randn(COUNT, 1, rows, inputs), torch.randn(COUNT, 1, rows, outputs)
    return Outer(a.to(dtype), g.to(dtype), (outputs, inputs))


FACTORS = {
    "products": lambda: outer(5, 4, 6),
    "products of the same shapes in another dtype": lambda: outer(5, 4, 6, torch.bfloat16),
    "products, turned": lambda: outer(5, 4, 6).transpose(),
    "Gram matrices": lambda: outer(2, 100, 120),
    "one row": lambda: outer(1, 4, 6),
    "biases": lambda: Dense(torch.randn(COUNT, 7)),
    "complex ones": lambda: Dense(torch.randn(COUNT, 7, dtype=torch.complex64)),
}


def together(factors):
    """The norms by name, in the order in which they were handed out."""
    taken = {}
    small = SmallFactors(taken.__setitem__)
    for name, factor in factors.items():
        small.add(name, factor)
    at_once = list(taken)
    small.flush()
    return taken, at_once


def truth(factor):
    """Squared norms of the gradients themselves, in float64 or complex128."""
    if isinstance(factor, Dense):
        grads = factor.grads.to(torch.promote_types(factor.grads.dtype, torch.float64))
    else:
        grads = factor.g.double().mT @ factor.a.double()
    return grads.abs().flatten(1).square().sum(1)


def test_each_factor_has_the_norms_that_it_has_alone():
    torch.manual_seed(0)
    factors = {f"{name} {i}": make() for i in range(3) for name, make in FACTORS.items()}
    taken, at_once = together(factors)
    assert taken.keys() == factors.keys()
    assert not at_once
    for name, factor in factors.items():
        torch.testing.assert_close(taken[name], factor.sq_norms(), rtol=1e-6, atol=0, msg=name)
        torch.testing.assert_close(taken[name], truth(factor), rtol=1e-5, atol=0, msg=name)


def test_large_factors_do_not_wait():
    large = Dense(torch.ones(1, small_factors.SMALL + 1))
    _, at_once = together({"small": Dense(torch.ones(1, 1)), "large": large})
    assert at_once == ["large"]


def test_few_elements_wait_at_a_time(monkeypatch):
    monkeypatch.setattr(small_factors, "HELD", 20)
    _, at_once = together({str(i): Dense(torch.ones(1, 7)) for i in range(4)})
    assert at_once == ["0", "1", "2"]


def test_another_backend_is_asked_of_each_factor():
    with ops.using("reference"):
        _, at_once = together({str(i): Dense(torch.ones(1, 7)) for i in range(2)})
    assert at_once == ["0", "1"]
