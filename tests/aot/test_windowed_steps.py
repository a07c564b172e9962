"""Steps of models with windows, sinks and two kinds of heads, compiled for an H200: KV in place, no waits."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxinfer.cache.kv_pool import kv_bytes_per_token
from jaxinfer.checkpoint.directory import read_config
from jaxinfer.config import EngineConfig
from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from jaxinfer.planning.programs import BRANCH_LOOP, DECODE_LOOP, PREFILL, AbstractEngine

PUBLISHED = Path(__file__).resolve().parent.parent / "fixtures" / "configs" / "published"
# One period of layers of each: with a window and without.
LAYERS = {"gpt-oss-20b": 2, "gemma-3-27b-it": 6}
BF16 = jnp.dtype(jnp.bfloat16)
ROWS, LENGTH = 16, 4096


@pytest.fixture(scope="module", params=LAYERS)
def engine(request) -> tuple[AbstractEngine, int]:
    """An engine that compiles, and the bytes of its pool."""
    config = read_config(PUBLISHED / request.param)[1].with_num_layers(LAYERS[request.param])
    assert len(config.kinds) == 2
    limits = EngineConfig(max_num_seqs=ROWS, max_model_len=LENGTH, kv_cache_tokens=ROWS * LENGTH)
    abstract = AbstractEngine(config, limits, compile_target(H200), dtype=BF16)
    return abstract, ROWS * LENGTH * kv_bytes_per_token(config, BF16)


@pytest.mark.parametrize("name", [PREFILL, DECODE_LOOP, BRANCH_LOOP])
def test_windows_leave_the_pool_in_place(engine, name):
    abstract, pool_bytes = engine
    program = abstract.compile(name)
    assert program.kv_alias_bytes == pool_bytes
    assert (program.kv_copies, program.host_waits) == (0, 0)
