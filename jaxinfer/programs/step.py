"""The device steps: (params, cache, batch) -> (cache, output), pure, compiled once per shape."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.programs.forward import forward
from jaxinfer.sampling.next_tokens import logits_and_greedy, next_tokens
from jaxinfer.sampling.sampler import sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step leaves on the device. T tokens, Q wanted logits, V words."""

    token_ids: jax.Array  # int32 [Q], sampled
    logits: jax.Array  # float32 [Q, V]
    hidden: jax.Array  # [T, hidden], after the final norm


def step(model: DecoderLM, cache: KVCache, batch: StepBatch, backend: AttentionBackend) -> tuple[KVCache, StepOutput]:
    """One step of every way of decoding: new tokens into their slots, logits where wanted, sampled tokens out."""
    cache, hidden = forward(model, cache, batch, backend)
    logits, greedy = logits_and_greedy(model, hidden[batch.logits_index])
    return cache, StepOutput(token_ids=sample(logits, batch.sampling, greedy), logits=logits, hidden=hidden)


def decode_loop(
    model: DecoderLM, cache: KVCache, batch: StepBatch, backend: AttentionBackend, *, max_steps: int
) -> tuple[KVCache, jax.Array]:
    """`batch.num_steps` decode steps in one launch, fewer if every row ends before.

    A row ends with one of its `ending_token_ids`; from then on it writes nothing and its tokens are -1. The page table
    must have room for all steps.

    Args:
        batch: decode rows alone, one token each.
        max_steps: the most steps that the compiled program can run.

    Returns:
        The cache, and int32 [max_steps, Q]: the tokens of each step, -1 where a row had ended or a step did not run.
    """
    rows = jnp.arange(batch.decode_rows)
    page_size = cache.page_size
    num_slots = cache.num_pages * page_size

    def unfinished(state: tuple[jax.Array, KVCache, StepBatch, jax.Array, jax.Array]) -> jax.Array:
        index, _, _, ended, _ = state
        return (index < batch.num_steps) & ~jnp.all(ended)

    def one_step(state: tuple[jax.Array, KVCache, StepBatch, jax.Array, jax.Array]):
        index, cache, now, ended, tokens = state
        cache, hidden = forward(model, cache, now, backend)
        token_ids = next_tokens(model, hidden[now.logits_index], now.sampling)
        sampled = jnp.where(ended, -1, token_ids)
        tokens = lax.dynamic_update_index_in_dim(tokens, sampled, index, axis=0)
        ended = ended | jnp.any(sampled[:, None] == now.ending_token_ids, axis=1)
        position = now.positions + 1
        # A page is looked up for the position of the token just sampled, which the next round writes.
        page = jnp.take_along_axis(now.page_table, (position // page_size)[:, None], axis=1, mode="clip")[:, 0]
        slot = jnp.where(ended | (now.kv_len == 0), num_slots + rows, page * page_size + position % page_size)
        longer = jnp.where(now.kv_len > 0, now.kv_len + 1, 0)
        now = dataclasses.replace(
            now,
            token_ids=jnp.where(ended, 0, token_ids),
            positions=position,
            lengths=jnp.maximum(now.lengths, position + 1),
            slot_mapping=slot,
            limit=jnp.where(now.kv_len > 0, now.limit + 1, -1),
            kv_len=longer,
            trunk_len=longer,
            tail_start=longer,
            sampling=dataclasses.replace(now.sampling, sample_position=now.sampling.sample_position + 1),
        )
        return index + 1, cache, now, ended, tokens

    tokens = jnp.full((max_steps, batch.decode_rows), -1, jnp.int32)
    start = (jnp.int32(0), cache, batch, batch.kv_len == 0, tokens)
    _, cache, _, _, tokens = lax.while_loop(unfinished, one_step, start)
    return cache, tokens
