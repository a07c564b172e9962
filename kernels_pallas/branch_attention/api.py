"""Attention over paged KV, planned once for all layers of a step: the kernel if it can run, else the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.branch_attention import merging
from kernels_pallas.branch_attention.blocks import (
    AttentionSizes,
    BlockPlan,
    StepIntegers,
    block_of_tokens,
    decode_blocks,
    plan_blocks,
    prefill_blocks,
)
from kernels_pallas.branch_attention.mosaic_gpu import attend_blocks
from kernels_pallas.branch_attention.reference import PagedPlan, paged_attention, plan_paged_attention
from kernels_pallas.branch_attention.tuning import Tuning, choose_tuning
from kernels_pallas.devices import num_cores, tell_once, why_not_here
from kernels_pallas.visibility import MAX_TAIL_TOKENS

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)
DTYPES = ("bfloat16", "float16")
MAX_GROUP = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionLaunch:
    """One launch of the kernel: the decode rows of a step, or its packed rows. N tokens."""

    blocks: BlockPlan
    # For packed rows with splits, int32 [N] each: the block of each token and its place in it. None without splits, and
    # for decode rows, where they follow from the shapes.
    places: tuple[jax.Array, jax.Array] | None
    first_token: int = field(metadata={"static": True})
    rows: int = field(metadata={"static": True})
    tokens_per_row: int = field(metadata={"static": True})
    tuning: Tuning = field(metadata={"static": True})

    @property
    def num_tokens(self) -> int:
        return self.rows * self.tokens_per_row


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelPlan:
    """Plan that the kernel reads in every layer of a step."""

    launches: tuple[AttentionLaunch, ...]
    interpret: Any = field(metadata={"static": True})  # `InterpretGPUParams`, to run on a CPU


type Reference = Callable[[StepIntegers, AttentionSizes], PagedPlan]


def plan_branch_attention(
    step: StepIntegers,
    sizes: AttentionSizes,
    *,
    reference: Reference = plan_paged_attention,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> KernelPlan | PagedPlan:
    """Plan the attention of a step for all layers: which code runs, and the integers that it reads.

    Args:
        step: see `StepIntegers`.
        reference: plans for plain XLA if the kernel cannot run; the reason is logged once.
        tuning: sizes of the launches; None: chosen from the shapes.
        interpret: `InterpretGPUParams`, to run the kernel on a CPU.
    """
    reason = why_not(step, sizes) or (None if interpret else why_not_here())
    if reason is not None:
        tell_once("branch attention runs", reason)
        return reference(step, sizes)
    decode_tokens = step.decode_rows * step.decode_width
    launches = []
    for cut, first, rows, tokens in (
        (decode_blocks, 0, step.decode_rows, step.decode_width),
        (prefill_blocks, decode_tokens, 1, step.limit.shape[0] - decode_tokens),
    ):
        if not rows * tokens:
            continue
        used = tuning or _tuning(step, sizes, rows, tokens, interpret)
        blocks = cut(step, used.tokens_per_block(sizes.group))
        places = None
        if used.splits > 1 and cut is prefill_blocks:
            places = block_of_tokens(blocks, first + jnp.arange(tokens, dtype=jnp.int32))
        planned = plan_blocks(step, blocks, page_size=sizes.page_size, group=sizes.group, tuning=used)
        launches.append(AttentionLaunch(planned, places, first, rows, tokens, used))
    return KernelPlan(tuple(launches), interpret)


def branch_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    plan: KernelPlan | PagedPlan,
    *,
    scale: float,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute attention of a step's tokens over one layer of the pool by the visibility rule.

    Args:
        q: [T, num_heads, head_dim].
        k_pages, v_pages: [num_pages, page_size, num_kv_heads, head_dim], this step's tokens already written.
        plan: plan of the step for these sizes.
        scale: factor of the scores, usually head_dim ** -0.5.
        cap: bound of the scaled scores x, which become cap * tanh(x / cap); None: they stay.
        sinks: [num_heads], for each head a score that every token sees beside the others and that has no value; it is
            neither scaled nor capped. None: there are none.

    Returns:
        [T, num_heads, head_dim] in q's dtype; zeros for tokens that see nothing.
    """
    if isinstance(plan, PagedPlan):
        return paged_attention(q, k_pages, v_pages, plan, scale=scale, cap=cap, sinks=sinks)
    log_sinks = None if sinks is None else sinks.astype(jnp.float32) * math.log2(math.e)
    parts = [_attend(q, k_pages, v_pages, launch, scale, cap, log_sinks, plan.interpret) for launch in plan.launches]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def why_not(step: StepIntegers, sizes: AttentionSizes) -> str | None:
    """Return the reason why the kernel does not take these shapes; None if it does."""
    if sizes.dtype.name not in DTYPES or sizes.cache_dtype != sizes.dtype:
        return f"q is {sizes.dtype} and the cache {sizes.cache_dtype}, both must be one of {', '.join(DTYPES)}"
    if sizes.head_dim not in HEAD_DIMS:
        return f"head_dim is {sizes.head_dim}, must be one of {', '.join(map(str, HEAD_DIMS))}"
    if sizes.page_size not in PAGE_SIZES:
        return f"page_size is {sizes.page_size}, must be one of {', '.join(map(str, PAGE_SIZES))}"
    if sizes.num_heads % sizes.num_kv_heads or sizes.group > MAX_GROUP:
        return f"{sizes.num_heads} query heads share {sizes.num_kv_heads} KV heads, at most {MAX_GROUP} can share one"
    if 32 * step.tail_bits.shape[1] > MAX_TAIL_TOKENS:
        return f"tails have {32 * step.tail_bits.shape[1]} bits, at most {MAX_TAIL_TOKENS} are possible"
    return None


def _tuning(step: StepIntegers, sizes: AttentionSizes, rows: int, tokens_per_row: int, interpret: Any) -> Tuning:
    return choose_tuning(
        tokens_per_row=tokens_per_row,
        rows=rows,
        kv_heads=sizes.num_kv_heads,
        group=sizes.group,
        head_dim=sizes.head_dim,
        tokens_of_lane=step.page_table.shape[1] * sizes.page_size,
        tail_words=step.tail_bits.shape[1],
        has_first=step.first.shape[0] > 0,
        num_cores=132 if interpret else num_cores(),
        weights_in_registers=not interpret,
    )


def _attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    launch: AttentionLaunch,
    scale: float,
    cap: float | None,
    log_sinks: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """Return the results [N, num_heads, head_dim] of one launch, with its splits merged."""
    tuning, group = launch.tuning, q.shape[1] // k_pages.shape[2]
    out, log_weight = attend_blocks(
        launch.blocks, q, k_pages, v_pages, scale=scale, cap=cap, log_sinks=None if tuning.splits > 1 else log_sinks,
        first_token=launch.first_token, num_tokens=launch.num_tokens, tuning=tuning, interpret=interpret,
    )  # fmt: skip
    if log_weight is None:
        return out
    if launch.places is None:
        weights = merging.of_decode_tokens(log_weight, launch.rows, launch.tokens_per_row, group, tuning)
    else:
        weights = merging.of_tokens(log_weight, *launch.places, group, tuning)
    return merging.merge(out, weights, log_sinks).astype(q.dtype)
