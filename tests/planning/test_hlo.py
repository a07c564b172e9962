"""A program's text is read right: what launches, what is updated in place, what copies the pool."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxinfer.planning.hlo import PoolArray, ProgramText, _called, _launches

SHAPE = (64, 16, 2, 8)
POOL = PoolArray("f32", SHAPE, 4)
POOL_BYTES = 4 * 64 * 16 * 2 * 8


def program(function, *, donate: bool) -> ProgramText:
    """A function of (an array of the pool, a page), compiled here."""
    arguments = jax.ShapeDtypeStruct(SHAPE, jnp.float32), jax.ShapeDtypeStruct((1, *SHAPE[1:]), jnp.float32)
    compiled = jax.jit(function, donate_argnums=0 if donate else ()).lower(*arguments).compile()
    return ProgramText(compiled.as_text())


def write(pool, page):
    return lax.dynamic_update_slice_in_dim(pool, page, 3, axis=0)


def test_a_donated_array_that_is_updated_is_in_place_and_not_copied():
    text = program(write, donate=True)
    assert text.kv_alias_bytes(POOL) == POOL_BYTES
    assert text.kv_copies(POOL) == []


def test_an_array_that_is_not_donated_is_copied_and_not_in_place():
    text = program(write, donate=False)
    assert text.kv_alias_bytes(POOL) == 0
    assert len(text.kv_copies(POOL)) == 1


@pytest.mark.parametrize("shape", [SHAPE, (1024, 2, 8), (64, 256), (16384,), (2, 64, 16, 8)])
def test_the_pool_is_known_with_its_dimensions_merged_or_in_another_order(shape):
    assert POOL.is_held_by("f32", shape)
    assert not POOL.is_held_by("bf16", shape)


@pytest.mark.parametrize("shape", [(128, 128), (64, 16, 4, 4), (512, 32), (64, 16, 2, 9), (1024, 2, 2, 4)])
def test_other_arrays_are_not_the_pool_even_with_as_many_elements(shape):
    assert not POOL.is_held_by("f32", shape)


def test_an_array_that_is_computed_anew_counts_as_a_copy_whatever_its_dimensions():
    text = program(lambda pool, page: (pool * 2).reshape(-1, 2, 8), donate=False)
    assert len(text.kv_copies(POOL)) == 1


def test_a_donated_array_that_is_needed_as_it_was_after_its_update_is_copied():
    text = program(lambda pool, page: (write(pool, page), write(pool, page + 1)), donate=True)
    assert text.kv_alias_bytes(POOL) == POOL_BYTES
    assert len(text.kv_copies(POOL)) >= 1


def test_arrays_of_other_sizes_are_not_the_pool():
    text = program(lambda pool, page: page * 2, donate=False)
    assert text.kv_copies(POOL) == []
    assert text.kernels() == 1


def test_a_loop_s_body_counts_once():
    def loop(pool, page):
        return lax.fori_loop(0, 5, lambda _, x: jnp.sin(x) @ jnp.ones((8, 8)), page)

    def once(pool, page):
        return jnp.sin(page) @ jnp.ones((8, 8))

    assert 0 < program(once, donate=False).kernels() <= program(loop, donate=False).kernels() < 15


def test_kernels_of_a_named_choice_are_those_of_its_branches():
    def choice(pool, page):
        always = jnp.sin(page) @ jnp.ones((8, 8))
        with jax.named_scope("if_asked"):
            page = lax.cond(page.sum() < 9, lambda: jnp.cos(page) @ jnp.ones((8, 8)), lambda: page)
        return page + lax.cond(always.sum() < 5, lambda: always @ jnp.ones((8, 8)), lambda: always)

    text = program(choice, donate=False)
    [named] = [i for i in text.scheduled if i.opcode == "conditional" and "if_asked" in i.arguments]
    inside = {i.name for name in _called(named) for i in text.computations[name] if _launches(i)}
    assert 0 < text.kernels_of_branches("if_asked") == len(inside) < text.kernels()
    assert text.kernels_of_branches("asked") == 0


def fixed_turns(pool, page):
    return lax.fori_loop(0, 5, lambda _, x: jnp.sin(x) @ jnp.ones((8, 8)), page)


def open_end(pool, page):
    return lax.while_loop(lambda x: x.sum() < 9, lambda x: jnp.sin(x) @ jnp.ones((8, 8)), page)


def turns_that_may_rest(pool, page):
    return lax.fori_loop(0, 5, lambda _, x: lax.cond(x.sum() < 9, jnp.sin, jnp.negative, x), page)


def a_choice_with_a_loop(pool, page):
    return lax.cond(page.sum() < 9, lambda: fixed_turns(pool, page), lambda: page)


def sorted_numbers(count: int, page):
    return jnp.sort(jnp.cos(jnp.arange(count) * page.sum())).sum()


def a_choice_with_a_sort_of_few(pool, page):
    return lax.cond(page.sum() < 9, lambda: sorted_numbers(256, page), lambda: page.sum())


def a_choice_with_a_sort_of_many(pool, page):
    return lax.cond(page.sum() < 9, lambda: sorted_numbers(100_000, page), lambda: page.sum())


def a_sort_of_many(pool, page):
    return sorted_numbers(100_000, page)


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (fixed_turns, []),
        (turns_that_may_rest, []),
        (open_end, ["while"]),
        (a_choice_with_a_loop, ["conditional"]),
        (a_choice_with_a_sort_of_few, []),
        (a_choice_with_a_sort_of_many, ["conditional"]),
        (a_sort_of_many, []),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_host_is_waited_for_by_loops_of_open_end_and_choices_that_hold_a_loop_or_a_sort_of_many(function, waits):
    assert [i.opcode for i in program(function, donate=False).host_waits()] == waits


GPU_TEXT = """\
HloModule jit_step, input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, must-alias), {2}: (4, {}, may-alias) }, \
entry_computation_layout={(f32[4]{0}, f32[64,16,2,8]{3,2,1,0})->f32[4]{0}}

