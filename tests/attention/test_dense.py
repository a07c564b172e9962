"""Causal attention without a cache: the definition that oracles and training share."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.dense import causal_attention
from tests.attention.scenes import dense_attention
from tests.tolerances import tolerance

LENGTH, DIM = 9, 8


def random_qkv(heads: int, kv_heads: int, lead: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((*lead, LENGTH, heads, DIM))
    k, v = (rng.standard_normal((*lead, LENGTH, kv_heads, DIM)) for _ in range(2))
    return q, k, v


def attend(q, k, v, documents=None) -> np.ndarray:
    documents = None if documents is None else jnp.asarray(documents)
    return np.asarray(causal_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), documents))


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
