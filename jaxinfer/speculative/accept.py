"""Acceptance by equality: a draft is accepted if it is the token that was sampled at its position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.programs.seats import ENDED, Seats
from jaxinfer.sampling.greatest import NO_SCORE


def num_accepted(drafts: jax.Array, count: jax.Array, sampled: jax.Array) -> jax.Array:
    """Return int32 [R], the number of each row's drafts before the first that is not accepted.

    Args:
        drafts: int32 [R, W - 1].
        count: int32 [R], drafts of each row.
        sampled: int32 [R, W], the tokens sampled after the latest token and after each draft.
    """
    agrees = (drafts == sampled[:, :-1]) & (jnp.arange(drafts.shape[1]) < count[:, None])
    return jnp.sum(lax.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)


def land(
    seats: Seats,
    seat: jax.Array,
    token: jax.Array,
    length: jax.Array,
    runs: jax.Array,
    sampled: jax.Array,
    accepted: jax.Array,
    *,
    ending_token_ids: jax.Array,
    max_len: jax.Array,
) -> tuple[Seats, jax.Array]:
    """Write the accepted tokens, and the sampled one after them, to the seats of their sequences.

    A sequence ends at the first of these tokens that is one of its ending tokens or `NO_SCORE`, and at its greatest
    length.

    Args:
        seat: int32 [R], out of range: the row has none.
        token: int32 [R], latest token of each sequence before.
        length: int32 [R], tokens of each sequence before.
        runs: bool [R], whether anything lands.
        sampled: int32 [R, W].
        accepted: int32 [R], number of accepted drafts.
        ending_token_ids: int32 [R, E], -1: none.
        max_len: int32 [R].

    Returns:
        The seats, and int32 [R, W]: the tokens that landed, a `NO_SCORE` included, then -1.
    """
    place = jnp.arange(sampled.shape[1])
    ends = (sampled == NO_SCORE) | (length[:, None] + place + 1 >= max_len[:, None])
    ends |= jnp.any(sampled[:, :, None] == ending_token_ids[:, None], axis=2)
    width = sampled.shape[1]
    first_end = jnp.min(jnp.where(ends, place, width), axis=1)
    last = jnp.minimum(accepted, first_end)
    lands = runs[:, None] & (place <= last[:, None])
    latest = jnp.take_along_axis(sampled, last[:, None], axis=1)[:, 0]
    at = jnp.where(runs, seat, seats.token.shape[0])
    known = jnp.concatenate([token[:, None], sampled], axis=1)
    seats = Seats(
        token=seats.token.at[at].set(jnp.where(first_end <= accepted, ENDED, latest), mode="drop"),
        before=seats.before.at[at].set(jnp.take_along_axis(known, last[:, None], axis=1)[:, 0], mode="drop"),
        length=seats.length.at[at].set(length + last + 1, mode="drop"),
    )
    return seats, jnp.where(lands, sampled, -1)
