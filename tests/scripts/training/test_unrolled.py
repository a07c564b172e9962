"""Unrolled drafting: its first step is a causal run, its later steps are drafting token by token with a KV cache."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.attention.attend import LayerKV
from jaxinfer.attention.dense import CausalAttend, masked_attention
from jaxinfer.attention.heads import ProjectedHeads
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3 import Eagle3Head, TokenIds
from jaxinfer.models.eagle3_config import Eagle3Config
from kernels_pallas.rotate_and_write.reference import rotate
from training.packing import Document, pack_rows
from training.unrolled import (
    STEP_DECAY,
    HeadRows,
    choose_starts,
    draft_losses,
    drafts_right,
    head_of,
    split_head,
    unrolled_logits,
    unrolled_losses,
)

VOCAB, HIDDEN, WORDS, STEPS = 40, 16, 12, 4
LAYER = ModelConfig(
    "LlamaForCausalLM", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_layers=1, num_heads=4,
    num_kv_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
RNG = np.random.default_rng(0)
TABLE, OUTPUT = (jnp.asarray(RNG.standard_normal((VOCAB, HIDDEN)), jnp.float32) for _ in range(2))
KNOWN_WORDS = np.arange(3, 3 + 3 * WORDS, 3)
LENGTH = 24


@pytest.fixture(scope="module")
def head() -> Eagle3Head:
    head = Eagle3Head(Eagle3Config(LAYER, WORDS, HIDDEN, (1, 2, 4)), rngs=nnx.Rngs(1))
    head.target_ids = TokenIds(jnp.asarray(KNOWN_WORDS, jnp.int32))
    return head


@pytest.fixture(scope="module")
def rows() -> HeadRows:
    """Two documents in one row, one in the other; the first four tokens of each are a prompt."""
    documents = [
        Document(RNG.integers(0, VOCAB, size).tolist(), [i >= 4 for i in range(size)]) for size in (11, 10, 17)
    ]
    packed = pack_rows([documents[:2], documents[2:]], LENGTH, 0.0)
    return HeadRows(
        **packed.arrays(),
        starts=choose_starts(packed, 16, RNG),
        features=RNG.standard_normal((2, LENGTH, 3 * HIDDEN)).astype(np.float16),
        hidden=RNG.standard_normal((2, LENGTH, HIDDEN)).astype(np.float16),
        known=np.ones((2, LENGTH), np.float32),
    )


@partial(jax.jit, static_argnames="steps")
def said_by(head: Eagle3Head, arrays: dict[str, jax.Array], steps: int) -> list[jax.Array]:
    return unrolled_logits(head, TABLE, arrays, steps)


@jax.jit
def losses_of(head: Eagle3Head, arrays: dict[str, jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return draft_losses(head, TABLE, OUTPUT, arrays, STEPS)


def document_of(rows: HeadRows, row: int, number: int) -> slice:
    inside = np.flatnonzero(rows.documents[row] == number)
    return slice(int(inside[0]), int(inside[-1]) + 1)


def causal(head: Eagle3Head, rows: HeadRows, row: int, inside: slice) -> jax.Array:
    """What a plain run of the head says at each pair of one document."""
    ids, features = rows.ids[row, inside], jnp.asarray(rows.features[row, inside], jnp.float32)
    count = len(ids) - 1
    out = head(TABLE[ids[1:]], head.project(features[:count]), jnp.arange(count), CausalAttend())
    return head.logits(out.normed)


def test_starts_are_the_pairs_whose_first_draft_counts(rows):
    assert rows.starts[0].tolist()[:12] == [2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 17]
    assert rows.starts[0, 13:].tolist() == [LENGTH - 1] * 3 and rows.starts[0, 12] == 18
    few = choose_starts(rows, 5, np.random.default_rng(3))
    assert set(few[0]) < set(rows.starts[0]) and (np.diff(few[0]) > 0).all()


def test_the_first_step_is_a_causal_run_of_each_document(head, rows):
    said = said_by(head, rows.arrays(), 1)[0].reshape(2, -1, WORDS)
    for row, number in ((0, 1), (0, 2), (1, 1)):
        inside = document_of(rows, row, number)
        expected = causal(head, rows, row, inside)
        for index, start in enumerate(rows.starts[row]):
            if inside.start <= start < inside.stop - 1:
                np.testing.assert_allclose(said[row, index], expected[start - inside.start], atol=2e-5)


@dataclass
class Cache:
    """An `Attend` with a KV cache: keys and values of all tokens so far, in the order of computing."""

    keys: list[jax.Array]
    values: list[jax.Array]

    def __call__(self, kv: LayerKV, heads: ProjectedHeads) -> tuple[jax.Array, LayerKV]:
        q, k, v = rotate(heads)
        self.keys.append(k)
        self.values.append(v)
        keys, values = jnp.concatenate(self.keys), jnp.concatenate(self.values)
        past = len(keys) - len(k)
        visible = jnp.arange(len(keys))[None] <= past + jnp.arange(len(k))[:, None]
        return masked_attention(q, keys, values, visible), None


@pytest.mark.parametrize(("row", "number", "start"), [(0, 1, 3), (0, 2, 15), (1, 1, 2), (1, 1, 9)])
def test_a_later_step_is_drafting_from_its_start_token_by_token(head, rows, row, number, start):
    index = rows.starts[row].tolist().index(start)
    said = [each.reshape(2, -1, WORDS)[row, index] for each in said_by(head, rows.arrays(), STEPS)]
    inside = document_of(rows, row, number)
    ids, at = rows.ids[row, inside], start - inside.start
    features = head.project(jnp.asarray(rows.features[row, inside][: at + 1], jnp.float32))
    cache = Cache([], [])
    # The traced layer takes no object that changes; what it does is the same without a trace.
    with jax.disable_jit():
        out = head(TABLE[ids[1 : at + 2]], features, jnp.arange(at + 1), cache)
        for step in range(STEPS):
            np.testing.assert_allclose(said[step], head.logits(out.normed[-1]), atol=2e-5, err_msg=f"step {step}")
            word = TABLE[ids[at + 2 + step]]
            out = head(word[None], out.hidden[-1:], jnp.array([at + 1 + step]), cache)


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


def literal_losses(head: Eagle3Head, rows: HeadRows, steps: int) -> list[tuple[float, float]]:
    """Compute the losses of each step literally, start by start."""
    said = [np.asarray(each).reshape(2, -1, WORDS) for each in said_by(head, rows.arrays(), steps)]
    found = []
    for step in range(steps):
        total = weight = 0.0
        for row in range(2):
            for index, start in enumerate(rows.starts[row]):
                before, after = start + 1 + step, start + 2 + step
                if after >= LENGTH or rows.documents[row, after] != rows.documents[row, start]:
                    continue
                if not rows.weights[row, after] or not rows.known[row, before]:
                    continue
                logits = np.asarray(OUTPUT)[KNOWN_WORDS] @ rows.hidden[row, before].astype(np.float32)
                p, q = softmax(logits), softmax(said[step][row, index])
                total += p @ np.log(p / q)
                weight += 1
        found.append((total, weight))
    return found


def test_the_loss_is_the_divergence_over_the_draft_words_of_written_tokens(head, rows):
    found = losses_of(head, rows.arrays())
    np.testing.assert_allclose(found, literal_losses(head, rows, STEPS), rtol=1e-4)
    # A start that is a token later has one draft less before its document ends.
    weights = [float(weight) for _, weight in found]
    assert weights[0] == 7 + 6 + 13 and np.diff(weights).tolist() == [-3] * (STEPS - 1)


def test_a_token_after_which_the_target_says_no_draft_word_counts_nothing(head, rows):
    known = rows.known.copy()
    known[0, 6] = 0.0
    masked = replace(rows, known=known)
    found = losses_of(head, masked.arrays())
    np.testing.assert_allclose(found, literal_losses(head, masked, STEPS), rtol=1e-4)
    whole = losses_of(head, rows.arrays())
    # Token 6 precedes what start 5 drafts first, start 4 second, and so on.
    assert [float(all_of - less) for (_, all_of), (_, less) in zip(whole, found, strict=True)] == [1.0] * STEPS


def test_steps_count_less_and_less(head, rows):
    graph, rest, params = split_head(head)
    total, weight = jax.jit(partial(unrolled_losses, graph, rest, TABLE, OUTPUT, STEPS))(params, rows.arrays())
    each = losses_of(head, rows.arrays())
    np.testing.assert_allclose(total, sum(STEP_DECAY**s * loss for s, (loss, _) in enumerate(each)), rtol=1e-5)
    np.testing.assert_allclose(weight, sum(STEP_DECAY**s * of for s, (_, of) in enumerate(each)), rtol=1e-5)


def test_token_ids_are_not_learned_and_come_back_with_the_head(head):
    graph, rest, params = split_head(head)
    assert "target_ids" not in params and "fc.kernel" in params
    np.testing.assert_array_equal(head_of(graph, rest, params).target_ids[...], KNOWN_WORDS)


def test_a_draft_is_right_where_its_likeliest_word_is_the_next_token(head, rows):
    right = np.asarray(jax.jit(drafts_right, static_argnums=3)(head, TABLE, rows.arrays(), STEPS))
    for step, logits in enumerate(said_by(head, rows.arrays(), STEPS)):
        words = KNOWN_WORDS[np.argmax(np.asarray(logits), axis=-1)].reshape(2, -1)
        for row in range(2):
            for index, start in enumerate(rows.starts[row]):
                after = start + 2 + step
                inside = after < LENGTH and rows.documents[row, after] == rows.documents[row, start]
                expected = inside and rows.weights[row, after] > 0 and rows.ids[row, after] == words[row, index]
                assert right[row, index, step] == expected
