"""Random models, several batches in one engine: right, or refused where samples interact.

``make fuzz`` draws many.
"""

import os
import secrets
import sys
import warnings

import pytest
import torch
from exact import assert_norms, truth
from fuzz_models import Model, inputs_of, specs
from hypothesis import HealthCheck, given, seed, settings

import fastlr
from fastlr.ghost.api import engine_for
from fastlr.ghost.trust.audits import Draw

# Of the value and of its sample's total; float64, float32.
TOLERANCES = {True: (1e-8, 1e-11), False: (5e-3, 5e-4)}
SEEN = {True: 1e-5, False: 1e-2}  # samples so far apart from themselves alone interact beyond doubt


@pytest.fixture(autouse=True)
def dtype_afterwards():
    yield
    torch.set_default_dtype(torch.float32)


# The audits of a measurement of one chunk.
A_MEASUREMENT = Draw.of_chunk(first=True, last=True)


def in_single(model, xs, v):
    """Return each sample's norms by plain autograd in float32, where that is far from float64's."""
    parameters, norms = dict(model.named_parameters()), []
    for j in range(len(v)):
        z = model(*(x[[j, j]] if torch.is_tensor(x) and len(x) == len(v) else x for x in xs))
        own = torch.zeros_like(z)
        own[0] = v[j]
        grads = torch.autograd.grad(z, list(parameters.values()), own, materialize_grads=True)
        norms.append(torch.stack([g.double().square().sum() for g in grads]))
    return dict(zip(parameters, torch.stack(norms, 1), strict=True))


def check_drawn(spec):
    """Compare every batch that the model of ``spec`` is measured on with the truth."""
    torch.set_default_dtype(torch.float64 if spec.double else torch.float32)
    torch.manual_seed(spec.seed)
    model = Model(spec)
    for number, batch in enumerate(spec.batches):
        model.set(batch.on and batch.count > 1)
        xs = tuple(inputs_of(spec, batch))
        v = torch.randn(batch.count, 3) if spec.pooled else torch.randn(batch.count, spec.time, 3)
        want = truth(model, xs, v)
        what = f"call {number} of check({spec!r})"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", fastlr.FastlrWarning)
                got = engine_for(model).run(xs, v, A_MEASUREMENT).per_parameter
        except fastlr.errors.ModelError as error:
            assert want.interact, (
                f"refused, though samples do not interact: {type(error).__name__}: {error}; {what}"
            )
        else:
            relative, of_total = TOLERANCES[spec.double]
            of_total += want.apart if want.apart < SEEN[spec.double] else 0  # faint: seen or not
            try:
                assert_norms(got, want.norms, relative, of_total, context=what)
            except AssertionError:
                if spec.double:
                    raise
                assert_norms(got, in_single(model, xs, v), 1e-3, 1e-6, context=what)


def run(examples, **options):
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )


@run(15, derandomize=True)
@given(specs())
def test_random_models(spec):
    check_drawn(spec)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_random_models(capsys):
    """``FASTLR_FUZZ`` models (200) with a fresh seed, or with that of ``FASTLR_FUZZ_SEED``."""
    number = int(os.environ.get("FASTLR_FUZZ") or 200)
    fresh = int(os.environ.get("FASTLR_FUZZ_SEED") or secrets.randbits(32))
    with capsys.disabled():
        # Which parallel workers share.
        print(f"\n{number} random models, FASTLR_FUZZ_SEED={fresh}", file=sys.stderr)
    seed(fresh)(run(number)(given(specs())(check_drawn)))()
