"""Every model of the zoo against one backward pass per sample in float64; the undefined is refused by name.

Run all, slow ones included: ``pytest tests/test_zoo.py -m "long or not long"``.
"""

from __future__ import annotations

import warnings

import models_zoo as zoo
import pytest
import torch

from bench import cases
from fastlr import errors
from fastlr.ghost import fuse

NAMES = [pytest.param(name, marks=[pytest.mark.long] if make.long else []) for name, make in zoo.ZOO.items()]
FAULTS = [name for name in zoo.ZOO if name.startswith("fault_")]
SOUND = [param for param in NAMES if param.values[0] not in FAULTS]


def state(model: torch.nn.Module) -> tuple:
    """What a measurement must leave alone: values, gradients, flags, and the random state."""
    values = [t.clone() for t in (*model.parameters(), *model.buffers())]
    flags = [m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    return values, flags, hooks, [p.grad is None for p in model.parameters()], torch.get_rng_state()


def assert_same_state(before: tuple, after: tuple) -> None:
    """Compare two states bit by bit."""
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0])), "a parameter or buffer changed"
    assert before[1] == after[1], "train/eval or requires_grad flags changed"
    assert before[2] == after[2], "hooks were left behind"
    assert all(after[3]), ".grad was written"
    assert torch.equal(before[4], after[4]), "the random state moved"


def measure(case: cases.Case, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    """The library's answer, with the check that it left the model as it was."""
    import fastlr

    before = state(case.model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errors.FastlrWarning)
            return fastlr.per_sample_grad_sq_norms(case.model, case.x, cotangent, per_parameter=True, **case.kwargs)
    finally:
        assert_same_state(before, state(case.model))


def refusals(case: cases.Case) -> tuple[type, ...]:
    """The error classes that a case may end in."""
    return tuple(getattr(errors, name) for name in case.expected.split("|") if name != "ok")


def compare(
    case: cases.Case, cotangent: torch.Tensor, truth: dict[str, torch.Tensor], itself: float, total: float
) -> None:
    """Hold each parameter and sample to ``itself`` times the truth plus ``total`` times the sample's total."""
    try:
        got = measure(case, cotangent)
    except refusals(case):
        return
    assert set(got) == set(truth)
    sums = torch.stack(list(truth.values())).sum(0)
    assert (sums > 0).all(), "a case without gradients tests nothing"
    for name, want in truth.items():
        assert got[name].dtype == torch.float64 and got[name].shape == want.shape
        error = (got[name] - want).abs()
        allowed = itself * want + total * sums
        assert (error <= allowed).all(), f"{name}: {got[name].tolist()} is not {want.tolist()} (total {sums.tolist()})"


@pytest.mark.parametrize("name", SOUND)
def test_zoo(name: str) -> None:
    exact = zoo.make(name, torch.float64)
    cotangent = cases.cotangent_for(exact)
    truth = cases.loop_norms(exact, cotangent)
    compare(exact, cotangent, truth, itself=1e-10, total=1e-13)
    del exact
    single = zoo.make(name, torch.float32)
    if single.kinked:  # hold it to float32 autograd on the same batch, which unfolded has the same kinks
        truth = cases.masked_norms(single, cotangent.float())
        compare(single, cotangent.float(), truth, itself=0.0, total=2e-3)
        with fuse.unfolded():
            compare(single, cotangent.float(), truth, itself=0.0, total=1e-4)
    else:
        compare(single, cotangent.float(), truth, itself=0.0, total=1e-4)


@pytest.mark.parametrize("name", FAULTS)
def test_zoo_refuses(name: str) -> None:
    case = zoo.make(name, torch.float32)
    with torch.random.fork_rng():
        result = cases.call(case.model, case.x)
    shape = result.shape if isinstance(result, torch.Tensor) else (case.batch, 3)
    with pytest.raises(refusals(case)) as caught:
        measure(case, torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    assert len(str(caught.value)) > 40, "the message names the thing, the reason and the remedy"


@pytest.mark.parametrize("name", SOUND)
def test_two_truths_agree(name: str) -> None:
    """Cutting the inputs and masking the cotangent give the same: the truth is right, samples do not interact."""
    if name == "embedding_scaled_by_frequency":
        pytest.skip("its gradient counts ids over the whole batch")
    case = zoo.make(name, torch.float64)
    cotangent = cases.cotangent_for(case)
    truth = cases.loop_norms(case, cotangent)
    assert cases.deviation(cases.masked_norms(case, cotangent), truth) < 1e-12
    dead = {n for n, value in truth.items() if not value.any()}
    assert dead <= {"extra", "unused.weight", "unused.bias", "b.weight", "b.bias"} and (not dead or "d" in name), dead
