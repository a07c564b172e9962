"""SpecSoT's cache: its operations are those of NumPy, in one place of memory, and it says what it does not do."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.textbook.branching import KVCache, ModelKVCache
from tests.builders import model_config

BATCH, HEADS, CAPACITY, DIM = 2, 3, 12, 4
SHAPE = (BATCH, HEADS, CAPACITY, DIM)


def tokens(count: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((BATCH, HEADS, count, DIM)), jnp.float32)


def cache_of(count: int) -> KVCache:
    cache = KVCache(SHAPE, "cpu", jnp.float32)
    cache.append(tokens(count))
    return cache


def test_a_new_cache_is_empty_and_has_the_sources_fields():
    cache = KVCache(SHAPE, device=jax.devices("cpu")[0], dtype=jnp.bfloat16)
    assert (cache.current_length, cache.capacity, cache.data.shape) == (0, CAPACITY, SHAPE)
    assert cache.data.dtype == jnp.bfloat16 and cache.get_valid().shape == (BATCH, HEADS, 0, DIM)


def test_appended_tokens_follow_each_other():
    cache = KVCache(SHAPE, "cpu", jnp.float32)
    for seed, count in enumerate((3, 1, 6)):
        cache.append(tokens(count, seed))
    assert cache.current_length == 10
    expected = np.concatenate([tokens(count, seed) for seed, count in enumerate((3, 1, 6))], axis=2)
    assert np.array_equal(cache.get_valid(), expected)


def test_concatenation_appends_and_returns_what_is_valid():
    cache = cache_of(3)
    valid = cache.cat(tokens(2, seed=4), dim=2)
    assert np.array_equal(valid, np.concatenate([tokens(3), tokens(2, seed=4)], axis=2)) and cache.current_length == 5


def test_accepted_drafts_close_up_and_the_length_stays_until_it_is_truncated():
    cache = cache_of(10)
    cache.copy(jnp.array([5, 6, 9]), dst_start=5)
    assert cache.current_length == 10
    assert np.array_equal(cache.get_valid(), np.asarray(tokens(10))[:, :, [0, 1, 2, 3, 4, 5, 6, 9, 8, 9]])
    cache.truncate(8)
    assert np.array_equal(cache.get_valid(), np.asarray(tokens(10))[:, :, [0, 1, 2, 3, 4, 5, 6, 9]])


def test_truncated_tokens_stay_in_memory_and_the_next_ones_take_their_place():
    cache = cache_of(9)
    cache.truncate(4)
    assert np.array_equal(cache.data[:, :, :9], tokens(9)) and cache.current_length == 4
    cache.append(tokens(2, seed=5))
    assert np.array_equal(cache.get_valid()[:, :, 4:], tokens(2, seed=5))


operations = st.lists(
    st.tuples(st.sampled_from(["append", "append", "copy", "truncate"]), st.integers(0, 99)), max_size=8
)


@settings(max_examples=30)
@given(operations)
def test_any_operations_are_those_of_numpy_in_one_place_of_memory(drawn):
    cache, data, length = KVCache(SHAPE, "cpu", jnp.float32), np.zeros(SHAPE, np.float32), 0
    place = cache.data.unsafe_buffer_pointer()
    for operation, seed in drawn:
        rng = np.random.default_rng(seed)
        if operation == "append":
            count = int(rng.integers(min(4, CAPACITY - length) + 1))
            data[:, :, length : length + count] = tokens(count, seed)
            cache.append(tokens(count, seed))
            length += count
        elif operation == "copy" and length:
            source = rng.integers(0, length, int(rng.integers(5)))
            start = int(rng.integers(CAPACITY - len(source) + 1))
            data[:, :, start : start + len(source)] = data[:, :, source]
            cache.copy(source, start)
        else:
            length = int(rng.integers(length + 1))
            cache.truncate(length)
        assert cache.current_length == length
    assert np.array_equal(cache.data, data)
    assert cache.data.unsafe_buffer_pointer() == place


def test_an_array_from_before_a_write_is_used_up():
    cache = cache_of(4)
    for write in (lambda: cache.append(tokens(2)), lambda: cache.copy([1, 0], 2)):
        before = cache.data
        write()
        assert before.is_deleted()


def test_a_prefix_is_copied_into_every_row():
    prefix = KVCache((1, HEADS, 6, DIM), "cpu", jnp.float32)
    prefix.append(tokens(5)[:1])
    copies = prefix.repeated(3, CAPACITY)
    assert (copies.data.shape, copies.current_length) == ((3, HEADS, CAPACITY, DIM), 5)
    for row in range(3):
        assert np.array_equal(copies.get_valid()[row], prefix.get_valid()[0])


def test_tokens_are_gathered_from_any_row_and_index():
    cache, rows, slots = cache_of(6), np.array([[1, 0, -1]]), np.array([[4, 2, -1]])
    found = cache.gathered(rows, slots, 5)
    assert (found.data.shape, found.current_length) == ((1, HEADS, 5, DIM), 3)
    assert np.array_equal(found.data[0, :, 0], cache.data[1, :, 4])
    assert np.array_equal(found.data[0, :, 1], cache.data[0, :, 2])
    assert not found.data[0, :, 2].any()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda cache: cache.append(tokens(7)), r"new_kv: 7 tokens after 6, the capacity is 12"),
        (lambda cache: cache.append(tokens(2)[:1]), r"new_kv: \(1, 3, 2, 4\), allowed are shapes \(2, 3, N, 4\)"),
        (lambda cache: cache.cat(tokens(2), dim=1), "dim: 1, allowed is 2"),
        (lambda cache: cache.copy([0, 6], 2), r"src_indices: \[0, 6\], allowed are 0 to 5"),
        (lambda cache: cache.copy([-1], 2), "src_indices: "),
        (lambda cache: cache.copy([0, 1], 11), "dst_start: 11, allowed are 0 to 10"),
        (lambda cache: cache.truncate(7), "length: 7, allowed are 0 to 6"),
        (lambda cache: cache.truncate(-1), "length: -1"),
        (lambda cache: cache.written(tokens(3), 3), "data: float32.* allowed is float32"),
        (lambda cache: cache.written(cache.data, 13), "length: 13, allowed are 0 to 12"),
        (lambda cache: cache.repeated(2, 12), "batch_size of what is repeated: 2"),
        (lambda cache: KVCache((1, 2, 3)), r"shape: \(1, 2, 3\), allowed are \(batch"),
        (lambda cache: KVCache((1, 2, 0, 3)), "shape: "),
        (lambda cache: KVCache(SHAPE, "warp"), "got 'warp'"),
    ],
)
def test_a_misuse_is_refused_by_name_and_changes_nothing(misuse, message):
    cache = cache_of(6)
    data = cache.data
    with pytest.raises(ValueError, match=message):
        misuse(cache)
    assert cache.data is data and cache.current_length == 6


def test_every_operation_is_a_line_of_the_log_of_memory(caplog):
    with caplog.at_level(logging.DEBUG, "jaxinfer.memory"):
        cache = cache_of(6)
        cache.copy([4, 5], 1)
        cache.truncate(3)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "KVCache: allocate 1152 bytes, capacity 12",
        "KVCache: append 6 tokens at 0",
        "KVCache: copy 2 tokens to 1",
        "KVCache: truncate 6 tokens to 3",
    ]


def test_the_caches_of_a_model_move_together():
    cache = ModelKVCache.allocate(model_config(), 8, batch_size=2, device="cpu")
    assert (cache.batch_size, cache.capacity, cache.current_length, len(cache.layers)) == (2, 8, 0, 2)
    cache.written([(k + 1, v + 2) for k, v in cache.data], 5)
    assert {c.current_length for layer in cache.layers for c in layer} == {5}
    cache.truncate(3)
    assert {c.current_length for layer in cache.layers for c in layer} == {3}
    assert [(float(k[0, 0, 0, 0]), float(v[0, 0, 0, 0])) for k, v in cache.data] == [(1, 2)] * 2
