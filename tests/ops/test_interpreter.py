"""Kernels in 16 bits in Triton's interpreter, as `fastlr.kernels.interpreter` makes it right."""

import interpreter
import pytest
import torch

from fastlr import ops
from fastlr.cli import kernels
from fastlr.kernels.interpreter import from_bfloat16, to_bfloat16

triton = pytest.importorskip("triton")
tl = triton.language
COMPARE = """
from fastlr.cli import kernels
kernels.SIZES = kernels.SIZES[:sizes]
found = {dtype: list(kernels.outcomes(torch.device("cpu"), dtype)) for dtype in dtypes}
results = found, out, broken
"""
ARITHMETIC = """
from test_interpreter import arithmetic
(a, b), sizes, dtypes = given
out = a.new_empty(2, len(a))
arithmetic[(1,)](a, b, out, len(a))

from borders import Borders
broken = []
for rows in (2, 1):  # the kernel writes two rows
    borders = Borders()
    a, b = borders.around_all((a, b))
    with borders:
        room = a.new_empty(rows, len(a))
    arithmetic[(1,)](a, b, room, len(a))
    broken.append(borders.broken())
"""


@triton.jit
def arithmetic(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(a + at), tl.load(b + at)
    one = tl.full((SIZE,), 1.0, tl.bfloat16)
    tl.store(out + at, tl.maximum(x * y + one, x - y))
    tl.store(out + SIZE + at, tl.where(x < y, tl.exp(x.to(tl.float32)).to(tl.bfloat16), one))


def test_bits_of_bfloat16_are_torchs():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e30
    ties = torch.tensor([1.00390625, 1.01171875, 3.3895e38, 1e-40, -0.0, torch.inf, -torch.inf])
    values = torch.cat([values, ties])
    bits = to_bfloat16(values.numpy())
    assert (bits == values.bfloat16().view(torch.uint16).numpy()).all()
    assert (from_bfloat16(bits) == values.bfloat16().float().numpy()).all()
    nan = to_bfloat16(torch.tensor([torch.nan]).numpy())
    assert from_bfloat16(nan) != from_bfloat16(nan)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """What the interpreter gives: of the arithmetic for two vectors, and of the quick ops."""
    vectors = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    given = vectors, 1, [torch.bfloat16]
    script = ARITHMETIC + COMPARE
    return vectors, interpreter.interpreted(script, tmp_path_factory.mktemp("quick"), given)


def test_arithmetic_in_bfloat16_is_torchs(quick):
    (a, b), (_, (high, low), _) = quick
    assert torch.equal(high, torch.maximum(a * b + 1, a - b))
    assert torch.equal(low, torch.where(a < b, a.float().exp().bfloat16(), torch.ones_like(a)))


def test_what_a_kernel_writes_beyond_a_tensor_is_seen(quick):
    assert quick[1][2] == [False, True]


def agree(found):
    """What ``fastlr doctor --kernels`` found: every kernel was compared, and is right."""
    for outcomes in found.values():
        assert [name for name, _, _ in outcomes] == ops.with_kernels()
        assert all(shares and not wrong for _, shares, wrong in outcomes), outcomes


def test_kernels_agree_with_plain_torch_in_bfloat16(quick):
    agree(quick[1][0])


@pytest.mark.long
def test_kernels_agree_with_plain_torch(tmp_path):
    script = "sizes, dtypes, out, broken = *given, None, None\n" + COMPARE
    agree(interpreter.interpreted(script, tmp_path, (3, kernels.DTYPES))[0])
