"""What an EAGLE-3 head learns from: its draft words, and rows with the target's features and last hidden states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.eagle3 import Eagle3Head
from training.loop import RowsAttend
from training.packing import Document, Rows
from training.unrolled import HeadRows, choose_starts

COVERAGE = 0.995
"""Share of the written tokens that draft words must be."""


def draft_words(documents: Sequence[Document], vocab_size: int, sizes: Sequence[int]) -> tuple[np.ndarray, float]:
    """The most frequent written tokens, ascending, as many as the least of `sizes` that covers `COVERAGE` of all
    written, or the greatest; and the share that they cover."""
    counts = Counter(
        token
        for document in documents
        for token, written in zip(document.ids, document.written, strict=True)
        if written
    )
    by_frequency = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    total = sum(counts.values())
    words, share = by_frequency, 1.0
    for size in sorted(sizes):
        words = by_frequency[:size]
        share = sum(counts[token] for token in words) / total
        if share >= COVERAGE:
            break
    return np.sort(np.asarray(words, np.int32)), share


def output_table(model: DecoderLM) -> jax.Array:
    """[vocab, hidden]: what a model's hidden states are multiplied with."""
    return model.embed.embedding[...] if model.lm_head is None else model.lm_head.kernel[...]


def make_head_teacher(
    model: DecoderLM, capture: tuple[int, ...], words: np.ndarray, rng: np.random.Generator, size: float = 1.0
) -> Callable[[Rows, int], HeadRows]:
    """A function that adds to rows what a head learns from, with so many starts in each row.

    Features are divided by `size`: an optimizer makes steps of one size for all weights, and features of a target's
    late layers may be a hundred times those of its first.

    Raises:
        FloatingPointError: a feature is greater than float16 holds.
    """
    vocabulary = np.zeros(model.config.vocab_size, bool)
    vocabulary[words] = True

    @jax.jit
    def computed(model: DecoderLM, rows: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        past = [None] * len(model.layers)
        ids, positions = rows["ids"].reshape(-1), rows["positions"].reshape(-1)
        found = model.with_kv(past, ids, positions, RowsAttend(rows["documents"]), capture=capture)
        assert found.features is not None
        likeliest = jnp.argmax(model.logits(found.hidden), axis=-1)
        shape = rows["ids"].shape
        return (
            (found.features / size).reshape(*shape, -1).astype(jnp.float16),
            found.hidden.reshape(*shape, -1).astype(jnp.float16),
            likeliest.reshape(shape),
        )

    def teach(rows: Rows, starts: int) -> HeadRows:
        arrays = rows.arrays()
        features, hidden, likeliest = map(np.asarray, computed(model, arrays))
        if not np.isfinite(features).all():
            raise FloatingPointError("a feature of the target is greater than float16 holds")
        known = vocabulary[likeliest].astype(np.float32)
        return HeadRows(
            **arrays, starts=choose_starts(rows, starts, rng), features=features, hidden=hidden, known=known
        )

    return teach


def feature_size(rows: HeadRows) -> float:
    """The root mean square of features, rounded to a power of two: dividing by it, and a head that learned so, is exact
    in any precision."""
    features = rows.features[rows.documents > 0].astype(np.float32)
    return float(2.0 ** np.round(np.log2(np.sqrt(np.mean(features**2)))))


def with_projection_scaled(head: Eagle3Head, factor: float) -> Eagle3Head:
    """Return a copy of the head for features that are divided by `factor`."""
    graph, state = nnx.split(head)
    scaled = nnx.merge(graph, state)
    assert scaled.fc is not None
    scaled.fc.kernel = nnx.Param(scaled.fc.kernel[...] * factor)
    return scaled
