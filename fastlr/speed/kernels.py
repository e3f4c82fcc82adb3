"""Every op with a kernel on its cases: held to its definition in float64 first, then timed against its own traffic.

An op that gives wrong numbers is reported as wrong and not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fastlr import ops
from fastlr.speed.cases import CASES
from fastlr.speed.clock import Timer, cache_bytes, release, spread
from fastlr.speed.layers import Call, Case, Draw
from fastlr.speed.record import Record

SECTION = "kernels"
MOST_SETS = 8  # of inputs that calls take in turn


def kernel_ops() -> list[str]:
    """Ops that have a Triton kernel."""
    return [name for name in ops.TABLE if "triton" in ops.backends(name)]


def chosen(quick: bool) -> list[tuple[str, Case]]:
    """The cases to run, the main ones of every op first; an op without a case is a KeyError."""
    pairs = [(name, case) for name in kernel_ops() for case in CASES[name]]
    main = [pair for pair in pairs if pair[1].main]
    return main if quick else main + [pair for pair in pairs if not pair[1].main]


def backend_for(name: str, device: torch.device) -> str:
    """The backend that is measured: the kernel on a GPU; plain torch, or else the definition, on a CPU."""
    if device.type == "cuda":
        return "triton"
    return "torch" if "torch" in ops.backends(name) else "reference"


def invoke(name: str, backend: str, call: Call) -> Any:
    """Run an op on a backend."""
    return ops.get(name, backend)(*call.args, **call.options)


def _leaves(result: Any) -> list[Tensor]:
    return [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]


def spoil(result: Any, call: Call) -> None:
    """Overwrite results with NaN, so that memory that is handed out again shows what was not written.

    Results that are (views of) the arguments are left alone.
    """
    own = {a.untyped_storage().data_ptr() for a in (*call.args, *call.options.values()) if isinstance(a, Tensor)}
    for t in _leaves(result):
        if t.is_floating_point() and t.untyped_storage().data_ptr() not in own:
            t.fill_(torch.nan)


def checked_samples(batch: int) -> list[int]:
    """The first, the middle and the last."""
    return sorted({0, batch // 2, batch - 1})


def expected(name: str, call: Call, batch: int) -> tuple[list[int] | None, list[Tensor]]:
    """What the op gives by definition: (samples, or None where there is no sample axis; leaves)."""
    samples = checked_samples(batch)
    if call.reference is not None:
        return samples, _leaves(call.reference(samples))
    if not call.batched:
        return None, _leaves(ops.get(name, "reference")(*call.args, **call.options))
    args = [a[samples] if i in call.batched else a for i, a in enumerate(call.args)]
    return samples, _leaves(ops.get(name, "reference")(*args, **call.options))


def deviation(result: Any, samples: list[int] | None, truth: list[Tensor]) -> float:
    """Largest ||out - ref|| / ||ref|| over outputs and samples; infinite for NaN, a missing output or another shape."""
    found = _leaves(result)
    if len(found) != len(truth):
        return float("inf")
    worst = 0.0
    for out, ref in zip(found, truth, strict=True):
        out = out if samples is None else out[samples]
        if out.shape != ref.shape:
            return float("inf")
        rows = [t.reshape(1 if samples is None else len(samples), -1).double() for t in (out, ref)]
        if torch.equal(*rows):
            continue
        norm = rows[1].norm(dim=1)
        error = (rows[0] - rows[1]).norm(dim=1)
        relative = torch.where(norm > 0, error / norm, torch.where(error > 0, torch.inf, 0.0))
        worst = max(worst, float(relative.nan_to_num(nan=torch.inf).max()))
    return worst


def measure(
    name: str, case: Case, draws: Callable[[int], Draw], timer: Timer, repeats: int, bandwidth: float, rate: float
) -> dict[str, Any]:
    """Check one case and time it.

    Args:
        name: of the op.
        case: one of its cases.
        draws: seed -> where its arguments are drawn.
        timer: the device's clock.
        repeats: how often; the median counts.
        bandwidth: of a copy, bytes a second.
        rate: of a matrix product, operations a second.

    Returns:
        A row: ``status`` ("ok", "wrong", "not covered" where there is no kernel for the case and plain torch was timed),
        ``backend``, ``deviation`` and ``tolerance``, ``bytes``, ``operations``, seconds, bytes_per_second and ``share``.
    """
    draw = draws(0)
    device, batch = draw.device, draw.batch
    call = case.build(draw)
    backend = backend_for(name, device)
    row: dict[str, Any] = {"op": name, "case": case.label, "backend": backend, "batch": batch, "bytes": call.bytes}
    row |= {"operations": call.operations, "tolerance": call.tolerance, "target": case.target}
    row["dtype"] = str(draw.dtype).removeprefix("torch.")
    result = invoke(name, backend, call)
    if result is NotImplemented:
        row["backend"] = backend = "torch"
        if backend not in ops.backends(name):
            return {**row, "status": "error", "error": "there is no kernel for this case, and nothing else serves"}
        result = invoke(name, backend, call)
    spoil(result, call)
    del result
    result = invoke(name, backend, call)
    row["deviation"] = deviation(result, *expected(name, call, batch))
    again = _leaves(invoke(name, backend, call))
    row["same_bits"] = all(_same(a, b) for a, b in zip(_leaves(result), again, strict=True))
    del result, again
    if not row["deviation"] <= call.tolerance:
        error = f"off by {row['deviation']:.2g} of the reference, more than {call.tolerance:.2g}: not timed"
        return {**row, "status": "wrong", "error": error}
    if not row["same_bits"]:
        return {**row, "status": "wrong", "error": "a second call gave other bits: not timed"}
    most = max(2, min(MOST_SETS, -(-3 * cache_bytes(device) // max(1, call.input_bytes()))))
    sets = [call, *(case.build(draws(seed)) for seed in range(1, most))]
    calls = [lambda c=c: invoke(name, backend, c) for c in sets]
    seconds = timer.seconds(calls, repeats)
    row |= spread(seconds) | {"input_sets": len(sets), "how": timer.how}
    row["floor_seconds"] = max(call.bytes / bandwidth, call.operations / rate)
    row["bytes_per_second"] = call.bytes / row["seconds"]
    row["share"] = row["bytes_per_second"] / bandwidth
    covered = row["backend"] == backend_for(name, device)
    if case.target is not None and covered and device.type == "cuda":
        row["meets_target"] = row["share"] >= case.target
    return {**row, "status": "ok" if covered else "not covered"}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def section(
    record: Record,
    device: torch.device,
    timer: Timer,
    pairs: Iterable[tuple[str, Case]],
    *,
    dtype: torch.dtype,
    batch: int,
    repeats: int,
    bandwidth: float,
    rate: float,
    shrink: int = 1,
    limit: float = float("inf"),
) -> None:
    """Measure cases into rows "op: case"; those that the time limit (seconds) leaves out are recorded as dropped."""
    start = time.monotonic()
    for name, case in pairs:
        title = f"{name}: {case.label}"
        if time.monotonic() - start > limit:
            record.add(SECTION, title, "dropped", op=name, case=case.label)
            continue
        with record.attempt(SECTION, title):
            row = measure(
                name, case, lambda seed: Draw(device, dtype, batch, shrink, seed), timer, repeats, bandwidth, rate
            )
            record.add(SECTION, title, **row)
        release(device)
