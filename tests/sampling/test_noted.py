"""Lists of likely tokens of a few draws among many: those that are computed for all draws."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.bounds import Bounded, Bounds
from jaxinfer.sampling.logprobs import Likely, likely_tokens
from jaxinfer.sampling.noted import Draws, at_once, in_blocks, logits_after, shown_logits
from jaxinfer.sampling.sampler import SamplingBatch

VOCAB, HIDDEN, SEATS = 101, 16, 7


@dataclass(frozen=True)
class Head:
    """The output head of a model."""

    table: jax.Array  # [vocab, hidden]

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden @ self.table.T


type Drawn = tuple[jax.Array, jax.Array, jax.Array, SamplingBatch, Bounded]


def random_draws(count: int) -> Drawn:
    """Return draws of all kinds, of sequences in and out of seats: table, hidden states, tokens, and the rest."""
    rng = np.random.default_rng(count)
    table = jnp.asarray(rng.standard_normal((VOCAB, HIDDEN)), jnp.float32)
    hidden = jnp.asarray(rng.standard_normal((count, HIDDEN)), jnp.float32)
    position = jnp.arange(count, dtype=jnp.int32)
    seat = rng.integers(0, SEATS + 2, count).astype(np.int32)
    sampling = SamplingBatch(
        temperature=jnp.asarray(rng.choice([0, 0.7, 1.3], count), jnp.float32),
        top_k=jnp.asarray(rng.choice([0, 3, 10], count), jnp.int32),
        top_p=jnp.asarray(rng.choice([1, 0.8], count), jnp.float32),
        min_p=jnp.zeros(count),
        request_key=jnp.zeros((count, 2), jnp.uint32),
        sample_position=position,
    )
    bounds = Bounds.allocate(SEATS, VOCAB)
    bounds = replace(
        bounds,
        binds=jnp.ones(SEATS, jnp.int32),
        allowed=jnp.full(bounds.allowed.shape, 0xFFFFFFFF, jnp.uint32),
        bias_token=jnp.full(bounds.bias_token.shape, VOCAB, jnp.int32),
        repetition_penalty=jnp.full(SEATS, 1.3),
        counts=jnp.asarray(rng.integers(0, 3, bounds.counts.shape), jnp.uint16),
        mask=jnp.asarray(np.bitwise_and.reduce(rng.integers(0, 2**32, (3, *bounds.mask.shape), dtype=np.uint32))),
        masked_at=jnp.asarray(
            [int(np.argmax(seat == each)) if each in seat else -1 for each in range(SEATS)], jnp.int32
        ),
        masks_list=jnp.ones(SEATS, jnp.int32),
    )
    path = jnp.asarray(rng.integers(-1, VOCAB, (count, 2)), jnp.int32)
    tokens = jnp.asarray(rng.integers(-2, VOCAB, count), jnp.int32)
    return table, hidden, tokens, sampling, Bounded(bounds, jnp.asarray(seat), position, path)


@pytest.mark.parametrize("way", [in_blocks, at_once])
@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("count", [7, 40, 200])
def test_lists_of_some_draws_are_those_of_all_draws_and_the_others_have_none(count, processed, way):
    drawn = random_draws(count)

    @jax.jit
    def of_all(table: jax.Array, hidden: jax.Array, tokens: jax.Array, sampling: SamplingBatch, bounded: Bounded):
        logits = Head(table).logits(hidden)
        shown = shown_logits(logits, jnp.maximum(tokens, 0), sampling, bounded, processed=processed)
        return likely_tokens(shown, bounded.listed(shown))

    @jax.jit
    def of_some(
        rows: jax.Array,
        table: jax.Array,
        hidden: jax.Array,
        tokens: jax.Array,
        sampling: SamplingBatch,
        bounded: Bounded,
    ):
        head: Any = Head(table)
        draws = Draws(logits_after(head, hidden), tokens, sampling, bounded)
        return way(partial(draws.likely, processed=processed), Likely.nothing(count, vocab=VOCAB), rows)

    everything = jax.tree.map(np.asarray, of_all(*drawn))
    assert (everything.logprob == -np.inf).any()  # masks and filters make lists shorter
    for wanted in sorted({0, 3, 8, 9, 64, 65, count}):
        rows = np.zeros(count, bool)
        rows[np.random.default_rng(wanted).permutation(count)[:wanted]] = True
        found = jax.tree.map(np.asarray, of_some(jnp.asarray(rows), *drawn))
        np.testing.assert_allclose(found.logprob[rows], everything.logprob[rows], atol=1e-5)
        listed = rows[:, None] & np.isfinite(everything.logprob)
        assert np.array_equal(found.token[listed], everything.token[listed])
        assert not np.any(found.token[~rows]) and not np.any(found.logprob[~rows])
