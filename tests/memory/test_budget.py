"""The memory plan of an engine on a GPU that is only said to be there."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.memory import budget as memory
from jaxinfer.memory.budget import MemoryBudget, plan_memory
from tests.builders import model_config, random_model

CARD, WORKSPACE = 10_000_000, 500_000
# Of 101 words with each of 64 seats: counts, four sets of bits, 320 biases and eight numbers.
SEATS = 64 * (2 * 101 + 4 * 4 * 4 + 320 * 8 + 8 * 4)


class FakeGPU:
    platform = "gpu"

    def __init__(self, jax_share: float) -> None:
        self.jax_share = jax_share

    in_use = 0

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": int(CARD * self.jax_share), "bytes_in_use": self.in_use}


@pytest.fixture
def plan(monkeypatch):
    """(JAX's share of the card, settings) -> the budget there."""
    model = random_model(model_config("Qwen3ForCausalLM"))
    engine = EngineConfig(max_model_len=4096, max_num_seqs=64, kv_cache_tokens=4096)

    def plan(jax_share: float, *, kv_cache_tokens: int | None = None, **settings) -> MemoryBudget:
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", str(jax_share))
        monkeypatch.setattr(jax, "local_devices", lambda: [FakeGPU(jax_share)])
        monkeypatch.setattr(memory, "largest_workspace", lambda *args, **kwargs: WORKSPACE)
        return plan_memory(
            model, engine, dtype=jnp.dtype("float32"), kv_cache_tokens=kv_cache_tokens, mesh=None, **settings
        )

    return plan


def test_the_limit_is_a_share_of_the_card_and_never_more_than_jax_has(plan):
    assert plan(0.9, gpu_memory_utilization=0.9).limit_bytes == 9_000_000
    assert plan(0.95, gpu_memory_utilization=0.9).limit_bytes == pytest.approx(9_000_000, abs=1)
    assert plan(0.6, gpu_memory_utilization=0.9).limit_bytes == 6_000_000


def test_the_pool_fills_the_limit_beside_weights_workspace_and_reserve(plan):
    budget = plan(0.9, gpu_memory_utilization=0.9)
    assert (budget.workspace_bytes, budget.reserve_bytes) == (WORKSPACE + SEATS, 270_000)
    left = 9_000_000 - 270_000 - WORKSPACE - SEATS - budget.weights_bytes - budget.kv_bytes
    assert 0 <= left < 16 * budget.kv_bytes_per_token


def test_a_pool_that_takes_from_the_reserve_is_refused_with_the_largest_that_does_not(plan):
    most = plan(0.9, gpu_memory_utilization=0.9).kv_tokens
    with pytest.raises(
        ValueError, match=rf"0.3 MiB of reserve and 0.0 MiB that others hold, .* at most {most} tokens fit"
    ):
        plan(0.9, gpu_memory_utilization=0.9, kv_cache_tokens=most + 16)


def test_the_table_names_every_part(plan):
    table = plan(0.9, gpu_memory_utilization=0.9).table()
    assert [line.split("  ")[0] for line in table.splitlines()] == [
        "limit", "weights", "workspace", "reserve", "held by others", "KV pool", "largest KV pool",
    ]  # fmt: skip


def test_the_pool_leaves_what_others_hold_beside_the_weights(plan, monkeypatch):
    alone = plan(0.9, gpu_memory_utilization=0.9)
    monkeypatch.setattr(FakeGPU, "in_use", alone.weights_bytes + 1_000_000)
    beside = plan(0.9, gpu_memory_utilization=0.9)
    assert beside.others_bytes == 1_000_000
    assert abs(alone.kv_bytes - beside.kv_bytes - 1_000_000) <= 16 * alone.kv_bytes_per_token
