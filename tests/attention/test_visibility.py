"""The visibility rule against the words that define it, and against what lanes of every kind are meant to show."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_pallas.visibility import visible
from tests.attention.lanes import Lane, block_lane, branched_lane, plain_lane, tail_words, windowed, with_tail

LANE = 160  # lane indices and queries are padded to one shape, so that nothing compiles twice
QUERIES = 100


def sees(
    index: int, first: int, limit: int, branch: int, tail: int, trunk_len: int, tail_start: int, owner: int
) -> bool:
    """The rule in plain Python; `tail` is one integer of any number of bits."""
    if index >= tail_start:
        return bool(tail >> (index - tail_start) & 1)
    return first <= index <= limit and (index < trunk_len or owner == branch)


def rule(firsts, limits, branches, bits, trunk_len: int, tail_start: int, owners) -> np.ndarray:
    """bool [queries, lane] from `visible`."""
    return np.asarray(
        visible(
            jnp.arange(len(owners), dtype=jnp.int32)[None],
            limit=jnp.asarray(limits, jnp.int32)[:, None],
            branch=jnp.asarray(branches, jnp.int32)[:, None],
            tail_bits=jnp.asarray(bits, jnp.uint32)[:, None],
            trunk_len=jnp.int32(trunk_len),
            tail_start=jnp.int32(tail_start),
            index_branch=jnp.asarray(owners, jnp.int32)[None],
            first=None if firsts is None else jnp.asarray(firsts, jnp.int32)[:, None],
        )
    )


@pytest.mark.parametrize("is_bounded", [False, True])
@pytest.mark.parametrize("words", [0, 1, 2, 3])
@given(data=st.data())
def test_the_rule_is_what_the_design_says_for_any_integers(words, is_bounded, data):
    index = st.integers(-1, LANE)
    trunk_len, tail_start = data.draw(index), data.draw(index)
    owners = data.draw(st.lists(st.integers(-2, 2), min_size=LANE, max_size=LANE))
    queries = data.draw(
        st.lists(
            st.tuples(
                index if is_bounded else st.just(0), index, st.integers(-1, 2), st.integers(0, 2 ** (32 * words) - 1)
            ),
            min_size=8,
            max_size=8,
        )
    )
    firsts, limits, branches, tails = zip(*queries, strict=True)
    bits = np.array([[tail >> (32 * w) & 0xFFFFFFFF for w in range(words)] for tail in tails], np.uint32)
    given_firsts = firsts if is_bounded else None
    got = rule(given_firsts, limits, branches, bits.reshape(8, words), trunk_len, tail_start, owners)
    expected = [[sees(i, *query, trunk_len, tail_start, owners[i]) for i in range(LANE)] for query in queries]
    assert np.array_equal(got, expected)


def check_lane(lane: Lane, words: int) -> None:
    """The rule, given the lane's integers, shows each query exactly what it was built to see."""
    owners = np.full(LANE, -1)
    per_slot = np.repeat(lane.owners, lane.page_size)[:LANE]
    owners[: len(per_slot)] = per_slot
    firsts, limits, branches = (np.full(QUERIES, -1) for _ in range(3))
    bits = np.zeros((QUERIES, words), np.uint32)
    expected = np.zeros((QUERIES, LANE), bool)
    for at, query in enumerate(lane.queries):
        firsts[at], limits[at], branches[at] = query.first, query.limit, query.branch
        bits[at] = tail_words(query.tail, words)
        expected[at, sorted(query.sees)] = True
    assert np.array_equal(rule(firsts, limits, branches, bits, lane.trunk_len, lane.tail_start, owners), expected)


page_sizes = st.sampled_from([1, 4, 16])
seeds = st.integers(0, 2**32).map(np.random.default_rng)
branch_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=4)


@given(page_size=page_sizes, context=st.integers(0, 80), new=st.integers(1, 80))
def test_plain_tokens_see_themselves_and_what_came_before(page_size, context, new):
    check_lane(plain_lane(page_size, context, new), words=0)


@given(page_size=page_sizes, context=st.integers(0, 80), block=st.integers(1, 32))
def test_tokens_of_a_diffusion_block_see_the_whole_block_and_what_came_before(page_size, context, block):
    check_lane(block_lane(page_size, context, block), words=0)


@given(page_size=page_sizes, rng=seeds, trunk=st.integers(0, 40), lengths=branch_lengths, new=st.integers(1, 4))
def test_a_branch_sees_the_trunk_and_its_own_tokens_however_the_pages_interleave(page_size, rng, trunk, lengths, new):
    check_lane(branched_lane(rng, page_size, trunk, lengths, new=new), words=0)


@pytest.mark.parametrize("words", [1, 2, 3])
@given(page_size=page_sizes, rng=seeds, context=st.integers(1, 60), data=st.data())
def test_a_draft_node_sees_its_ancestors_and_the_context(words, page_size, rng, context, data):
    nodes = data.draw(st.integers(32 * (words - 1) + 1, 32 * words))
    check_lane(with_tail(rng, plain_lane(page_size, context - 1, 1), nodes), words)


@given(page_size=page_sizes, rng=seeds, trunk=st.integers(0, 20), nodes=st.integers(1, 60), data=st.data())
def test_draft_nodes_of_several_branches_see_their_own_branch_alone(page_size, rng, trunk, nodes, data):
    lengths = data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=3))
    check_lane(with_tail(rng, branched_lane(rng, page_size, trunk, lengths), nodes), words=2)


windows = st.integers(1, 40)


@given(page_size=page_sizes, rng=seeds, trunk=st.integers(0, 40), lengths=branch_lengths, window=windows)
def test_a_window_of_a_branch_ends_at_a_lane_index_however_the_pages_interleave(page_size, rng, trunk, lengths, window):
    check_lane(windowed(branched_lane(rng, page_size, trunk, lengths, new=2), window), words=0)


@given(page_size=page_sizes, rng=seeds, context=st.integers(1, 60), nodes=st.integers(1, 32), window=windows)
def test_a_window_of_a_draft_node_has_bits_of_its_own(page_size, rng, context, nodes, window):
    check_lane(windowed(with_tail(rng, plain_lane(page_size, context - 1, 1), nodes), window), words=1)