%fused_scatter (param_0: f32[1024,2,8], param_1: f32[4,2,8], param_2: s32[4]) -> (f32[1024,2,8], s32[]) {
  %param_0 = f32[1024,2,8]{2,1,0} parameter(0)
  %param_1 = f32[4,2,8]{2,1,0} parameter(1)
  %param_2 = s32[4]{0} parameter(2)
  %constant_1 = s32[] constant(1)
  %scatter.1 = f32[1024,2,8]{2,1,0} scatter(%param_0, %param_2, %param_1), to_apply=%region
  %bitcast.9 = f32[64,16,2,8]{3,2,1,0} bitcast(%scatter.1)
  ROOT %tuple.1 = (f32[64,16,2,8]{3,2,1,0}, s32[]) tuple(%bitcast.9, %constant_1)
}

%fused_add (param_0.1: f32[4]) -> f32[4] {
  %param_0.1 = f32[4]{0} parameter(0)
  ROOT %add.1 = f32[4]{0} add(%param_0.1, %param_0.1)
}

%body (carry: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carry = (s32[], f32[4]{0}) parameter(0)
  %gte.1 = f32[4]{0} get-tuple-element(%carry), index=1
  %inner_fusion = f32[4]{0} fusion(%gte.1), kind=kLoop, calls=%fused_add
  ROOT %tuple.2 = (s32[], f32[4]{0}) tuple(%inner_fusion)
}

%condition (carry.1: (s32[], f32[4])) -> pred[] {
  %carry.1 = (s32[], f32[4]{0}) parameter(0)
  ROOT %wrapped_compare = pred[] fusion(%carry.1), kind=kLoop, calls=%fused_add
}

%command_buffer (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  %gemm = (f32[4]{0}, s8[128]{0}) custom-call(%p.1), custom_call_target="__cublas$gemm"
  ROOT %gte.9 = f32[4]{0} get-tuple-element(%gemm), index=0
}

