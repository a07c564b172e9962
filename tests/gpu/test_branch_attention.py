"""The branch attention kernel on a real GPU, in both forms, over the case table of the interpreted tests."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.attention.backend import select_backend
from kernels_pallas.branch_attention.reference import paged_attention, plan_paged_attention
from tests.attention.lanes import branched_lane, plain_lane, with_tail
from tests.attention.scenes import Heads, make_scene
from tests.kernels.branch_attention_cases import CASES
from tests.kernels.branch_attention_checks import TOLERANCE, BranchAttentionChecks, relative_error

pytestmark = pytest.mark.gpu


class TestFastForm(BranchAttentionChecks):
    def run(self, case, scene):
        return self.kernel(scene, tuning=case.tuning)


class TestInterpretableForm(BranchAttentionChecks):
    def run(self, case, scene):
        return self.kernel(scene, tuning=replace(case.tuning, weights_in_registers=False))


class TestChosenSizes(BranchAttentionChecks):
    def run(self, case, scene):
        return self.kernel(scene)


def test_auto_is_the_kernel():
    assert select_backend("auto").name == "pallas"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_random_steps_of_every_kind_of_row(head_dim, seed):
    rng = np.random.default_rng(seed)
    decodes = [plain_lane(16, int(n), 1) for n in rng.integers(0, 3000, 5)]
    decodes += [branched_lane(rng, 16, int(n), rng.integers(1, 200, 4).tolist()) for n in rng.integers(0, 2000, 3)]
    decodes += [with_tail(rng, plain_lane(16, int(n), 1), 16) for n in rng.integers(0, 900, 3)]
    prefills = [plain_lane(16, int(rng.integers(0, 900)), int(new)) for new in rng.integers(1, 300, 3)]
    heads = Heads(16, 4, head_dim, jnp.bfloat16)
    scene = make_scene(
        decodes, prefills, decode_rows=16, decode_width=16, num_words=1, prefill_rows=4, prefill_tokens=960,
        heads=heads, seed=seed,
    )  # fmt: skip
    assert relative_error(BranchAttentionChecks().kernel(scene), scene) < TOLERANCE["bfloat16"]


def test_the_same_step_gives_the_same_bits_again():
    scene = CASES["every_kind_of_row_at_once"].scene()
    backend = select_backend("pallas")
    first = scene.run(backend.plan, backend.attention)
    assert all(np.array_equal(first, scene.run(backend.plan, backend.attention)) for _ in range(20))


def test_the_reference_agrees_on_the_gpu_too():
    scene = CASES["every_kind_of_row_at_once"].scene()
    assert relative_error(scene.run(plan_paged_attention, paged_attention), scene) < TOLERANCE["bfloat16"]
