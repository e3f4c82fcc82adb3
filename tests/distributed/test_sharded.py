"""Estimates shared by ranks equal one process's; errors reach every rank; no rank hangs."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import rank_estimates as work
import torch
import torch.distributed as dist
from command_line import NETS, as_torchrun
from expected import needs_gpu, refused
from pytest import approx, fixture, mark, param
from ranks import TORCHRUN, Ended, good, run_ranks

import fastlr
from fastlr.distributed import sharded
from fastlr.distributed.messaging import Board
from fastlr.errors import DistributedError

DIFFERENCES = (
    "what they measure: total is 20 and 21; ",
    "seed is 0 and 1; ",
    "predictive is ",
    "the model: values of 3.bias; load the same weights on every rank, or broadcast them",
    "1.running_mean is 'torch.float32 [8]' and 'torch.float32 [9]'; ",
    "what they measure: inputs; pass the same arguments on every rank",
)
ESTIMATE = "estimate nets:net --inputs noise --size 8 -n 40 --batch-size 6 --device cpu".split()


@cache
def alone(name):
    return fastlr.estimate(work.mlp(), work.Drawn(), seed=3, **work.CASES[name])


@mark.parametrize("ranks", [1, param(2, marks=mark.long), 3])
def test_any_number_of_ranks_gives_the_same(ranks):
    results = good(run_ranks(ranks, work.estimates))
    for each in results:
        for name in work.CASES:
            same_as_alone(name, each[name], ranks)
            different = {key for key in each[name] if each[name][key] != results[0][name][key]}
            assert different <= {"seconds", "seen", "rank"}, (name, different)
        first, second, after = each["kept"]
        assert first != second
        assert second == approx(after, rel=1e-12)
        changed = work.mlp()
        with torch.no_grad():
            changed[3].weight.mul_(2)
        assert second == approx(fastlr.estimate(changed, work.Drawn(), 40, seed=1).value, rel=1e-12)


def same_as_alone(name, got, ranks):
    want = alone(name)
    assert got["n"] == want.n
    assert got["inputs_used"] == want.inputs_used
    if "batch_size" in work.CASES[name]:
        assert got["per_sample"] == want.per_sample.tolist()
        assert got["value"] == want.value
    assert got["per_sample"] == approx(want.per_sample.tolist(), rel=1e-12)
    assert got["value"] == approx(want.value, rel=1e-12)
    assert got["stderr"] == approx(want.stderr, rel=1e-9)
    assert got["per_parameter"] == approx(want.per_parameter, rel=1e-12)
    assert list(got["per_parameter"]) == list(want.per_parameter)
    for part in ("routes", "inputs_digest", "predictive", "probe", "seed", "dtype"):
        assert got[part] == getattr(want, part)
    assert got["training"], "the model's flags are as they were"
    assert bool(got["seen"]) == (got["rank"] == 0), "progress is reported on rank 0"
    assert got["notes"] == ([f"the inputs were shared by {ranks} ranks"] if ranks > 1 else [])


@mark.parametrize(
    "where, who, says",
    [
        ("model error", 1, "ModelError: rank 1: the forward pass fails"),
        (
            "other error",
            1,
            "ModelError: rank 1: Failing does not run on an input float64[3, 6] (KeyError: "
            "'absent')",
        ),
        ("arguments", 2, "DistributedError: rank 2: ValueError: no arguments"),
        ("after", 1, "ModelError: rank 1: too late"),
    ],
)
def test_a_rank_that_fails_is_everybodys_error(where, who, says):
    results = good(run_ranks(3, work.failing, who, where))
    assert [said for said, _ in results] == [says] * 3
    assert max(seconds for _, seconds in results) < 40


def test_a_rank_that_exits():
    results = run_ranks(3, work.failing, 1, "exits")
    assert results[1][0] == "SystemExit: 3"
    assert {results[0][0], results[2][0]} == {"DistributedError: rank 1: SystemExit: 3"}


def test_a_killed_rank():
    (said, seconds), gone = run_ranks(2, work.killed)
    assert isinstance(gone, Ended)
    assert said.startswith("DistributedError: rank 0: rank 1 did not arrive within 1 s: every rank")
    assert seconds < 30


def test_ranks_must_measure_the_same():
    first, second = good(run_ranks(2, work.differing))
    assert first == second
    for said, says in zip(first, DIFFERENCES, strict=True):
        assert said.startswith("InputError: ranks 0 and 1 differ in ") and says in said


def test_one_rank_alone_is_told():
    first, _ = good(run_ranks(2, work.alone))
    plain, error, seconds, (warned,) = first
    assert plain == 10, "without sharded(), one rank measures alone"
    assert "rank 1 did not arrive within 1 s: every rank of the group must enter" in error
    assert 1 <= seconds < 6
    assert warned.startswith("waiting for rank 1, for 1 s at most")


def test_a_rank_that_leaves():
    first, (other, _), third = good(run_ranks(3, work.leaving))
    assert other == "no error"
    for said, seconds in (first, third):
        assert "rank 1 left before the others were done" in said
        assert seconds < 40


def test_memory_that_runs_out_on_one_rank_makes_all_chunks_smaller():
    results = good(run_ranks(2, work.halved))
    for name, (rank, _, options) in work.HALVED.items():
        want = fastlr.estimate(work.mlp(), work.Drawn(), seed=3, **options)
        first, second = (result[name] for result in results)
        for part in ("values", "value", "notes", "chunk", "again"):
            assert first[part] == second[part], (name, part)
        assert first["values"] == approx(want.per_sample.tolist(), rel=1e-12)
        assert first["notes"][0] == "the inputs were shared by 2 ranks"
        assert first["chunk"] <= 6
        assert len(first["notes"]) > 1
        assert all(
            note.startswith(f"rank {rank}: out of memory with") for note in first["notes"][1:]
        )
        assert first["notes"][-1].endswith(f"went on with {first['chunk']}")
        value, notes, chunk = first["again"]
        assert value == approx(want.value, rel=1e-12)
        assert notes == first["notes"]
        assert chunk <= first["chunk"]
        assert all(max(each["sizes again"]) <= 6 for each in (first, second))
    sizes = results[0]["first round"]["sizes"]
    assert sizes.count(8) == 1 and max(sizes[sizes.index(8) + 1 :]) == 4, (
        "rank 0, which has memory, goes on as rank 1"
    )


def test_a_store_that_is_lost():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(
        dist.TCPStore("127.0.0.1", store.port, is_master=False), "lost", 0, 2, 20.0, "together"
    )
    del store
    with refused("rank 0: the store of the group was lost", DistributedError):
        board.share(1)
    with refused("was lost", DistributedError):
        board.share(2)


def test_messages_do_not_pile_up():
    store = dist.HashStore()
    boards = [Board(store, "kept", rank, 2, 20.0, "together") for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda b: [b.share([b.rank, k]) for k in range(50)], boards)
    assert first == second == [[[0, k], [1, k]] for k in range(50)]
    assert store.num_keys() <= 4


def test_nested():
    assert good(run_ranks(1, work.nested))[0] == "no error", "one rank shares nothing"
    for said in good(run_ranks(2, work.nested)):
        assert "entered twice" in said


def test_groups_side_by_side():
    for value, want in good(run_ranks(4, work.in_groups)):
        assert value == want


def test_without_torch_distributed():
    with refused("not initialised"), sharded():
        pass
    with refused("timeout"), sharded(timeout=-1):
        pass


@fixture
def nets(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def test_command_line_under_torchrun(nets, monkeypatch):
    first, second = as_torchrun(2, nets, [*ESTIMATE, "--json", "here.json"])
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert "local redundancy" in first[1]
    assert "shared by 2 ranks" in first[1]
    assert second[1] == second[2] == ""
    record = json.loads((nets / "here.json").read_text())
    monkeypatch.syspath_prepend(nets)
    from nets import net

    torch.manual_seed(0)
    want = fastlr.estimate(net(), fastlr.NoiseImages(size=(3, 8, 8)), 40, batch_size=6)
    assert record["value"] == want.value
    assert record["n"] == 40


def test_command_line_errors_are_printed_once(nets):
    first, second = as_torchrun(2, nets, [*ESTIMATE[:1], "nets:broken", *ESTIMATE[2:]])
    assert first[0] == second[0] == 1
    printed = first[2] + second[2]
    assert printed.startswith("error: rank ") and printed.count("the forward pass fails") == 1, (
        printed
    )


@mark.long
def test_torchrun_itself(nets):
    done = subprocess.run(
        [*TORCHRUN, "-m", "fastlr", *ESTIMATE, "--json", "-"],
        cwd=nets,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["notes"] == ["the inputs were shared by 2 ranks"]


@needs_gpu
def test_on_gpus():
    for got, want in good(run_ranks(2, work.estimates_on_gpu, limit=300, on_gpu=True)):
        assert got == approx(want, rel=1e-5)
