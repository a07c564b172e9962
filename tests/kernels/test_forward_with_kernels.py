"""A model's forward pass with every kernel in it, interpreted on the CPU, gives what plain XLA gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # JAX has no public name for it
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.attention.backend import AttentionBackend, select_backend
from jaxinfer.attention.residual import Residual
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.programs.batch_layout import BatchShape, PackedBatch, unpack
from jaxinfer.programs.forward import forward
from kernels_pallas.add_and_norm.api import add_and_norm
from kernels_pallas.branch_attention.api import branch_attention, plan_branch_attention
from kernels_pallas.rotate_and_write.api import rotate_and_write
from tests.builders import model_config, random_model

PAGE_SIZE, NUM_PAGES = 16, 6
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 64,
    "num_layers": 2,
}


def refuse(*_, **__):
    raise AssertionError("the reference was asked instead of the kernel")


def interpreted() -> AttentionBackend:
    options = {"reference": refuse, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    residual = Residual(partial(add_and_norm, **options), lambda rows, inner, columns: 2)
    return AttentionBackend(
        "interpreted",
        partial(plan_branch_attention, **options),
        branch_attention,
        partial(rotate_and_write, **options),
        lambda tokens: residual,
        min_tokens=2,
    )


def decode_of(positions: list[int]) -> PackedBatch:
    """One new token for each row, at these positions; every row has two pages."""
    rows = len(positions)
    packed = PackedBatch(BatchShape(decode_rows=rows, prefill_rows=0, prefill_tokens=0, pages_per_row=2))
    pages = np.random.default_rng(2).permutation(NUM_PAGES)[: 2 * rows].reshape(rows, 2)
    packed["token_ids"][:] = np.arange(rows) + 5
    packed["positions"][:] = packed["limit"][:] = positions
    packed["row"][:] = np.arange(rows)
    packed["slot_mapping"][:] = [
        page[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        for page, position in zip(pages, positions, strict=True)
    ]
    packed["branch"][:] = packed["page_branch"][:] = -1
    packed["page_table"][:] = pages
    for name in ("lengths", "kv_len", "trunk_len", "tail_start"):
        packed[name][:] = np.asarray(positions) + 1
    packed["query_start_loc"][:] = np.arange(rows + 1)
    return packed


# Each family brings what another lacks: norms of heads; a bias of the first projection; biases of all the others.
@pytest.mark.parametrize(
    ("family", "positions"),
    [
        ("Qwen3ForCausalLM", [20]),
        pytest.param("Qwen2ForCausalLM", [3, 31], marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", [17, 0, 16], marks=pytest.mark.slow),
    ],
)
def test_hidden_states_and_the_pool_are_those_of_plain_xla(family, positions):
    model = random_model(model_config(family, **SIZES), dtype=jnp.bfloat16)
    packed = decode_of(positions)
    batch = unpack(jnp.asarray(packed.buffer), packed.shape)
    rng = np.random.default_rng(1)

    def pool() -> tuple[jax.Array, ...]:
        shape = (NUM_PAGES, PAGE_SIZE, SIZES["num_kv_heads"], SIZES["head_dim"])
        return tuple(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(SIZES["num_layers"]))

    cache = KVPool(k=pool(), v=pool())
    (ours, hidden), (theirs, truth) = (
        jax.jit(partial(forward, model, backend=backend))(cache, batch)
        for backend in (interpreted(), select_backend("xla"))
    )
    assert not get_races().races_found
    assert hidden.shape == truth.shape == (len(positions), SIZES["hidden_size"])
    for one, other in zip(jax.tree.leaves((ours, hidden)), jax.tree.leaves((theirs, truth)), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.linalg.norm(one - other) < 2e-2 * np.linalg.norm(other)
    written = np.asarray(batch.slot_mapping)
    for one, before in zip(jax.tree.leaves(ours), jax.tree.leaves(cache), strict=True):
        changed = np.any(np.asarray(one != before).reshape(NUM_PAGES * PAGE_SIZE, -1), axis=1)
        assert np.array_equal(np.flatnonzero(changed), np.sort(written))
