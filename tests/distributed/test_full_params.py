"""Models under fully_shard measure as the unsharded model does, and train on unaffected."""

import itertools
import math

import full_params_ranks as work
import torch
from pytest import approx, importorskip, mark, param
from ranks import Ended, good, run_ranks
from torch.utils._pytree import tree_leaves

import fastlr

# Our hooks of saved tensors from a model's own: before torch 2.11 nothing is folded beside them.
TOLD_APART = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


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


@mark.parametrize("whole", [param(True, marks=mark.long), False])
def test_measurements_within_a_training(whole):
    results = good(run_ranks(2, work.training, whole))
    for rank, each in enumerate(results):
        assert each["as before"]
        assert each["same training"]
        assert each["proofs"] <= 3, "those of the first measurements serve the others"
        close(each["in the midst"], work.norms(work.tokens_model(), work.batch(3, rank)))
        assert each["values"] == results[0]["values"]
        assert len(set(each["values"])) == 2
        assert each["values"][2] == each["values"][3], "nothing moved between the parts of a step"
        want = fastlr.estimate(
            unsharded(each["weights"]), work.DRAWN, 7, predictive=work.PREDICTIVE, batch_size=2
        )
        assert each["values"][-1] == approx(want.value, rel=1e-6)
        assert each["routes"] == want.routes or not (whole or TOLD_APART)
        assert each["per parameter"] == approx(want.per_parameter, rel=1e-5, abs=1e-5 * want.value)


def test_parameters_on_demand():
    says = (
        "the model writes to a parameter of shape (1,) through another tensor",
        "parameter scale of module (root) (Written) change the output but are not in its autograd "
        "graph",
        "No space left on device): let the environment variable TMPDIR name a folder",
    )
    for each in good(run_ranks(2, work.one_by_one)):
        assert all(each["here", True])
        assert not any(each["here", False])
        for whole, demanded in zip(each[True], each[False], strict=True):
            for a, b in zip(tree_leaves(whole), tree_leaves(demanded), strict=True):
                rtol, atol = (0, 0) if TOLD_APART else (1e-4, 1e-6)
                torch.testing.assert_close(
                    a, b, rtol=rtol, atol=atol, msg=lambda text: f"the same bits: {text}"
                )
        assert not each["notes", True][1:]
        assert "in memory only while it was used" in each["notes", False][1]
        assert each["by itself"] == each["notes", False], (
            "too little memory on one rank is too little"
        )
        assert max(each["mapped"]) < 3 << 20, "of eight parameters of a MiB, one or two"
        assert each["left"] == [] and each["kept"] == "None", (
            "no file, and no graph that refers to itself"
        )
        for text, said in zip(says, each["errors"], strict=True):
            assert text in said


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
        assert each["half on demand"]
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
        assert each["on demand"], "the same bits"
