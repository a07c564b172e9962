"""A small model that drafts for a large one with the same vocabulary, over a KV pool of its own with the same pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import Device
from jaxinfer.programs.wide_rows import wide_rows
from jaxinfer.sampling.next_tokens import logits_and_greedy, next_tokens
from jaxinfer.sampling.sampler import SamplingBatch, sample
from jaxinfer.speculative.proposer import Drafts, RoundsShape, Seated, entropies, integers

DRAFTER, DRAFT_STATE = "drafter", "draft_state"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """What the drafter has of S sequences. Programs take it donated and return it."""

    kv: KVCache  # of the drafter's layers; slots are the target's
    token_before: jax.Array  # int32 [S], the token before the latest one, which the drafter may not have computed


class DraftModel:
    """Drafts the tokens that the small model would sample, with the noise that the target samples with.

    Rounds and steps take in two tokens of each sequence, the latest and the one before: where all drafts of the last
    round were accepted, the drafter has not computed the last of them; where not, it computes it once more.

    Args:
        model: the small model.
        with_entropy: whether `Drafts.entropy` is made, for controllers that ask for it.
    """

    reads = (DRAFTER,)
    writes = (DRAFT_STATE,)
    may_find_nothing = False
    knows_pages = True
    capture = ()

    def __init__(self, model: DecoderLM, *, with_entropy: bool = False) -> None:
        self.models: Mapping[str, Any] = {DRAFTER: model}
        self._with_entropy = with_entropy

    def follow(
        self, device: Device, batch: StepBatch, features: jax.Array | None, *, again: bool = False
    ) -> dict[str, Any]:
        state: DraftState = device.state[DRAFT_STATE]
        rows, kv = batch.decode_rows, state.kv
        taken_in = batch
        if rows:
            before = state.token_before.at[jnp.maximum(batch.row_seat[:rows], 0)].get(mode="clip")
            taken_in = wide_rows(
                batch,
                jnp.stack([before, batch.token_ids[:rows]], axis=1),
                batch.positions[:rows] - 1,
                jnp.where(batch.limit[:rows] >= 0, 2, 0),
                page_size=kv.page_size,
                num_slots=kv.num_pages * kv.page_size,
            )
        kv, _ = forward(device.models[DRAFTER], kv, taken_in, device.backend)
        # The last token of a row whose next one is sampled is the one before the latest then.
        last = batch.token_ids[batch.logits_index]
        at = jnp.where(batch.samples.sampling.sample_position >= 0, batch.samples.seat, state.token_before.shape[0])
        return {DRAFT_STATE: DraftState(kv, state.token_before.at[at].set(last, mode="drop"))}

    def propose(self, device: Device, seated: Seated, shape: RoundsShape) -> tuple[dict[str, Any], Drafts]:
        width = shape.width
        state: DraftState = device.state[DRAFT_STATE]
        batch, wanted = seated.batch, seated.num_drafts
        rows = wanted.shape[0]
        before = state.token_before.at[jnp.maximum(batch.row_seat, 0)].get(mode="clip")
        entropy = jnp.zeros(rows, jnp.float32)

        def draft(kv: KVCache, tokens: jax.Array, first: jax.Array, entropy: jax.Array, number: jax.Array | int):
            """The draft after `tokens` [R, N], of the rows that want so many."""
            goes_on = wanted > number
            count = jnp.where(goes_on, tokens.shape[1], 0)
            wide = wide_rows(batch, tokens, first, count, page_size=kv.page_size, num_slots=kv.num_pages * kv.page_size)
            kv, hidden = forward(device.models[DRAFTER], kv, wide, device.backend)
            position = jnp.where(goes_on, first + tokens.shape[1], -1)
            sampling = replace(batch.samples.sampling, sample_position=position)
            found, of_this = self._sampled(device, hidden.reshape(*tokens.shape, -1)[:, -1], sampling)
            return kv, found, jnp.where(goes_on, of_this, entropy)

        def nothing(kv: KVCache, tokens: jax.Array, first: jax.Array, entropy: jax.Array, number: jax.Array | int):
            return kv, tokens[:, -1], entropy

        kv, drafted, entropy = lax.cond(
            jnp.any(wanted > 0), draft, nothing,
            state.kv, jnp.stack([before, seated.token], axis=1), seated.length - 2, entropy, 0,
        )  # fmt: skip
        drafts = jnp.zeros((rows, width - 1), jnp.int32).at[:, 0].set(drafted)

        def turn(number: jax.Array, carried: tuple[KVCache, jax.Array, jax.Array]):
            kv, drafts, entropy = carried
            latest = lax.dynamic_slice_in_dim(drafts, number - 1, 1, axis=1)
            kv, drafted, entropy = lax.cond(
                jnp.any(wanted > number), draft, nothing, kv, latest, seated.length - 1 + number, entropy, number
            )
            return kv, lax.dynamic_update_slice_in_dim(drafts, drafted[:, None], number, axis=1), entropy

        if width > 2:
            kv, drafts, entropy = lax.fori_loop(1, width - 1, turn, (kv, drafts, entropy))
        return {DRAFT_STATE: replace(state, kv=kv)}, Drafts(drafts, wanted, entropy)

    def settle(self, device: Device, seated: Seated, landed: jax.Array, features: jax.Array | None) -> dict[str, Any]:
        state: DraftState = device.state[DRAFT_STATE]
        count = jnp.sum(landed >= 0, axis=1)
        known = jnp.concatenate([seated.token[:, None], landed], axis=1)
        before = jnp.take_along_axis(known, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        at = jnp.where(count > 0, seated.batch.row_seat, state.token_before.shape[0])
        return {DRAFT_STATE: replace(state, token_before=state.token_before.at[at].set(before, mode="drop"))}

    def _sampled(self, device: Device, hidden: jax.Array, sampling: SamplingBatch) -> tuple[jax.Array, jax.Array]:
        """Tokens int32 [R] after hidden states [R, hidden], and the entropy of their distributions in nats.

        Where nothing can be sampled any token is drafted, and is as good as its chance to be accepted.
        """
        model = device.models[DRAFTER]
        if not self._with_entropy:
            return jnp.maximum(next_tokens(model, hidden, sampling), 0), jnp.zeros(hidden.shape[0], jnp.float32)
        logits, greedy = logits_and_greedy(model, hidden)
        return jnp.maximum(sample(logits, sampling, greedy), 0), entropies(logits)


def draft_state(kv: KVCache, num_seats: int, whole: jax.sharding.Sharding | None = None) -> DraftState:
    """The state of a drafter with a pool: of shapes alone, to compile for, where that is.

    Args:
        whole: where seats lie; None: on the default device.
    """
    return DraftState(kv, integers((num_seats,), whole, abstract=kv.is_abstract))
