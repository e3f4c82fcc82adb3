"""Models under fully_shard measure as the unsharded model does, and train on unaffected."""

import itertools
import math

import full_params_ranks as work
import torch
from pytest import approx, importorskip, mark
from ranks import Ended, good, run_ranks

import fastlr


def unsharded(weights):
    model = work.tokens_model()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()})
    return model


def close(got, want):
    """Per-parameter norms to 1e-5 of each sample's total."""
    assert list(got) == list(want)
    total = sum(want.values())
    for name in want:
        assert (torch.as_tensor(got[name]) - want[name]).abs().le(1e-5 * total).all(), name


def test_measurements_within_a_training():
    results = good(run_ranks(2, work.training))
    for rank, each in enumerate(results):
        assert each["as before"]
        assert each["same training"]
        assert each["checks"] <= 3, "those of the first measurements serve the others"
        close(each["in the midst"], work.norms(work.tokens_model(), work.batch(3, rank)))
        assert each["values"] == results[0]["values"]
        assert len(set(each["values"])) == 2
        assert each["values"][2] == each["values"][3], "nothing moved between the parts of a step"
        want = fastlr.estimate(
            unsharded(each["weights"]), work.DRAWN, 7, predictive=work.PREDICTIVE, batch_size=2
        )
        assert each["values"][-1] == approx(want.value, rel=1e-6)
        assert each["routes"] == want.routes
        assert each["per parameter"] == approx(want.per_parameter, rel=1e-5, abs=1e-5 * want.value)


def test_what_is_written_into_whole_parameters_is_lost():
    model = work.tokens_model()
    for rank, each in enumerate(good(run_ranks(2, work.written_inside))):
        plain, written, after = each["norms"]
        want = work.norms(model, work.batch(3, rank))
        close(plain, want)
        close(after, want)
        moved = work.tokens_model()
        with torch.no_grad():
            moved.embedding.weight.add_(1.0)
            moved.memory.bias_hh_l0.fill_(1.0)
        close(written, work.norms(moved, work.batch(3, rank)))
        assert each["as before"]


def test_parameters_that_do_not_fit():
    value = fastlr.estimate(work.tokens_model(), work.DRAWN, 4, predictive=work.PREDICTIVE).value
    for each in good(run_ranks(2, work.too_little_memory)):
        for said, reason in zip(
            each["errors"], ("0.00 GB free", "CUDA out of memory"), strict=True
        ):
            assert said.startswith(
                "ModelError: out of memory: the whole parameters of the sharded model do not fit "
                "on rank 1 ("
            )
            assert f"{reason}); free memory, or load the full state dict into an unsharded" in said
        assert each["as before"]
        assert each["value"] == approx(value, rel=1e-6), "the failure leaves nothing behind"


@mark.long
def test_ways_to_shard_and_to_measure():
    results = good(run_ranks(2, work.variants))
    model = work.tokens_model()
    held = len(list(model.parameters()))
    value = fastlr.estimate(model, work.DRAWN, 4, predictive=work.PREDICTIVE).value
    norm = float(fastlr.metrics.measures(model, ["weight_norm"])["weight_norm"])
    half = work.norms(model.bfloat16(), work.batch(3, 0))
    for rank, each in enumerate(results):
        assert each["frozen"] and each["exchanges"] == held, "each parameter is exchanged once"
        assert each["shared"] == approx((value, norm, value), rel=1e-6)
        assert each["same output"], "the policy's casts are made without its hooks"
        total = sum(half.values())
        for found in each["half"]:
            for name in half:
                assert (torch.as_tensor(found[name]) - half[name]).abs().le(0.03 * total).all(), (
                    name
                )
        assert each["monitor"][0] == approx(value, rel=1e-6)
        assert [who for who, _ in each["monitor"][1]] == ([0] if rank == 0 else []), (
            "rank 0 keeps the best"
        )
        assert each["routes"] <= {"rule", "node"}


@mark.long
def test_what_is_refused():
    says = [
        "ModelError: the model is under fully_shard: measure within "
        "fastlr.distributed.full_params(model)",
        "ModelError: parameter weight is a sharded DTensor, but the model is not under "
        "torch.distributed.fsdp.fully_shard",
        "ModelError: parameter 0.weight is a sharded DTensor, but the model is not under "
        "torch.distributed.fsdp.fully_shard",
        "ModelError: module (the model) is under fully_shard, but its parameters are DTensors of "
        "tensor parallelism",
        "ModelError: rank 1: no more",
        "InputError: ranks 0 and 1 differ in what they measure: total is 4 and 5",
    ]
    for rank, found in enumerate(good(run_ranks(2, work.refused))):
        assert len(found) == 7
        for text, said in zip(says, found, strict=False):
            assert said.startswith(text), said
        late = (
            "DistributedError: rank 0: rank 1 did not arrive within 1 s"
            if rank == 0
            else "no error"
        )
        assert found[6].startswith(late)


@mark.long
def test_a_model_on_some_of_the_ranks():
    first, (other,), third = good(run_ranks(3, work.some_of_three))
    want = fastlr.estimate(work.tokens_model(), work.DRAWN, 4, predictive=work.PREDICTIVE).value
    says = "the ranks that share this estimate are not those of the sharded model"
    assert says in other
    for value, said in (first, third):
        assert value == approx(want, rel=1e-6)
        assert says in said


@mark.parametrize("fully", [False, True])
def test_threads_of_two_ranks_measure_in_any_order(fully):
    model = work.tokens_model()
    options = {"n": 4, "predictive": work.PREDICTIVE}
    wanted = [fastlr.estimate(model, work.DRAWN, seed=seed, **options).value for seed in range(2)]
    for measured in good(run_ranks(2, work.in_threads, fully)):
        for values, value in zip(measured, wanted, strict=True):
            assert values == approx([value] * 5, rel=1e-6)


@mark.long
def test_a_rank_that_was_killed_is_an_error():
    said, gone = run_ranks(2, work.killed)
    assert isinstance(gone, Ended)
    assert said[0].startswith("DistributedError: ")
    assert said[1] < 30


@mark.long
@mark.parametrize(
    ("name", "mesh"),
    [
        *itertools.product(["gpt2", "llama", "vit", "mixtral"], [(2,), (4,)]),
        ("gpt2", (2, 2)),
        ("lora", (2,)),
        ("checkpointed", (2,)),
    ],
)
def test_transformers(name, mesh):
    importorskip("peft" if name == "lora" else "transformers")
    model, _, x, predictive, inputs = work.big(name)
    want = fastlr.per_sample_grad_sq_norms(model, x, work.cotangent, per_parameter=True)
    value = fastlr.estimate(model, inputs, 6, predictive=predictive, batch_size=2).value
    for each in good(run_ranks(math.prod(mesh), work.language_models, name, mesh)):
        close(each["norms"], want)
        assert each["value"] == approx(value, rel=1e-5)
        assert each["as before"]
