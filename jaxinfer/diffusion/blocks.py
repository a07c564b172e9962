"""What the device knows of each running sequence's block: its tokens so far, and its own counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.limits import MAX_LOGPROBS
from jaxinfer.sampling.logprobs import TokenLogprobs

BLOCKS = "blocks"  # the part of the device's state


type Make = Callable[..., Any]


def maker_of(num_seats: int, sharding: jax.sharding.Sharding | None, *, abstract: bool) -> Make:
    """A function of sizes and a dtype, int32 by default, that makes an array of zeros for every seat; or its shape."""

    def make(*shape: int, dtype: Any = jnp.int32) -> Any:
        if abstract:
            return jax.ShapeDtypeStruct((num_seats, *shape), dtype, sharding=sharding)
        return jnp.zeros((num_seats, *shape), dtype, device=sharding)

    return make


def notes_of(make: Make, block_size: int, vocab_size: int) -> TokenLogprobs:
    """Room for how probable the tokens of each seat's block were."""
    most = min(MAX_LOGPROBS, vocab_size)
    return TokenLogprobs(
        make(block_size, dtype=jnp.float32), make(block_size), make(block_size, most),
        make(block_size, most, dtype=jnp.float32),
    )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """One entry for each of S seats; of a block of B tokens. Programs take it donated and return it."""

    tokens: Any  # int32 [S, B], masks included
    start: Any  # int32 [S], the position of the block's first token
    num_given: Any  # int32 [S], the first of its tokens, which the prompt ends with: they stay
    round: Any  # int32 [S], rounds of this block so far
    num_edits: Any  # int32 [S], of these, how many found no mask and changed a token
    ended: Any  # bool [S], nothing is generated any more
    noted: Any  # TokenLogprobs [S, B], of the tokens in the round that committed them
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
        """Of seats that nobody has; or their shapes alone."""
        make = maker_of(num_seats, sharding, abstract=abstract)
        return cls(
            make(block_size), make(), make(), make(), make(), make(dtype=jnp.bool_),
            notes_of(make, block_size, vocab_size),
            make(block_size, vocab_size if with_credits else 0, dtype=jnp.float32),
        )  # fmt: skip

    def at(self, seat: jax.Array) -> Blocks:
        """Those of seats int32 [R]; out of range: anybody's."""
        return jax.tree.map(lambda x: x.at[jnp.maximum(seat, 0)].get(mode="clip"), self)

    def put(self, seat: jax.Array, there: jax.Array, blocks: Blocks) -> Blocks:
        """The same with those of seats int32 [R] replaced, where bool [R] says so."""
        at = jnp.where(there, seat, self.start.shape[0])
        return jax.tree.map(lambda old, new: old.at[at].set(new, mode="drop"), self, blocks)
