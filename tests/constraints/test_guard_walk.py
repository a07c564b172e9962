"""Walks along drawn tokens: the end that comes does not depend on how many were drawn, nor do forced tokens."""

from __future__ import annotations

import pytest

from jaxinfer.constraints.guard import Guard, WalkLimits, walk
from tests.constraints.guided import EOS, EOS_TOO, compiled, tokens_of

LIMITS = WalkLimits(
    vocab=0, ending_token_ids=frozenset({EOS, EOS_TOO}), num_output_tokens=0, min_tokens=0, max_output_tokens=99,
    num_in_flight=0, forces_ends=True, wants_mask=False,
)  # fmt: skip


def all_tokens(guard: Guard, drawn: list[int], sizes: list[int]) -> list[int]:
    """The output after launches of so many drawn tokens each."""
    found: list[int] = []
    state = guard.start
    for size in sizes:
        part, drawn = drawn[:size], drawn[size:]
        result = walk(guard, state, part, LIMITS._replace(num_output_tokens=len(found)))
        found += [*part[: result.num_kept], *result.forced]
        state = result.state
        if result.is_complete or result.is_refused:
            break
    return found


@pytest.mark.parametrize("drawn", [EOS, EOS_TOO])
def test_of_several_ends_the_same_one_comes_in_launches_of_any_size(drawn):
    guard = Guard(compiled(regex="[a-c]{3}"), [], [EOS, EOS_TOO])
    tokens = [*(token for letter in "abc" for token in tokens_of(letter)), drawn]
    for sizes in ([4], [1, 1, 1, 1], [3, 1], [2, 2]):
        assert all_tokens(guard, tokens, sizes) == [*tokens[:-1], min(EOS, EOS_TOO)]


def test_forced_tokens_before_one_that_may_not_be_drawn_are_kept():
    text = tokens_of("The lamp is lit")
    automaton = compiled(grammar='start: "The lamp is lit"')
    guard = Guard(automaton, [], [EOS], excluded={text[-1]})
    first = walk(guard, guard.start, [], LIMITS)
    assert first.error is None and [*first.forced] == text[:-1]
    then = walk(guard, first.state, [], LIMITS._replace(num_output_tokens=len(text) - 1))
    assert then.num_kept == 0 and not then.forced and "which allowed_token_ids or bad_words exclude" in str(then.error)
