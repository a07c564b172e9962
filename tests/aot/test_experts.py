"""Steps of mixtures of experts compiled for an H200: KV in place, no waits, temporaries that grow with tokens alone."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxinfer.cache.kv_pool import kv_bytes_per_token
from jaxinfer.config import EngineConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from jaxinfer.planning.programs import DECODE_LOOP, DENOISE_LOOP, PREFILL, AbstractEngine
from tests.models.test_sparse_config import LLADA2_MINI, QWEN3_30B_A3B

BF16 = jnp.dtype(jnp.bfloat16)
LENGTH = 4096


def of_layers(fields: dict, count: int) -> ModelConfig:
    return ModelConfig.from_hf(fields | {"num_hidden_layers": count})


@pytest.mark.parametrize(
    ("fields", "rows", "name"),
    [
        (QWEN3_30B_A3B, 64, PREFILL), (QWEN3_30B_A3B, 64, DECODE_LOOP), (QWEN3_30B_A3B, 1, DECODE_LOOP),
        (LLADA2_MINI, 32, PREFILL), (LLADA2_MINI, 1, DENOISE_LOOP), (LLADA2_MINI, 32, DENOISE_LOOP),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_steps_with_experts_leave_the_cache_in_place_and_never_wait(fields, rows, name):
    """Two layers of Qwen3-MoE; of LLaDA2 a dense one and two with experts."""
    config = of_layers(fields, 3 if fields is LLADA2_MINI else 2)
    experts = config.experts
    assert experts is not None
    engine = EngineConfig(max_model_len=LENGTH, max_num_seqs=rows, kv_cache_tokens=rows * LENGTH, page_size=32)
    planned = AbstractEngine(config, engine, compile_target(H200), dtype=BF16)
    program = planned.compile(name)
    kv_bytes = rows * LENGTH * kv_bytes_per_token(config, BF16)
    assert (program.kv_alias_bytes, program.kv_copies, program.host_waits) == (kv_bytes, 0, 0)
    # Logits and what sampling makes of their size; of a layer, every token as often as it has experts, with as much
    # again for blocks that are not full, between the products too. And kernels that are copied at a time.
    shape = program.shape
    tokens = shape.num_tokens * (1 if config.block_size is None else config.block_size)
    logits = shape.num_logits * (1 if config.block_size is None else config.block_size)
    places = 2 * tokens * experts.experts_per_token + 8 * experts.num_experts
    of_a_layer = (
        places * 2 * (3 * experts.intermediate_size + 2 * config.hidden_size) + tokens * config.hidden_size * 16
    )
    most = 6 * 4 * logits * config.vocab_size + 3 * of_a_layer + 2 * 2**28 + 2**26
    assert 0 < program.temp_bytes <= most, (program.temp_bytes, most)
