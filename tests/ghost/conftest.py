"""Shared by the tests of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from fastlr.ghost.verification.prover import Prover


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by an entry for every proof made."""
    made: list[int] = []
    prove = Prover.prove

    def counted(self: Prover, *args: Any, **kwargs: Any) -> None:
        made.append(1)
        prove(self, *args, **kwargs)

    monkeypatch.setattr(Prover, "prove", counted)
    return made
