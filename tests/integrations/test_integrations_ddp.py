"""Two processes train together (gloo): none hangs, rank 0 measures, training stays the same."""

import integration_worker as work
from pytest import approx, importorskip, mark
from ranks import good, run_ranks


def test_hand_written_loop():
    (same, values, wanted), second = good(run_ranks(2, work.by_hand))
    assert same and second[0]
    assert values == {"nobody": None, "both": wanted, "first": wanted}
    assert second[1] == {"nobody": None, "both": None, "first": None}


def test_ranks_measure_together_with_the_running_statistics_of_rank_0():
    (values, alone, logged, same), second = good(run_ranks(2, work.together))
    assert values == alone
    assert not set(alone) & set(second[1])
    assert (logged, same) == (3, True)
    assert (second[0], *second[2:]) == (values, 0, True)


@mark.long
def test_lightning():
    importorskip("lightning")
    first, second = results = good(run_ranks(2, work.by_lightning, limit=400))
    for result in results:
        assert result["same"]
        assert result["steps"] == 2
        assert result["value"] == result["wanted"] == approx(result["metric"])
    assert "Categorical(dim=0)" in first["error"]
    assert "failed on the main process" in second["error"]


@mark.long
def test_hugging_face(tmp_path):
    importorskip("accelerate")
    results = good(run_ranks(2, work.by_huggingface, tmp_path, limit=400))
    for result in results:
        assert result["values"] == results[0]["values"]
        assert len(result["values"]) == 3
        assert result["value"] == approx(result["wanted"], rel=1e-9)
        assert result["best"] == min(result["values"][1:])


@mark.long
def test_lightning_sharded():
    importorskip("lightning")
    for result in good(run_ranks(2, work.by_lightning_sharded, limit=400)):
        assert result["same"]
        assert result["steps"] == 2
        assert result["value"] == approx(result["wanted"], rel=1e-6)
        assert result["value"] == approx(result["metric"])


@mark.long
@mark.parametrize("bf16", [False, True])
def test_hugging_face_sharded(tmp_path, bf16):
    importorskip("accelerate")
    results = good(run_ranks(2, work.by_huggingface_sharded, tmp_path, bf16, limit=400))
    for result in results:
        assert result["units"] == [
            "FSDPGPT2LMHeadModel",
            "FSDPEmbedding",
            "FSDPGPT2Block",
            "FSDPLayerNorm",
            "FSDPLinear",
        ]
        assert result["same"]
        assert result["values"] == results[0]["values"]
        assert len(result["values"]) == 3
        assert (
            result["value"]
            == result["by hand"]
            == approx(result["wanted"], rel=0.05 if bf16 else 1e-6)
        )
