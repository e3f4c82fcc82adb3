"""Audits of what is measured: their number, their price, and what a failure leads to."""

import warnings

import pytest
import torch
from expected import refused, warned
from single_samples import Written
from test_trust import truth
from torch import nn
from torch.testing import assert_close

import fastlr
from fastlr.distributed.sharding import Team
from fastlr.estimator.ranks import holds_on_all
from fastlr.ghost.api import engine_for
from fastlr.ghost.norms.sq_norms import sq_norms
from fastlr.ghost.trust import audits as audit
from fastlr.ghost.trust.ladder import Rung

GAUSSIAN = fastlr.Gaussian()
HIDDEN = {"alpha": 0.0, "scale": 1.0}


def forward(m, x):
    h = m.a(x).tanh()
    h = h - HIDDEN["alpha"] * h.detach().mean(0)
    return m.b(h) * HIDDEN["scale"]


def written_net():
    return Written(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 4)).eval()


@pytest.fixture(autouse=True)
def nothing_hidden(double):
    HIDDEN.update(alpha=0.0, scale=1.0)


def measured(model, x, size=8, **how):
    return fastlr.estimate(
        model, fastlr.TensorInputs(x), len(x), batch_size=size, predictive=GAUSSIAN, **how
    )


def test_an_interaction_that_begins_between_two_calls_is_refused():
    model, x, v = written_net(), torch.randn(8, 5), torch.randn(8, 4)
    fastlr.per_sample_grad_sq_norms(model, x, v)
    HIDDEN["alpha"] = 1.0
    with warned("audit"), pytest.raises(fastlr.InteractionError):
        fastlr.per_sample_grad_sq_norms(model, x, v, check=True)
    HIDDEN["alpha"] = 0.0
    total = torch.stack(list(truth(model, (x,), v).norms.values())).sum(0)
    assert_close(fastlr.per_sample_grad_sq_norms(model, x, v), total, rtol=1e-9, atol=0)


def test_an_interaction_that_begins_between_two_measurements_is_refused():
    model, x = written_net(), torch.randn(40, 5)
    before = measured(model, x)
    HIDDEN["alpha"] = 1.0
    with warned("audit"), pytest.raises(fastlr.InteractionError):
        measured(model, x)
    HIDDEN["alpha"] = 0.0
    assert_close(measured(model, x).per_sample, before.per_sample, rtol=1e-12, atol=0)


def test_an_interaction_that_begins_in_the_last_chunk_is_refused():
    class Inputs(fastlr.TensorInputs):
        def batch(self, start, stop, **how):
            HIDDEN["alpha"] = float(start == 32)
            return super().batch(start, stop, **how)

    inputs = Inputs(torch.randn(40, 5))
    with warned("audit"), pytest.raises(fastlr.InteractionError):
        fastlr.estimate(written_net(), inputs, 40, batch_size=8, predictive=GAUSSIAN)


@pytest.mark.parametrize(
    ("n", "size", "audits"), [(40, 8, 5), (8, 8, 4), (2, 8, 2), (16, 1, 2), (1, 8, 1)]
)
def test_a_measurement_audits_its_first_and_its_last_chunk(n, size, audits):
    model, x = written_net(), torch.randn(n, 5)
    for _ in range(2):
        found = measured(model, x, size)
        assert found.audits == found.to_dict()["audits"] == audits
        samples = "1 sample" if audits == 1 else f"{audits} samples"
        assert f"checked: {samples} against plain autograd" in str(found)


def test_a_measurement_that_may_stop_early_audits_where_it_stops():
    found = measured(written_net(), torch.randn(600, 5), 64, target_rel_stderr=0.5, min_n=128)
    assert found.n == 128
    assert found.audits == 5


def test_raw_calls_are_audited_as_often_as_asked():
    model, x, v = written_net(), torch.randn(8, 5), torch.randn(8, 4)
    audits = engine_for(model).audits
    for check, passed in [(False, 3), (False, 3), (True, 4), (True, 5), (False, 5)]:
        fastlr.per_sample_grad_sq_norms(model, x, v, check=check)
        assert audits.passed == passed
    fastlr.per_sample_grad_sq_norms(model, x[:6], v[:6], check=False)
    assert audits.passed == 8, "a new shape is audited"
    with refused("check=1", fastlr.InputError):
        fastlr.per_sample_grad_sq_norms(model, x, v, check=1)