ENTRY %main.1 (x.1: f32[4], k.1: f32[64,16,2,8], v.1: f32[64,16,2,8], s.1: s32[4], latest.1: s32[8]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  %k.1 = f32[64,16,2,8]{3,2,1,0} parameter(1), metadata={op_name="cache.k[0]"}
  %v.1 = f32[64,16,2,8]{3,2,1,0} parameter(2)
  %s.1 = s32[4]{0} parameter(3)
  %latest.1 = s32[8]{0} parameter(4)
  %input_scatter_fusion = (f32[64,16,2,8]{3,2,1,0}, /*index=1*/s32[]) fusion(%k.1, %x.1, %s.1), kind=kInput, \
calls=%fused_scatter
  %kernel = (f32[4]{0}, f32[64,16,2,8]{3,2,1,0}) custom-call(%x.1, %v.1), custom_call_target="mosaic_gpu_v2", \
output_to_operand_aliasing={{1}: (1, {})}
  %copy-start.1 = (f32[64,16,2,8]{3,2,1,0}, f32[64,16,2,8]{3,2,1,0}, u32[]) copy-start(%v.1)
  %copy-done.1 = f32[64,16,2,8]{3,2,1,0} copy-done(%copy-start.1)
  %while.1 = (s32[], f32[4]{0}) while(%x.1), condition=%condition, body=%body
  %call.1 = f32[4]{0} call(%x.1), to_apply=%command_buffer
  ROOT %bitcast.1 = f32[4]{0} bitcast(%call.1)
}
"""


def test_launches_of_a_gpu_program_are_fusions_library_calls_and_copies_also_in_loops_and_command_buffers():
    launched = {"input_scatter_fusion", "kernel", "copy-start.1", "inner_fusion", "wrapped_compare", "gemm"}
    text = ProgramText(GPU_TEXT)
    assert text.kernels() == len(launched)
    assert [i.name for i in text.host_waits()] == ["while.1"]
    assert launched <= {instruction.name for instruction in text.scheduled}


def test_scatters_and_aliasing_calls_are_updates_in_place_and_copies_are_not():
    assert [i.name for i in ProgramText(GPU_TEXT).kv_copies(POOL)] == ["copy-start.1"]


def test_a_call_that_says_of_another_result_that_it_is_aliased_counts_as_a_copy():
    text = ProgramText(GPU_TEXT.replace("{{1}: (1, {})}", "{{0}: (0, {})}"))
    assert [i.name for i in text.kv_copies(POOL)] == ["kernel", "copy-start.1"]


def test_a_fusion_that_ends_in_arithmetic_counts_as_a_copy():
    text = ProgramText(GPU_TEXT.replace("scatter(%param_0, %param_2, %param_1), to_apply=%region", "negate(%param_0)"))
    assert [i.name for i in text.kv_copies(POOL)] == ["input_scatter_fusion", "copy-start.1"]


def test_only_arrays_of_the_pool_count_as_kv_in_place():
    assert ProgramText(GPU_TEXT).kv_alias_bytes(POOL) == 2 * POOL_BYTES


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        ProgramText("HloModule nothing\n")


FUSED_CALL = """\
%sliced_kernel (p0: s32[8], p1: f32[64,16,2,8]) -> (f32[4], f32[64,16,2,8]) {
  %p0 = s32[8]{0} parameter(0)
  %p1 = f32[64,16,2,8]{3,2,1,0} parameter(1)
  %slice.1 = s32[4]{0} slice(%p0), slice={[0:4]}
  %copied = f32[64,16,2,8]{3,2,1,0} copy(%p1)
  ROOT %call.9 = (f32[4]{0}, f32[64,16,2,8]{3,2,1,0}) custom-call(%slice.1, %p1), custom_call_target="mosaic_gpu_v2", \
output_to_operand_aliasing={{1}: (1, {})}
}

%fused_add (param_0.1"""


@pytest.mark.parametrize(("operand", "copies"), [("%p1", []), ("%copied", ["kernel"])])
def test_a_call_fused_with_slices_of_its_operands_is_in_place_if_it_aliases_what_the_fusion_gets(operand, copies):
    text = GPU_TEXT.replace("%fused_add (param_0.1", FUSED_CALL.replace("(%slice.1, %p1)", f"(%slice.1, {operand})"), 1)
    call = 'custom-call(%x.1, %v.1), custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{1}: (1, {})}'
    assert call in text
    text = text.replace(call, "fusion(%latest.1, %v.1), kind=kCustom, calls=%sliced_kernel")
    assert [i.name for i in ProgramText(text).kv_copies(POOL)] == [*copies, "copy-start.1"]
