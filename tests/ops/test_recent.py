"""The cache that keeps what was used last."""

from fastlr.ops.recent import Recent


def test_what_was_used_longest_ago_is_dropped():
    recent = Recent[str, int](2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1  # used: now b is the older one
    recent.put("c", 3)
    assert recent.get("b") is None
    assert recent.get("a") == 1
    assert len(recent) == 2


def test_a_value_put_anew_counts_as_used():
    recent = Recent[str, int](2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.put("a", 4) == 4
    recent.put("c", 3)
    assert recent.get("b") is None
    assert recent.get("a") == 4


def test_forgets_the_keys_that_fit_or_all():
    recent = Recent[tuple[str, int], int](4)
    for key in (("a", 1), ("a", 2), ("b", 1)):
        recent.put(key, 0)
    recent.forget(lambda key: key[0] == "a")
    assert recent.get(("a", 1)) is None
    assert recent.get(("b", 1)) == 0
    recent.forget()
    assert len(recent) == 0
