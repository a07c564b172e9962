"""The branch attention kernel on the CPU: GPU memory, barriers and copies simulated, races found.

The simulation finds races of copies with each other and with loads and stores, and barriers without a waiter. It does
not follow when a matrix product reads shared memory: a missing `commit_smem` before one, or a consumer that multiplies
values before the other has cleaned them, shows only on a GPU.
"""

from dataclasses import replace

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # JAX has no public name for it
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.branch_attention_checks import TOLERANCE, BranchAttentionChecks, relative_error, scene_of


class TestInterpreted(BranchAttentionChecks):
    def run(self, case, scene):
        tuning = replace(case.tuning, weights_in_registers=False)
        out = self.kernel(scene, tuning=tuning, interpret=plgpu.InterpretGPUParams(detect_races=True))
        assert not get_races().races_found
        return out

    def test_the_sizes_chosen_for_a_step_are_right_too(self):
        scene = scene_of("prefills_of_two_warpgroups_beside_padding")
        out = self.kernel(scene, interpret=plgpu.InterpretGPUParams(detect_races=True))
        assert not get_races().races_found
        assert relative_error(out, scene) < TOLERANCE["float16"]
