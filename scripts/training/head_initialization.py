"""What an EAGLE-3 head begins as: the best linear guess, and attention that looks up and copies.

Two things are fitted by least squares. The target's last hidden state is guessed from the features of the token before
and the token's embedding: the first part becomes the head's projection, the second the output of attention heads that
look at their own pair alone. And the token of a feature is recognised in the projection: keys are made from that.

To draft a text that repeats itself, a head finds the earlier occurrence of the last token and says what followed it (an
induction head). A pair has both: its feature tells which token it is of, and its embedding is the token after. So some
queries begin as the last embedding and match keys that are recognised tokens, by the same random projection; values are
embeddings (in the way of mimetic initialization, Trockman and Kolter 2023). Training may change all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.eagle3 import Eagle3Head, TokenIds
from jaxinfer.models.eagle3_config import Eagle3Config
from training.head_lessons import output_table
from training.unrolled import HeadRows

FIRST_SLOW_PAIR = 14 / 32
"""Share of the rotary pairs, fastest first, that turn within a few tokens: by them a pair finds itself, by the others a
token is found anywhere."""
SHARPNESS_FOUND, SHARPNESS_SELF = 1.6, 2.0
"""Scale of queries and of keys."""
WRITTEN = 0.2
"""Scale of what is copied."""
NOISE = 0.3
"""Scale of the other queries, against that of usual weights."""
RIDGE = 30.0


@dataclass(frozen=True)
class LinearGuess:
    """Least squares over pairs, applied from the left.

    `projection` [hidden, num_features] and `words` [hidden, hidden], of normed embeddings, guess the target's last
    hidden state without the scale of its norm; `tokens` [hidden, hidden] guesses the normed embedding of a pair's first
    token from the normed projection.
    """

    projection: np.ndarray
    words: np.ndarray
    tokens: np.ndarray


def fit_guess(target: DecoderLM, lessons: Iterable[HeadRows]) -> LinearGuess:
    """Fit the guess over the pairs of some lessons: all pairs for the first token, those whose first draft counts for
    what they draft."""
    table, scale = _normed(np.asarray(target.embed.embedding[...])), np.asarray(target.final_norm.scale[...])
    features, first, second, wanted, counts = [], [], [], [], []
    for rows in lessons:
        inside = (rows.documents[:, 1:] == rows.documents[:, :-1]) & (rows.documents[:, 1:] > 0)
        drafted = np.pad(rows.weights[:, 2:] > 0, ((0, 0), (0, 1)))
        features.append(rows.features[:, :-1][inside].astype(np.float32))
        first.append(table[rows.ids[:, :-1][inside]])
        second.append(table[rows.ids[:, 1:][inside]])
        wanted.append(rows.hidden[:, 1:][inside].astype(np.float32) / scale)
        counts.append(drafted[inside])
    inputs, drafted = np.concatenate(features), np.concatenate(counts)
    # Layers differ in size by much, and least squares with a ridge are fair to what is of one size.
    size = np.sqrt(np.mean(inputs**2))
    both = np.concatenate([inputs / size, np.concatenate(second)], axis=1)
    guess = _least_squares(both[drafted], np.concatenate(wanted)[drafted])
    width = inputs.shape[1]
    projected = inputs @ (guess[:width] / size)
    tokens = _least_squares(_normed(projected), np.concatenate(first))
    return LinearGuess(guess[:width].T / size, guess[width:].T, tokens.T)


def initial_head(
    config: Eagle3Config, target: DecoderLM, words: np.ndarray, guess: LinearGuess, seed: int
) -> Eagle3Head:
    """A head in float32 that drafts `words`, int32 [draft_vocab_size], for a target that is as wide.

    The output head and the last norm begin as the target's, and the MLP adds nothing yet.
    """
    assert config.layer.hidden_size == config.target_hidden_size, "a head as wide as its target"
    head = Eagle3Head(config, rngs=nnx.Rngs(seed))
    assert head.fc is not None
    head.target_ids = TokenIds(jnp.asarray(words, jnp.int32))
    head.lm_head.kernel = nnx.Param(jnp.take(output_table(target), words, axis=0).astype(jnp.float32))
    head.final_norm.scale = nnx.Param(target.final_norm.scale[...].astype(jnp.float32))
    head.fc.kernel = nnx.Param(jnp.asarray(guess.projection, jnp.float32))
    others = NOISE * np.array(head.attention.qkv.kernel[...])
    qkv, out = _attention(config, guess, others, np.random.default_rng(seed))
    head.attention.qkv.kernel, head.attention.o.kernel = nnx.Param(jnp.asarray(qkv)), nnx.Param(jnp.asarray(out))
    head.mlp.down.kernel = nnx.Param(jnp.zeros_like(head.mlp.down.kernel[...]))
    return head


def _attention(
    config: Eagle3Config, guess: LinearGuess, qkv: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Kernels [num_kv_heads, group + 2, head_dim, 2 * hidden] and [hidden, num_kv_heads, group, head_dim].

    In each group the first query looks up and the second looks at itself; without a second one, every other group does.
    Other queries of `qkv` stay, and write nothing yet.
    """
    layer, half = config.layer, config.layer.head_dim // 2
    hidden, dim, group, count = layer.hidden_size, layer.head_dim, layer.group_size, layer.num_kv_heads
    slow = np.arange(dim) % half >= int(half * FIRST_SLOW_PAIR)
    bases = [np.linalg.qr(rng.normal(size=(hidden, hidden)))[0] for _ in range(2)]
    # Heads share an embedding, which several may have.
    sharing = max(1.0, count * dim / hidden) / (2 if group == 1 else 1)
    out = np.zeros((hidden, count, group, dim), np.float32)
    for number in range(count):
        match, copy = (base[(number * dim + np.arange(dim)) % hidden] for base in bases)
        finders, selves = ([0], [1]) if group > 1 else (([0], []) if number % 2 == 0 else ([], [0]))
        qkv[number, [*finders, *selves, group, group + 1]] = 0.0
        qkv[number, group, slow, hidden:] = SHARPNESS_FOUND * (match @ guess.tokens)[slow]
        qkv[number, group, ~slow, :hidden] = SHARPNESS_SELF * match[~slow]
        qkv[number, group + 1, :, :hidden] = copy
        for member in finders:
            qkv[number, member, slow, :hidden] = SHARPNESS_FOUND * match[slow]
            out[:, number, member] = WRITTEN / sharing * copy.T
        for member in selves:
            qkv[number, member, ~slow, :hidden] = SHARPNESS_SELF * match[~slow]
            out[:, number, member] = guess.words @ copy.T / sharing
    return qkv, out


def _normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def _least_squares(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """[inputs, outputs]"""
    return np.linalg.solve(inputs.T @ inputs + RIDGE * np.eye(inputs.shape[1]), inputs.T @ outputs)
