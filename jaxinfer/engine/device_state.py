"""The state that an engine keeps on the device."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxinfer.attention.tensor_parallel import sharding_of_pages
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.config import EngineConfig
from jaxinfer.engine.strategy import Strategy
from jaxinfer.models.config import ModelConfig
from jaxinfer.programs.program import BOUNDS, bounds_place
from jaxinfer.programs.runner import initial_state


def make_device_state(
    config: EngineConfig, model: ModelConfig, strategy: Strategy, *, dtype, mesh: Mesh | None
) -> dict[str, object]:
    """Allocate the pool, empty seats, bounds of draws and the state of the strategy."""
    cache = KVPool.allocate(
        model, num_pages=config.num_pages + strategy.num_tail_pages, page_size=config.page_size, dtype=dtype,
        sharding=sharding_of_pages(mesh),
    )  # fmt: skip
    state = initial_state(cache, config.max_num_seqs, model.vocab_size, bounds_place(mesh, model.vocab_size))
    if strategy.takes_prompts:
        del state[BOUNDS]  # its draws have no bounds
    return {**state, **strategy.make_state()}
