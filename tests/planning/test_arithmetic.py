"""Bytes and operations of a model, against figures worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxinfer.checkpoint.directory import read_config
from jaxinfer.models.layer_config import LayerConfig
from jaxinfer.planning.arithmetic import (
    decode_bytes,
    outside_windows_bytes,
    prefill_operations,
    product_operations,
    token_bytes,
    weights_bytes,
)
from tests.builders import model_config, random_model

BF16 = jnp.dtype(jnp.bfloat16)
# Qwen3-8B: q, k, v; o; gate, up, down; two norms and those of q and k.
LAYER_8B = 4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288
NORMS_8B = 2 * 4096 + 2 * 128
TABLE_8B = 151936 * 4096


@pytest.fixture
def config(configs):
    return lambda name: read_config(configs / name)[1]


def test_weights_of_qwen3_8b_are_16_4_gigabytes(config):
    expected = 2 * (36 * (LAYER_8B + NORMS_8B) + 2 * TABLE_8B + 4096)
    assert weights_bytes(config("qwen3-8b"), BF16) == expected == 16_381_470_720


def test_weights_of_llama_3_1_8b_are_16_1_gigabytes(config):
    layer = 4096 * (32 + 8 + 8) * 128 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert weights_bytes(config("llama-3.1-8b"), BF16) == 2 * (32 * layer + 2 * 128256 * 4096 + 4096) == 16_060_522_496


def test_a_tied_table_is_counted_once(config):
    layer = 1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    assert weights_bytes(config("qwen3-0.6b"), BF16) == 2 * (28 * layer + 151936 * 1024 + 1024) == 1_192_099_840


@pytest.mark.parametrize(("name", "expected"), [("qwen3-8b", 147456), ("qwen3-0.6b", 114688), ("llama-3.1-8b", 131072)])
def test_a_token_s_kv_is_two_vectors_for_each_layer_and_kv_head(config, name, expected):
    assert token_bytes(config(name), BF16) == expected


def test_a_decode_step_reads_the_rows_of_the_table_but_the_whole_head(config):
    read = decode_bytes(config("qwen3-8b"), BF16, rows=64, visible_tokens=64 * 4096)
    assert read == 16_381_470_720 - 2 * TABLE_8B + 2 * 64 * 4096 + 64 * 4096 * 147456


def test_a_decode_step_reads_a_tied_table_as_the_head(config):
    read = decode_bytes(config("qwen3-0.6b"), BF16, rows=1, visible_tokens=10)
    assert read == 1_192_099_840 + 2 * 1024 + 10 * 114688


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tokens", "logits"), [(4, 4), (36, 4)])
def test_each_token_meets_every_kernel_once_and_each_logit_every_word(tokens, logits, tied):
    config = model_config(tie_word_embeddings=tied)
    model = random_model(config)
    leaves = jax.tree.leaves_with_path(nnx.state(model.layers))
    kernels = sum(leaf.size for path, leaf in leaves if "kernel" in jax.tree_util.keystr(path))
    operations = product_operations(config, tokens=tokens, logits=logits)
    assert operations == 2 * (kernels * tokens + model.embed.embedding.size * logits)


def test_prefill_multiplies_with_every_kernel_attends_causally_and_makes_one_row_of_logits(config):
    operations = prefill_operations(config("qwen3-8b"), tokens=2048, prompt_len=2048)
    attention = 36 * 4 * 32 * 128 * (2048 * 2049 // 2)
    assert operations == 2 * 2048 * 36 * LAYER_8B + attention + 2 * TABLE_8B


def test_a_budget_that_is_no_multiple_of_the_prompts_ends_with_a_shorter_one(config):
    operations = prefill_operations(config("qwen3-8b"), tokens=100, prompt_len=40)
    pairs = 2 * (40 * 41 // 2) + 20 * 21 // 2
    assert operations == 2 * 100 * 36 * LAYER_8B + 36 * 4 * 32 * 128 * pairs + 3 * 2 * TABLE_8B


def test_over_four_gpus_everything_but_the_norms_is_split(config):
    whole, quarter = (weights_bytes(config("qwen3-8b"), BF16, devices=n) for n in (1, 4))
    norms = 2 * (36 * NORMS_8B + 4096)
    assert quarter == (whole - norms) // 4 + norms
    assert token_bytes(config("qwen3-8b"), BF16, devices=4) == 147456 // 4


def test_over_more_gpus_than_kv_heads_a_head_is_kept_more_than_once(config):
    assert token_bytes(config("qwen3-8b"), BF16, devices=16) == 147456 // 8


def test_a_model_that_cannot_be_split_is_refused(config):
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        weights_bytes(config("qwen3-8b"), BF16, devices=3)


def test_layers_with_a_window_read_and_compute_what_is_within_it_and_keep_the_rest():
    layers = (LayerConfig(4, 2, 16, window=100), LayerConfig(4, 2, 16))
    windowed = model_config(num_layers=2, num_kv_heads=2, layers=layers)
    full = model_config(num_layers=2, num_kv_heads=2)
    dtype = jnp.dtype(jnp.bfloat16)
    of_layer = 2 * 2 * 16 * 2  # bytes of the K and V of a token
    read, all_read = (decode_bytes(c, dtype, rows=3, visible_tokens=3 * 1000) for c in (windowed, full))
    assert all_read - read == 3 * 900 * of_layer
    assert outside_windows_bytes(windowed, dtype, length=1000) == 900 * of_layer
    assert outside_windows_bytes(full, dtype, length=1000) == 0
    # 1000 tokens see 1, 2, .. of each other; with the window 100 at most.
    pairs = 1000 * 1001 // 2 - (100 * 101 // 2 + 900 * 100)
    work, all_work = (prefill_operations(c, tokens=1000, prompt_len=1000) for c in (windowed, full))
    assert all_work - work == 4 * 4 * 16 * pairs
