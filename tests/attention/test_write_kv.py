"""Writing new keys and values into the pool's slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.rotate_and_write.reference import write_kv

PAGES, PAGE_SIZE, HEADS, DIM = 5, 4, 2, 3
SLOTS = PAGES * PAGE_SIZE


def pool(dtype=jnp.float32) -> jax.Array:
    return jnp.arange(SLOTS * HEADS * DIM, dtype=dtype).reshape(PAGES, PAGE_SIZE, HEADS, DIM)


def new(tokens: int) -> jax.Array:
    return -1.0 - jnp.arange(tokens * HEADS * DIM, dtype=jnp.float32).reshape(tokens, HEADS, DIM)


def test_each_token_lands_in_its_slot_and_nothing_else_changes():
    slots = np.random.default_rng(0).permutation(SLOTS)[:7]
    expected = np.array(pool()).reshape(SLOTS, HEADS, DIM)
    expected[slots] = np.array(new(7))
    written = write_kv(pool(), new(7), jnp.asarray(slots, jnp.int32))
    assert np.array_equal(np.asarray(written).reshape(SLOTS, HEADS, DIM), expected)


def test_tokens_whose_slot_is_out_of_range_are_dropped():
    slots = jnp.asarray([SLOTS, 3, SLOTS + 1, SLOTS + 1000], jnp.int32)
    expected = np.array(pool()).reshape(SLOTS, HEADS, DIM)
    expected[3] = np.array(new(4))[1]
    assert np.array_equal(np.asarray(write_kv(pool(), new(4), slots)).reshape(SLOTS, HEADS, DIM), expected)


def test_nan_of_a_dropped_token_goes_nowhere():
    written = write_kv(pool(), jnp.full((2, HEADS, DIM), jnp.nan), jnp.asarray([SLOTS, SLOTS + 1], jnp.int32))
    assert np.array_equal(np.asarray(written), np.asarray(pool()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_values_are_rounded_to_the_pools_dtype(dtype):
    values = jnp.asarray(np.random.default_rng(1).standard_normal((2, HEADS, DIM)), jnp.float32)
    written = write_kv(pool(dtype), values, jnp.asarray([0, 9], jnp.int32))
    assert written.dtype == dtype
    assert np.array_equal(np.asarray(written).reshape(SLOTS, HEADS, DIM)[9], np.asarray(values[1].astype(dtype)))


def test_a_donated_pool_is_updated_in_place():
    donated = pool() + 0
    address = donated.unsafe_buffer_pointer()
    written = jax.jit(write_kv, donate_argnums=0)(donated, new(1), jnp.asarray([2], jnp.int32))
    assert donated.is_deleted() and written.unsafe_buffer_pointer() == address
