"""Training of block diffusion (Arriola et al. 2025): a model learns the masked words in each block of an answer,
given the clean blocks before it.

A lesson holds its text once clean, but for the last block, and then the blocks of the answer several times over, each
copy with other words masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.dense import masked_attention
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.decoder import DecoderLM
from kernels_pallas.rotate_and_write.reference import rotate
from training.dense_experts import DENSE_EXPERTS
from training.initialization import Params
from training.loop import module_of
from training.packing import Document, Rows

NEVER = 2.0
OWN_SHARE, OWN_SURENESS = 0.67, (0.6, 0.95)
"""Share of blocks in which the model's own round comes first, and how sure it must be of a word there."""


@dataclass(frozen=True)
class MaskWeights:
    """Weights of a run of masks: each has `following` times the weight of the one before, and none less than `least`.
    The first are committed first, and far after them much cannot be known."""

    following: float = 0.85
    least: float = 0.1

    def __call__[T: (np.ndarray, jax.Array)](self, hidden: T, begins: T) -> T:
        """float32 [rows, length], 0 where nothing is hidden; `begins` where a block does. Arrays: NumPy's or JAX's."""
        library = hidden.__array_namespace__()
        follows_hidden = library.pad(hidden[:, :-1], ((0, 0), (1, 0))) & ~begins
        index = library.arange(hidden.shape[1])
        first = library.maximum.accumulate(library.where(follows_hidden, 0, index), axis=1)
        return library.maximum(self.following ** (index - first), self.least).astype(np.float32) * hidden


@dataclass(frozen=True)
class Noise:
    """What is masked, and the weights of masks. Of the blocks a share is masked `wholly`, as every block begins, and
    one from some place on to its `end`, as an answer grows; in others a share is, drawn between 0 and 1. With `is_own`
    the model's own round comes first, see `own_losses`."""

    weights: MaskWeights = MaskWeights()
    wholly: float = 0.2
    end: float = 0.3
    is_own: bool = False


USUAL_NOISE = Noise()


@dataclass(frozen=True)
class Lesson(Document):
    """A text with copies of its answer, one after the other; `written` is what is learned, in the copies alone."""

    positions: list[int]
    copies: list[int]  # 0: the clean text


@dataclass(frozen=True)
class LessonRows(Rows):
    """Packed lessons, int32 [rows, length]; `weights` are above 0 where a token is masked."""

    copies: np.ndarray
    noisy: np.ndarray  # `ids` with masks
    certainty: np.float32  # weight of the entropy of what is said where that is right
    sureness: np.ndarray  # float32: what the model is so sure of is shown first, see `own_losses`; above 1, nothing is


def lesson_of(document: Document, block_size: int, filler: int, copies: int) -> Lesson:
    """The lesson of a text's last answer, filled to whole blocks with the `filler` that follows an answer's end."""
    last = max(place for place, written in enumerate(document.written) if written)
    first = last
    while first and document.written[first - 1]:
        first -= 1
    ids = [*document.ids[: last + 1], *[filler] * (-(last + 1) % block_size)]
    start, end = first - first % block_size, len(ids) - block_size
    answer = [False] * (first - start) + [True] * (len(ids) - first)
    return Lesson(
        ids=ids[:end] + ids[start:] * copies,
        written=[False] * end + answer * copies,
        positions=[*range(end), *[*range(start, len(ids))] * copies],
        copies=[0] * end + [copy for copy in range(1, copies + 1) for _ in answer],
    )


def pack_lessons(chosen: Sequence[Sequence[Document]], length: int) -> LessonRows:
    """Pack lessons into rows of `length` tokens; nothing is masked yet, and all that may be has weight."""
    shape = (len(chosen), length)
    ids, positions, documents, copies = (np.zeros(shape, np.int32) for _ in range(4))
    weights = np.zeros(shape, np.float32)
    for row, members in enumerate(chosen):
        start = 0
        for number, lesson in enumerate(members, start=1):
            assert isinstance(lesson, Lesson)
            inside = slice(start, start + len(lesson.ids))
            ids[row, inside], positions[row, inside] = lesson.ids, lesson.positions
            documents[row, inside], copies[row, inside] = number, lesson.copies
            weights[row, inside] = lesson.written
            start = inside.stop
    return LessonRows(
        ids, positions, documents, weights, copies, ids, np.float32(0.0), np.full(shape, NEVER, np.float32)
    )


def masked(rows: LessonRows, shares: np.ndarray, rng: np.random.Generator, mask_token_id: int) -> LessonRows:
    """Rows in which words are masked, each with the probability in `shares` [rows, length]."""
    chosen = (rows.weights > 0) & (rng.random(rows.ids.shape) < shares)
    noisy = np.where(chosen, mask_token_id, rows.ids)
    return replace(rows, weights=chosen.astype(np.float32), noisy=noisy)


def with_noise(
    rows: LessonRows,
    rng: np.random.Generator,
    mask_token_id: int,
    block_size: int,
    noise: Noise = USUAL_NOISE,
) -> LessonRows:
    """Rows with masks that are drawn for every block of every copy, and their weights."""
    place = rows.positions % block_size
    share, kind = (_of_blocks(rng, rows, block_size) for _ in range(2))
    is_behind = place >= (share * block_size).astype(int)
    shares = np.where(kind < noise.wholly + noise.end, is_behind, share)
    noisy = masked(rows, np.where(kind < noise.wholly, 1.0, shares), rng, mask_token_id)
    return replace(noisy, weights=noise.weights(noisy.weights > 0, place == 0))


