"""The kernel that rotates heads and writes K and V on the CPU: copies and barriers simulated, races found."""

from functools import partial

import jax
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # JAX has no public name for it
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.rotate_and_write.api import rotate_and_write
from tests.kernels.rotate_and_write_checks import RotateAndWriteChecks


def refuse(*_):
    raise AssertionError("the reference was asked instead of the kernel")


class TestInterpreted(RotateAndWriteChecks):
    def run(self, case):
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        kernel = jax.jit(partial(rotate_and_write, reference=refuse, interpret=interpret))
        written = kernel(case.heads, *case.pages, case.slot_mapping)
        assert not get_races().races_found
        return written
