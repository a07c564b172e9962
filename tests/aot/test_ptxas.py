"""The reports of ptxas are read as they are printed: a kernel that has too few registers is found out."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.planning.compile_target import compile_target
from jaxinfer.planning.devices import H200
from tests.aot.ptxas import KernelReport, read_reports

# As printed by the ptxas of CUDA 13, for one kernel after the other.
RECORDED = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'planted_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for planted_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 90 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 29.376 ms

ptxas info    : (C7519) warpgroup.arrive is injected in around line 395 by compiler to allow use of registers in GMMA \
in function 'planted_mosaic_gpu_kernel'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the wgmma pipeline in the function 'planted_mosaic_gpu_kernel'
ptxas warning : Registers are spilled to local memory in function 'planted_mosaic_gpu_kernel', 1084 bytes spill \
stores, 1084 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'planted_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for planted_mosaic_gpu_kernel
    1056 bytes stack frame, 1084 bytes spill stores, 1084 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1056 bytes cumulative stack size, 1 bytes smem
ptxas info    : Compile time = 235.543 ms

ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rotate_and_write_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for rotate_and_write_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 239 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 61.120 ms
"""
PIPELINE = "insufficient register resources for the wgmma pipeline"
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def compile_two_products(columns: int) -> None:
    """A kernel that holds two accumulators of [64, columns] at once: `columns` registers of each thread, in float32."""

    def body(left, right, out, left_tile, right_tile, out_tile, loaded):
        plgpu.copy_gmem_to_smem(left, left_tile, loaded)
        plgpu.copy_gmem_to_smem(right, right_tile, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(one, other):
            plgpu.wgmma(one, left_tile, right_tile)
            plgpu.wgmma(other, left_tile, right_tile)
            plgpu.wgmma_wait(0)
            return one[...] + other[...]

        accumulator = plgpu.ACC((64, columns), jnp.float32)
        out_tile[...] = pl.run_scoped(multiply, accumulator, accumulator).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out)
        plgpu.wait_smem_to_gmem(0)

    shapes = (64, 64), (64, columns), (64, columns)
    tiles = [plgpu.SMEM(shape, jnp.bfloat16, transforms=_TILED) for shape in shapes]
    left, right, out = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    scratch = [*tiles, plgpu.Barrier(num_arrivals=2)]
    kernel = plgpu.kernel(body, out_type=out, scratch_types=scratch, kernel_name="planted")
    compile_target(H200).compile(kernel, left, right)


def test_recorded_reports_are_read():
    assert read_reports(RECORDED) == [
        KernelReport("planted", "sm_90a", 90, 0, ()),
        KernelReport("planted", "sm_90a", 255, 2 * 1084, (PIPELINE,)),
        KernelReport("rotate_and_write", "sm_90a", 239, 4, ()),
    ]


def test_a_report_without_its_numbers_is_an_error():
    with pytest.raises(ValueError, match="does not say what planted uses and spills"):
        read_reports(RECORDED.partition("    0 bytes stack")[0])


def test_where_nothing_was_compiled_there_is_no_report(ptxas):
    assert ptxas() == []


def test_a_kernel_with_room_for_its_accumulators_spills_nothing(ptxas):
    compile_two_products(64)
    [report] = ptxas()
    assert (report.kernel, report.target, report.spilled, report.serialised) == ("planted", "sm_90a", 0, ())


def test_a_kernel_without_room_for_its_accumulators_is_found_out_every_time(ptxas):
    for _ in range(2):
        compile_two_products(256)
        [report] = ptxas()
        assert report.spilled > 1000 and report.serialised == (PIPELINE,)
