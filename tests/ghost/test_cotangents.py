"""Cotangents of any size are brought to unit size without losing a bit."""

import math

import torch
from pytest import mark, raises

from fastlr.errors import NonFiniteError
from fastlr.ghost.norms.cotangents import scaled

SIZES = [0.0, 1e-45, 3e-42, 1e-38, 1e-30, 1.0, 7.5, 3e38]


def by_definition(v, out_dim):
    """(v over the power of two at or below its largest element, that power squared), in float64."""
    wide = v.double().movedim(out_dim, 0)
    largest = [row.abs().max().item() for row in wide]
    powers = [2.0 ** (math.frexp(size)[1] - 1) if size else 1.0 for size in largest]
    power = wide.new_tensor(powers)
    unit = wide / power.view(-1, *[1] * (v.ndim - 1))
    return unit.movedim(0, out_dim), power**2


@mark.parametrize("shape, out_dim", [((8,), 0), ((8, 5), 0), ((3, 8, 5), 1), ((3, 5, 8), -1)])
@mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@mark.parametrize("given", [None, torch.float64])
def test_samples_are_scaled_to_unit_size(shape, out_dim, dtype, given):
    generator = torch.Generator().manual_seed(0)
    signs = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    sizes = signs.new_tensor(SIZES)
    axis = [1] * len(shape)
    axis[out_dim] = len(sizes)
    v = (signs * sizes.view(axis)).to(given or dtype)
    unit, squares = scaled(v, torch.empty(shape, dtype=dtype), out_dim)
    want, power = by_definition(v, out_dim)
    assert unit.dtype == dtype
    assert squares.dtype == torch.float64
    assert squares.shape == (len(SIZES),)
    assert torch.equal(unit, want.to(dtype))
    assert torch.equal(squares, power)


@mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_refused(bad):
    v = torch.ones(4, 3, 2)
    v[2, 1, 0] = bad
    with raises(NonFiniteError, match="cotangent"):
        scaled(v, torch.ones(4, 3, 2), 0)
