"""The case table of the kernel that rotates heads and writes K and V: sizes, precisions and slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.heads import ProjectedHeads

BF16, FP16 = jnp.bfloat16, jnp.float16


@dataclass(frozen=True)
class Case:
    """Random heads for `slots`, in a pool that is random too; `slow`: interpreting it takes long."""

    slots: tuple[int, ...]
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    page_size: int = 16
    num_pages: int = 3
    norms: bool = True
    dtype: jnp.dtype = BF16
    slow: bool = False

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @cached_property
    def heads(self) -> ProjectedHeads:
        rng = np.random.default_rng(3)
        tokens, dim = len(self.slots), self.head_dim
        # Heads of very different sizes: a norm taken over the wrong elements would show.
        size = np.exp(rng.standard_normal((tokens, self.kv_heads, self.group + 2, 1)))
        qkv = size * rng.standard_normal((tokens, self.kv_heads, self.group + 2, dim))
        angle = rng.uniform(-4, 4, (tokens, dim // 2))
        q_scale, k_scale = (jnp.asarray(np.exp(0.4 * rng.standard_normal(dim)), self.dtype) for _ in range(2))
        return ProjectedHeads(
            jnp.asarray(qkv, self.dtype),
            # Some rotary types scale what they rotate.
            jnp.asarray(1.2 * np.cos(angle), jnp.float32),
            jnp.asarray(1.2 * np.sin(angle), jnp.float32),
            q_scale=q_scale if self.norms else None,
            k_scale=k_scale if self.norms else None,
            eps=1e-6,
        )

    @cached_property
    def pages(self) -> tuple[jax.Array, jax.Array]:
        rng = np.random.default_rng(4)
        shape = (self.num_pages, self.page_size, self.kv_heads, self.head_dim)
        k, v = (jnp.asarray(rng.standard_normal(shape), self.dtype) for _ in range(2))
        # What is not written must not be touched, whatever it is.
        return k.at[1].set(jnp.nan), v.at[1].set(jnp.nan)

    @property
    def slot_mapping(self) -> jax.Array:
        return jnp.asarray(self.slots, jnp.int32)


CASES = {
    "one_token": Case((17,)),
    "slots_of_several_pages_first_and_last": Case((47, 0, 16, 15)),
    "slots_out_of_range_are_dropped": Case((48, 5, 49, 2**31 - 1)),
    "no_norms": Case((3, 40), norms=False),
    "float16": Case((3, 40), dtype=FP16),
    "one_head_per_kv_head": Case((9,), kv_heads=3, group=1),
    "heads_of_128_in_odd_numbers": Case((30, 31), kv_heads=1, group=7, head_dim=128, page_size=32),
    "heads_of_256": Case((70,), head_dim=256, page_size=64),
    "two_tiles_that_queries_and_keys_share": Case((7, 48), kv_heads=8, group=8, head_dim=128),
    "a_tile_of_keys_alone": Case((11,), kv_heads=16, group=4, slow=True),
    "three_tiles_and_no_norms": Case((11, 12), kv_heads=8, group=16, norms=False, slow=True),
    "many_tokens": Case(tuple(range(33, 16, -1)) + (48,) * 3, slow=True),
}
