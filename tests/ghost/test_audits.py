"""Audits of what is measured: their number, their price, and what a failure leads to."""

import warnings

import pytest
import torch
from expected import warned
from single_samples import Written
from test_trust import truth
from torch import nn
from torch.testing import assert_close

import fastlr
from fastlr.distributed.sharding import Team
from fastlr.estimator.ranks import holds_on_all
from fastlr.ghost.api import engine_for
from fastlr.ghost.backward import sq_norms
from fastlr.ghost.verification import audit

HIDDEN = {"alpha": 0.0, "scale": 1.0}


def hidden(name):
    """Found by a text: no fingerprint reads it."""
    return globals()["HIDDEN"][name]


def forward(m, x):
    h = m.a(x).tanh()
    h = h - hidden("alpha") * h.detach().mean(0)
    return m.b(h) * hidden("scale")


def written_net():
    return Written(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 4)).eval()


@pytest.fixture(autouse=True)
def nothing_hidden(double):
    HIDDEN.update(alpha=0.0, scale=1.0)


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(audit, "SHARE", 1e9)


def measured(model, x, size=8):
    return fastlr.estimate(
        model, fastlr.TensorInputs(x), n=len(x), batch_size=size, predictive=fastlr.Gaussian()
    )


def test_an_interaction_that_only_an_audit_can_see_is_refused(always):
    model, x, v = written_net(), torch.randn(8, 5), torch.randn(8, 4)
    fastlr.per_sample_grad_sq_norms(model, x, v)
    HIDDEN["alpha"] = 1.0
    with warned("audit"), pytest.raises(fastlr.InteractionError):
        fastlr.per_sample_grad_sq_norms(model, x, v)
    HIDDEN["alpha"] = 0.0
    total = torch.stack(list(truth(model, (x,), v).norms.values())).sum(0)
    assert_close(fastlr.per_sample_grad_sq_norms(model, x, v), total, rtol=1e-9, atol=0)


def test_a_failed_audit_measures_all_chunks_again(always, monkeypatch):
    """A rule that goes wrong in the fourth chunk of five has all chunks measured again.

    A rule whose assumption no longer holds would go wrong so.
    """
    model, x = written_net(), torch.randn(40, 5)
    want, calls = measured(model, x).per_sample, 0

    def wrong(*args, **kwargs):
        nonlocal calls
        calls += 1
        norms = sq_norms(*args, **kwargs)
        return {name: 2 * norm for name, norm in norms.items()} if calls == 4 else norms

    monkeypatch.setattr("fastlr.ghost.norms.sq_norms", wrong)
    with warned("proven anew"):
        again = measured(model, x)
    assert_close(again.per_sample, want, rtol=1e-12, atol=0)
    assert engine_for(model).audits.failed == 1
    assert any("measured again" in note for note in again.notes)


def test_estimates_of_one_model_share_a_proof_and_count_their_audits(proofs):
    model, x = written_net(), torch.randn(16, 5)
    first, second = measured(model, x), measured(model, x)
    fastlr.LocalRedundancy(
        model, fastlr.TensorInputs(x), 16, predictive=fastlr.Gaussian()
    ).measure()
    fastlr.per_sample_grad_sq_norms(model, x, torch.randn(16, 4))
    assert len(proofs) == engine_for(model).known.proofs == 1
    assert first.audits >= 1
    assert first.to_dict()["audits"] == first.audits
    assert f"{first.audits} audited" in str(first)
    assert torch.equal(first.per_sample, second.per_sample)


def test_audits_keep_within_their_share_of_the_time(monkeypatch):
    now = 0.0
    monkeypatch.setattr(audit.time, "perf_counter", lambda: now)
    audits, done = audit.Audits(), 0
    for chunk in range(1000):
        if chunk == 0 or audits.due():
            with audits.timed():
                now += 0.1
            done += 1
        audits.measured(1.0)
    assert 250 <= done <= 300  # 0.03 * 1000 / 0.1
    audits.fail(audit.Disproved(0, ""))
    assert all(audits.due() and audits.draw(4) < 4 for _ in range(9))  # all from then on


def test_what_one_rank_finds_changes_what_all_run():
    class Two(Team):
        """This process is rank 0; rank 1 has found a parameter that only the loop gets right."""

        def share(self, message):
            clean, off, loop, failed = message
            return [message, [clean, off, sorted({*loop, "a.weight"}), failed]]

    model, x = written_net(), torch.randn(16, 5)
    estimator = fastlr.LocalRedundancy(
        model, fastlr.TensorInputs(x), n=16, predictive=fastlr.Gaussian()
    )
    before = estimator.measure()
    assert not holds_on_all(Two(), estimator.engine, estimator.chunks, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastlr.FastlrWarning)
        after = estimator.measure()
    assert after.routes["a.weight"] == "loop"
    assert holds_on_all(Two(), estimator.engine, estimator.chunks, 0)
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
