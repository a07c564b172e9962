"""The engine's own programs, compiled for a GPU that need not be there, and what the compiler says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxinfer.attention.backend import select_backend
from jaxinfer.attention.tensor_parallel import sharding_of_pages
from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.checkpoint.load import module_around
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel
from jaxinfer.checkpoint.weight_map import parameters
from jaxinfer.config import EngineConfig
from jaxinfer.engine.memory import largest_step, workspace_of
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.planning.compile_target import CompileTarget
from jaxinfer.planning.hlo import Pool, ProgramText
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.runner import StepRunner

PREFILL, DECODE, DECODE_LOOP = "prefill", "decode", "decode_loop"
_FEW_LAYERS = 2
_HLO_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True)
class CompiledProgram:
    """What is known of one program. Bytes; `kernels` counts what it launches, a loop's body once."""

    name: str
    shape: BatchShape
    temp_bytes: int  # temporaries and results, beside weights and KV
    kv_alias_bytes: int  # KV that it updates where it lies
    kv_copies: int  # times that it writes an array of the pool anew
    kernels: int


def program_shapes(engine: EngineConfig) -> dict[str, BatchShape]:
    """The programs that a plan looks at: name -> shape.

    `prefill` is the step with the most prompt tokens (decode rows beside them, as the engine's mixed steps have them),
    `decode` and `decode_loop` have every row at work and page tables for the longest requests.
    """
    buckets = Buckets.from_config(engine)
    decode = buckets.shape_for(
        decode_rows=engine.max_num_seqs, prefill_rows=0, prefill_tokens=0, pages_per_row=buckets.pages_per_row[-1]
    )
    shapes = {PREFILL: largest_step(buckets), DECODE: decode}
    return shapes if engine.max_decode_steps == 1 else shapes | {DECODE_LOOP: decode}


def compile_program(
    name: str, config: ModelConfig, engine: EngineConfig, target: CompileTarget, *, dtype: jnp.dtype
) -> CompiledProgram:
    """One of `program_shapes`, compiled as the engine would compile it on that GPU."""
    shape = program_shapes(engine)[name]
    program = compile_shape(name, shape, config, engine, target, dtype=dtype)
    pool = pool_array(config, engine, dtype, target.mesh.size)
    text = ProgramText(program.as_text() or "")
    return CompiledProgram(
        name=name,
        shape=shape,
        temp_bytes=workspace_of(program),
        kv_alias_bytes=text.kv_alias_bytes(pool),
        kv_copies=len(text.kv_copies(pool)),
        kernels=text.kernels(),
    )


def compile_shape(
    name: str,
    shape: BatchShape,
    config: ModelConfig,
    engine: EngineConfig,
    target: CompileTarget,
    *,
    dtype: jnp.dtype,
) -> jax.stages.Compiled:
    """A step, or with the name DECODE_LOOP a loop, of any shape; weights and KV exist as shapes only."""
    config = for_tensor_parallel(config, target.mesh.size)
    cache = KVCache.shapes(
        config, num_pages=engine.num_pages, page_size=engine.page_size, dtype=dtype,
        sharding=sharding_of_pages(target.mesh),
    )  # fmt: skip
    with target.lowering():
        runner = StepRunner(
            abstract_model(config, target, dtype=dtype),
            cache,
            select_backend(engine.attention_backend),
            num_seats=engine.max_num_seqs,
            max_decode_steps=engine.max_decode_steps,
            mesh=target.mesh if target.mesh.size > 1 else None,
        )
        return runner.compile_decode_loop(shape) if name == DECODE_LOOP else runner.compile_step(shape)


def abstract_model(config: ModelConfig, target: CompileTarget, *, dtype: jnp.dtype) -> DecoderLM:
    """The model with shapes on `target` for parameters, each split as it will be."""
    shapes = {
        parameter.path: jax.ShapeDtypeStruct(
            parameter.shape, dtype, sharding=NamedSharding(target.mesh, parameter.spec)
        )
        for parameter in parameters(config)
    }
    return module_around(dataclasses.replace(config, dtype=dtype.name), shapes)


def pool_array(config: ModelConfig, engine: EngineConfig, dtype: jnp.dtype, num_devices: int = 1) -> Pool:
    """One of the arrays that a device's share of the KV pool is made of, as a program's text names it."""
    heads = for_tensor_parallel(config, num_devices).num_kv_heads // num_devices
    shape = (engine.num_pages, engine.page_size, heads, config.head_dim)
    return Pool(_HLO_NAMES[jnp.dtype(dtype).name], shape, jnp.dtype(dtype).itemsize)


def compile_plan(
    config: ModelConfig,
    engine: EngineConfig,
    target: CompileTarget,
    *,
    dtype: jnp.dtype,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[list[CompiledProgram], float]:
    """All programs of a plan, and the kernels that a layer adds to a decode step.

    The latter is the difference between the step and that of a model of two layers, over the difference in layers, so
    that what a step does once (embedding, head, sampling, the attention's plan) drops out. It need not be whole: the
    compiler does not fuse every layer alike.

    Args:
        progress: is told what is compiled next, in words.
    """
    programs = []
    for name, shape in program_shapes(engine).items():
        progress(f"{name.replace('_', ' ')}: {shape.describe()}")
        programs.append(compile_program(name, config, engine, target, dtype=dtype))
    layers = _FEW_LAYERS if config.num_layers > _FEW_LAYERS else config.num_layers + _FEW_LAYERS
    progress(f"decode with {layers} layers, to count the kernels of one")
    other = compile_program(DECODE, dataclasses.replace(config, num_layers=layers), engine, target, dtype=dtype)
    decode = next(program for program in programs if program.name == DECODE)
    return programs, round((decode.kernels - other.kernels) / (config.num_layers - layers), 2)
