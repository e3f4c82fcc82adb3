"""Sums over ranks are bit for bit the float32 sum in rank order, rounded once.

This holds on every route, on every rank and in every run.
"""

import math
from importlib.util import find_spec

import pytest
import rank_reductions as work
import torch
from rank_reductions import left_behind
from ranks import Ended, good, run_ranks

from fastlr import distributed
from fastlr.errors import InputError
from fastlr.ops import reference
from fastlr.ops.reference.reductions import fixed_order_sum

built = pytest.mark.skipif(find_spec("fastlr._C") is None, reason="fastlr._C is not built")
ROUTES = [pytest.param("extension", marks=built), "torch.distributed"]


@pytest.mark.parametrize(
    "ranks, prefer",
    [
        pytest.param(2, "extension", marks=built),
        pytest.param(4, "extension", marks=built),
        (2, "torch.distributed"),
    ],
)
def test_all_checks(ranks, prefer):
    """One world of processes for all of them."""
    before = left_behind()
    results = good(run_ranks(ranks, work.all_checks, prefer, "cpu", 1 << 16))
    assert left_behind() == before
    assert {each["route"][0] for each in results} == {prefer}
    assert len({each["route"] for each in results}) == 1
    for each in results:
        assert each["sums"] == [], "not the fixed-order sum rounded once"
        assert each["special"] == []
        assert each["layouts"] == []
        norms_are_right(each["norms"], results[0]["norms"])
        nothing_else_is_added(each["refused"])
        errors_are_those_of_one_rounding(each["errors"], ranks)
        for how, gap in (("float32", 1e-6), ("bfloat16", 0.05), ("compressed", 0.01)):
            assert each["ddp"][how]["not the mean"] == 0, how
            assert each["ddp"][how]["gap"] < gap, (
                f"{how}: not the step of one process on the joined batch"
            )
    assert len({each["hash"] for each in results} | {each["again"] for each in results}) == 1, (
        "ranks or runs differ"
    )


def norms_are_right(norms, first):
    assert norms["got"][0] == pytest.approx(norms["want"], rel=1e-13)
    assert norms["got"] == first["got"]
    assert norms["got"][0] == norms["got"][1]
    assert norms["want"] == pytest.approx(norms["float64"], rel=1e-6)
    assert norms["small buckets"] == pytest.approx(norms["want"], rel=1e-13)
    value, want, *about = norms["one"]
    assert value == pytest.approx(want, rel=1e-13)
    assert about == ["torch.float64", 0, "cpu"]
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
        assert errors["bfloat16"] == pytest.approx(errors["fastlr"], rel=1e-6)
    else:
        assert errors["fastlr"] < 0.8 * errors["bfloat16"]
        assert errors["fastlr"] <= errors["gloo"]


@pytest.mark.parametrize("prefer", ROUTES)
@pytest.mark.parametrize(
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
    assert results[0][1] < 2.5
    assert "rank 0" in results[1][0]


def test_options_are_checked():
    for timeout, prefer, size, meta, differ, member in good(run_ranks(2, work.options_that_differ)):
        assert "timeout must be" in timeout
        assert "prefer must be" in prefer
        assert "buffer_bytes must be" in size
        assert "not on meta" in meta
        assert "ranks differ in prefer" in differ
        assert "not in the group" in member


@pytest.mark.parametrize("who", [0, 1])
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
    with pytest.raises(InputError, match="not initialised"):
        distributed.all_reduce(torch.ones(3))
    with pytest.raises(InputError, match="not initialised"):
        distributed.reduce_sq_norm([torch.ones(3)])


def test_fixed_order_sum_is_sequential():
    parts = [torch.tensor([x], dtype=torch.float32) for x in (1e8, 1.0, -1e8)]
    assert fixed_order_sum(parts).item() == 0.0
    assert fixed_order_sum(parts[::-1]).item() == 0.0
    assert fixed_order_sum([parts[0], parts[2], parts[1]]).item() == 1.0
    assert fixed_order_sum([p.double() for p in parts]).dtype == torch.float64
    assert set(("all_reduce", "reduce_sq_norm")) <= set(reference.__all__)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@built
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gpus(ranks):
    """The same checks pass through CUDA IPC; processes share GPUs that are fewer than the ranks."""
    results = good(run_ranks(ranks, work.all_checks, "extension", "cuda", limit=300))
    for each in results:
        assert each["route"][0] == "extension"
        assert "CUDA IPC" in each["route"][1]
        assert each["sums"] == each["special"] == each["layouts"] == []
        norms = each["norms"]
        assert norms["got"][0] == norms["got"][1] == pytest.approx(norms["want"], rel=1e-13)
        assert each["errors"]["fastlr"] < 2.0**-9
        assert "CUDA graph" in each["capture"]
        assert all(each["ddp"][how]["not the mean"] == 0 for how in each["ddp"])
        assert not math.isnan(each["ddp"]["float32"]["gap"])
        assert each["ddp"]["float32"]["gap"] < 1e-4
    assert len({each["hash"] for each in results} | {each["again"] for each in results}) == 1


@built
def test_no_processes_are_left():
    """Those of this file were joined; what they mapped has no name."""
    assert not left_behind()
