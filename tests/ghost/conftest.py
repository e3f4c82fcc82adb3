"""Shared by the tests of the engine."""

import pytest

from fastlr.ghost import planner


@pytest.fixture
def checks(monkeypatch):
    """Return a list that grows by an entry for every new structure that is checked."""
    made = []
    check = planner._check_absent

    def counted(chunk):
        made.append(1)
        check(chunk)

    monkeypatch.setattr(planner, "_check_absent", counted)
    return made
