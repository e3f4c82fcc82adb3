"""The cache of what was used most recently."""

from fastlr.ops.recent import Recent


def test_the_entry_used_least_recently_goes():
    recent = Recent(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    assert recent.put("c", 3) == 3
    assert recent.get("b") is None
    assert "a" in recent
    assert "c" in recent
    assert len(recent) == 2


def test_a_value_may_be_replaced_and_forgotten():
    recent = Recent()
    recent.put("a", 1)
    recent.put("a", 2)
    assert recent.get("a") == 2
    assert len(recent) == 1
    recent.clear()
    assert recent.get("a") is None
    assert not len(recent)
