"""Common parts of denoising programs: shapes, inputs, and the output that they leave on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.programs.batch_layout import BatchShape, idle_batch
from jaxinfer.programs.program import TARGET, Place
from jaxinfer.sampling.logprobs import TokenLogprobs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoiseOutput:
    """Output of N rounds of Q rows on the device; blocks have B tokens."""

    tokens: jax.Array  # int32 [N * B, Q], landed tokens in order; -1: none; NO_SCORE: the row failed
    ran: jax.Array  # bool [N, Q], whether the row took part in the round
    blocks: jax.Array  # int32 [N, Q, B], each row's block after each round, masks included; -1 after the sequence's end
    start: jax.Array  # int32 [N, Q], the position of the block's first token
    logprobs: TokenLogprobs  # [N * B, Q], of landed tokens in the rounds that committed them, if the batch wants that

    @classmethod
    def empty(cls, rounds: int, rows: int, size: int, vocab: int) -> DenoiseOutput:
        """Return the output before the first of `rounds` rounds."""
        return cls(
            tokens=jnp.full((rounds * size, rows), -1, jnp.int32),
            ran=jnp.zeros((rounds, rows), bool),
            blocks=jnp.zeros((rounds, rows, size), jnp.int32),
            start=jnp.zeros((rounds, rows), jnp.int32),
            logprobs=TokenLogprobs.nothing(rounds * size, rows, vocab=vocab),
        )


class DenoisingProgram:
    """A program of up to `max_rounds` rounds, or of one round beside chunks of prompts. Its input is a packed batch,
    whose `num_steps` is the number of rounds of each row."""

    shapes: Sequence[BatchShape]
    max_rounds: int
    reads = (TARGET,)

    @property
    def planned(self) -> Mapping[str, BatchShape]:
        loops = [shape for shape in self.shapes if not shape.prefill_tokens]
        mixed = [shape for shape in self.shapes if shape.prefill_tokens]
        return {
            name: max(shapes, key=lambda s: (s.num_rows, s.prefill_tokens, s.block_size, s.pages_per_row))
            for name, shapes in (("prefill", mixed), ("denoise_loop", loops))
            if shapes
        }

    def describe(self, shape: BatchShape) -> str:
        return f"rounds of denoising for {shape.describe()}"

    def idle(self, shape: BatchShape, place: Place) -> tuple[Any, ...]:
        return (idle_batch(shape, num_slots=place.num_slots, num_seats=place.num_seats).buffer,)

    def rounds_in(self, shape: BatchShape) -> int:
        """Most rounds of a launch of the shape: 1 with chunks of prompts, which are computed once."""
        return 1 if shape.prefill_tokens else self.max_rounds
