"""The benchmark's machinery: repairs change no gradient, wrong contenders are caught."""

import models_zoo as zoo
import torch
from exact import assert_norms
from expected import refused
from pytest import importorskip, mark, param, raises

from bench import cases, repairs
from bench import test_peers as peers
from bench.paired import Wrong

MODELS = ["vit_thin", "patchtst", param("resnet_thin", marks=mark.long), "mobilenet_thin"]


@mark.parametrize("model", MODELS)
@mark.parametrize("peer", ["loop", "vmap", "opacus", "opacus-ghost", "backpack"])
def test_contenders_agree_with_the_truth_after_repairs(peer, model):
    for package in ("opacus", "backpack"):
        if peer.startswith(package):
            importorskip(package)
    case = zoo.make(model)
    cotangent = cases.cotangent_for(case)
    truth = cases.loop_norms(cases.as_double(case), cotangent)
    before = [p.clone() for p in case.model.parameters()]
    contender = peers.PEERS[peer](case, cotangent)
    found = contender.run()
    if (peer, model) == (
        "backpack",
        "mobilenet_thin",
    ):  # it takes a depthwise convolution for a dense one
        with refused(r"times the truth \(.*block.1.0.weight .* times\)", Wrong):
            peers.hold(found, truth, range(case.batch))
        return
    assert peers.hold(found, truth, range(case.batch))["deviation"] < 1e-4
    again = contender.run()
    assert_norms(
        again, {n: t.double() for n, t in found.items()}, 0.0, 1e-6, context="the second call"
    )
    assert all(torch.equal(a, b) for a, b in zip(before, case.model.parameters()))
    assert all(p.grad is None for p in case.model.parameters())


@mark.parametrize("model", MODELS)
def test_repairs_keep_the_function(model):
    case = cases.as_double(zoo.make(model))
    repaired, notes = repairs.repaired(
        case.model, repairs.layer_norm_as_batch_norm, repairs.frozen_batch_norm
    )
    assert notes, "nothing was repaired: the test shows nothing"
    want = cases.forward(case.model, case.x)
    got = cases.forward(repaired, case.x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    owners = {p.original for p in repaired.parameters() if p.requires_grad}
    assert owners == set(cases.trainable(case.model)), "a parameter was lost"


def test_the_hold_catches_what_is_wrong():
    truth = {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor([3.0, 0.0]).double()}
    right = {"a": torch.tensor([1.0, 9.0, 2.0]), "b": torch.tensor([3.0, 9.0, 0.0])}
    assert peers.hold(right, truth, [0, 2])["deviation"] == 0
    with refused(r"1.1 times the truth \(a 1.1 times\)", Wrong):
        peers.hold({**right, "a": torch.tensor([1.0, 9.0, 2.2])}, truth, [0, 2])
    with refused("no norm for 1 parameters, first b", Wrong):
        peers.hold({"a": right["a"]}, truth, [0, 2])
    with raises(Wrong):
        peers.hold({**right, "b": torch.tensor([float("nan"), 9.0, 0.0])}, truth, [0, 2])


@mark.parametrize(("batch", "want"), [(16, [0, 5, 10, 15]), (3, [0, 1, 2]), (1, [0])])
def test_checked_samples(batch, want):
    assert peers.checked_samples(batch) == want


def test_vmap_takes_tuples_and_inner_sample_axes():
    for name in ("multi_tensor_input", "time_first", "shared_input"):
        case = zoo.make(name, torch.float64)
        cotangent = cases.cotangent_for(case)
        truth = cases.loop_norms(case, cotangent)
        assert_norms(peers.vmap(case, cotangent, chunk=3).run(), truth, 0.0, 1e-12, context=name)
