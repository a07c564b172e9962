"""State of each running sequence's block on the device: its tokens so far, and its counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.limits import MAX_LOGPROBS
from jaxinfer.sampling.logprobs import Likely, TokenLogprobs

BLOCKS = "blocks"  # the part of the device's state


type Make = Callable[..., Any]


def maker_of(num_seats: int, sharding: jax.sharding.Sharding | None, *, abstract: bool) -> Make:
    """Return a function of sizes and a dtype (default int32) that makes zeros [num_seats, ...], or only the shape."""

    def make(*shape: int, dtype: Any = jnp.int32) -> Any:
        if abstract:
            return jax.ShapeDtypeStruct((num_seats, *shape), dtype, sharding=sharding)
        return jnp.zeros((num_seats, *shape), dtype, device=sharding)

    return make


def notes_of(make: Make, block_size: int, vocab_size: int) -> TokenLogprobs:
    """Allocate log probabilities for the tokens of each seat's block."""
    most = min(MAX_LOGPROBS, vocab_size)
    likely = Likely(make(block_size, most), make(block_size, most, dtype=jnp.float32))
    return TokenLogprobs(make(block_size, dtype=jnp.float32), make(block_size), likely)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Entries of S seats, each with a block of B tokens. Programs take it donated and return it."""

    tokens: Any  # int32 [S, B], masks included
    start: Any  # int32 [S], the position of the block's first token
    num_given: Any  # int32 [S], number of its first tokens that are the prompt's last; they never change
    round: Any  # int32 [S], number of rounds of this block so far
    num_edits: Any  # int32 [S], number of these rounds that found no mask and edited a token
    ended: Any  # bool [S], whether the sequence has ended
    noted: Any  # TokenLogprobs [S, B] of the tokens in the rounds that committed them
    credits: Any  # float32 [S, B, vocab], see `Credit`; [S, B, 0] for other rules

    @classmethod
    def allocate(
        cls,
        num_seats: int,
        block_size: int,
        vocab_size: int,
        sharding: jax.sharding.Sharding | None = None,
        *,
        with_credits: bool = False,
        abstract: bool = False,
    ) -> Blocks:
        """Allocate entries of free seats; with `abstract`, only their shapes."""
        make = maker_of(num_seats, sharding, abstract=abstract)
        return cls(
            make(block_size), make(), make(), make(), make(), make(dtype=jnp.bool_),
            notes_of(make, block_size, vocab_size),
            make(block_size, vocab_size if with_credits else 0, dtype=jnp.float32),
        )  # fmt: skip

    def at(self, seat: jax.Array) -> Blocks:
        """Return the entries of seats int32 [R]; an out-of-range seat yields an arbitrary entry."""
        return jax.tree.map(lambda x: x.at[jnp.maximum(seat, 0)].get(mode="clip"), self)

    def put(self, seat: jax.Array, there: jax.Array, blocks: Blocks) -> Blocks:
        """Replace the entries of seats int32 [R] where `there` bool [R] is true."""
        at = jnp.where(there, seat, self.start.shape[0])
        return jax.tree.map(lambda old, new: old.at[at].set(new, mode="drop"), self, blocks)
