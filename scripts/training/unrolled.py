"""Training-time test of EAGLE-3 heads (Li et al. 2025): while a head learns, it drafts on from its own outputs.

Pair i of a row is what the head computes at position i: the target's feature of token i, and the embedding of token
i + 1, from which it says token i + 2. Drafting begins at some pairs, the starts. Step s continues each of them by
one token, as decoding would, with the text's own tokens for those drafted: its feature is the head's output of the step
before, its position is i + s, and it sees the pairs up to i of step 0 and what came of i in the steps since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.eagle3 import Eagle3Head
from kernels_pallas.rotate_and_write.reference import rotate
from training.initialization import Params
from training.loop import RowsAttend
from training.packing import Rows

STEP_DECAY = 0.8
"""Of the loss's weight, from one step to the next."""


@dataclass(frozen=True)
class HeadRows(Rows):
    """Rows with all that a head learns from.

    `starts` are pairs, int32 [rows, starts], those beyond the text at the row's end; `features` float16 [rows, length,
    num_features], of the size that the head is for, and `hidden` float16 [rows, length, hidden] are the target's;
    `known` float32 [rows, length] is 1 at tokens after which the target's likeliest token is a draft word.
    """

    starts: np.ndarray
    features: np.ndarray
    hidden: np.ndarray
    known: np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftsAttend:
    """An `Attend` of a later step, of all starts of rows, which come flattened. Its keys and values are those of the
    starts' own steps so far, [rows, starts, steps, num_kv_heads, head_dim]."""

    keys: jax.Array  # [rows, length, num_kv_heads, head_dim], of step 0
    values: jax.Array  # the same
    visible: jax.Array  # bool [rows, starts, length]

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        q, k, v = (x.reshape(*self.visible.shape[:2], *x.shape[1:]) for x in rotate(heads))
        k, v = k[:, :, None], v[:, :, None]
        if kv is not None:
            k, v = jnp.concatenate([kv[0], k], axis=2), jnp.concatenate([kv[1], v], axis=2)
        q = q.reshape(*q.shape[:2], k.shape[3], -1, q.shape[-1]) * q.shape[-1] ** -0.5
        before = jnp.einsum("rqhgd,rkhd->rqhgk", q, self.keys)
        before = jnp.where(self.visible[:, :, None, None], before, jnp.finfo(before.dtype).min)
        own = jnp.einsum("rqhgd,rqshd->rqhgs", q, k)
        weights = jax.nn.softmax(jnp.concatenate([before, own], axis=-1), axis=-1)
        past, own = jnp.split(weights, [self.keys.shape[1]], axis=-1)
        out = jnp.einsum("rqhgk,rkhd->rqhgd", past, self.values) + jnp.einsum("rqhgs,rqshd->rqhgd", own, v)
        return out.reshape(-1, q.shape[2] * q.shape[3], q.shape[-1]), (k, v)


def unrolled_logits(head: Eagle3Head, table: jax.Array, rows: dict[str, jax.Array], steps: int) -> list[jax.Array]:
    """What a head says in each step of drafting from the starts of rows, float32 [rows * starts, draft_vocab_size].

    `table` [vocab, hidden] has the embeddings. Tokens are flattened for all but attention, see `hidden_of`.
    """
    ids, starts, documents = rows["ids"], rows["starts"], rows["documents"]
    count, length = ids.shape
    words = jnp.take(table, jnp.roll(ids, -1, axis=1).reshape(-1), axis=0)
    features = head.project(rows["features"].reshape(count * length, -1).astype(head.dtype))
    first = head(words, features, rows["positions"].reshape(-1), RowsAttend(documents))
    assert first.kv is not None
    chosen = (jnp.arange(count)[:, None] * length + starts).reshape(-1)
    same = jnp.take_along_axis(documents, starts, axis=1)[:, :, None] == documents[:, None]
    attend = DraftsAttend(*first.kv, same & (jnp.arange(length) <= starts[:, :, None]))
    hidden, kv = jnp.take(first.hidden, chosen, axis=0), None
    positions = jnp.take(rows["positions"].reshape(-1), chosen)
    found = [head.logits(jnp.take(first.normed, chosen, axis=0))]
    for step in range(1, steps):
        drafted = jnp.take_along_axis(ids, jnp.minimum(starts + 1 + step, length - 1), axis=1)
        out = head(jnp.take(table, drafted.reshape(-1), axis=0), hidden, positions + step, attend, kv)
        hidden, kv = out.hidden, out.kv
        found.append(head.logits(out.normed))
    return found


