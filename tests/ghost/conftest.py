"""Shared by the tests of the engine."""

import pytest

from fastlr.ghost.trust import planning


@pytest.fixture
def checks(monkeypatch):
    """Return a list that grows by an entry for every new structure that is checked."""
    made = []
    check = planning.require_no_hidden_parameters

    def counted(*given):
        made.append(1)
        return check(*given)

    monkeypatch.setattr(planning, "require_no_hidden_parameters", counted)
    return made
