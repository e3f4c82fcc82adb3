"""Kernels in 16 bits in Triton's interpreter, as `fastlr.ops.interpreter` makes it right."""

import interpreter
import pytest
import torch

from fastlr import ops
from fastlr.ops.interpreter import from_bfloat16, to_bfloat16

triton = pytest.importorskip("triton")
tl = triton.language
QUICK = ("channel_sums", "fold_weights")
COMPARE = """
from fastlr.cli import doctor
found = [(finding.name, finding.found, finding.detail) for finding in doctor.kernels(names)]
results = found, out, broken
"""
ARITHMETIC = """
from test_interpreter import arithmetic
(a, b), names = given
out = a.new_empty(2, len(a))
arithmetic[(1,)](a, b, out, len(a))

from fastlr.ops.borders import Borders
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
    script = ARITHMETIC + COMPARE
    return vectors, interpreter.interpreted(
        script, tmp_path_factory.mktemp("quick"), (vectors, QUICK)
    )


def test_arithmetic_in_bfloat16_is_torchs(quick):
    (a, b), (_, (high, low), _) = quick
    assert torch.equal(high, torch.maximum(a * b + 1, a - b))
    assert torch.equal(low, torch.where(a < b, a.float().exp().bfloat16(), torch.ones_like(a)))


def test_what_a_kernel_writes_beyond_a_tensor_is_seen(quick):
    assert quick[1][2] == [False, True]


def agree(found, names):
    """Hold what ``fastlr doctor --kernels`` found: every op in three dtypes, all right."""
    assert len(found) == 3 * len(names)
    assert [finding for finding in found if not finding[1]] == []


def test_quick_kernels_agree_with_plain_torch_in_16_bits(quick):
    agree(quick[1][0], QUICK)


@pytest.mark.long
def test_kernels_agree_with_plain_torch_in_16_bits(tmp_path):
    with_kernel = [name for name in ops.TABLE if "triton" in ops.backends(name)]
    script = "names, out, broken = given, None, None\n" + COMPARE
    agree(interpreter.interpreted(script, tmp_path, with_kernel)[0], with_kernel)
