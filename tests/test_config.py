"""The engine's settings are refused where they are made, naming the field, the value and what is allowed."""

import re

import jax.numpy as jnp
import pytest

from jaxinfer.config import EngineConfig, resolve_dtype

GOOD = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_tokens": 512}


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        *(
            (field, value, "an integer of at least 1")
            for field in (
                "max_model_len",
                "max_num_seqs",
                "max_num_batched_tokens",
                "page_size",
                "kv_cache_tokens",
                "max_decode_steps",
            )
            for value in (0, -1, 1.5, "8", None, True)
        ),
        ("page_size", 3, "a power of two up to 256"),
        ("prefix_cache_tokens", 0, "an integer of at least 1"),
        ("prefix_cache_tokens", 15, "None or at least a page of 16"),
        ("prefix_cache_policy", "random", "one of lru, lfu"),
        ("page_size", 512, "a power of two up to 256"),
        ("scheduling_policy", "lifo", "one of fcfs, priority"),
        ("scheduling_policy", None, "one of fcfs, priority"),
        ("attention_backend", "cuda", "one of auto, xla"),
        ("seed", "seven", "an integer"),
        ("seed", 1.5, "an integer"),
    ],
)
def test_a_bad_value_is_refused_by_field_and_value(field, value, allowed):
    with pytest.raises(ValueError, match=rf"^{field} must be {re.escape(allowed)}.*got {re.escape(repr(value))}$"):
        EngineConfig(**{**GOOD, field: value})


def test_fewer_tokens_in_a_step_than_rows_are_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        EngineConfig(**{**GOOD, "max_num_batched_tokens": 3})


def test_a_pool_too_small_for_one_request_is_refused_with_what_would_do():
    with pytest.raises(ValueError, match=r"kv_cache_tokens \(120\) holds 112 tokens .* max_model_len \(128\).* 112$"):
        EngineConfig(**{**GOOD, "kv_cache_tokens": 120})


def test_a_pool_smaller_than_a_page_is_refused():
    with pytest.raises(ValueError, match=r"kv_cache_tokens \(10\) holds 0 tokens"):
        EngineConfig(**{**GOOD, "kv_cache_tokens": 10, "max_model_len": 1})


def test_a_pool_of_exactly_one_request_is_enough():
    assert EngineConfig(**{**GOOD, "kv_cache_tokens": 128}).num_pages == 8


def test_the_defaults_need_nothing_but_a_length():
    config = EngineConfig(max_model_len=4096)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.page_size) == (256, 2048, 16)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(AttributeError):
        EngineConfig(**GOOD).page_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", jnp.float32),
        ("bfloat16", jnp.bfloat16),
        ("float16", jnp.float16),
        (jnp.bfloat16, jnp.bfloat16),
        ("auto", jnp.float32),  # on a CPU
    ],
)
def test_a_dtype_is_found_by_its_name(name, dtype):
    assert resolve_dtype(name) == jnp.dtype(dtype)


@pytest.mark.parametrize("name", ["float8", "int8", "fp32", "", jnp.int32, 16])
def test_an_unknown_dtype_is_refused_by_name(name):
    shown = getattr(name, "__name__", str(name))
    with pytest.raises(ValueError, match=rf"dtype.*{shown}"):
        resolve_dtype(name)
