"""Rotation and norms of heads in plain XLA, against their definitions in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.rotate_and_write import reference
from tests.kernels.rotate_and_write_cases import Case
from tests.tolerances import tolerance


def normed(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    """x [T, heads, head_dim], each head divided by its root mean square."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [T, heads, head_dim], whose halves are the parts of complex numbers that are multiplied by cos + i sin."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def by_definition(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Queries [T, num_heads, head_dim] and keys [T, num_kv_heads, head_dim]."""
    heads = case.heads
    qkv, cos, sin = (np.asarray(x, np.float64) for x in (heads.qkv, heads.cos, heads.sin))

    def finished(x: np.ndarray, scale: jax.Array | None) -> np.ndarray:
        if scale is None:
            return rotated(x, cos, sin)
        wide = np.asarray(scale, np.float64)
        if case.norms_late:
            return normed(rotated(x, cos, sin), wide, heads.eps)
        return rotated(normed(x, wide, heads.eps), cos, sin)

    queries = qkv[:, :, :-2].reshape(len(qkv), -1, case.head_dim)
    return finished(queries, heads.q_scale), finished(qkv[:, :, -2], heads.k_scale)


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 2, 3), dtype=jnp.float32),
        Case((1, 2, 3), dtype=jnp.float32, norms_late=True),
        Case((1, 2, 3), dtype=jnp.float32, norms=False),
        Case((1, 2, 3), dtype=jnp.float32, norms=False, norms_late=True),
    ],
    ids=["early", "late", "no_norms", "no_norms_late"],
)
def test_norms_precede_or_follow_the_rotation(case):
    q, k, v = reference.rotate(case.heads)
    for found, expected in zip((q, k), by_definition(case), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance(1e-5), atol=tolerance(1e-5))
    assert np.array_equal(np.asarray(v), np.asarray(case.heads.qkv)[:, :, -1])


def test_late_norms_give_other_heads_than_early_ones():
    early = Case((1, 2, 3), dtype=jnp.float32).heads
    q, k, _ = (np.asarray(x) for x in reference.rotate(early))
    late_q, late_k, _ = (np.asarray(x) for x in reference.rotate(replace(early, norms_late=True)))
    assert np.abs(q - late_q).max() > 0.1 and np.abs(k - late_k).max() > 0.1


@pytest.mark.parametrize("norms_late", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_float32_scales_leave_heads_in_their_own_precision(dtype, norms_late):
    case = Case((1, 2, 3), dtype=dtype, wide_scales=True, norms_late=norms_late)
    q, k, _ = reference.rotate(case.heads)
    assert q.dtype == k.dtype == dtype
    for found, expected in zip((q, k), by_definition(case), strict=True):
        error = np.linalg.norm(np.asarray(found, np.float64) - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert error.max() < (6e-3 if dtype == jnp.bfloat16 else 8e-4)
