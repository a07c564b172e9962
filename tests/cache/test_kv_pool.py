"""The pool is as large as was asked for, and steps update it in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxinfer.attention.tensor_parallel import sharding_of_pages
from jaxinfer.cache.kv_pool import KVPool, kv_bytes_per_token
from tests.builders import drain, make_request, model_config, random_prompts


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_the_pool_has_the_bytes_of_its_slots_and_not_one_more(family, dtype):
    config = model_config(family)
    cache = KVPool.allocate(config, num_pages=6, page_size=4, dtype=dtype)
    bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
    assert kv_bytes_per_token(config, dtype) == bytes_per_token
    assert cache.nbytes == 6 * 4 * bytes_per_token


def test_the_pool_has_one_zeroed_array_of_keys_and_one_of_values_for_each_layer():
    config = model_config(num_layers=3)
    cache = KVPool.allocate(config, num_pages=6, page_size=4, dtype=jnp.bfloat16)
    assert len(cache.k) == len(cache.v) == 3
    for array in (*cache.k, *cache.v):
        assert array.shape == (6, 4, config.num_kv_heads, config.head_dim) and array.dtype == jnp.bfloat16
        assert not np.asarray(array).any()
    assert (cache.num_pages, cache.page_size) == (6, 4)
    assert len({array.unsafe_buffer_pointer() for array in (*cache.k, *cache.v)}) == 6


def test_the_heads_of_the_pool_are_split_over_the_tensor_axis():
    mesh = jax.make_mesh((1,), ("tensor",))
    sharding = sharding_of_pages(mesh)
    cache = KVPool.allocate(model_config(), num_pages=2, page_size=4, dtype=jnp.float32, sharding=sharding)
    assert all(array.sharding.spec == PartitionSpec(None, None, "tensor") for array in (*cache.k, *cache.v))


def test_steps_take_the_pool_donated_and_update_it_in_place(idle_engine):
    core = idle_engine()
    addresses = [array.unsafe_buffer_pointer() for array in (*core.kv.k, *core.kv.v)]
    for number, prompt in enumerate(random_prompts([5, 20, 70])):
        core.add_request(make_request(str(number), prompt, max_tokens=6, stream=number == 0))
    steps = 0
    while core.has_unfinished_requests():
        before = core.kv
        core.step()
        steps += 1
        after = core.kv
        assert [array.unsafe_buffer_pointer() for array in (*after.k, *after.v)] == addresses
        if after is not before:
            assert all(array.is_deleted() for array in (*before.k, *before.v))
    assert steps > 4
    drain(core)
