"""The branch attention kernel on the CPU: GPU memory, barriers and copies simulated, races found."""

from dataclasses import replace

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # JAX has no public name for it
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.branch_attention_checks import BranchAttentionChecks


class TestInterpreted(BranchAttentionChecks):
    def run(self, case, scene):
        tuning = replace(case.tuning, weights_in_registers=False)
        out = self.kernel(scene, tuning=tuning, interpret=plgpu.InterpretGPUParams(detect_races=True))
        assert not get_races().races_found
        return out
