"""The kernel that rotates heads and writes K and V on a real GPU, over the case table of the interpreted tests."""

import jax
import numpy as np
import pytest

from jaxinfer.attention.backend import select_backend
from kernels_pallas.rotate_and_write import reference
from tests.kernels.rotate_and_write_cases import Case
from tests.kernels.rotate_and_write_checks import RotateAndWriteChecks, bits, expected, relative_error, whole

pytestmark = pytest.mark.gpu


def run(case: Case):
    # Copies, because the pages are donated as in a step.
    pages = tuple(x.copy() for x in case.pages)
    kernel = jax.jit(select_backend("pallas").rotate_and_write, donate_argnums=(1, 2))
    return kernel(case.heads, *pages, case.slot_mapping)


class TestOnTheGpu(RotateAndWriteChecks):
    def run(self, case):
        return run(case)


def test_a_norm_is_rounded_after_the_product_with_a_wide_scale_alone():
    case = Case((3, 40), wide_scales=True)
    # Outside of jit, so that every operation is rounded.
    once = np.asarray(reference.rotate(case.heads)[0], np.float32)
    found = np.asarray(run(case)[0], np.float32)
    # Some results differ in their last bit, as sums do; of another rounding, many would.
    assert np.linalg.norm(found - once) < 6e-4 * np.linalg.norm(once)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("norms", [True, False])
def test_thousands_of_tokens_at_once(head_dim, norms):
    slots = np.random.default_rng(0).permutation(8192)[:5000].tolist()
    case = Case(tuple(slots), kv_heads=8, head_dim=head_dim, num_pages=512, norms=norms)
    q, k_pages, v_pages = run(case)
    truth_q, truth_k = expected(case)
    assert relative_error(q, truth_q) < 6e-3
    assert relative_error(k_pages.reshape(8192, 8, head_dim)[np.asarray(slots)], truth_k) < 6e-3
    assert np.array_equal(bits(v_pages).reshape(8192, 8, head_dim)[slots], bits(whole(case.heads.qkv))[:, :, -1])
