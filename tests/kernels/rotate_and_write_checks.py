"""Checks of the kernel that rotates heads and writes K and V, shared by interpreted runs on a CPU and runs on a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.parts import whole
from kernels_pallas.rotate_and_write import reference
from tests.kernels.rotate_and_write_cases import CASES, Case

# Norm of a head's error over the norm of the head: rounding to 16 bits, after the norm, its scale and the rotation.
TOLERANCE = {"bfloat16": 6e-3, "float16": 8e-4}

NAMES = [pytest.param(name, marks=[pytest.mark.slow] if case.slow else []) for name, case in CASES.items()]


def bits(x: jax.Array) -> np.ndarray:
    """The array's bits: NaN equals itself."""
    return np.asarray(x).view(np.uint16)


def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Queries [T, num_heads, head_dim] and keys [T, num_kv_heads, head_dim] in float32, by plain XLA."""
    wide = dataclasses.replace(case.heads, qkv=whole(case.heads.qkv))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), wide)
    q, k, _ = reference.rotate(wide)
    return np.asarray(q), np.asarray(k)


def relative_error(found: jax.Array, truth: np.ndarray) -> float:
    """The largest relative error of any head."""
    error = np.linalg.norm(np.asarray(found, np.float32) - truth, axis=-1)
    return float((error / np.linalg.norm(truth, axis=-1)).max(initial=0.0))


class RotateAndWriteChecks:
    """Subclasses say how a case runs; every one of them goes over the whole table."""

    def run(self, case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
        raise NotImplementedError

    @pytest.mark.parametrize("name", NAMES)
    def test_queries_come_back_keys_and_values_lie_in_their_slots_and_no_other_slot_changes(self, name):
        case = CASES[name]
        q, k_pages, v_pages = self.run(case)
        truth_q, truth_k = expected(case)
        tolerance = TOLERANCE[q.dtype.name]
        assert q.dtype == case.dtype and relative_error(q, truth_q) < tolerance

        kept = [token for token, slot in enumerate(case.slots) if slot < case.num_slots]
        slots = [case.slots[token] for token in kept]
        flat_k, flat_v = (x.reshape(case.num_slots, case.kv_heads, case.head_dim) for x in (k_pages, v_pages))
        assert relative_error(flat_k[jnp.asarray(slots, jnp.int32)], truth_k[kept]) < tolerance
        assert np.array_equal(bits(flat_v)[slots], bits(whole(case.heads.qkv))[kept, :, -1])
        others = np.setdiff1d(np.arange(case.num_slots), slots)
        for now, before in ((flat_k, case.pages[0]), (flat_v, case.pages[1])):
            assert np.array_equal(bits(now)[others], bits(before).reshape(flat_k.shape)[others])

    @pytest.mark.parametrize("name", ["slots_out_of_range_are_dropped", "float16_in_parts", "wide_scales"])
    def test_plain_xla_does_the_same(self, name):
        case = CASES[name]
        ours = self.run(case)
        theirs = jax.jit(reference.rotate_and_write)(case.heads, *case.pages, case.slot_mapping)
        for one, other in zip(ours, theirs, strict=True):
            one, other = (np.nan_to_num(np.asarray(x, np.float32)) for x in (one, other))
            # One unit in the last of 8 bits where roundings fall apart.
            np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-2)
