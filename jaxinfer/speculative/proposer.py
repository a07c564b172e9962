"""What drafts tokens: a Protocol over parts of the device's state, so that one program of rounds serves every kind.

What is proposed, and how much of it, has no influence on what is generated: the target samples a token at every drafted
place as it would have without drafts, and a draft stays where it is the token that was sampled.
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
    """Rows of a launch, the most tokens that land for each in a round, and how many are verified at once."""

    batch: BatchShape
    width: int  # drafted tokens one after the other, and one more
    num_nodes: int = 0  # of the trees that are drafted, the root not counted; 0: chains of `width - 1`

    @property
    def verified(self) -> int:
        """Tokens of each row."""
        return 1 + (self.num_nodes or self.width - 1)

    def proposed(self, drafted: np.ndarray) -> np.ndarray:
        """How many tokens are drafted, where so many are one after the other."""
        return np.where(drafted > 0, self.num_nodes, 0) if self.num_nodes else drafted


@dataclass(frozen=True)
class Seated:
    """R sequences at the start of a round, while a program is traced."""

    batch: StepBatch  # their rows: decode rows of one token, which nobody has completed
    token: jax.Array  # int32 [R], the latest token, which no model has computed
    length: jax.Array  # int32 [R], tokens of the sequence, the latest included
    num_drafts: jax.Array  # int32 [R], how many are wanted; 0 where the row is idle or its drafter is behind
    runs: jax.Array  # bool [R]

    def latest_output(self, bounds: Bounds) -> jax.Array:
        """int32 [R]: the latest tokens as they begin the paths of draws; -1 where they are of prompts."""
        return latest_output(bounds, self.batch.row_seat, self.token, self.length - 1)


@dataclass(frozen=True)
class Drafts:
    """What was drafted for R rows, at most W - 1 tokens for each."""

    tokens: jax.Array  # int32 [R, W - 1]
    count: jax.Array  # int32 [R], at most what was wanted
    entropy: jax.Array  # float32 [R], of the distribution of the last drafted token in nats; 0 where there is none


class Proposer(Protocol):
    """Drafts tokens inside a program.

    It keeps parts of the device's state, by seats and by slots of the pool, and sees every token there that a step
    computes while it is told to follow. Methods return the parts that they change.
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
        """Whether rounds are to be expected in which nothing is drafted for anybody: they cost a plain step then."""
        ...

    @property
    def knows_pages(self) -> bool:
        """Whether what it has of a sequence lies in the sequence's pages, for whoever shares them, and not in its
        seat."""
        ...

    @property
    def capture(self) -> Sequence[int]:
        """Layers of the target, ascending, whose inputs it goes on from; none: it knows tokens alone."""
        ...

    def follow(
        self, device: Device, batch: StepBatch, features: jax.Array | None, *, again: bool = False
    ) -> dict[str, Any]:
        """Take in the tokens of a step, prompt chunks and decodes.

        Args:
            features: [T, F * hidden], the inputs of the layers of `capture`.
            again: whether the target had computed the tokens before: then what is known of each row begins with the
                features of its first token.
        """
        ...

    def propose(self, device: Device, seated: Seated, shape: RoundsShape) -> tuple[dict[str, Any], Drafts | Tree]:
        """Draft behind the latest tokens: trees where the shape has nodes, else chains."""
        ...

    def settle(self, device: Device, seated: Seated, landed: jax.Array, features: jax.Array | None) -> dict[str, Any]:
        """Take in the tokens int32 [R, W] that landed, -1 where none did.

        Args:
            features: [R, W, F * hidden] of what the target computed: the latest token, and landed ones but the last.
        """
        ...


def entropies(logits: jax.Array) -> jax.Array:
    """Entropies float32 [Q], in nats, of the distributions that logits [Q, V] stand for; ln V where NaN stands for
    none."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.where(jnp.isfinite(entropy), entropy, jnp.log(float(logits.shape[-1])))


def integers(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, *, abstract: bool) -> Any:
    """Zeros, int32, for a part of the state; or their shape alone."""
    if abstract:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return jnp.zeros(shape, jnp.int32, device=sharding)
