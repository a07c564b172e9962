"""Responses that are kept: bounds of each key, the least recently used ones first, conversations that stay whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.server.response_store import ResponseStore, StoredResponse


def response(size: int = 10, previous: StoredResponse | None = None) -> StoredResponse:
    return StoredResponse("completed", b"x" * (size - 4), b"in[]", previous)


def test_the_least_recently_used_response_makes_room():
    store = ResponseStore(2, 1000)
    for name in ("a", "b"):
        store.put("", name, response())
    assert store.get("", "a") is not None  # used later than b now
    store.put("", "c", response())
    assert [store.get("", name) is not None for name in "abc"] == [True, False, True] and store.size("") == (2, 20)


def test_bytes_are_bounded_too():
    store = ResponseStore(100, 100)
    for number in range(30):
        store.put("", str(number), response(30))
    assert store.size("") == (3, 90) and store.get("", "29") is not None and store.get("", "26") is None
    store.put("", "great", response(101))
    assert store.get("", "great") is None and store.size("") == (3, 90)


def test_a_key_neither_sees_nor_displaces_the_responses_of_another():
    store = ResponseStore(2, 100)
    store.put("one", "a", response())
    for number in range(5):
        store.put("two", str(number), response())
    assert store.get("one", "a") is not None and store.get("two", "a") is None and not store.drop("two", "a")
    assert store.size("one") == (1, 10) and store.size("two") == (2, 20) and store.size("three") == (0, 0)


def test_a_response_that_is_dropped_is_gone_once():
    store = ResponseStore(2, 100)
    store.put("", "a", response())
    assert store.drop("", "a") and not store.drop("", "a") and store.size("") == (0, 0)


def test_a_conversation_stays_whole_when_its_beginning_is_dropped():
    store = ResponseStore(10, 1000)
    first = response(10)
    second = response(20, first)
    store.put("", "first", first)
    store.put("", "second", second)
    store.drop("", "first")
    assert store.get("", "first") is None and store.size("") == (1, 30)
    assert list(second.conversation()) == [first, second]
    store.put("", "third", response(5, first))  # it was found before the first was dropped
    assert store.size("") == (2, 35)
    store.drop("", "second")
    store.drop("", "third")
    assert store.size("") == (0, 0)


def test_no_response_is_kept_where_none_may_be():
    store = ResponseStore(0, 1000)
    store.put("", "a", response())
    assert store.get("", "a") is None and store.size("") == (0, 0)


actions = st.lists(st.tuples(st.sampled_from(["put", "continue", "get", "drop"]), st.integers(0, 9)), max_size=60)


@given(actions=actions, most=st.integers(0, 5), most_bytes=st.integers(0, 120))
def test_bounds_hold_and_bytes_are_counted_whatever_happens(actions, most, most_bytes):
    store = ResponseStore(most, most_bytes)
    for action, number in actions:
        name = str(number)
        if action in ("put", "continue"):
            previous = store.get("", str((number + 1) % 10)) if action == "continue" else None
            store.put("", name, response(7 + 3 * number, previous))
        elif action == "get":
            store.get("", name)
        else:
            store.drop("", name)
        kept = [found for each in range(10) if (found := store.get("", str(each))) is not None]
        needed = {id(one): one for each in kept for one in each.conversation()}
        assert store.size("") == (len(kept), sum(one.num_bytes for one in needed.values()))
        assert len(kept) <= most and store.size("")[1] <= most_bytes
