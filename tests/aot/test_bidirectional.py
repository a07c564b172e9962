"""Rounds of a bidirectional model compiled for an H200: KV and canvas in place, waits only where much is computed."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxinfer.cache.kv_pool import kv_bytes_per_token
from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from jaxinfer.planning.programs import DENOISE_LOOP, PREFILL, AbstractEngine
from tests.models.test_llada_config import LLADA_MOE

BF16 = jnp.dtype(jnp.bfloat16)
LENGTH, SEATS = 4096, 8
PUBLISHED = DiffusionConfig(
    block_size=64, threshold=0.8, prefix_look=16, after_look=16, warmup_steps=4, cont_weight=0.3
)


@pytest.mark.parametrize("diffusion", [DiffusionConfig(block_size=64), PUBLISHED], ids=["plain", "smoothed"])
@pytest.mark.parametrize("name", [PREFILL, DENOISE_LOOP])
def test_refreshes_and_windows_leave_the_cache_in_place_and_wait_only_for_experts_of_whole_sequences(name, diffusion):
    """Two layers of LLaDA-MoE-7B-A1B: whole sequences (PREFILL) and loops of windows."""
    config = ModelConfig.from_hf(LLADA_MOE | {"num_hidden_layers": 2, "moe_layer_freq": [1, 1]})
    engine = EngineConfig(
        max_model_len=LENGTH, max_num_seqs=SEATS, max_num_batched_tokens=LENGTH + 256, kv_cache_tokens=SEATS * LENGTH,
        enable_prefix_caching=False,
    )  # fmt: skip
    planned = AbstractEngine(config, engine, compile_target(H200), dtype=BF16, diffusion=diffusion)
    program = planned.compile(name)
    kv_bytes = SEATS * LENGTH * kv_bytes_per_token(config, BF16)
    # Eight experts of each of 4,856 tokens are more rows than XLA sorts without CUB.
    waits = int(name == PREFILL)
    assert (program.kv_alias_bytes, program.kv_copies, program.host_waits) == (kv_bytes, 0, waits)
