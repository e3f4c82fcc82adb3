"""Every model of the zoo against one backward pass per sample in float64; the rest is refused.

Run all, slow ones included: ``pytest tests/ghost/test_zoo.py -m "long or not long"``.
"""

import warnings

import models_zoo as zoo
import pytest
import torch
from exact import assert_norms, seeded
from expected import needs_gpu
from untouched import untouched

from bench import cases
from fastlr import errors
from fastlr.ghost.fusion import mode as fuse

NAMES = [pytest.param(name, marks=[pytest.mark.long] * make.long) for name, make in zoo.ZOO.items()]
FAULTS = [name for name in zoo.ZOO if name.startswith("fault_")]
# Their forward passes make tensors on the CPU.
OF_THE_CPU = {"masked_rows", "masked_rows_inner", "position_ids_made_inside", "rows_by_data"}
SOUND = [param for param in NAMES if param.values[0] not in FAULTS]


def measure(case, cotangent):
    """The library's answer, with the check that it left the model as it was."""
    import fastlr

    with untouched(case.model), warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.FastlrWarning)
        return fastlr.per_sample_grad_sq_norms(
            case.model, case.x, cotangent, per_parameter=True, **case.kwargs
        )


def masked_norms(case, cotangent):
    """Return the truth from the whole batch, by a backward pass per sample.

    The cotangent of each pass is zero in all other samples.

    It needs no cutting of inputs, and equals ``cases.loop_norms`` when samples do not interact: the
    two check each other.
    """
    params = cases.trainable(case.model)
    rows = []
    for j in range(case.batch):
        z = cases.forward(case.model, case.x, case.kwargs.get("output"))
        v = torch.zeros_like(z)
        v.narrow(case.out_dim, j, 1).copy_(cotangent.narrow(case.out_dim, j, 1))
        grads = torch.autograd.grad(z, list(params.values()), v, materialize_grads=True)
        rows.append(torch.stack([g.to_dense().double().square().sum() for g in grads]))
    return dict(zip(params, torch.stack(rows, 1)))


def refusals(case):
    """The error classes that a case may end in."""
    return tuple(getattr(errors, name) for name in case.expected.split("|") if name != "ok")


def compare(case, cotangent, truth, itself, total):
    """Hold each value within ``itself`` of the truth plus ``total`` of its sample's total.

    Values are squared norms by parameter and sample; both tolerances are relative.
    """
    try:
        got = measure(case, cotangent)
    except refusals(case):
        return
    assert set(got) == set(truth)
    assert (sum(truth.values()) > 0).all(), "a case without gradients tests nothing"
    assert all(
        value.dtype == torch.float64 and value.shape == truth[name].shape
        for name, value in got.items()
    )
    assert_norms(got, truth, itself, total)


def two_truths_agree(case, cotangent, truth):
    """Cutting the inputs and masking the cotangent agree: truth is right, samples independent."""
    if case.name == "embedding_scaled_by_frequency":
        return  # its gradient counts ids over the whole batch
    assert_norms(masked_norms(case, cotangent), truth, 0.0, 1e-12)
    dead = {n for n, value in truth.items() if not value.any()}
    assert dead <= {"extra", "unused.weight", "unused.bias", "b.weight", "b.bias"}
    assert not dead or "d" in case.name, dead


@pytest.mark.parametrize("name", SOUND)
def test_zoo(name):
    exact = zoo.make(name, torch.float64)
    cotangent = cases.cotangent_for(exact)
    truth = cases.loop_norms(exact, cotangent)
    two_truths_agree(exact, cotangent, truth)
    compare(exact, cotangent, truth, itself=1e-10, total=1e-13)
    del exact
    single = zoo.make(name, torch.float32)
    if single.kinked:
        # Hold it to float32 autograd on the same batch, which unfolded has the same kinks.
        truth = masked_norms(single, cotangent.float())
        compare(single, cotangent.float(), truth, itself=0.0, total=2e-3)
        with fuse.unfolded():
            compare(single, cotangent.float(), truth, itself=0.0, total=1e-4)
    else:
        compare(single, cotangent.float(), truth, itself=0.0, total=1e-4)


@needs_gpu
@pytest.mark.parametrize("name", [p for p in SOUND if p.values[0] not in OF_THE_CPU])
def test_zoo_on_a_gpu(name):
    """In float32, against the truth of the CPU: on an H200 the 206 tried were within 1e-6."""
    exact = zoo.make(name, torch.float64)
    cotangent = cases.cotangent_for(exact)
    truth = cases.loop_norms(exact, cotangent)
    single = zoo.make(name, torch.float32).to(torch.device("cuda"))
    found = measure(single, cotangent.float().cuda())
    on_the_cpu = {parameter: value.cpu() for parameter, value in found.items()}
    assert_norms(on_the_cpu, truth, 0.0, 2e-3 if single.kinked else 1e-4)


@pytest.mark.parametrize("name", FAULTS)
def test_zoo_refuses(name):
    case = zoo.make(name, torch.float32)
    with torch.random.fork_rng():
        result = cases.call(case.model, case.x)
    shape = result.shape if isinstance(result, torch.Tensor) else (case.batch, 3)
    with pytest.raises(refusals(case)) as caught:
        measure(case, torch.randn(shape, generator=seeded(1)))
    assert len(str(caught.value)) > 40, "the message names the thing, the reason and the remedy"
