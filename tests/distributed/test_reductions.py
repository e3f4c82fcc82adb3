"""Sums over ranks are bit for bit the float32 sum in rank order, rounded once.

This holds on every route, on every rank and in every run.
"""

from importlib.util import find_spec

import rank_reductions as work
import torch
from expected import needs_gpu
from pytest import approx, mark, param, raises
from rank_reductions import left_behind
from ranks import Ended, good, run_ranks

from fastlr import distributed
from fastlr.distributed.backends import fixed_order_sum
from fastlr.errors import InputError

built = mark.skipif(find_spec("fastlr._C") is None, reason="fastlr._C is not built")
gpu = needs_gpu
ROUTES = [param("extension", marks=built), "torch.distributed"]


@mark.parametrize(
    "ranks, prefer, device",
    [
        param(2, "extension", "cpu", marks=built),
        param(4, "extension", "cpu", marks=built),
        (2, "torch.distributed", "cpu"),
        param(2, "extension", "cuda", marks=[built, gpu]),
        param(4, "extension", "cuda", marks=[built, gpu]),
    ],
)
def test_all_checks(ranks, prefer, device):
    """One world of processes for all of them; on GPUs, which they may share, by CUDA IPC."""
    before = left_behind()
    buffer_bytes = 1 << 16 if device == "cpu" else None
    given = prefer, device, buffer_bytes
    on_gpu = device == "cuda"
    results = good(run_ranks(ranks, work.all_checks, *given, limit=300, on_gpu=on_gpu))
    assert left_behind() == before
    assert {each["route"][0] for each in results} == {prefer}
    assert len({each["route"] for each in results}) == 1
    for each in results:
        assert each["sums"] == [], "not the fixed-order sum rounded once"
        assert each["special"] == []
        assert each["layouts"] == []
        norms_are_right(each["norms"], results[0]["norms"], device)
        nothing_else_is_added(each["refused"])
        errors_are_those_of_one_rounding(each["errors"], ranks)
        exact = 1e-6 if device == "cpu" else 1e-4
        for how, gap in (("float32", exact), ("bfloat16", 0.05), ("compressed", 0.01)):
            assert each["ddp"][how]["not the mean"] == 0, how
            assert each["ddp"][how]["gap"] < gap, (
                f"{how}: not the step of one process on the joined batch"
            )
        if device == "cuda":
            assert "CUDA IPC" in each["route"][1]
            assert "CUDA graph" in each["capture"]
    assert len({each["hash"] for each in results} | {each["again"] for each in results}) == 1, (
        "ranks or runs differ"
    )


def norms_are_right(norms, first, device):
    assert norms["got"][0] == approx(norms["want"], rel=1e-13)
    assert norms["got"] == first["got"]
    assert norms["got"][0] == norms["got"][1]
    assert norms["want"] == approx(norms["float64"], rel=1e-6)
    assert norms["small buckets"] == approx(norms["want"], rel=1e-13)
    value, want, *about = norms["one"]
    assert value == approx(want, rel=1e-13)
    assert about == ["torch.float64", 0, device]
    assert norms["none"] == 0
    assert norms["unchanged"]


def nothing_else_is_added(refused):
    assert "torch.int64" in refused["integers"]
    assert "torch.complex64" in refused["complex"]
    assert "sparse" in refused["sparse"]
    assert "not list" in refused["a list"]
    assert all(text.startswith("InputError: ") for text in refused.values())


def errors_are_those_of_one_rounding(errors, ranks):
    """Rounding once to 8 bits errs by about 2^-9 / sqrt(3); bfloat16 sums err more by rank."""
    assert errors["fastlr"] < 2.0**-9
    if ranks == 2:
        # One addition, one rounding.
        assert errors["bfloat16"] == approx(errors["fastlr"], rel=1e-6)
    else:
        assert errors["fastlr"] < 0.8 * errors["bfloat16"]
        assert errors["fastlr"] <= errors["gloo"]


@mark.parametrize("prefer", ROUTES)
@mark.parametrize(
    "ranks, when", [(2, "before connecting"), (4, "later"), (2, "in a backward pass")]
)
def test_a_killed_rank_is_an_error_within_the_limit(ranks, when, prefer):
    before, limit = left_behind(), 2.0
    results = run_ranks(ranks, work.one_is_killed, when, prefer, limit)
    assert isinstance(results[1], Ended)
    assert "-9" in str(results[1])
    for rank, (said, seconds) in ((r, x) for r, x in enumerate(results) if r != 1):
        assert said.startswith("DistributedError: "), (rank, said)
        assert "rank 1" in said or prefer == "torch.distributed", (rank, said)
        assert seconds < limit + 5
    assert left_behind() == before


@built
def test_a_rank_that_does_not_come_in_time():
    results = good(run_ranks(3, work.one_is_stopped, 0.5))
    for rank in (0, 2):
        said, seconds, spoilt = results[rank]
        assert "rank 1 did not arrive at a reduction within 0.5 s" in said[0]
        assert 0.3 < seconds < 5
        assert "has failed before" in said[1]
        assert spoilt, "what was not added up must not look like a sum"
    assert any("rank 1 did not arrive" in text for text in results[1][0])


@built
def test_ranks_that_call_different_reductions():
    for each in good(run_ranks(2, work.different_calls)):
        assert all("ranks" in text and "called different reductions" in text for text in each)


@built
def test_an_interrupt_gets_through():
    results = good(run_ranks(2, work.interrupted))
    assert results[0][0].startswith("KeyboardInterrupt")
    assert results[0][1] < 5.5  # the other rank comes after 6
    assert "rank 0" in results[1][0]


def test_options_are_checked():
    for timeout, prefer, size, meta, differ, member in good(run_ranks(2, work.options_that_differ)):
        assert "timeout must be" in timeout
        assert "prefer must be" in prefer
        assert "buffer_bytes must be" in size
        assert "not on meta" in meta
        assert "ranks differ in prefer" in differ
        assert "not in the group" in member


@mark.parametrize("who", [0, 1])
def test_without_the_extension_on_one_rank(who):
    for (name, why), right in good(run_ranks(2, work.without_the_extension, who)):
        assert name == "torch.distributed"
        assert f"rank {who}: fastlr._C is not built" in why
        assert "pip install --no-build-isolation -e ." in why
        assert right


def test_subgroups_do_not_meet():
    for rank, (value, said) in enumerate(good(run_ranks(4, work.subgroups))):
        assert value == (2.0 if rank % 2 == 0 else 4.0)
        assert "not in the group" in said


def test_one_process_without_a_group():
    with raises(InputError, match="not initialised"):
        distributed.all_reduce(torch.ones(3))
    with raises(InputError, match="not initialised"):
        distributed.reduce_sq_norm([torch.ones(3)])


def test_fixed_order_sum_is_sequential():
    parts = [torch.tensor([x], dtype=torch.float32) for x in (1e8, 1.0, -1e8)]
    assert fixed_order_sum(parts).item() == 0.0
    assert fixed_order_sum(parts[::-1]).item() == 0.0
    assert fixed_order_sum([parts[0], parts[2], parts[1]]).item() == 1.0
    assert fixed_order_sum([p.double() for p in parts]).dtype == torch.float64


@built
def test_no_processes_are_left():
    """Those of this file were joined; what they mapped has no name."""
    assert not left_behind()
