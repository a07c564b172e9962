"""Planning of the device's memory: weights, KV pool, workspace of the largest step, and a reserve."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.attention.backend import select_backend
from jaxinfer.attention.tensor_parallel import sharding_of_pages
from jaxinfer.cache.kv_pool import KVPool, kv_bytes_per_token
from jaxinfer.config import EngineConfig
from jaxinfer.engine.strategy import StrategyMaker
from jaxinfer.memory.share import check_utilization, engine_limit, reserve_of
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import TARGET, Program, bounds_place
from jaxinfer.programs.runner import Runner, initial_state
from jaxinfer.sampling.bounds import Bounds

# On a CPU the pool shares memory with everything else: enough for work on a laptop; `kv_cache_tokens` sets more.
DEFAULT_CPU_KV_BYTES = 512 * 2**20


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on each device, and the KV tokens that fit into them."""

    limit_bytes: int  # what the engine may use
    weights_bytes: int
    workspace_bytes: int  # temporaries and results of the largest step (0 on a CPU), bounds, tails, a strategy's state
    kv_bytes_per_token: int
    kv_tokens: int
    reserve_bytes: int = 0  # kept free for what is not counted
    others_bytes: int = 0  # what the process has on the device besides

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * self.kv_bytes_per_token

    @property
    def largest_kv_tokens(self) -> int:
        """The most tokens that a KV pool can hold beside everything else."""
        taken = self.weights_bytes + self.workspace_bytes + self.reserve_bytes + self.others_bytes
        return max(0, self.limit_bytes - taken) // self.kv_bytes_per_token

    @property
    def fits(self) -> bool:
        return self.kv_tokens <= self.largest_kv_tokens

    def table(self) -> str:
        """Format the budget as a table, for a log or a terminal."""
        rows = [
            ("limit", _size(self.limit_bytes)),
            ("weights", _size(self.weights_bytes)),
            ("workspace", _size(self.workspace_bytes)),
            ("reserve", _size(self.reserve_bytes)),
            ("held by others", _size(self.others_bytes)),
            ("KV pool", f"{_size(self.kv_bytes)} = {self.kv_tokens} tokens of {self.kv_bytes_per_token} bytes"),
            ("largest KV pool", f"{self.largest_kv_tokens} tokens"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def plan_memory(
    model: DecoderLM,
    engine: EngineConfig,
    *,
    dtype: jnp.dtype,
    kv_cache_tokens: int | None,
    gpu_memory_utilization: float,
    mesh: Mesh | None,
    maker: StrategyMaker | None = None,
) -> MemoryBudget:
    """Plan the memory of an engine; with `kv_cache_tokens` None, the KV pool is as large as is sensible.

    On a GPU the largest step is compiled to learn its workspace, and the pool fills the rest of the share
    `gpu_memory_utilization` of the card, or of JAX's share if that is less; on a CPU it takes at most
    DEFAULT_CPU_KV_BYTES. It never exceeds what all requests at full length need, and holds at least one request. The
    needs of a strategy are included.

    Raises:
        ValueError: the requested pool does not fit; the message names the largest one that does.
    """
    check_utilization(gpu_memory_utilization)
    config = model.config
    num_devices = 1 if mesh is None else mesh.size
    device = jax.local_devices()[0]
    on_gpu = device.platform != "cpu"
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    per_token = kv_bytes_per_token(config, dtype)
    if maker is not None:
        weights += maker.weights_bytes
        per_token += maker.kv_bytes_per_token(dtype)
    weights, per_token = weights // num_devices, per_token // num_devices
    page_size = engine.page_size
    one = -(-engine.max_model_len // page_size) * page_size
    if on_gpu:
        limit = engine_limit(device.memory_stats()["bytes_limit"], gpu_memory_utilization)
        reserve = reserve_of(limit)
        workspace = largest_workspace(model, engine, dtype=dtype, mesh=mesh, maker=maker)
        # A trainer's optimizer, or another engine: weights that were lent are the engine's own here.
        others = max(0, device.memory_stats()["bytes_in_use"] - weights)
    else:
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        workspace = reserve = others = 0
    if config.mask_token_id is None:
        workspace += Bounds.bytes_of(engine.max_num_seqs, config.vocab_size, num_devices)
    if maker is not None:  # trees are stored in slots that no request has; seats may keep more than a token
        workspace += maker.tail_tokens(engine) * per_token + maker.state_bytes(engine, config, dtype)
    room = MemoryBudget(limit, weights, workspace, per_token, 0, reserve, others).largest_kv_tokens
    if kv_cache_tokens is None:
        wanted = room if on_gpu else DEFAULT_CPU_KV_BYTES // per_token
        kv_cache_tokens = max(one, min(wanted // page_size * page_size, one * engine.max_num_seqs))
    budget = MemoryBudget(limit, weights, workspace, per_token, kv_cache_tokens, reserve, others)
    if not budget.fits:
        raise ValueError(
            f"kv_cache_tokens={kv_cache_tokens} takes {_size(budget.kv_bytes)} beside {_size(weights)} of weights, "
            f"{_size(workspace)} of workspace, {_size(reserve)} of reserve and {_size(others)} that others hold, more "
            f"than the {_size(limit)} there are: "
            f"at most {budget.largest_kv_tokens // page_size * page_size} tokens fit"
        )
    return budget


def largest_workspace(
    model: DecoderLM,
    engine: EngineConfig,
    *,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    maker: StrategyMaker | None = None,
) -> int:
    """Compile the largest step and the largest rounds; return the bytes of temporaries and results on a device of the
    one that takes more.

    Raises:
        RuntimeError: the compiler gives no memory analysis.
    """
    buckets = Buckets.from_config(engine)
    programs = EnginePrograms.of(
        buckets, vocab_size=model.config.vocab_size, max_decode_steps=engine.max_decode_steps,
        page_size=engine.page_size, processed=engine.processes_logprobs,
    )  # fmt: skip
    # Temporaries do not depend on the pool's size: the pages of one full page table are enough for the compiler.
    shape = programs.step.largest
    pages = shape.pages_per_row * shape.num_rows
    small = dataclasses.replace(engine, kv_cache_tokens=pages * engine.page_size)
    cache = KVPool.shapes(
        model.config, num_pages=pages, page_size=engine.page_size, dtype=dtype, sharding=sharding_of_pages(mesh)
    )
    vocab = model.config.vocab_size
    models = {TARGET: model}
    state = initial_state(cache, buckets.max_num_seqs, vocab, bounds_place(mesh, vocab))
    compiled: list[tuple[Program, Any]] = []
    takes_prompts = False
    if maker is not None:
        strategy = maker.strategy(small, model, dtype=dtype, mesh=mesh, abstract=True)(programs, buckets)
        models, state = {**models, **strategy.models}, {**state, **strategy.make_state()}
        takes_prompts = strategy.takes_prompts
        programs = programs.followed_by(strategy.follower)
        compiled += [(program, shape) for program in strategy.programs for shape in program.planned.values()]
    if not takes_prompts:
        compiled.append((programs.step, shape))
    runner = Runner(models, state, select_backend(engine.attention_backend), mesh=mesh)
    return max(workspace_of(runner.compile(*program)) for program in compiled)


def workspace_of(program: jax.stages.Compiled) -> int:
    """Return the bytes of temporaries and results that a program needs beside its arguments.

    Raises:
        RuntimeError: the compiler gives no memory analysis.
    """
    analysis = program.memory_analysis()
    if analysis is None:
        raise RuntimeError("the compiler gives no memory analysis of a step: set kv_cache_tokens")
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
