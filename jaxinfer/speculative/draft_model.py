"""A small model that drafts for a target with the same vocabulary, over its own KV pool with the target's page ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import BOUNDS, SEATS, Device
from jaxinfer.programs.weights import detached
from jaxinfer.programs.wide_rows import wide_rows
from jaxinfer.sampling.bounds import Bounded
from jaxinfer.sampling.next_tokens import as_held, logits_and_greedy, next_tokens
from jaxinfer.sampling.sampler import SamplingBatch, sample
from jaxinfer.speculative.proposer import Drafts, RoundsShape, Seated, entropies

DRAFTER = "drafter"
DRAFT_KV = "draft_kv"  # the pool of the drafter's layers, whose slots are the target's


class DraftModel:
    """Proposer of the tokens that a small model samples, with the same noise as the target.

    Rounds and steps compute two tokens of each sequence, the latest and the one before. If all drafts of the last round
    were accepted, the drafter has not computed the last of them; otherwise it computes that token once more. Like the
    target, it samples within the bounds of each sequence: tokens that these rule out would never be accepted.

    Args:
        model: the small model.
        with_entropy: whether to compute `Drafts.entropy`, for controllers that need it.
    """

    reads = (DRAFTER,)
    writes = (DRAFT_KV,)
    may_find_nothing = False
    knows_pages = True
    capture = ()

    def __init__(self, model: DecoderLM, *, with_entropy: bool = False) -> None:
        self.models: Mapping[str, Any] = {DRAFTER: detached(model)}
        self._with_entropy = with_entropy

    def follow(
        self, device: Device, batch: StepBatch, features: jax.Array | None, *, again: bool = False
    ) -> dict[str, Any]:
        kv: KVPool = device.state[DRAFT_KV]
        rows = batch.decode_rows
        taken_in = batch
        if rows:
            before = _tokens_before(device, batch.row_seat[:rows])
            taken_in = wide_rows(
                batch,
                jnp.stack([before, batch.token_ids[:rows]], axis=1),
                batch.positions[:rows] - 1,
                jnp.where(batch.limit[:rows] >= 0, 2, 0),
                page_size=kv.page_size,
                num_slots=kv.num_slots,
            )
        return {DRAFT_KV: forward(device.models[DRAFTER], kv, taken_in, device.backend)[0]}

    def propose(self, device: Device, seated: Seated, shape: RoundsShape) -> tuple[dict[str, Any], Drafts]:
        width = shape.width
        batch, wanted = seated.batch, seated.num_drafts
        rows = wanted.shape[0]
        before = _tokens_before(device, batch.row_seat)
        latest = seated.latest_output(device.state[BOUNDS])
        entropy = jnp.zeros(rows, jnp.float32)

        def draft(
            kv: KVPool,
            tokens: jax.Array,
            first: jax.Array,
            path: jax.Array,
            entropy: jax.Array,
            number: jax.Array | int,
        ) -> tuple[KVPool, jax.Array, jax.Array]:
            """Draft the token after `tokens` [R, N] for rows that want so many drafts; `path`: all drafts before it."""
            goes_on = wanted > number
            count = jnp.where(goes_on, tokens.shape[1], 0)
            wide = wide_rows(batch, tokens, first, count, page_size=kv.page_size, num_slots=kv.num_slots)
            kv, hidden = forward(device.models[DRAFTER], kv, wide, device.backend)
            position = jnp.where(goes_on, first + tokens.shape[1], -1)
            sampling = replace(batch.samples.sampling, sample_position=position)
            path = jnp.concatenate([latest[:, None], jnp.where(jnp.arange(width - 1) < number, path, -1)], axis=1)
            bounded = Bounded(device.state[BOUNDS], batch.row_seat, position, path)
            found, entropy_of_draw = self._sampled(device, hidden.reshape(*tokens.shape, -1)[:, -1], sampling, bounded)
            return kv, found, jnp.where(goes_on, entropy_of_draw, entropy)

        def nothing(
            kv: KVPool,
            tokens: jax.Array,
            first: jax.Array,
            path: jax.Array,
            entropy: jax.Array,
            number: jax.Array | int,
        ) -> tuple[KVPool, jax.Array, jax.Array]:
            return kv, tokens[:, -1], entropy

        drafts = jnp.zeros((rows, width - 1), jnp.int32)
        kv, drafted, entropy = lax.cond(
            jnp.any(wanted > 0), draft, nothing, device.state[DRAFT_KV],
            jnp.stack([before, seated.token], axis=1), seated.length - 2, drafts, entropy, 0,
        )  # fmt: skip
        drafts = drafts.at[:, 0].set(drafted)

        def turn(number: jax.Array, carried: tuple[KVPool, jax.Array, jax.Array]):
            kv, drafts, entropy = carried
            last = lax.dynamic_slice_in_dim(drafts, number - 1, 1, axis=1)
            kv, drafted, entropy = lax.cond(
                jnp.any(wanted > number), draft, nothing,
                kv, last, seated.length - 1 + number, drafts, entropy, number,
            )  # fmt: skip
            return kv, lax.dynamic_update_slice_in_dim(drafts, drafted[:, None], number, axis=1), entropy

        if width > 2:
            kv, drafts, entropy = lax.fori_loop(1, width - 1, turn, (kv, drafts, entropy))
        return {DRAFT_KV: kv}, Drafts(drafts, wanted, entropy)

    def settle(self, device: Device, seated: Seated, landed: jax.Array, features: jax.Array | None) -> dict[str, Any]:
        return {}  # the drafter reads the landed tokens that it needs from the seats

    def _sampled(
        self, device: Device, hidden: jax.Array, sampling: SamplingBatch, bounded: Bounded
    ) -> tuple[jax.Array, jax.Array]:
        """Sample tokens int32 [R] after hidden states [R, hidden]; returns them and the entropies in nats.

        Where no token can be sampled, an arbitrary one is drafted.
        """
        model = device.models[DRAFTER]
        if not self._with_entropy:
            drafted = next_tokens(model, hidden, sampling, bounded=bounded)
            return jnp.maximum(drafted, 0), jnp.zeros(hidden.shape[0], jnp.float32)
        logits, greedy = logits_and_greedy(model, hidden)
        held, greedy = as_held(logits, greedy, bounded)
        return jnp.maximum(sample(held, sampling, greedy), 0), entropies(logits)


def _tokens_before(device: Device, seat: jax.Array) -> jax.Array:
    """Return int32 [R], the token before the latest one of the sequence in each seat [R]."""
    return device.state[SEATS].before.at[jnp.maximum(seat, 0)].get(mode="clip")
