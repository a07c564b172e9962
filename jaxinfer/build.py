"""`build_client`: an engine and its client from the arguments of `LLM`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxinfer.attention.tensor_parallel import make_mesh
from jaxinfer.checkpoint.directory import embedded_checkpoint, find_checkpoint, read_config, read_generation_config
from jaxinfer.checkpoint.dtypes import parse_dtype
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.compile_cache import enable_compile_cache
from jaxinfer.config import EngineConfig, check_model_len, page_size_for, resolve_dtype
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.field_checks import check_positive_integer
from jaxinfer.frontend.client import EngineClient
from jaxinfer.frontend.input_processor import InputProcessor
from jaxinfer.frontend.weights_source import WeightsSource
from jaxinfer.hosts.connect import connect, runner_for
from jaxinfer.hosts.team import current_team, has_joined
from jaxinfer.live_model import config_of_live, placed_live
from jaxinfer.memory.budget import MemoryBudget, plan_memory
from jaxinfer.memory.share import set_jax_share
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.unknown_fields import ConfigOptions
from jaxinfer.strategies.choose import denoiser_of, diffusion_of, most_sequences
from jaxinfer.strategies.draft_options import SpeculativeConfig
from jaxinfer.strategies.drafters import check_drafter, load_speculator, with_drafter
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def build_client(
    *,
    model: str | os.PathLike[str] | nnx.Module | tuple[ModelConfig, Any] | None,
    tokenizer: str | os.PathLike[str] | None,
    skip_tokenizer_init: bool,
    dtype: Any,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    page_size: int,
    kv_cache_tokens: int | None,
    gpu_memory_utilization: float,
    enable_prefix_caching: bool,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None,
    diffusion_config: DiffusionConfig | Mapping[str, Any] | None,
    branch_mode: str,
    scheduling_policy: str,
    tensor_parallel_size: int,
    attention_backend: str,
    seed: int,
    strict_config: bool,
    ignore_config_fields: Sequence[str],
    warm_up: str | bool,
    prefix_cache_tokens: int | None,
    prefix_cache_policy: str,
    logprobs_mode: str,
) -> tuple[EngineClient, MemoryBudget]:
    """Build an engine; returns its client and its memory budget. Arguments and errors are those of `LLM`."""
    if warm_up not in ("background", False):
        raise ValueError(f'warm_up must be "background" or False, got {warm_up!r}')
    fields: ConfigOptions = {"strict_config": strict_config, "ignore_config_fields": ignore_config_fields}
    speculative = None if speculative_config is None else SpeculativeConfig.of(speculative_config)
    if not has_joined():  # JAX writes it in the first process alone; the others would wait for what that has skipped
        enable_compile_cache()
    set_jax_share(gpu_memory_utilization)  # before anything below starts JAX
    resolved = resolve_dtype(dtype)
    team = current_team()
    mesh = make_mesh("tensor_parallel_size", tensor_parallel_size)
    if team is not None:
        team.check(mesh)
    for name, value in (
        ("max_model_len", max_model_len), ("page_size", page_size), ("kv_cache_tokens", kv_cache_tokens),
    ):  # fmt: skip
        if value is not None:
            check_positive_integer(name, value)
    directory = None
    if model is None or isinstance(model, (str, os.PathLike)):
        directory = find_checkpoint(embedded_checkpoint() if model is None else model)
    if team is not None and directory is None:
        raise ValueError("several processes share a model that they load: give a directory or a hub id")
    config = config_of_live(model) if directory is None else read_config(directory, **fields)[1]
    diffusion = diffusion_of(config, diffusion_config, speculative)
    if diffusion is not None:
        if logprobs_mode != "raw_logprobs":
            raise ValueError(f"a diffusion model has raw_logprobs alone, got logprobs_mode={logprobs_mode!r}")
        max_num_seqs = most_sequences(diffusion, config, max_num_seqs, max_num_batched_tokens)
        enable_prefix_caching &= not config.is_bidirectional  # the KV of a token depends on later tokens
        page_size = page_size_for(config, None if page_size == EngineConfig.page_size else page_size)
        branch_mode = "batching"  # blocks of several branches do not share a row
    if max_model_len is None:
        max_model_len = config.max_position_embeddings
        if kv_cache_tokens is not None and kv_cache_tokens >= page_size:
            # A pool size without a length asks for the longest requests that the pool holds.
            max_model_len = min(max_model_len, kv_cache_tokens // page_size * page_size)
    else:
        check_model_len(config, max_model_len)
    engine_config = EngineConfig(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        page_size=page_size, enable_prefix_caching=enable_prefix_caching, scheduling_policy=scheduling_policy,
        attention_backend=attention_backend, branch_mode=branch_mode, seed=seed,
        prefix_cache_tokens=prefix_cache_tokens, prefix_cache_policy=prefix_cache_policy, logprobs_mode=logprobs_mode,
        # Until memory is planned, room for one request.
        kv_cache_tokens=max_model_len + page_size if kv_cache_tokens is None else kv_cache_tokens,
    )  # fmt: skip
    # Small files first, so that their faults are reported before the weights are loaded.
    generation_config = {} if directory is None else read_generation_config(directory)
    tokenizer_directory = Path(tokenizer) if tokenizer is not None else directory
    tokenizer_of_model = None
    has_tokenizer = tokenizer is not None or (directory is not None and Tokenizer.exists(directory))
    if not skip_tokenizer_init and tokenizer_directory is not None and has_tokenizer:
        tokenizer_of_model = Tokenizer(tokenizer_directory)
    drafter = None
    if speculative is not None:
        speculative = with_drafter(speculative, directory)
        drafter = check_drafter(speculative, tokenizer_directory, config, max_model_len, **fields)
    lent: bool | list[bool] = False
    if directory is None:
        module, lent = placed_live(model, dtype=parse_dtype(dtype), mesh=mesh)
        resolved = jnp.dtype(module.config.dtype)
    source = WeightsSource(config, directory, tokenizer_directory, resolved, mesh, fields, speculative, max_model_len)
    if directory is not None:
        _, module = load_checkpoint(directory, dtype=resolved, mesh=mesh, config=config)
    config = module.config
    maker = None if diffusion is None else denoiser_of(diffusion, config)
    if speculative is not None:
        maker = load_speculator(speculative, config, drafter, dtype=resolved, mesh=mesh, **fields)
    budget = plan_memory(
        module, engine_config, dtype=resolved, kv_cache_tokens=kv_cache_tokens,
        gpu_memory_utilization=gpu_memory_utilization, mesh=mesh, maker=maker,
    )  # fmt: skip
    if team is not None:  # the devices of some have less room
        budget = dataclasses.replace(budget, kv_tokens=team.least(budget.kv_tokens))
    logger.info("memory of each device:\n%s", budget.table())
    engine_config = dataclasses.replace(engine_config, kv_cache_tokens=budget.kv_tokens)
    make = None if maker is None else maker.strategy(engine_config, module, dtype=resolved, mesh=mesh)
    strategy = {} if make is None else {"make_strategy": make}
    core = EngineCore(
        module, engine_config, dtype=resolved, mesh=mesh, lent=lent, drafter_is_lent=False,
        make_runner=runner_for(team), **strategy,
    )  # fmt: skip
    if team is not None and directory is not None:
        files = sorted((path.name, path.stat().st_size) for path in directory.iterdir() if path.is_file())
        connect(team, core, (engine_config, config, speculative, diffusion, files))
    edit_threshold = None if diffusion is None else diffusion.edit_threshold
    inputs = InputProcessor(engine_config, config, generation_config, tokenizer_of_model, core.workers, edit_threshold)
    if warm_up and (team is None or team.leads):  # the others compile what the first one compiles
        core.warm_up_in_background()
    return EngineClient(core, inputs, tokenizer_of_model, source), budget
