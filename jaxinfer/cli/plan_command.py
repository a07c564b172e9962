"""`jaxinfer plan`: computes and prints the plan that its options ask for."""

from __future__ import annotations

import argparse
import json
import sys

import jax
from rich.console import Console

from jaxinfer.checkpoint.directory import find_config, read_config_file
from jaxinfer.checkpoint.dtypes import parse_dtype
from jaxinfer.cli.config_field_options import config_options
from jaxinfer.cli.speculative_options import speculative_config
from jaxinfer.config import EngineConfig, check_model_len, page_size_for
from jaxinfer.field_checks import check_positive_integer
from jaxinfer.memory.share import share_in_environment
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.compile_target import compile_target, cuda_plugin
from jaxinfer.planning.devices import find_gpu
from jaxinfer.planning.plan import Compiled, PlannedSpeculation, PlanRequest, compiled_figures, make_plan
from jaxinfer.planning.programs import compile_plan
from jaxinfer.planning.report import HOW_TO_COMPILE, as_json, plan_table, verdict
from jaxinfer.strategies.choose import diffusion_of, most_sequences
from jaxinfer.strategies.draft_options import SpeculativeConfig


def run_plan(args: argparse.Namespace) -> bool:
    """Plan and report as the options say; returns whether the model fits.

    Raises:
        ValueError, FileNotFoundError: an option or the model's configuration is not usable; the message says why.
    """
    # A plan needs no GPU, and must not take memory of a local one that is in use.
    jax.config.update("jax_platforms", "cpu")
    request = request_of(args)
    compiled, remark = None, ""
    if cuda_plugin() is None:
        remark = HOW_TO_COMPILE
    else:
        compiled = _compile(request)
    plan = make_plan(request, compiled)
    if args.json:
        print(json.dumps(as_json(plan, request, compiled, model=args.model), indent=2))
    else:
        console = Console()
        console.print(plan_table(plan, request, compiled, model=args.model))
        if remark:
            console.print(remark, highlight=False, markup=False)
        console.print(verdict(plan, request), style="green" if plan.fits else "red", highlight=False, markup=False)
    return plan.fits


def request_of(args: argparse.Namespace) -> PlanRequest:
    """Return the plan's request that the options describe.

    Raises:
        ValueError, FileNotFoundError: as for `run_plan`.
    """
    gpu = find_gpu(args.device)
    dtype = parse_dtype("bfloat16" if args.dtype == "auto" else args.dtype)
    assert dtype is not None
    for name in ("max_num_seqs", "max_model_len", "page_size", "tensor_parallel_size"):
        if getattr(args, name) is not None:
            check_positive_integer(name, getattr(args, name))
    model = read_config_file(find_config(args.model), **config_options(args))
    return PlanRequest(
        model=model,
        engine=_engine(args, model),
        gpu=gpu,
        dtype=dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_parallel_size,
        speculation=_speculation(args, model),
        jax_memory_share=share_in_environment(),
    )


def _speculation(args: argparse.Namespace, target: ModelConfig) -> PlannedSpeculation | None:
    fields = speculative_config(args)
    if fields is None:
        return None
    config = SpeculativeConfig(**fields)
    method = config.row
    if method.model is None:
        return PlannedSpeculation(config)
    if args.draft_model is None:
        raise ValueError(f"--speculative {config.method} needs --draft-model, {method.model_words}")
    return PlannedSpeculation(config, method.device.plan(find_config(args.draft_model), target, **config_options(args)))


def _engine(args: argparse.Namespace, model: ModelConfig) -> EngineConfig:
    """Return the configuration of an engine whose pool holds every sequence at full length."""
    length = args.max_model_len
    if length is None:
        length = model.max_position_embeddings
    check_model_len(model, length)
    names = ("max_num_seqs", "max_num_batched_tokens")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    rows, size = given.get("max_num_seqs", EngineConfig.max_num_seqs), page_size_for(model, args.page_size)
    fields = speculative_config(args)
    diffusion = diffusion_of(model, None, None if fields is None else SpeculativeConfig(**fields))
    if diffusion is not None:
        batched = given.get("max_num_batched_tokens", EngineConfig.max_num_batched_tokens)
        rows = given["max_num_seqs"] = most_sequences(diffusion, model, rows, batched)
    tokens = rows * -(-length // size) * size
    return EngineConfig(max_model_len=length, kv_cache_tokens=tokens, page_size=size, **given)


def _compile(request: PlanRequest) -> Compiled:
    def progress(what: str) -> None:
        print(f"compiling for {request.gpu.device_kind}: {what} ...", file=sys.stderr, flush=True)

    target = compile_target(request.gpu, request.tensor_parallel_size)
    programs, kernels = compile_plan(
        request.model, request.engine, target, dtype=request.dtype, speculation=request.speculation, progress=progress
    )
    return compiled_figures(programs, kernels)
