"""The step: new tokens into their slots, logits where wanted, sampled tokens out. (params, state, batch) -> (...)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape, Samples, StepBatch, idle_batch, unpack
from jaxinfer.programs.forward import forward
from jaxinfer.programs.program import KV, SEATS, TARGET, Device, Place
from jaxinfer.programs.seats import Seats, read_seats, write_seats
from jaxinfer.sampling.next_tokens import logits_and_greedy
from jaxinfer.sampling.sampler import sample


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step leaves on the device. T tokens, Q wanted logits, V words."""

    token_ids: jax.Array  # int32 [Q], sampled; -1 where the row is idle
    logits: jax.Array  # float32 [Q, V]
    hidden: jax.Array  # [T, hidden], after the final norm
    samples: Samples  # [Q], completed from the seats


def step(
    model: DecoderLM, kv: KVCache, seats: Seats, batch: StepBatch, backend: AttentionBackend
) -> tuple[KVCache, Seats, StepOutput]:
    """One step of every way of decoding."""
    batch = read_seats(batch, seats, page_size=kv.page_size, num_slots=kv.num_pages * kv.page_size)
    kv, hidden = forward(model, kv, batch, backend)
    logits, greedy = logits_and_greedy(model, hidden[batch.logits_index])
    tokens = sample(logits, batch.samples.sampling, greedy)
    seats, landed = write_seats(seats, batch.samples, tokens)
    return kv, seats, StepOutput(landed, logits, hidden, batch.samples)


def padded_tokens(num_tokens: int) -> int:
    """The number of hidden states that a step of `num_tokens` returns: the next power of two."""
    return 1 << (num_tokens - 1).bit_length()


@dataclass(frozen=True, eq=False)
class Step:
    """The program of one step, mixed or of decodes alone. Its input is a packed batch."""

    shapes: Sequence[BatchShape] = ()
    reads = (TARGET,)
    writes = (KV, SEATS)

    @property
    def planned(self) -> dict[str, BatchShape]:
        decodes = [shape for shape in self.shapes if not shape.prefill_tokens]
        return {
            "prefill": self.largest,
            "decode": max(decodes, key=lambda shape: (shape.num_rows, shape.pages_per_row)),
        }

    @property
    def largest(self) -> BatchShape:
        """The shape with the most tokens and rows."""
        return max(self.shapes, key=lambda shape: (shape.num_tokens, shape.num_logits, shape.pages_per_row))

    def describe(self, shape: BatchShape) -> str:
        return f"step for {shape.describe()}"

    def idle(self, shape: BatchShape, place: Place) -> tuple[Any, ...]:
        return (idle_batch(shape, num_slots=place.num_slots, num_seats=place.num_seats).buffer,)

    def run(self, device: Device, shape: BatchShape, buffer: jax.Array) -> tuple[dict[str, Any], StepOutput]:
        """The state, and the output with its hidden states padded: few shapes of them mean few programs that read
        them."""
        model, kv, seats = device.models[TARGET], device.state[KV], device.state[SEATS]
        kv, seats, output = step(model, kv, seats, unpack(buffer, shape), device.backend)
        extra = padded_tokens(shape.num_tokens) - shape.num_tokens
        return {KV: kv, SEATS: seats}, StepOutput(
            token_ids=device.readable(output.token_ids),
            logits=device.split_by_word(output.logits),
            hidden=device.readable(jnp.pad(output.hidden, ((0, extra), (0, 0)))),
            samples=device.readable(output.samples),
        )