def with_own_round(rows: LessonRows, rng: np.random.Generator, block_size: int) -> LessonRows:
    """Rows in whose blocks, or most of them, the model shows first what it is sure of."""
    is_own = _of_blocks(rng, rows, block_size) < OWN_SHARE
    least, most = OWN_SURENESS
    sureness = least + (most - least) * _of_blocks(rng, rows, block_size)
    return replace(rows, sureness=np.where(is_own, sureness, NEVER).astype(np.float32))


def _of_blocks(rng: np.random.Generator, rows: LessonRows, block_size: int) -> np.ndarray:
    """Numbers between 0 and 1 [rows, length], the same for all tokens of a block."""
    index = np.arange(rows.ids.shape[1])
    first = np.maximum.accumulate(np.where(rows.positions % block_size == 0, index, 0), axis=1)
    return np.take_along_axis(rng.random(rows.ids.shape), first, axis=1)


def noisy_steps(
    steps: Iterator[list[LessonRows]],
    seed: int,
    mask_token_id: int,
    block_size: int,
    certainty: Callable[[int], float] = lambda step: 0.0,
    noise: Noise = USUAL_NOISE,
) -> Iterator[list[Rows]]:
    """Steps' groups of rows with noise, new in each, and the weight of certainty in each step, counted from 0; and
    `with_own_round`s."""
    rng = np.random.default_rng(seed)
    for number, groups in enumerate(steps):
        noisy = [with_noise(rows, rng, mask_token_id, block_size, noise) for rows in groups]
        if noise.is_own:
            noisy = [with_own_round(rows, rng, block_size) for rows in noisy]
        yield [replace(rows, certainty=np.float32(certainty(number))) for rows in noisy]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LessonAttend:
    """An `Attend` of packed lessons, whose tokens come flattened: each sees the clean blocks before its own, and its
    own block of its own copy."""

    documents: jax.Array  # int32 [rows, length]
    copies: jax.Array
    blocks: jax.Array  # of its text

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        q, k, v = (x.reshape(*self.documents.shape, *x.shape[1:]) for x in rotate(heads))
        same_text, same_copy, same_block = (
            x[:, :, None] == x[:, None, :] for x in (self.documents, self.copies, self.blocks)
        )
        is_before = self.blocks[:, None, :] < self.blocks[:, :, None]
        is_clean = (self.copies == 0)[:, None, :]
        out = masked_attention(q, k, v, same_text & ((is_clean & is_before) | (same_copy & same_block)))
        return out.reshape(-1, *out.shape[2:]), (k, v)


def masked_losses(
    graph: nnx.GraphDef, block_size: int, params: Params, rows: dict[str, jax.Array], doubt: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Weighted sum of the masked tokens' losses in nats, and the sum of the weights.

    With `certainty`, the entropy of what is said joins the loss where the likeliest token is the right one: it becomes
    sure of what it knows, so that more is committed at once (Chen et al. 2025, dParallel). With `doubt`, a loss counts
    up to so much more where a wrong token is said, from a probability of 0.5 on: what is committed wrongly stays, and
    to wait costs a round.
    """
    logits, words, weights = _said(graph, block_size, params, rows)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, words)
    is_right = jnp.argmax(logits, axis=-1) == words
    sureness = jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
    losses *= 1 + doubt * ~is_right * jax.lax.stop_gradient(jnp.maximum(2 * sureness - 1, 0))
    entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1)
    return jnp.sum((losses + rows["certainty"] * is_right * entropy) * weights), jnp.sum(weights)


def own_losses(
    graph: nnx.GraphDef,
    block_size: int,
    mask_token_id: int,
    mask_weights: MaskWeights,
    doubt: float,
    params: Params,
    rows: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """`masked_losses` after a round of the model's own: hidden words that it says, as sure as `sureness` asks, are
    shown. What is left hidden is what it meets when it decodes, and what it would say wrongly there."""
    logits, words, _ = _said(graph, block_size, jax.lax.stop_gradient(params), rows)
    sure = jnp.exp(-optax.softmax_cross_entropy_with_integer_labels(logits, words)).reshape(rows["ids"].shape)
    noisy = jnp.where(sure >= rows["sureness"], rows["ids"], rows["noisy"])
    weights = mask_weights(noisy == mask_token_id, rows["positions"] % block_size == 0)
    return masked_losses(graph, block_size, params, rows | {"noisy": noisy, "weights": weights}, doubt)


def masked_agreements(
    graph: nnx.GraphDef, block_size: int, params: Params, rows: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Like `masked_losses`, but the weights of tokens that are found most likely."""
    logits, words, weights = _said(graph, block_size, params, rows)
    return jnp.sum((jnp.argmax(logits, axis=-1) == words) * weights), jnp.sum(weights)


def _said(
    graph: nnx.GraphDef, block_size: int, params: Params, rows: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits [rows * length, vocab], the words that are right and the weights."""
    model = module_of(graph, params)
    assert isinstance(model, DecoderLM)
    attend = LessonAttend(rows["documents"], rows["copies"], rows["positions"] // block_size)
    hidden = model(rows["noisy"].reshape(-1), rows["positions"].reshape(-1), attend, residual=DENSE_EXPERTS)
    return model.logits(hidden), rows["ids"].reshape(-1), rows["weights"].reshape(-1)
