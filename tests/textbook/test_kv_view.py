"""One sequence over a lane of the pool: what it holds after any operations, and that the pool stays where it is."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.textbook.kv_view import KVCache

LAYERS, NUM_PAGES, PAGE_SIZE, HEADS, DIM = 2, 9, 4, 2, 3
PAGES = (6, 0, 7, 3)  # of the lane, in no order
CAPACITY = len(PAGES) * PAGE_SIZE


def random_pool(dtype: jnp.dtype = jnp.float32) -> KVPool:
    rng = np.random.default_rng(0)
    shape = (NUM_PAGES, PAGE_SIZE, HEADS, DIM)
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2 * LAYERS)]
    return KVPool(k=tuple(arrays[::2]), v=tuple(arrays[1::2]))


def tokens(count: int, seed: int = 1) -> tuple[list[jax.Array], list[jax.Array]]:
    """Keys and values of each layer."""
    rng = np.random.default_rng(seed)
    drawn = jnp.asarray(rng.standard_normal((2, LAYERS, count, HEADS, DIM)), jnp.float32)
    return list(drawn[0]), list(drawn[1])


def contents(cache: KVCache) -> np.ndarray:
    """[k or v, layer, token, head, dim]"""
    return np.array(cache.get_valid())


def lane_of(pool: KVPool, pages: Sequence[int] = PAGES) -> np.ndarray:
    """[k or v, layer, slot, head, dim] of all slots of a lane"""
    stacked = np.array([pool.k, pool.v])
    return stacked[:, :, list(pages)].reshape(2, LAYERS, -1, HEADS, DIM)


def addresses(pool: KVPool) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in (*pool.k, *pool.v)]


def test_a_view_starts_empty_or_with_what_the_lane_holds_already():
    pool = random_pool()
    assert (KVCache(pool, PAGES).current_length, KVCache(pool, PAGES).capacity) == (0, CAPACITY)
    assert contents(KVCache(pool, PAGES)).shape == (2, LAYERS, 0, HEADS, DIM)
    assert np.array_equal(contents(KVCache(pool, PAGES, 7)), lane_of(pool)[:, :, :7])


def test_appended_tokens_stand_behind_each_other_across_pages():
    cache = KVCache(random_pool(), PAGES)
    for seed, count in enumerate((3, 1, 6)):
        cache.append(*tokens(count, seed))
    expected = np.concatenate([np.array(tokens(count, seed)) for seed, count in enumerate((3, 1, 6))], axis=2)
    assert cache.current_length == 10
    assert np.array_equal(contents(cache), expected)
    assert np.array_equal(lane_of(cache.pool)[:, :, :10], expected)


def test_accepted_drafts_close_up_and_the_lane_ends_behind_them():
    cache = KVCache(random_pool(), PAGES)
    cache.append(*tokens(10))
    cache.copy([5, 6, 9], dst_start=5)
    assert cache.current_length == 8
    assert np.array_equal(contents(cache), np.array(tokens(10))[:, :, [0, 1, 2, 3, 4, 5, 6, 9]])


@pytest.mark.parametrize("source", [[0, 1, 2, 3, 4], [5, 4, 3, 2, 1], [2, 2, 2]])
def test_moves_that_overlap_take_every_token_as_it_was_before_all_of_them(source):
    cache = KVCache(random_pool(), PAGES)
    cache.append(*tokens(6))
    cache.copy(source, dst_start=1)
    assert np.array_equal(contents(cache), np.array(tokens(6))[:, :, [0, *source]])


def test_truncating_forgets_the_end_and_what_is_appended_then_takes_its_place():
    cache = KVCache(random_pool(), PAGES)
    cache.append(*tokens(9))
    cache.truncate(4)
    assert np.array_equal(contents(cache), np.array(tokens(9))[:, :, :4])
    cache.append(*tokens(2, seed=5))
    assert np.array_equal(contents(cache)[:, :, 4:], np.array(tokens(2, seed=5)))


def test_what_one_lane_holds_can_be_appended_to_another_in_the_same_pool():
    one = KVCache(random_pool(), PAGES)
    one.append(*tokens(5))
    other = KVCache(one.pool, (1, 8))
    other.append(*one.get_valid())
    one.pool = other.pool
    assert np.array_equal(contents(one), contents(other))


operations = st.lists(
    st.tuples(st.sampled_from(["append", "append", "copy", "truncate"]), st.integers(0, 2**32)), max_size=8
)


@settings(max_examples=40)
@given(operations)
def test_any_operations_are_those_of_numpy_and_touch_no_slot_of_anybody_else(drawn):
    cache, length = KVCache(random_pool(), PAGES), 0
    expected = lane_of(cache.pool)
    others = [page for page in range(NUM_PAGES) if page not in PAGES]
    of_others = lane_of(cache.pool, others)
    at = addresses(cache.pool)
    for operation, seed in drawn:
        rng = np.random.default_rng(seed)
        if operation == "append":
            new = tokens(int(rng.integers(min(5, CAPACITY - length) + 1)), seed)
            end = length + len(new[0][0])
            expected[:, :, length:end] = np.array(new)
            cache.append(*new)
        elif operation == "copy" and length:
            start = int(rng.integers(length + 1))
            source = rng.integers(0, length, int(rng.integers(min(5, CAPACITY - start) + 1)))
            end = start + len(source)
            expected[:, :, start:end] = expected[:, :, source]
            cache.copy(source, start)
        else:
            end = int(rng.integers(length + 1))
            cache.truncate(end)
        length = end
        assert cache.current_length == length
    assert np.array_equal(contents(cache), expected[:, :, :length])
    assert np.array_equal(lane_of(cache.pool), expected)
    assert np.array_equal(lane_of(cache.pool, others), of_others)
    assert addresses(cache.pool) == at


@pytest.mark.parametrize("count", [1, 4])
def test_the_pool_is_written_where_it_lies_and_the_object_from_before_is_used_up(count):
    cache = KVCache(random_pool(), PAGES)
    at = addresses(cache.pool)
    for write in (lambda: cache.append(*tokens(count)), lambda: cache.copy(list(range(count)), 1)):
        before = cache.pool
        write()
        assert addresses(cache.pool) == at
        assert all(array.is_deleted() for array in (*before.k, *before.v))


def test_what_writes_nothing_keeps_the_pool():
    cache = KVCache(random_pool(), PAGES, 5)
    pool = cache.pool
    cache.append(*tokens(0))
    cache.copy([], 4)
    cache.truncate(3)
    cache.get_valid()
    assert cache.pool is pool and cache.current_length == 3 and not pool.k[0].is_deleted()


def test_what_is_appended_is_rounded_to_the_pools_dtype():
    cache = KVCache(random_pool(jnp.bfloat16), PAGES)
    cache.append(*tokens(2))
    k, v = cache.get_valid()
    assert {x.dtype for x in (*k, *v)} == {jnp.dtype(jnp.bfloat16)}
    assert np.array_equal(k[0], tokens(2)[0][0].astype(jnp.bfloat16))


def wrong_heads() -> tuple[list[jax.Array], list[jax.Array]]:
    k, v = tokens(2)
    return k, [x[:, :1] for x in v]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda cache: cache.append(*tokens(11)), "11 tokens from lane index 6 on do not fit into a lane of 16"),
        (lambda cache: cache.append(*wrong_heads()), "k, v: "),
        (lambda cache: cache.append(tokens(2)[0][:1], tokens(2)[1]), "k, v: "),
        (lambda cache: cache.copy([0, 6], 2), "src_indices: "),
        (lambda cache: cache.copy([-1], 2), "src_indices: "),
        (lambda cache: cache.copy([0], 7), "dst_start: 7, allowed are 0 to 6"),
        (lambda cache: cache.copy([0] * 12, 5), "12 tokens from lane index 5 on do not fit"),
        (lambda cache: cache.truncate(7), "length: 7, allowed are 0 to 6"),
        (lambda cache: cache.truncate(-1), "length: -1"),
    ],
)
def test_a_misuse_is_refused_by_name_and_changes_nothing(misuse, message):
    cache = KVCache(random_pool(), PAGES, 6)
    pool = cache.pool
    with pytest.raises(ValueError, match=message):
        misuse(cache)
    assert cache.pool is pool and cache.current_length == 6


@pytest.mark.parametrize(
    ("pages", "length", "message"),
    [
        ((1, 9), 0, r"pages: \[1, 9\], allowed are distinct ones of the pool's 9"),
        ((-1, 2), 0, "pages: "),
        ((2, 3, 2), 0, "pages: "),
        ((2, 3), 9, "length: 9, allowed are 0 to 8"),
    ],
)
def test_a_lane_that_cannot_be_is_refused(pages, length, message):
    with pytest.raises(ValueError, match=message):
        KVCache(random_pool(), pages, length)


def test_the_sources_arguments_are_sent_to_the_sources_class():
    with pytest.raises(TypeError, match=r"pool: \(1, 2, 8, 4\), .* is jaxinfer\.textbook\.branching\.KVCache"):
        KVCache((1, 2, 8, 4), "cpu", jnp.float32)
