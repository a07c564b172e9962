"""Checks of the branch attention kernel, shared by interpreted runs on a CPU and runs on a GPU."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from kernels_pallas.branch_attention.api import branch_attention, plan_branch_attention
from tests.attention.scenes import Scene
from tests.kernels.branch_attention_cases import CASES, Case

# Norm of a head's error over the norm of the result.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3}


@cache
def scene_of(name: str) -> Scene:
    return CASES[name].scene()


def relative_error(out: np.ndarray, scene: Scene) -> float:
    """The largest relative error of any head of any token that sees something."""
    tokens = scene.row_of >= 0
    error = np.linalg.norm(out[tokens] - scene.expected[tokens], axis=-1)
    return float((error / np.linalg.norm(scene.expected[tokens], axis=-1)).max())


class BranchAttentionChecks:
    """Subclasses say how a case runs; every one of them goes over the whole table."""

    def run(self, case: Case, scene: Scene) -> np.ndarray:
        raise NotImplementedError

    def kernel(self, scene: Scene, **options: Any) -> np.ndarray:
        def refuse(*_, **__):
            raise AssertionError("the reference was asked instead of the kernel")

        plan = partial(plan_branch_attention, reference=refuse, **options)
        return scene.run(plan, branch_attention)

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] if case.slow else []) for name, case in CASES.items()]
    )
    def test_a_token_attends_to_what_it_sees_and_padding_gives_zeros(self, name):
        scene = scene_of(name)
        out = self.run(CASES[name], scene)
        assert relative_error(out, scene) < TOLERANCE[scene.q.dtype.name]
        padding = out[scene.row_of < 0]
        assert np.array_equal(padding, np.zeros_like(padding))
