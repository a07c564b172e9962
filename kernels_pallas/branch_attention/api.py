"""Attention of one layer over paged KV: the kernel where it can run, the reference where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.branch_attention import merging
from kernels_pallas.branch_attention.blocks import (
    Blocks,
    StepIntegers,
    block_of_tokens,
    decode_blocks,
    plan_blocks,
    prefill_blocks,
)
from kernels_pallas.branch_attention.mosaic_gpu import attend_blocks
from kernels_pallas.branch_attention.reference import paged_attention
from kernels_pallas.branch_attention.tuning import Tuning, choose_tuning
from kernels_pallas.devices import num_cores, tell_once, why_not_here

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)
DTYPES = ("bfloat16", "float16")
MAX_GROUP = 16
MAX_TAIL_TOKENS = 512

type Reference = Callable[..., jax.Array]


def branch_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    step: StepIntegers,
    *,
    scale: float,
    reference: Reference = paged_attention,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Attention of a step's tokens over one layer of the pool, by the visibility rule.

    Args:
        q: [T, num_heads, head_dim].
        k_pages, v_pages: [num_pages, page_size, num_kv_heads, head_dim], this step's tokens already written.
        step: see `StepIntegers`.
        scale: factor of the scores, usually head_dim ** -0.5.
        reference: computes the same from (q, k_pages, v_pages, step, scale=scale) where the kernel cannot run; the
            reason is logged once.
        tuning: sizes of the launch, chosen from the shapes if not given.
        interpret: `InterpretGPUParams`, to run the kernel on a CPU.

    Returns:
        [T, num_heads, head_dim] in q's dtype; zeros for tokens that see nothing.
    """
    reason = why_not(q, k_pages, step) or (None if interpret else why_not_here())
    if reason is not None:
        tell_once("branch attention runs", reason)
        return reference(q, k_pages, v_pages, step, scale=scale)
    decode_tokens = step.decode_rows * step.decode_width
    prefill_tokens = q.shape[0] - decode_tokens
    parts = []
    for cut, first, tokens, rows in (
        (decode_blocks, 0, decode_tokens, step.decode_rows),
        (prefill_blocks, decode_tokens, prefill_tokens, 1),
    ):
        if tokens:
            used = tuning or _tuning(q, k_pages, step, rows, tokens // rows, interpret)
            blocks = cut(step, used.tokens_per_block(q.shape[1] // k_pages.shape[2]))
            parts.append(_attend(q, k_pages, v_pages, step, blocks, first, tokens, scale, used, interpret))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def why_not(q: jax.Array, k_pages: jax.Array, step: StepIntegers) -> str | None:
    """Why the kernel does not take these shapes, in words; None if it does."""
    num_heads, head_dim = q.shape[1:]
    _, page_size, kv_heads, _ = k_pages.shape
    if q.dtype.name not in DTYPES or k_pages.dtype != q.dtype:
        return f"q is {q.dtype} and the cache {k_pages.dtype}, both must be one of {', '.join(DTYPES)}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}, must be one of {', '.join(map(str, HEAD_DIMS))}"
    if page_size not in PAGE_SIZES:
        return f"page_size is {page_size}, must be one of {', '.join(map(str, PAGE_SIZES))}"
    if num_heads % kv_heads or num_heads // kv_heads > MAX_GROUP:
        return f"{num_heads} query heads share {kv_heads} KV heads, at most {MAX_GROUP} can share one"
    if 32 * step.tail_bits.shape[1] > MAX_TAIL_TOKENS:
        return f"tails have {32 * step.tail_bits.shape[1]} bits, at most {MAX_TAIL_TOKENS} are possible"
    return None


def _tuning(
    q: jax.Array, k_pages: jax.Array, step: StepIntegers, rows: int, tokens_per_row: int, interpret: Any
) -> Tuning:
    _, page_size, kv_heads, head_dim = k_pages.shape
    return choose_tuning(
        tokens_per_row=tokens_per_row,
        rows=rows,
        kv_heads=kv_heads,
        group=q.shape[1] // kv_heads,
        head_dim=head_dim,
        tokens_of_lane=step.page_table.shape[1] * page_size,
        tail_words=step.tail_bits.shape[1],
        num_cores=132 if interpret else num_cores(),
        weights_in_registers=not interpret,
    )


def _attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    step: StepIntegers,
    blocks: Blocks,
    first_token: int,
    num_tokens: int,
    scale: float,
    tuning: Tuning,
    interpret: Any,
) -> jax.Array:
    """[num_tokens, num_heads, head_dim]: the results of one launch, its splits merged."""
    page_size, kv_heads, head_dim = k_pages.shape[1:]
    group = q.shape[1] // kv_heads
    plan = plan_blocks(step, blocks, page_size=page_size, group=group, tuning=tuning)
    out, log_weight = attend_blocks(
        plan, q, k_pages, v_pages, scale=scale, first_token=first_token, num_tokens=num_tokens, tuning=tuning,
        interpret=interpret,
    )  # fmt: skip
    if log_weight is None:
        return out
    if first_token == 0 and step.decode_rows:
        weights = merging.of_decode_tokens(log_weight, step.decode_rows, step.decode_width, group, tuning)
    else:
        tokens = first_token + jnp.arange(num_tokens, dtype=jnp.int32)
        weights = merging.of_tokens(log_weight, *block_of_tokens(blocks, tokens), group, tuning)
    return merging.merge(out, weights).astype(q.dtype)
