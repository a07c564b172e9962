"""Prompt lookup on the device, against a search in plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.speculative.ngram import look_up

CAPACITY = 40


def expected_place(tokens: list[int], shortest: int, longest: int) -> int | None:
    """The place after the latest of the longest earlier occurrences of the sequence's end."""
    for size in range(longest, shortest - 1, -1):
        ending = tokens[-size:]
        places = [end for end in range(size, len(tokens)) if tokens[end - size : end] == ending]
        if len(ending) == size and places:
            return places[-1]
    return None


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 3), (2, 8)])
def test_the_place_is_that_of_a_search_token_by_token(shortest, longest):
    rng = np.random.default_rng(longest)
    lengths = rng.integers(1, CAPACITY + 1, 200)
    rows = [rng.integers(0, 2 + row % 4, CAPACITY) for row in range(200)]
    place, found = look_up(
        jnp.asarray(np.stack(rows), jnp.int32), jnp.asarray(lengths, jnp.int32), shortest=shortest, longest=longest
    )
    expected = [
        expected_place(row[:length].tolist(), shortest, longest) for row, length in zip(rows, lengths, strict=True)
    ]
    assert np.asarray(found).tolist() == [where is not None for where in expected]
    for got, where in zip(np.asarray(place).tolist(), expected, strict=True):
        assert where is None or got == where
    assert 0 < sum(where is None for where in expected) < 200


def test_what_stands_behind_the_end_of_a_sequence_is_not_looked_at():
    tokens = jnp.asarray([[1, 2, 3, 9, 9, 1, 2, 7, 1, 2]], jnp.int32)
    place, found = look_up(tokens, jnp.asarray([7], jnp.int32), shortest=2, longest=2)
    assert bool(found[0]) and int(place[0]) == 2
