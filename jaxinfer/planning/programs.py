"""The engine's own programs, compiled for a GPU that need not be there, and the compiler's figures of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxinfer.attention.backend import select_backend
from jaxinfer.attention.tensor_parallel import sharding_of_pages
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.checkpoint.layout import Layout
from jaxinfer.checkpoint.load import module_around
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel
from jaxinfer.checkpoint.weight_map import parameters
from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.engine.strategy import StrategyMaker
from jaxinfer.memory.budget import workspace_of
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.layer_config import kinds_of
from jaxinfer.planning.compile_target import CompileTarget
from jaxinfer.planning.hlo import PoolArray, ProgramText
from jaxinfer.planning.plan import PlannedSpeculation
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import KV, TARGET, Program, sharding_of_logits
from jaxinfer.programs.runner import Runner, initial_state
from jaxinfer.sampling.bounds import BoundsPlace
from jaxinfer.sampling.next_tokens import SECOND_DRAW
from jaxinfer.sampling.noted import NOTES
from jaxinfer.strategies.choose import denoiser_of
from jaxinfer.strategies.speculator import Speculator

PREFILL, DECODE_LOOP, BRANCH_LOOP = "prefill", "decode_loop", "branch_loop"
DENOISE_LOOP = "denoise_loop"  # of models that denoise blocks
_FEW_LAYERS = 2
_HLO_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True)
class CompiledProgram:
    """Figures of one program. Bytes; `kernels` counts what it launches, a loop's body once."""

    name: str
    shape: Any
    description: str
    temp_bytes: int  # temporaries and results, besides weights and KV
    kv_alias_bytes: int | None  # KV that it updates in place or leaves alone; None: it touches none
    kv_copies: int  # times that it writes an array of the pool anew
    kernels: int
    note_kernels: int  # how many of them run only where log probabilities of drawn tokens are noted
    second_draw_kernels: int  # how many of the others run only after a mask refused a draw
    host_waits: int  # places where the GPU waits for the host within a launch


class AbstractEngine:
    """Programs that an engine would have on a GPU, with shapes in the place of weights and KV."""

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        target: CompileTarget,
        *,
        dtype: jnp.dtype,
        speculation: PlannedSpeculation | None = None,
        diffusion: DiffusionConfig | None = None,
    ) -> None:
        devices = target.mesh.size
        self.target = target
        maker: StrategyMaker | None = None
        if config.mask_token_id is not None:
            maker = denoiser_of(diffusion or DiffusionConfig(), config)
        if speculation is not None:
            maker = abstract_speculator(speculation, target, dtype=dtype)
        tail_pages = 0 if maker is None else maker.tail_tokens(engine) // engine.page_size
        num_pages = engine.num_pages + tail_pages
        self.pools = {KV: pool_arrays(config, engine, dtype, devices, num_pages=num_pages)}
        config = for_tensor_parallel(config, devices)
        mesh = target.mesh if devices > 1 else None
        kv = KVPool.shapes(
            config, num_pages=num_pages, page_size=engine.page_size, dtype=dtype,
            sharding=sharding_of_pages(target.mesh),
        )  # fmt: skip
        model = abstract_model(config, target, dtype=dtype)
        place = BoundsPlace(target.sharding, sharding_of_logits(target.mesh, config.vocab_size))
        models, state = {TARGET: model}, initial_state(kv, engine.max_num_seqs, config.vocab_size, place)
        programs = engine_programs(config, engine)
        of_engine: Sequence[Program] = programs.all
        of_strategy: Sequence[Program] = ()
        with target.lowering():
            if maker is not None:
                if maker.layers is not None:
                    assert speculation is not None and speculation.layers is not None
                    own = pool_arrays(speculation.layers, engine, dtype, devices, num_pages=num_pages)
                    self.pools[speculation.config.row.device.state] = own
                strategy = maker.strategy(
                    engine, model, dtype=dtype, mesh=target.mesh, whole=target.sharding, abstract=True
                )(programs, Buckets.from_config(engine))
                models, state = {**models, **strategy.models}, {**state, **strategy.make_state()}
                of_strategy = strategy.programs
                of_engine = () if strategy.takes_prompts else programs.followed_by(strategy.follower).all
            self.runner = Runner(
                models,
                state,
                select_backend(engine.attention_backend),
                programs=[*of_engine, *of_strategy],
                mesh=mesh,
            )

    @property
    def planned(self) -> dict[str, tuple[Program, Any]]:
        """Programs that a plan looks at, each with its largest shape: `prefill` (the step with the most prompt tokens,
        and decode rows beside them), `decode_loop` (every row at work, page tables for the longest requests), and those
        of entries and log probabilities."""
        programs = self.runner.programs
        return {name: (program, shape) for program in programs for name, shape in program.planned.items()}

    def compile(self, name: str) -> CompiledProgram:
        """Return one of `planned`, compiled as the engine would compile it on that GPU."""
        program, shape = self.planned[name]
        with self.target.lowering():
            compiled = self.runner.compile(program, shape)
        text = ProgramText(compiled.as_text() or "")
        notes = text.kernels_of_branches(NOTES)
        return CompiledProgram(
            name=name,
            shape=shape,
            description=program.describe(shape),
            temp_bytes=workspace_of(compiled),
            kv_alias_bytes=self._kv_left_in_place(text, program) if set(self.pools) & set(program.writes) else None,
            kv_copies=sum(len(text.kv_copies(array)) for array in {x for pool in self.pools.values() for x in pool}),
            kernels=text.kernels(),
            note_kernels=notes,
            second_draw_kernels=text.kernels_of_branches(SECOND_DRAW, NOTES) - notes,
            host_waits=len(text.host_waits()),
        )

    def _kv_left_in_place(self, text: ProgramText, program: Program) -> int:
        """Return the bytes of all pools that the program updates in place or does not touch."""
        touched = {array for part, pool in self.pools.items() if part in program.writes for array in pool}
        untouched = sum(
            array.nbytes * count
            for part, pool in self.pools.items()
            if part not in program.writes
            for array, count in pool.items()
        )
        return untouched + sum(text.kv_alias_bytes(array) for array in touched)


