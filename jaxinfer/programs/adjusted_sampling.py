"""Sampling from adjusted logits, with log probabilities: a small program behind the steps that have such rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.limits import MAX_ENDING_TOKEN_IDS
from jaxinfer.programs.batch_layout import Samples
from jaxinfer.programs.program import SEATS, Device, Place
from jaxinfer.programs.seats import write_seats
from jaxinfer.sampling.adjustments import Adjustments, adjust
from jaxinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxinfer.sampling.sampler import SamplingBatch, sample

# So many entries take no longer than one: below a hundredth of a step even on a CPU.
_FEWEST_ENTRIES = 4096


class SamplingShape(NamedTuple):
    """Rows of logits, and entries of adjustments for all of them."""

    num_logits: int
    num_entries: int


def entry_buckets(num_seqs: int, vocab_size: int) -> list[int]:
    """The numbers of entries that launches come in, up to every word for every row: a program belongs to each."""
    most = num_seqs * vocab_size
    buckets = [min(_FEWEST_ENTRIES, most)]
    while buckets[-1] < most:
        buckets.append(min(buckets[-1] * 64, most))
    return buckets


@dataclass(frozen=True, eq=False)
class AdjustedSampling:
    """The program that samples a step's logits again. Its inputs are the step's logits and samples, and adjustments."""

    shapes: Sequence[SamplingShape] = ()
    reads = ()
    writes = (SEATS,)

    @property
    def planned(self) -> dict[str, SamplingShape]:
        return {"adjusted_sampling": max(self.shapes)}

    def describe(self, shape: SamplingShape) -> str:
        return f"sampling of {shape.num_logits} rows with {shape.num_entries} adjustments"

    def idle(self, shape: SamplingShape, place: Place) -> tuple[Any, ...]:
        count, vocab = shape.num_logits, place.model.config.vocab_size
        logits = jax.ShapeDtypeStruct((count, vocab), jnp.float32, sharding=place.split_by_word)

        def of(dtype: Any, *extent: int) -> Any:
            return jax.ShapeDtypeStruct((count, *extent), dtype, sharding=place.whole)

        i, f = jnp.int32, jnp.float32
        sampling = SamplingBatch(of(f), of(i), of(f), of(f), of(jnp.uint32, 2), of(i))
        samples = Samples(sampling, seat=of(i), ending_token_ids=of(i, MAX_ENDING_TOKEN_IDS), max_len=of(i))
        return logits, samples, Adjustments.empty(count, shape.num_entries)

    def run(
        self, device: Device, shape: SamplingShape, logits: jax.Array, samples: Samples, adjustments: Adjustments
    ) -> tuple[dict[str, Any], tuple[jax.Array, TokenLogprobs]]:
        """The seats, and tokens [Q] with log probabilities."""
        del shape
        tokens = sample(adjust(logits, adjustments), samples.sampling)
        seats, landed = write_seats(device.state[SEATS], samples, tokens)
        return {SEATS: seats}, device.readable((landed, token_logprobs(logits, tokens)))
