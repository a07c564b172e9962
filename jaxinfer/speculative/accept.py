"""Acceptance by equality: a draft stays if it is the token that was sampled at its place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.programs.seats import ENDED, Seats
from jaxinfer.sampling.greatest import NO_SCORE


def num_accepted(drafts: jax.Array, count: jax.Array, sampled: jax.Array) -> jax.Array:
    """int32 [R]: how many of each row's first `count` drafts int32 [R, W - 1] are, one after the other, the tokens
    sampled int32 [R, W] at the place before each."""
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
    """Sampled tokens [R, W] up to the one behind the accepted drafts go to their sequences.

    A sequence ends with the first of them that is one of its ending tokens or `NO_SCORE`, and where it reaches its
    greatest length.

    Args:
        seat: int32 [R], out of range: nowhere.
        token: int32 [R], the latest of the sequence before.
        length: int32 [R], tokens of the sequence before.
        runs: bool [R], whether anything lands.
        accepted: int32 [R].
        ending_token_ids: int32 [R, E], -1: none.
        max_len: int32 [R].

    Returns:
        The seats, and int32 [R, W]: the tokens that landed, a `NO_SCORE` included, -1 behind them.
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
