"""Shared by the tests of the engine."""

import pytest

from fastlr.ghost.verification.prover import Prover


@pytest.fixture
def proofs(monkeypatch):
    """Return a list that grows by an entry for every proof made."""
    made = []
    prove = Prover.prove

    def counted(self, *args, **kwargs):
        made.append(1)
        prove(self, *args, **kwargs)

    monkeypatch.setattr(Prover, "prove", counted)
    return made
