"""The case table of the kernel that rotates heads and writes K and V: sizes, precisions and slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.attention.heads import ProjectedHeads
from kernels_pallas.parts import Parts

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
    wide_scales: bool = False  # the scales of norms are float32
    norms_late: bool = False  # norms follow the rotation
    parts: int = 0  # of the projection; 0: it is whole
    bias: bool = False  # of the parts' sum
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
        values = size * rng.standard_normal((max(1, self.parts), tokens, self.kv_heads, self.group + 2, dim))
        bias = jnp.asarray(rng.standard_normal(values.shape[2:]), self.dtype) if self.bias else None
        whole = jnp.asarray(values[0], self.dtype)
        qkv = Parts(jnp.asarray(values, jnp.float32), bias, whole.dtype) if self.parts else whole
        angle = rng.uniform(-4, 4, (tokens, dim // 2))
        precision = jnp.float32 if self.wide_scales else self.dtype
        q_scale, k_scale = (jnp.asarray(np.exp(0.4 * rng.standard_normal(dim)), precision) for _ in range(2))
        return ProjectedHeads(
            qkv,
            # Some rotary types scale what they rotate.
            jnp.asarray(1.2 * np.cos(angle), jnp.float32),
            jnp.asarray(1.2 * np.sin(angle), jnp.float32),
            q_scale=q_scale if self.norms else None,
            k_scale=k_scale if self.norms else None,
            eps=1e-6,
            norms_late=self.norms_late,
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
    "slots_of_several_pages_first_and_last": Case((47, 0, 15)),
    "slots_out_of_range_are_dropped": Case((48, 5, 2**31 - 1), norms=False),
    "float16_in_parts": Case((3, 40), dtype=FP16, parts=3),
    "parts_with_a_bias": Case((3, 40), norms=False, kv_heads=1, head_dim=128, parts=2, bias=True),
    "heads_of_128_in_odd_numbers": Case((30,), kv_heads=1, group=7, head_dim=128, page_size=32),
    "values_in_a_tile_of_their_own": Case((7,), kv_heads=6, group=10, num_pages=1),
    "wide_scales": Case((3, 40), wide_scales=True),
    "wide_scales_in_parts": Case((3,), kv_heads=1, head_dim=128, parts=2, bias=True, dtype=FP16, wide_scales=True),
    "heads_of_256": Case((70, 71), head_dim=256, page_size=64, slow=True),
    "wide_scales_of_256": Case((70,), kv_heads=1, head_dim=256, page_size=64, wide_scales=True, slow=True),
    "one_head_per_kv_head": Case((9, 10), kv_heads=3, group=1, slow=True),
    "two_tiles_that_queries_and_keys_share": Case((7, 48), kv_heads=8, group=8, head_dim=128, slow=True),
    "a_tile_of_keys_and_values": Case((11,), kv_heads=16, group=4, slow=True),
    "three_tiles_in_parts": Case((11, 12), kv_heads=8, group=16, norms=False, parts=2, bias=True, slow=True),
    "parts_that_do_not_fit": Case((5,), kv_heads=16, group=4, head_dim=128, parts=4, slow=True),
    "many_tokens": Case(tuple(range(33, 16, -1)) + (48,) * 3, slow=True),
}
