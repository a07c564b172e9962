"""Inside the kernel: the warpgroup that loads queries, keys and values by TMA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.branch_attention.blocks import HEADER, PAGE
from kernels_pallas.branch_attention.tuning import KernelLaunch
from kernels_pallas.branch_attention.work import Item

# Page numbers of a tile read into registers at a time: the producer has few registers. L1 has the next ones.
PAGES_AT_ONCE = 4


def produce(launch: KernelLaunch, memory: Any, number: jax.Array, item: Item) -> None:
    """Load an item's tiles as soon as their stages are free, and its queries once the previous item's are used."""
    first_tiles = jnp.minimum(item.begin + launch.tuning.stages, item.end)
    _load_tiles(launch, memory, item, item.begin, first_tiles)

    @pl.when(number > 0)
    def _():
        for consumer in range(launch.tuning.consumers):
            plgpu.barrier_wait(memory.q_used.at[consumer])

    _load_queries(launch, memory, item)
    _load_tiles(launch, memory, item, first_tiles, item.end)


def _load_queries(launch: KernelLaunch, memory: Any, item: Item) -> None:
    heads = pl.ds(item.head * launch.group, launch.group)
    first = memory.header[item.block, HEADER.index("first_token")]
    per_consumer = launch.tuning.tokens_per_consumer(launch.group)
    last_token = memory.q.shape[0] - 1
    for consumer in range(launch.tuning.consumers):
        loaded = memory.q_loaded.at[consumer]
        plgpu.copy_gmem_to_smem(memory.queries.at[item.block, consumer], memory.integers.at[consumer], loaded)
        if launch.tail_words:
            plgpu.copy_gmem_to_smem(memory.tail_bits.at[item.block, consumer], memory.bits.at[consumer], loaded)

        @pl.loop(0, per_consumer)
        def _(index, consumer=consumer, loaded=loaded):
            # Rows beyond the block's tokens are computed but not stored, so any token will do.
            token = jnp.minimum(first + consumer * per_consumer + index, last_token)
            place = memory.q_plain.at[consumer, pl.ds(index * launch.group, launch.group)]
            plgpu.copy_gmem_to_smem(memory.q.at[token, heads], place, loaded)


def _load_tiles(launch: KernelLaunch, memory: Any, item: Item, begin: jax.Array, end: jax.Array) -> None:
    page_size, stages = launch.page_size, launch.tuning.stages

    @pl.loop(begin, end)
    def _(tile):
        stage = item.stage(tile, stages)
        for source, target, loaded, used in (
            (memory.k, memory.k_tiles, memory.k_loaded, memory.k_used),
            (memory.v, memory.v_tiles, memory.v_loaded, memory.v_used),
        ):
            for first in range(0, launch.pages_per_tile, PAGES_AT_ONCE):
                parts = range(first, min(first + PAGES_AT_ONCE, launch.pages_per_tile))
                entry = tile * launch.pages_per_tile
                pages = [memory.pages[item.block, PAGE.index("page"), entry + part] for part in parts]
                if first == 0:

                    @pl.when(item.step + tile - item.begin >= stages)
                    def _(used=used):
                        plgpu.barrier_wait(used.at[stage])

                for part, page in zip(parts, pages, strict=True):
                    place = target.at[stage, pl.ds(part * page_size, page_size)]
                    plgpu.copy_gmem_to_smem(source.at[page, :, item.head], place, loaded.at[stage])


def drain(launch: KernelLaunch, memory: Any, steps: jax.Array) -> None:
    """Wait for the consumers: a program ends only when nothing is in flight."""
    stages = launch.tuning.stages

    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def _(step):
        stage = lax.rem(step, jnp.int32(stages))
        plgpu.barrier_wait(memory.k_used.at[stage])
        plgpu.barrier_wait(memory.v_used.at[stage])

    for consumer in range(launch.tuning.consumers):
        plgpu.barrier_wait(memory.q_used.at[consumer])
