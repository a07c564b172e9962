"""The engine's limits in a benchmark: options that set them, and their record in results. Imports no JAX."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.config_field_options import config_options
from jaxinfer.cli.speculative_options import speculative_config

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens", "tensor_parallel_size")


def add_engine_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine's limits to a benchmark."""
    group = parser.add_argument_group("engine (default: as LLM(...))")
    for name in _OPTIONS:
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options as keyword arguments of `LLM`."""
    names = ("dtype", "max_model_len", *_OPTIONS)
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return {**given, **config_options(args), "speculative_config": speculative_config(args)}


def engine_settings(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's limits and options that a measurement depends on."""
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "kv_cache_tokens")
    config = llm.core.config
    return {name: getattr(config, name) for name in names} | {
        "dtype": str(llm.core.kv.k[0].dtype), "tensor_parallel_size": args.tensor_parallel_size or 1,
        "speculative_config": speculative_config(args),
    }  # fmt: skip