def engine_programs(config: ModelConfig, engine: EngineConfig) -> EnginePrograms:
    """Return the programs that the engine itself warms up."""
    return EnginePrograms.of(
        Buckets.from_config(engine), vocab_size=config.vocab_size, max_decode_steps=engine.max_decode_steps,
        page_size=engine.page_size, processed=engine.processes_logprobs,
    )  # fmt: skip


def abstract_model(config: ModelConfig, target: CompileTarget, *, dtype: jnp.dtype) -> DecoderLM:
    """Return the model with shapes on `target` for parameters, each sharded as it will be."""
    return module_around(dataclasses.replace(config, dtype=dtype.name), _shapes(config, target, dtype))


def abstract_speculator(speculation: PlannedSpeculation, target: CompileTarget, *, dtype: jnp.dtype) -> Speculator:
    """Return the `Speculator`, with shapes on `target` for the parameters of its draft model or head."""
    method = speculation.config.row.device
    drafter = method.abstract(
        speculation.drafter, lambda layout: _shapes(layout, target, dtype), target.mesh.size, dtype
    )
    return Speculator(speculation.config, drafter)


def _shapes(layout: ModelConfig | Layout, target: CompileTarget, dtype: jnp.dtype) -> dict[str, Any]:
    """Return the shapes of all parameters, each sharded as it will be."""
    return {
        parameter.path: jax.ShapeDtypeStruct(
            parameter.shape, parameter.dtype or dtype, sharding=NamedSharding(target.mesh, parameter.spec)
        )
        for parameter in parameters(layout)
    }


def pool_arrays(
    config: ModelConfig,
    engine: EngineConfig,
    dtype: jnp.dtype,
    num_devices: int = 1,
    *,
    num_pages: int | None = None,
) -> Counter[PoolArray]:
    """Return the arrays of a device's share of the KV pool, as a program's text names them, and how many are alike.

    Args:
        num_pages: pages of the pool; None: those of the engine's requests.
    """
    found: Counter[PoolArray] = Counter()
    for layer in for_tensor_parallel(config, num_devices).kv_layers:
        heads = layer.num_kv_heads // num_devices
        shape = (num_pages or engine.num_pages, engine.page_size, heads, layer.head_dim)
        found[PoolArray(_HLO_NAMES[jnp.dtype(dtype).name], shape, jnp.dtype(dtype).itemsize)] += 2
    return found


def _first_of_all_kinds(config: ModelConfig) -> int:
    """Return how many of the first layers have all kinds of heads and windows."""
    layers, kinds = config.all_layers, len(config.kinds)
    return next(count for count in range(1, len(layers) + 1) if len(kinds_of(layers[:count])) == kinds)


def compile_plan(
    config: ModelConfig,
    engine: EngineConfig,
    target: CompileTarget,
    *,
    dtype: jnp.dtype,
    speculation: PlannedSpeculation | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[list[CompiledProgram], float]:
    """Compile all programs of a plan; return them and the kernels that a layer adds to a decode or denoising step.

    The latter is the difference between the loop and that of a model of two layers, or of the first layers of every
    kind, over the difference in layers, so
    that what a step does once (embedding, head, sampling, the attention's plan) drops out. It need not be whole: the
    compiler does not fuse every layer alike.

    Args:
        progress: called with what is compiled next, in words.
    """
    whole = AbstractEngine(config, engine, target, dtype=dtype, speculation=speculation)
    programs = []
    for name, (program, shape) in whole.planned.items():
        progress(f"{name.replace('_', ' ')}: {program.describe(shape)}")
        programs.append(whole.compile(name))
    few = max(_FEW_LAYERS, _first_of_all_kinds(config))
    layers = few if config.num_layers > few else config.num_layers + few
    counted = DECODE_LOOP if DECODE_LOOP in whole.planned else DENOISE_LOOP
    progress(f"{counted.replace('_', ' ')} with {layers} layers, to count the kernels of one")
    other = AbstractEngine(config.with_num_layers(layers), engine, target, dtype=dtype).compile(counted)
    decode = next(program for program in programs if program.name == counted)
    return programs, round((decode.kernels - other.kernels) / (config.num_layers - layers), 2)
