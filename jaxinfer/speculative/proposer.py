"""What drafts tokens: a Protocol over parts of the device's state, so that one program of rounds serves every kind.

What is proposed, and how much of it, has no influence on what is generated: the target samples a token at every drafted
place as it would have without drafts, and a draft stays where it is the token that was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import StepBatch
from jaxinfer.programs.program import Device


@dataclass(frozen=True)
class Seated:
    """R sequences at the start of a round, while a program is traced."""

    batch: StepBatch  # their rows: decode rows of one token, which nobody has completed
    token: jax.Array  # int32 [R], the latest token, which no model has computed
    length: jax.Array  # int32 [R], tokens of the sequence, the latest included
    num_drafts: jax.Array  # int32 [R], how many are wanted; 0 where the row is idle or its drafter is behind
    runs: jax.Array  # bool [R]


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
    def models(self) -> Mapping[str, DecoderLM]:
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

    def follow(self, device: Device, batch: StepBatch) -> dict[str, Any]:
        """Take in the tokens of a step, prompt chunks and decodes."""
        ...

    def propose(self, device: Device, seated: Seated, width: int) -> tuple[dict[str, Any], Drafts]:
        """Draft up to `width - 1` tokens behind the latest one."""
        ...

    def settle(self, device: Device, seated: Seated, landed: jax.Array) -> dict[str, Any]:
        """Take in the tokens int32 [R, W] that landed, -1 where none did."""
        ...


def integers(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, *, abstract: bool) -> Any:
    """Zeros, int32, for a part of the state; or their shape alone."""
    if abstract:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return jnp.zeros(shape, jnp.int32, device=sharding)