def draft_losses(
    head: Eagle3Head, table: jax.Array, output: jax.Array, rows: dict[str, jax.Array], steps: int
) -> list[tuple[jax.Array, jax.Array]]:
    """Return, for each step, the weighted sum of the divergences KL(target || head) over the draft words in nats, and
    the sum of the weights.

    Args:
        table: [vocab, hidden], the embeddings that the head reads.
        output: [vocab, hidden], the target's output head.
        rows: a token counts as much as its weight says, and nothing where the target says no draft word.
    """
    hidden = rows["hidden"].reshape(-1, output.shape[1]).astype(output.dtype)
    wanted = jax.nn.log_softmax(hidden @ jnp.take(output, head.target_ids[...], axis=0).T)
    found = []
    for step, said in enumerate(unrolled_logits(head, table, rows, steps)):
        row, before, weights = _drafted(rows, step)
        target = jnp.take(wanted, (row * rows["ids"].shape[1] + before).reshape(-1), axis=0)
        divergence = jnp.sum(jnp.exp(target) * (target - jax.nn.log_softmax(said)), axis=-1)
        weights = (weights * rows["known"][row, before]).reshape(-1)
        found.append((jnp.sum(divergence * weights), jnp.sum(weights)))
    return found


def unrolled_losses(
    graph: nnx.GraphDef,
    rest: nnx.State,
    table: jax.Array,
    output: jax.Array,
    steps: int,
    params: Params,
    rows: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The `draft_losses` of all steps together, each step counting `STEP_DECAY` of the one before, for `train`."""
    found = draft_losses(head_of(graph, rest, params), table, output, rows, steps)
    sums = [jnp.stack(each) * STEP_DECAY**step for step, each in enumerate(found)]
    total, weight = sum(sums[1:], start=sums[0])
    return total, weight


def drafts_right(head: Eagle3Head, table: jax.Array, rows: dict[str, jax.Array], steps: int) -> jax.Array:
    """bool [rows, starts, steps]: whether the head's likeliest word is the text's token, in each step after right ones
    of a greedy chain; False after the end of the text."""
    found = []
    for step, said in enumerate(unrolled_logits(head, table, rows, steps)):
        row, before, weights = _drafted(rows, step)
        drafted = jnp.take(head.target_ids[...], jnp.argmax(said, axis=-1)).reshape(before.shape)
        after = jnp.minimum(before + 1, rows["ids"].shape[1] - 1)
        found.append((drafted == rows["ids"][row, after]) & (weights > 0))
    return jnp.stack(found, axis=-1)


def split_head(head: Eagle3Head) -> tuple[nnx.GraphDef, nnx.State, Params]:
    """The graph, what does not learn, and a flat {name: array} of what does."""
    graph, params, rest = nnx.split(head, nnx.Param, ...)
    return graph, rest, {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(params)}


def head_of(graph: nnx.GraphDef, rest: nnx.State, params: Params) -> Eagle3Head:
    """The head with these parameters."""
    flat: dict[Any, Any] = {tuple(name.split(".")): nnx.Param(value) for name, value in params.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat), rest)


def choose_starts(rows: Rows, count: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [rows, count]: pairs from which the first drafted token counts, ascending, a random choice where there are
    more; rows with fewer are filled up with their end."""
    length = rows.ids.shape[1]
    starts = np.full((len(rows.ids), count), length - 1, np.int32)
    inside = (rows.documents[:, 2:] == rows.documents[:, :-2]) & (rows.weights[:, 2:] > 0)
    for row, good in enumerate(inside):
        found = np.flatnonzero(good)
        found = np.sort(rng.choice(found, count, replace=False)) if len(found) > count else found
        starts[row, : len(found)] = found
    return starts


def _drafted(rows: dict[str, jax.Array], step: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return, for the draft of each start in a step, its row [rows, 1], the token before it, int32 [rows, starts], and
    its weight float32 [rows, starts]."""
    starts, documents, length = rows["starts"], rows["documents"], rows["ids"].shape[1]
    row = jnp.arange(starts.shape[0])[:, None]
    before = jnp.minimum(starts + 1 + step, length - 1)
    after = starts + 2 + step
    inside = (after < length) & (documents[row, jnp.minimum(after, length - 1)] == documents[row, starts])
    return row, before, rows["weights"][row, jnp.minimum(after, length - 1)] * inside
