"""The engine's settings, validated where they are made."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.attention.backend import ATTENTION_BACKENDS
from jaxinfer.cache.eviction import EVICTION_POLICIES
from jaxinfer.checkpoint.dtypes import parse_dtype
from jaxinfer.field_checks import check_positive_integer
from jaxinfer.limits import BRANCH_MODES, SCHEDULING_POLICIES
from jaxinfer.models.config import ModelConfig


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine. Sizes count tokens, except `max_num_seqs` (requests running at once).

    Raises:
        ValueError: a field is out of range, named with its value and what is allowed.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    page_size: int = 16
    kv_cache_tokens: int = 65536
    enable_prefix_caching: bool = True
    prefix_cache_policy: str = "lru"  # what is forgotten first
    scheduling_policy: str = "fcfs"
    attention_backend: str = "auto"
    branch_mode: str = (
        "in_one_sequence"  # how launches read what sequences of one request share: once, or once for each
    )
    max_parallel_branches: int | None = None  # sequences of one request that run at once; None: all
    seed: int = 0
    max_decode_steps: int = 16  # most decode steps in one launch, where no request needs the host in between; 1: off
    overlap: bool = True  # launch a step before the results of the one before are read
    strict_compiles: bool = False  # a compile after warm-up is an error

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "page_size",
            "kv_cache_tokens",
            "max_decode_steps",
        ):
            check_positive_integer(name, getattr(self, name))
        if self.max_parallel_branches is not None:
            check_positive_integer("max_parallel_branches", self.max_parallel_branches)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        for name in ("enable_prefix_caching", "overlap", "strict_compiles"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.page_size & (self.page_size - 1) or self.page_size > 256:
            raise ValueError(f"page_size must be a power of two up to 256, got {self.page_size}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): a step decodes one token for every running request"
            )
        if self.num_pages * self.page_size < self.max_model_len:
            raise ValueError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) holds {self.num_pages * self.page_size} tokens in whole "
                f"pages of {self.page_size}, too few for one request of max_model_len ({self.max_model_len}): raise "
                f"kv_cache_tokens or set max_model_len to at most {self.num_pages * self.page_size}"
            )
        for name, allowed in (
            ("scheduling_policy", SCHEDULING_POLICIES),
            ("attention_backend", ATTENTION_BACKENDS),
            ("prefix_cache_policy", EVICTION_POLICIES),
            ("branch_mode", BRANCH_MODES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def num_pages(self) -> int:
        return self.kv_cache_tokens // self.page_size


def page_size_for(config: ModelConfig, page_size: int | None) -> int:
    """The size that is asked for; None: the default one, or a block of a model whose blocks are larger."""
    return max(EngineConfig.page_size, config.block_size or 0) if page_size is None else page_size


def check_model_len(config: ModelConfig, max_model_len: int) -> None:
    """Raises ValueError, naming both, if the model's positions do not reach so far."""
    if max_model_len > config.max_position_embeddings and not config.rope.depends_on_length:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the model's max_position_embeddings "
            f"({config.max_position_embeddings})"
        )


def resolve_dtype(name: Any) -> jnp.dtype:
    """The dtype of weights and KV called `name`; "auto" is bfloat16 on accelerators and float32 on CPU.

    XLA's bfloat16 matrix-vector product on CPU runs at a quarter of float32's speed.

    Raises:
        ValueError: not a dtype that the engine runs in.
    """
    dtype = parse_dtype(name)
    if dtype is None:
        dtype = jnp.dtype(jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16)
    return dtype


def __getattr__(name: str) -> Any:
    if name == "SpeculativeConfig":  # its old home
        return importlib.import_module("jaxinfer.strategies.draft_options").SpeculativeConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
