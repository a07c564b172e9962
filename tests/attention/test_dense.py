"""Causal attention without a cache: the definition that oracles and training share."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.dense import CausalAttend, causal_attention, masked_attention
from jaxinfer.attention.heads import ProjectedHeads
from tests.attention.scenes import dense_attention
from tests.tolerances import tolerance

LENGTH, DIM = 9, 8


def random_qkv(heads: int, kv_heads: int, lead: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((*lead, LENGTH, heads, DIM))
    k, v = (rng.standard_normal((*lead, LENGTH, kv_heads, DIM)) for _ in range(2))
    return q, k, v


def attend(q, k, v, documents=None, sinks=None, **more) -> np.ndarray:
    documents = None if documents is None else jnp.asarray(documents)
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    return np.asarray(causal_attention(q, k, v, documents, sinks=sinks, **more))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (4, 1)])
def test_a_token_sees_itself_and_the_tokens_before_it(heads, kv_heads):
    q, k, v = random_qkv(heads, kv_heads)
    expected = [dense_attention(q[t], k[: t + 1], v[: t + 1], DIM**-0.5) for t in range(LENGTH)]
    np.testing.assert_allclose(attend(q, k, v), expected, rtol=tolerance(1e-5), atol=tolerance(1e-6))


def test_packed_documents_do_not_see_each_other():
    q, k, v = random_qkv(4, 2)
    documents = np.array([5, 5, 5, 2, 2, 2, 2, 9, 9])
    expected = []
    for t in range(LENGTH):
        own = np.flatnonzero((documents == documents[t]) & (np.arange(LENGTH) <= t))
        expected.append(dense_attention(q[t], k[own], v[own], DIM**-0.5))
    np.testing.assert_allclose(attend(q, k, v, documents), expected, rtol=tolerance(1e-5), atol=tolerance(1e-6))


def test_leading_axes_are_batches():
    q, k, v = random_qkv(4, 2, lead=(2, 3))
    together = attend(q, k, v)
    alone = [[attend(q[i, j], k[i, j], v[i, j]) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(together, alone, rtol=tolerance(1e-6), atol=tolerance(1e-6))


@pytest.mark.parametrize("window", [1, 2, 5, LENGTH - 1, LENGTH, 3 * LENGTH])
def test_a_window_is_the_number_of_tokens_that_a_token_sees(window):
    q, k, v = random_qkv(4, 2)
    seen = [slice(max(0, t + 1 - window), t + 1) for t in range(LENGTH)]
    expected = [dense_attention(q[t], k[seen[t]], v[seen[t]], DIM**-0.5) for t in range(LENGTH)]
    np.testing.assert_allclose(attend(q, k, v, window=window), expected, rtol=tolerance(1e-5), atol=tolerance(1e-6))


def test_a_window_ends_where_a_packed_document_begins():
    q, k, v = random_qkv(4, 2)
    documents = np.array([5, 5, 5, 5, 2, 2, 2, 2, 9])
    together = attend(q, k, v, documents, window=3)
    for document in (5, 2, 9):
        own = documents == document
        alone = attend(q[own], k[own], v[own], window=3)
        np.testing.assert_allclose(together[own], alone, rtol=tolerance(1e-6), atol=tolerance(1e-6))


SINKS = (0.5, -3.0, 4.0, 0.0)


@pytest.mark.parametrize(
    "more",
    [{"scale": 0.7}, {"cap": 0.9}, {"sinks": SINKS}, {"scale": 2.0, "cap": 1.5, "sinks": SINKS}],
    ids=lambda more: "-".join(more),
)
def test_scores_are_scaled_and_capped_beside_sinks(more):
    q, k, v = random_qkv(4, 2)
    options = {"scale": DIM**-0.5, **more}
    expected = [dense_attention(q[t], k[: t + 1], v[: t + 1], **options) for t in range(LENGTH)]
    np.testing.assert_allclose(attend(q, k, v, **more), expected, rtol=tolerance(1e-5), atol=tolerance(1e-6))


def test_a_sink_is_seen_by_every_query_of_a_mask():
    q, k, v = random_qkv(4, 2, lead=(2,))
    visible = np.random.default_rng(1).random((2, LENGTH, LENGTH)) < 0.5
    visible[..., 0] = True
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    found = masked_attention(*arrays, jnp.asarray(visible), sinks=jnp.asarray(SINKS))
    expected = np.zeros(q.shape)
    for i, t in np.ndindex(2, LENGTH):
        seen = visible[i, t]
        expected[i, t] = dense_attention(q[i, t], k[i, seen], v[i, seen], DIM**-0.5, sinks=SINKS)
    np.testing.assert_allclose(found, expected, rtol=tolerance(1e-5), atol=tolerance(1e-6))


def test_a_very_high_sink_leaves_nothing_and_a_very_low_one_everything():
    q, k, v = random_qkv(3, 3)
    found = attend(q, k, v, sinks=(1e4, -1e4, 0.0))
    assert np.array_equal(found[:, 0], np.zeros((LENGTH, DIM)))
    np.testing.assert_allclose(found[:, 1], attend(q, k, v)[:, 1], rtol=tolerance(1e-6), atol=tolerance(1e-6))


def test_projected_heads_say_how_their_layer_attends():
    q, k, v = random_qkv(4, 2)
    qkv = np.concatenate([q.reshape(LENGTH, 2, 2, DIM), k[:, :, None], v[:, :, None]], axis=2)
    angle = jnp.zeros((LENGTH, DIM // 2))
    more = {"window": 3, "scale": 0.6, "cap": 1.5, "sinks": jnp.asarray(SINKS)}
    documents = np.array([5, 5, 5, 5, 2, 2, 2, 2, 9])
    heads = ProjectedHeads(jnp.asarray(qkv, jnp.float32), jnp.cos(angle), jnp.sin(angle), None, None, eps=1e-6, **more)
    found, _ = CausalAttend(jnp.asarray(documents))(None, heads)
    assert np.array_equal(np.asarray(found), attend(q, k, v, documents, **more))


def test_what_heads_say_is_static_apart_from_arrays():
    plain = ProjectedHeads(*(jnp.zeros(1) for _ in range(3)), None, None, eps=1e-6)
    sliding = replace(plain, window=4, sinks=jnp.zeros(4))
    assert len(jax.tree.leaves(plain)) == 3 and len(jax.tree.leaves(sliding)) == 4
    assert jax.tree.map(lambda x: x, sliding).window == 4
    assert jax.tree.structure(plain) != jax.tree.structure(replace(plain, cap=2.0))
