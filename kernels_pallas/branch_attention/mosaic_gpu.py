"""The kernel for Hopper: online softmax over the listed pages of every query block, in Pallas for Mosaic GPU.

A work item is a query block, a KV head and a share of the block's tiles. The block's tokens times the query heads of
the KV head are the rows of the matrix products, so all branches of a lane read its trunk once. The kernel is
persistent: it has as many programs as the GPU has cores, and each processes several items. In a program, a producer
warpgroup loads tiles of K and V by TMA, page by page, without a pause between items; one or two consumer warpgroups
multiply. The running softmax follows FlashAttention (Dao et al.), warp specialisation FlashAttention-3 (Shah et al.).

Tested in interpretation on a CPU, and on an H200.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.branch_attention import masking
from kernels_pallas.branch_attention.blocks import HEADER, IDLE, QUERY, BlockPlan
from kernels_pallas.branch_attention.masking import ROWS, WGMMA
from kernels_pallas.branch_attention.producer import drain, produce
from kernels_pallas.branch_attention.tuning import QUERY_ROWS, STORED_COLUMNS, KernelLaunch, Tuning, stores_in_columns
from kernels_pallas.branch_attention.work import Item, item_of

_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
_accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
# Scores are in units of log2. A masked one is so far below the least maximum that its weight is exactly 0.
_LOWEST = -1e30
_LOG2_E = math.log2(math.e)


def attend_blocks(
    plan: BlockPlan,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    scale: float,
    cap: float | None,
    log_sinks: jax.Array | None,
    first_token: int,
    num_tokens: int,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Compute attention of the tokens of the plan's blocks.

    Args:
        q: [T, num_heads, head_dim], queries of the whole step.
        k_pages, v_pages: [num_pages, page_size, num_kv_heads, head_dim].
        log_sinks: float32 [num_heads], sinks in units of log2; with splits, the merge adds them instead.
        first_token, num_tokens: range of the step's tokens that the blocks hold.
        interpret: `InterpretGPUParams` to run on a CPU.

    Returns:
        Without splits, [num_tokens, num_heads, head_dim] in q's dtype, and None. With S splits, float32 [S, num_tokens,
        num_heads, head_dim], each split's own result, and float32 [S, B, num_kv_heads, C, QUERY_ROWS], the base-2
        logarithms of their weights.
    """
    page_size, kv_heads, head_dim = k_pages.shape[1:]
    blocks = plan.header.shape[0]
    items = blocks * tuning.splits * kv_heads
    tail_words = 0 if plan.tail_bits is None else plan.tail_bits.shape[2]
    launch = KernelLaunch(
        tuning,
        page_size,
        head_dim,
        q.shape[1] // kv_heads,
        first_token,
        tail_words,
        _LOG2_E * scale * (1 if cap is None else 2 / cap),
        None if cap is None else _LOG2_E * cap,
        q.dtype,
        kv_heads,
        items,
        plan.has_first,
        log_sinks is not None,
    )
    out_shape = (num_tokens, *q.shape[1:])
    if launch.split:
        out_type = [
            jax.ShapeDtypeStruct((tuning.splits, *out_shape), launch.stored_dtype),
            jax.ShapeDtypeStruct((tuning.splits, blocks, kv_heads, tuning.consumers, QUERY_ROWS), jnp.float32),
        ]
    else:
        out_type = [jax.ShapeDtypeStruct(out_shape, launch.stored_dtype)]
    inputs = {"header": plan.header, "pages": plan.pages, "queries": plan.queries, "q": q, "k": k_pages, "v": v_pages}
    if tail_words:
        inputs |= {"tail_bits": plan.tail_bits, "block_tail_bits": plan.block_tail_bits}
    if log_sinks is not None:
        group = launch.group
        inputs["sinks"] = jnp.tile(log_sinks.reshape(kv_heads, group), (1, -(-QUERY_ROWS // group)))[:, :QUERY_ROWS]
    names = [*inputs, "out", *(["log_weight"] if launch.split else [])]

    def body(*references: Any, **scratch: Any) -> None:
        _program(launch, SimpleNamespace(**dict(zip(names, references, strict=True)), **scratch))

    results = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=_scratch(launch),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(launch.programs,),
        grid_names=("program",),
        num_threads=tuning.consumers + 1,
        thread_name="warpgroup",
        kernel_name="branch_attention",
        interpret=interpret,
    )(*inputs.values())
    return (results[0], results[1]) if launch.split else (results[0], None)


def _scratch(launch: KernelLaunch) -> dict[str, Any]:
    tuning, head_dim = launch.tuning, launch.head_dim
    consumers, stages = tuning.consumers, tuning.stages
    tiles = plgpu.SMEM((stages, tuning.tile, head_dim), launch.dtype, transforms=_TILED)
    loads = launch.pages_per_tile
    query_loads = tuning.tokens_per_consumer(launch.group) + 1 + bool(launch.tail_words)
    scratch = {
        # TMA delivers each token's heads untiled, because their number need not fit the tiling.
        "q_plain": plgpu.SMEM((consumers, QUERY_ROWS, head_dim), launch.dtype),
        "q_tiled": plgpu.SMEM((consumers, QUERY_ROWS, head_dim), launch.dtype, transforms=_TILED),
        "integers": plgpu.SMEM((consumers, len(QUERY) - (not launch.has_first), QUERY_ROWS), jnp.int32),
        "k_tiles": tiles,
        "v_tiles": tiles,
        "q_loaded": plgpu.Barrier(num_arrivals=query_loads, num_barriers=consumers),
        "k_loaded": plgpu.Barrier(num_arrivals=loads, num_barriers=stages),
        "v_loaded": plgpu.Barrier(num_arrivals=loads, num_barriers=stages),
        "q_used": plgpu.Barrier(num_barriers=consumers),
        "k_used": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        "v_used": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    }
    if consumers > 1:
        scratch["v_cleaned"] = plgpu.Barrier(num_arrivals=consumers)
    if launch.tail_words:
        scratch["bits"] = plgpu.SMEM((consumers, launch.tail_words, QUERY_ROWS), jnp.int32)
    if not tuning.weights_in_registers:
        scratch["weights"] = plgpu.SMEM((consumers, QUERY_ROWS, tuning.tile), launch.dtype, transforms=_TILED)
    if stores_in_columns(tuning, head_dim):
        scratch["columns"] = plgpu.SMEM((consumers, QUERY_ROWS, STORED_COLUMNS), launch.stored_dtype)
    if launch.split:
        scratch["weight_rows"] = plgpu.SMEM((consumers, QUERY_ROWS), jnp.float32)
    return scratch


def _program(launch: KernelLaunch, memory: Any) -> None:
    consumers = launch.tuning.consumers
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    num_items = lax.div(launch.items - 1 - program, jnp.int32(launch.programs)) + 1

    def over_items(work) -> jax.Array:
        """Call `work(number, item)` for the program's items; return the number of their tiles."""

        def one(number: jax.Array, step: jax.Array) -> jax.Array:
            item = item_of(launch, memory, program + number * launch.programs, step)
            work(number, item)
            return step + item.end - item.begin

        return lax.fori_loop(0, num_items, one, jnp.int32(0))

    @pl.when(warpgroup == consumers)
    def _():
        if consumers > 1:
            plgpu.set_max_registers(40, action="decrease")
        steps = over_items(partial(produce, launch, memory))
        drain(launch, memory, steps)

    @pl.when(warpgroup < consumers)
    def _():
        if consumers > 1:
            plgpu.set_max_registers(232, action="increase")
        over_items(partial(_consume, launch, memory, warpgroup))


def _consume(launch: KernelLaunch, memory: Any, consumer: jax.Array, number: jax.Array, item: Item) -> None:
    """Multiply the queries of this warpgroup with every tile, then store its tokens' results."""
    del number
    plgpu.barrier_wait(memory.q_loaded.at[consumer])
    plain = plgpu.load(memory.q_plain.at[consumer], layout=WGMMA, optimized=False)
    memory.q_tiled.at[consumer][...] = plain
    plgpu.commit_smem()

    carry = (
        plgpu.layout_cast(jnp.zeros((QUERY_ROWS, launch.head_dim), jnp.float32), WGMMA),
        plgpu.layout_cast(jnp.full((QUERY_ROWS,), _LOWEST, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), ROWS),
    )
    sections = [("full_tiles", None), ("context_tiles", masking.hide_context)]
    if launch.tail_words:
        sections.append(("tiles", masking.hide_context_and_tail))
    start = item.begin
    for name, hide in sections:
        stop = jnp.clip(memory.header[item.block, HEADER.index(name)], start, item.end)
        carry = lax.fori_loop(start, stop, partial(_one_tile, launch, memory, item, consumer, hide), carry)
        start = stop
    total, top, weight = carry
    if launch.has_sinks:
        sink = plgpu.load(memory.sinks.at[item.head], layout=ROWS, optimized=False)
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp2(top - new_top)
        total *= lax.broadcast_in_dim(shrink, total.shape, [0])
        weight = weight * shrink + jnp.exp2(sink - new_top)
    queries = masking.load_queries(launch, memory, item.block, consumer)
    weight = jnp.where(queries.branch == IDLE, 0.0, weight)
    _store(launch, memory, item, consumer, total, top, weight)
    plgpu.barrier_arrive(memory.q_used.at[consumer])


def _one_tile(launch, memory, item, consumer, hide, tile, carry):
    """Do one step of the online softmax; `hide` masks the scores, None if every query sees the whole tile."""
    total, top, weight = carry
    tuning = launch.tuning
    stage = item.stage(tile, tuning.stages)

    def multiply_keys(accumulator):
        plgpu.wgmma(accumulator, memory.q_tiled.at[consumer], memory.k_tiles.at[stage].transpose((1, 0)))
        return accumulator[...]

    plgpu.barrier_wait(memory.k_loaded.at[stage])
    scores = pl.run_scoped(multiply_keys, _accumulator((QUERY_ROWS, tuning.tile), jnp.float32))
    plgpu.barrier_arrive(memory.k_used.at[stage])
    scores *= launch.scale
    if launch.cap is not None:
        # tanh(x) by exp2(2x): the instruction for tanh has too few digits.
        scores = launch.cap - (2 * launch.cap) / (1.0 + jnp.exp2(scores))
    if hide is not None:
        # Loaded for every masked tile: kept across tiles, they would take registers from the result.
        queries = masking.load_queries(launch, memory, item.block, consumer)
        scores = hide(launch, memory, queries, tile, scores, 2 * _LOWEST)
    new_top = jnp.maximum(top, scores.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    total *= lax.broadcast_in_dim(shrink, total.shape, [0])
    weight = weight * shrink + weights.sum(axis=1)
    weights = weights.astype(launch.dtype)
    plgpu.barrier_wait(memory.v_loaded.at[stage])
    if hide is not None:
        masking.clean_values(launch, memory, queries, tile, memory.v_tiles.at[stage])

    def multiply_values(accumulator, left):
        plgpu.wgmma(accumulator, left, memory.v_tiles.at[stage])

    if tuning.weights_in_registers:
        total = pl.run_state(lambda accumulator: multiply_values(accumulator, weights))(_accumulator.init(total))
    else:
        left = memory.weights.at[consumer]
        left[...] = weights
        plgpu.commit_smem()

        def product(accumulator):
            multiply_values(accumulator, left)
            return accumulator[...]

        total += pl.run_scoped(product, _accumulator(total.shape, jnp.float32))
    plgpu.barrier_arrive(memory.v_used.at[stage])
    return total, new_top, weight


def _store(launch: KernelLaunch, memory: Any, item: Item, consumer, total, top, weight) -> None:
    """Divide by the weights' sum and store the rows of the block's own tokens."""
    tuning, group = launch.tuning, launch.group
    block, split, head = item.block, item.split, item.head
    per_consumer = tuning.tokens_per_consumer(group)
    first = memory.header[block, HEADER.index("first_token")] - launch.first_token + consumer * per_consumer
    count = memory.header[block, HEADER.index("num_tokens")] - consumer * per_consumer
    count = jnp.clip(count, 0, per_consumer)
    # A query that sees nothing has no weight, and zeros in `total`.
    inverse = jnp.where(weight > 0.0, 1.0 / weight, 0.0)
    total *= lax.broadcast_in_dim(inverse, total.shape, [0])

    def store_tokens(source, target_of) -> None:
        plgpu.commit_smem()

        @pl.loop(0, count)
        def _(index):
            plgpu.copy_smem_to_gmem(source.at[pl.ds(index * group, group)], target_of(first + index))

        plgpu.wait_smem_to_gmem(0)

    heads = pl.ds(head * group, group)
    out = memory.out.at[split] if launch.split else memory.out
    if not stores_in_columns(tuning, launch.head_dim):
        place = memory.q_plain.at[consumer]
        place[...] = total.astype(launch.dtype)
        store_tokens(place, lambda token: out.at[token, heads])
        return
    place = memory.columns.at[consumer]
    for column in range(0, launch.head_dim, STORED_COLUMNS):
        columns = pl.ds(column, STORED_COLUMNS)
        place[...] = total[:, column : column + STORED_COLUMNS].astype(launch.stored_dtype)
        store_tokens(place, lambda token, columns=columns: out.at[token, heads, columns])
    if not launch.split:
        return
    rows = memory.weight_rows.at[consumer]
    rows[...] = jnp.where(weight > 0.0, top + jnp.log2(weight), _LOWEST)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rows, memory.log_weight.at[split, block, head, consumer])
    plgpu.wait_smem_to_gmem(0)
