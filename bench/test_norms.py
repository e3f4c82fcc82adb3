"""Every op with a kernel on its cases, held to its definition, then compared with its traffic.

It is also held to the calls of kernel_cases.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import kernel_cases
import pytest
import torch
from definitions import definition
from kernel_calls import outcome
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.benchmark import Timer

from bench.layers import CASES, Call, Draw
from fastlr import ops
from fastlr.ops.kernel_checks import compared
from fastlr.ops.shape_images import shape_images

OPS = ops.with_kernels()
STORED = ("folded_conv", "folded_conv_backward", "fold_weights")
# Deviation of sums in float32; what is STORED in 16 bits may be off by what rounding explains.
SUMMED = 1e-3
ROUNDS = 20


def leaves(result: Any) -> list[Tensor]:
    """The tensors in a result or in arguments."""
    return [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]


def check(name: str, result: Any, call: Call, device: torch.device) -> float:
    """Return how far a result is from its definition in float64; fail where that is too far.

    Some samples are compared.
    """
    if name.startswith("shape_images"):
        define = partial(shape_images, **{**call.options, "device": device})
        same = [torch.equal(result[i : i + 1], define(i, i + 1)) for i in (0, len(result) - 1)]
        assert all(same), "other bits than the definition's"
        return 0.0
    define = definition(name)
    off = compared(define, call.args, ops.TABLE[name].samples, result)
    assert off.share <= 1, (
        f"off by {off.relative:.2g} of the definition, {off.share:.2g} times what rounding explains"
    )
    assert name in STORED or off.relative <= SUMMED, f"off by {off.relative:.2g} of the definition"
    return off.relative


def spoil(result: Any, call: Call) -> None:
    """Overwrite results with NaN.

    Memory that is handed out again then shows what a kernel has not written.
    """
    given = {t.untyped_storage().data_ptr() for t in leaves((call.args, call.options))}
    for t in leaves(result):
        if t.is_floating_point() and t.untyped_storage().data_ptr() not in given:
            t.fill_(torch.nan)


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, the median over many: by events on a GPU."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(function, warmup=10, rep=50, return_mode="median") / 1000
    return (
        Timer("function()", globals={"function": function}).blocked_autorange(min_run_time=1).median
    )


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes read and written a second by a large copy, the ceiling for kernels."""
    source = torch.randn((1 << 28 if device.type == "cuda" else 1 << 24), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


@cache
def wrong_calls(name: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the calls of kernel_cases.py that an op gets wrong.

    Kernels are compared with plain torch; without a GPU plain torch with the definition.
    """
    backend, twin = "triton", ops.get(name, "torch")
    if device.type != "cuda":
        backend, twin = "torch", definition(name)
    calls = kernel_cases.CASES[name]() if name in kernel_cases.CASES else {}
    return outcome(name, device, dtype, backend, twin, calls)[0]


def bytes_of(tree: Any) -> int:
    """Return how many bytes the tensors of a tree hold, those of one address counted once."""
    by_address = {t.data_ptr(): t.nbytes for t in leaves(tree)}
    return sum(by_address.values())


def cases() -> list[Any]:
    """Every op and case, the first cases of all ops first."""
    places = [(place, name, label) for name in OPS for place, label in enumerate(CASES[name])]
    places.sort(key=operator.itemgetter(0))
    return [pytest.param(*each, id="-".join(each[1:]).replace(" ", "_")) for each in places]


@pytest.mark.parametrize("place, name, label", cases())
def test_op(
    benchmark: BenchmarkFixture,
    place: int,
    name: str,
    label: str,
    device: torch.device,
    quick: bool,
) -> None:
    """One op on one layer; two layers of each op in a quick run."""
    if quick and place > 1:
        pytest.skip("not in a quick run")
    if device.type == "cuda":
        dtype, backend = torch.bfloat16, "triton"
        draw = Draw(device, dtype, batch=256, shrink=1)
    else:
        dtype, backend = torch.float32, "torch"
        draw = Draw(device, dtype, batch=2, shrink=8 if quick else 2)
    call = CASES[name][label](draw)
    assert not wrong_calls(name, device, dtype)

    def run() -> Any:
        return ops.get(name, backend)(*call.args, **call.options)

    if run() is NotImplemented:
        backend = "torch"  # serves where the kernel does not cover a case
    spoil(run(), call)
    result = run()
    off = check(name, result, call, device)
    assert all(torch.equal(a, b) for a, b in zip(leaves(result), leaves(run()))), (
        "another call gave other bits"
    )
    moved = bytes_of((call.args, call.options, result))
    del result
    benchmark.group = f"op {name}"
    benchmark.extra_info |= {"contender": label, "op": name, "backend": backend, "deviation": off}
    benchmark.extra_info |= {"bytes": moved, "operations": call.operations}
    benchmark.pedantic(run, rounds=3 if quick else ROUNDS, warmup_rounds=1)
    if benchmark.disabled:
        return
    seconds = seconds_of(run, device) if device.type == "cuda" else benchmark.stats.stats.median
    rate, bandwidth = moved / seconds, copy_bandwidth(device)
    benchmark.extra_info |= {
        "seconds": seconds,
        "bytes_per_second": rate,
        "share": rate / bandwidth,
    }
    benchmark.extra_info["copy_bandwidth"] = bandwidth
