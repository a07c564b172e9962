"""Proposers of drafts: a Protocol over parts of the device's state, so that one program of rounds serves every kind.

Drafts and their number have no influence on the output. At every drafted position the target samples a token as it
would without drafts, and a draft is accepted if it is that token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.programs.batch_layout import BatchShape, StepBatch
from jaxinfer.programs.program import Device
from jaxinfer.sampling.bounds import Bounds, latest_output
from jaxinfer.speculative.tree import Tree


class RoundsShape(NamedTuple):
    """Shape of a launch of rounds: its rows, the most tokens that land for each in a round, and its tree's nodes."""

    batch: BatchShape
    width: int  # most drafts along a path, plus one
    num_nodes: int = 0  # of drafted trees, without the root; 0: chains of `width - 1` drafts

    @property
    def verified(self) -> int:
        """Tokens of each row that the target verifies in a round."""
        return 1 + (self.num_nodes or self.width - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, one for each sequence."""
        return self.batch.num_tokens

    @property
    def pages_per_row(self) -> int:
        return self.batch.pages_per_row

    def holds(self, other: RoundsShape) -> bool:
        """Whether a launch of the other shape fits into this one, so that all that differs is padding."""
        return self[1:] == other[1:] and self.batch.holds(other.batch)

    def proposed(self, drafted: np.ndarray) -> np.ndarray:
        """Return the number of drafted tokens, given the drafts along a path."""
        return np.where(drafted > 0, self.num_nodes, 0) if self.num_nodes else drafted


@dataclass(frozen=True)
class Seated:
    """R sequences at the start of a round, while a program is traced."""

    batch: StepBatch  # decode rows of one token, not completed from their seats
    token: jax.Array  # int32 [R], the latest token, which no model has computed
    length: jax.Array  # int32 [R], tokens of the sequence, the latest included
    num_drafts: jax.Array  # int32 [R], wanted drafts; 0 where the row is idle or its drafter has to catch up
    runs: jax.Array  # bool [R]

    def latest_output(self, bounds: Bounds) -> jax.Array:
        """Return int32 [R], the latest tokens, with which paths of draws start; -1 where they are of prompts."""
        return latest_output(bounds, self.batch.row_seat, self.token, self.length - 1)


@dataclass(frozen=True)
class Drafts:
    """Chains of drafts for R rows, at most W - 1 tokens for each."""

    tokens: jax.Array  # int32 [R, W - 1]
    count: jax.Array  # int32 [R], at most the wanted number
    entropy: jax.Array  # float32 [R], of the last drafted token's distribution in nats; 0 where there is none


class Proposer(Protocol):
    """Maker of drafts inside a program.

    It owns parts of the device's state, by seats and by slots of the pool. While it follows, it takes in every token
    that a step computes. Methods return the parts of the state that they change.
    """

    @property
    def models(self) -> Mapping[str, Any]:
        """Models that it reads, by name."""
        ...

    @property
    def reads(self) -> Sequence[str]: ...  # names of models

    @property
    def writes(self) -> Sequence[str]: ...  # names of parts of the state

    @property
    def may_find_nothing(self) -> bool:
        """Whether rounds without any drafts are to be expected; the program then runs a plain step for them."""
        ...

    @property
    def knows_pages(self) -> bool:
        """Whether its state of a sequence is stored in the sequence's pages, and shared with them, not in its seat."""
        ...

    @property
    def capture(self) -> Sequence[int]:
        """Layers of the target, ascending, whose inputs are its features; empty: it uses tokens alone."""
        ...

    def follow(
        self, device: Device, batch: StepBatch, features: jax.Array | None, *, again: bool = False
    ) -> dict[str, Any]:
        """Take in the tokens of a step, prompt chunks and decodes.

        Args:
            features: [T, F * hidden], the inputs of the layers of `capture`.
            again: whether the target had computed these tokens before; features before a row's first token are
                unknown then.
        """
        ...

    def propose(self, device: Device, seated: Seated, shape: RoundsShape) -> tuple[dict[str, Any], Drafts | Tree]:
        """Draft after the latest tokens: trees if the shape has nodes, else chains."""
        ...

    def settle(self, device: Device, seated: Seated, landed: jax.Array, features: jax.Array | None) -> dict[str, Any]:
        """Take in the tokens int32 [R, W] that landed, -1 where none did.

        Args:
            features: [R, W, F * hidden], of the tokens that the target computed: the latest, then landed ones but the
                last.
        """
        ...


def entropies(logits: jax.Array) -> jax.Array:
    """Return the entropies float32 [Q] of the distributions of logits [Q, V], in nats; ln V where not finite."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.where(jnp.isfinite(entropy), entropy, jnp.log(float(logits.shape[-1])))


def integers(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, *, abstract: bool) -> Any:
    """Return int32 zeros for a part of the state, or their shape alone."""
    if abstract:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return jnp.zeros(shape, jnp.int32, device=sharding)
