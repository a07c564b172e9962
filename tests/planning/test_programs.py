"""The engine's programs are compiled from shapes alone; here for the CPU, for GPUs in tests/aot."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxinfer.attention.backend import select_backend
from jaxinfer.cache.kv_pool import kv_bytes_per_token
from jaxinfer.config import EngineConfig
from jaxinfer.planning import compile_target as targets
from jaxinfer.planning.compile_target import NoCompilerError, compile_target, description
from jaxinfer.planning.devices import B200, GPUS, H100, H200
from jaxinfer.planning.programs import (
    BRANCH_LOOP,
    DECODE_LOOP,
    PREFILL,
    AbstractEngine,
    abstract_model,
    compile_plan,
)
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.entry import Enters, EntryShape
from tests.builders import make_engine, model_config, random_model

F32 = jnp.dtype(jnp.float32)
ENGINE = EngineConfig(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, page_size=4, kv_cache_tokens=256, max_decode_steps=4
)


def planned_shapes(engine: EngineConfig, target) -> dict:
    planned = AbstractEngine(model_config(), engine, target, dtype=F32).planned
    return {name: shape for name, (_, shape) in planned.items()}


def test_a_plan_looks_at_the_largest_shape_of_every_program_of_the_engine(stand_in):
    engine = EngineConfig(max_model_len=4096, max_num_seqs=64)
    assert planned_shapes(engine, stand_in(B200)) == {
        PREFILL: BatchShape(64, 64, 1984, 256, num_logits=64),
        "entry": EntryShape(4, 4096, 101, Enters.ALL),
        "prompt_logprobs": 2048,
        DECODE_LOOP: BatchShape(64, 0, 0, 256),
        BRANCH_LOOP: BatchShape.of_lanes(64, 256, 3),
        "commit_tail": (1, 16),
    }


def test_the_programs_are_those_that_the_engine_warms_up(stand_in):
    core = make_engine(random_model(model_config()))
    runner = AbstractEngine(core.model_config, core.config, stand_in(B200), dtype=F32).runner
    described = [
        [program.describe(shape) for program in programs for shape in program.shapes]
        for programs in (runner.programs, core.runner.programs)
    ]
    assert described[0] == described[1]


def test_all_programs_are_compiled_from_shapes_and_update_the_whole_pool_in_place(stand_in):
    config, told = model_config(num_layers=3), []
    programs, kernels = compile_plan(config, ENGINE, stand_in(B200), dtype=F32, progress=told.append)
    pool = ENGINE.kv_cache_tokens * kv_bytes_per_token(config, F32)
    assert {program.name: program.kv_alias_bytes for program in programs} == {
        PREFILL: pool, "entry": None, "prompt_logprobs": None, DECODE_LOOP: pool,
        BRANCH_LOOP: pool, "commit_tail": pool,
    }  # fmt: skip
    assert all(program.temp_bytes > 0 and program.kernels > 0 for program in programs)
    assert 1 <= kernels < min(program.kernels for program in programs if isinstance(program.shape, BatchShape))
    assert len(told) == 7 and told[0].startswith("prefill: step for 4 decodes and 28 prompt tokens")


def test_parameters_are_shapes_on_the_target_split_over_its_devices(stand_in):
    target = stand_in(H200)
    model = abstract_model(model_config(), target, dtype=F32)
    leaves = jax.tree.leaves(model)
    assert leaves and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert {leaf.sharding.mesh for leaf in leaves} == {target.mesh}
    assert model.layers[0].mlp.down.kernel.get_value().sharding.spec == PartitionSpec(None, "tensor")


@pytest.mark.parametrize(("gpu", "backend"), [(H200, "pallas"), (H100, "pallas"), (B200, "xla")])
def test_the_attention_backend_is_that_of_the_gpu_that_is_compiled_for(stand_in, gpu, backend):
    assert select_backend("auto").name == "xla"
    with stand_in(gpu).lowering():
        assert select_backend("auto").name == backend


def test_without_the_plugin_there_is_no_target_and_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(targets, "PLUGINS", ("no_such_plugin",))
    assert targets.cuda_plugin() is None
    with pytest.raises(NoCompilerError, match=r"pip install .*jaxinfer\[cuda13\]"):
        compile_target.__wrapped__(H200)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_description_holds_the_sizes_of_its_gpu(gpu):
    text = description(gpu)
    assert f"core_count: {gpu.num_cores}\n" in text and f"device_memory_size: {gpu.memory_bytes}\n" in text
    assert f"memory_bandwidth: {gpu.nominal_bandwidth:.0f}\n" in text and f'"{gpu.device_kind}"' in text
