"""From hidden states to tokens, with the product of the output head in the order that the device computes fastest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.sampling.greatest import first_of_greatest, greatest_of_rows
from jaxinfer.sampling.sampler import SamplingBatch, sample

# Up to so many rows a CPU is faster with the table as the left operand, which it reads as it lies: 8 against 12 ms for
# 32 rows of 32,000 words. With more rows, the maximum over the first axis takes back what the product gains.
TABLE_FIRST_ROWS = 64


def logits_and_greedy(model: DecoderLM, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits float32 [Q, vocab] of hidden states [Q, hidden], and the token of the greatest in each row, int32 [Q].

    Of equal logits the one with the lower token id is the greatest.
    """

    def hidden_first(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.logits(hidden)
        return logits, greatest_of_rows(logits)

    def table_first(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The maximum is taken before transposing: XLA would merge the transpose with the product, and swap operands.
        logits = model.logits_by_word(hidden)
        return logits.T, first_of_greatest(logits)

    if hidden.shape[0] > TABLE_FIRST_ROWS:
        return hidden_first(hidden)
    return lax.platform_dependent(hidden, cpu=table_first, default=hidden_first)


def next_tokens(model: DecoderLM, hidden: jax.Array, sampling: SamplingBatch) -> jax.Array:
    """Tokens int32 [Q] that `sample` takes after hidden states [Q, hidden], where nobody asks for the logits."""

    def any_row() -> jax.Array:
        logits, greedy = logits_and_greedy(model, hidden)
        return sample(logits, sampling, greedy)

    # Where all rows are greedy, nothing reads the logits by rows, and XLA leaves their transpose out.
    return lax.cond(jnp.any(sampling.temperature > 0), any_row, lambda: logits_and_greedy(model, hidden)[1])