def test_a_hook_that_clips_gradients_of_the_callers_size_is_refused():
    """At unit size all three samples are clipped, and scaling by powers of two shows none."""

    def clipped(m, x):
        h = m.a(x)
        h.register_hook(lambda g: g.clamp(-1e3, 1e3))
        return m.b(h)

    model = Written(clipped, a=nn.Linear(5, 6), b=nn.Linear(6, 4)).eval()
    x, v = torch.randn(8, 5), 1e4 * torch.randn(8, 4)
    with pytest.raises(fastlr.errors.ModelError):
        fastlr.per_sample_grad_sq_norms(model, x, v)


def test_a_failed_audit_measures_all_chunks_again(monkeypatch):
    """A rule that goes wrong in the last chunk of five has all chunks measured again.

    A rule whose assumption no longer holds would go wrong so.
    """
    model, x = written_net(), torch.randn(40, 5)
    want, calls = measured(model, x).per_sample, 0

    def wrong(*args, **kwargs):
        nonlocal calls
        calls += 1
        norms = sq_norms(*args, **kwargs)
        return {name: 2 * norm for name, norm in norms.items()} if calls == 5 else norms

    monkeypatch.setattr("fastlr.ghost.engine.sq_norms", wrong)
    with warned("checked again"):
        again = measured(model, x)
    assert_close(again.per_sample, want, rtol=1e-12, atol=0)
    assert engine_for(model).audits.failed == 1
    assert any("measured again" in note for note in again.notes)


def test_measurements_of_one_model_share_a_check(checks):
    model, x = written_net(), torch.randn(16, 5)
    first, second = measured(model, x), measured(model, x)
    fastlr.LocalRedundancy(model, fastlr.TensorInputs(x), 16, predictive=GAUSSIAN).measure()
    fastlr.per_sample_grad_sq_norms(model, x, torch.randn(16, 4))
    assert len(checks) == 1
    assert torch.equal(first.per_sample, second.per_sample)


def test_audits_keep_within_their_share_of_the_time():
    audits, done = audit.Audits(), 0
    for _ in range(1000):
        if audits.samples(4, None):
            audits.spent += 0.1
            done += 1
        audits.measured += 1.0
    assert 250 <= done <= 300  # 0.03 * 1000 / 0.1
    audits.fail(0)
    assert audits.samples(4, False) == [0], "the sample that failed first, then one in every batch"
    assert all(len(audits.samples(4, False)) == 1 for _ in range(9))


def test_what_one_rank_finds_changes_what_all_run():
    class Two(Team):
        """This process is rank 0; rank 1 has stepped down."""

        def share(self, message):
            holds, outdated, _ = message
            return [message, [holds, outdated, int(Rung.BY_SAMPLE)]]

    model, x = written_net(), torch.randn(16, 5)
    estimator = fastlr.LocalRedundancy(
        model, fastlr.TensorInputs(x), n=16, predictive=fastlr.Gaussian()
    )
    before = estimator.measure()
    engine = estimator.engine
    assert not holds_on_all(Two(), engine, estimator.chunks, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastlr.FastlrWarning)
        after = estimator.measure()
    assert set(after.routes.values()) == {"loop"}
    assert holds_on_all(Two(), engine, estimator.chunks, 0)
    assert_close(after.per_sample, before.per_sample, rtol=1e-9, atol=0)


def test_measurements_that_never_hold_say_so(monkeypatch):
    estimator = fastlr.LocalRedundancy(
        written_net(), fastlr.TensorInputs(torch.randn(8, 5)), n=8, predictive=fastlr.Gaussian()
    )
    assert not estimator.measure().notes
    monkeypatch.setattr("fastlr.estimator.estimator.holds_on_all", lambda *arguments: False)
    with warned("may be wrong"):
        found = estimator.measure()
    assert any("may be wrong" in note for note in found.notes)
