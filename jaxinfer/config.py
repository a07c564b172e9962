"""The engine's settings, validated on construction."""

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
from jaxinfer.limits import BRANCH_MODES, LOGPROBS_MODES, SCHEDULING_POLICIES
from jaxinfer.models.config import ModelConfig


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        max_model_len: most tokens of prompt and output of a request.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens computed in one step.
        page_size: tokens per KV page, a power of two up to 256.
        kv_cache_tokens: tokens that the KV pool holds.
        enable_prefix_caching: cache KV of prefixes for later requests.
        prefix_cache_tokens: most tokens that are cached, at least a page; None: as many as the pool has room for.
        prefix_cache_policy: which cached pages are evicted first: "lru", "lfu", "fifo" or "priority".
        scheduling_policy: "fcfs" or "priority".
        attention_backend: "auto", "xla" or "pallas".
        branch_mode: how launches read KV that sequences of one request share: "in_one_sequence" once, "batching" once
            for each.
        max_parallel_branches: most sequences of one request that run at once; None: all.
        seed: of requests without a seed of their own.
        max_decode_steps: most decode steps in one launch, if no request needs the host in between; 1: one step.
        overlap: launch a step before the results of the previous one are read.
        strict_compiles: a compile after warm-up is an error.
        logprobs_mode: "raw_logprobs" are of the model's own distribution, "processed_logprobs" of the one that a token
            is drawn from.

    Raises:
        ValueError: a field is out of range; the message has its name, its value and what is allowed.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    page_size: int = 16
    kv_cache_tokens: int = 65536
    enable_prefix_caching: bool = True
    prefix_cache_tokens: int | None = None
    prefix_cache_policy: str = "lru"
    scheduling_policy: str = "fcfs"
    attention_backend: str = "auto"
    branch_mode: str = "in_one_sequence"
    max_parallel_branches: int | None = None
    seed: int = 0
    max_decode_steps: int = 16
    overlap: bool = True
    strict_compiles: bool = False
    logprobs_mode: str = "raw_logprobs"

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
        if self.prefix_cache_tokens is not None:
            check_positive_integer("prefix_cache_tokens", self.prefix_cache_tokens)
            if self.prefix_cache_tokens < self.page_size:
                raise ValueError(
                    f"prefix_cache_tokens must be None or at least a page of {self.page_size}, got "
                    f"{self.prefix_cache_tokens}"
                )
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
            ("logprobs_mode", LOGPROBS_MODES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def processes_logprobs(self) -> bool:
        return self.logprobs_mode == "processed_logprobs"

    @property
    def num_pages(self) -> int:
        return self.kv_cache_tokens // self.page_size


def page_size_for(config: ModelConfig, page_size: int | None) -> int:
    """Return the page size that is asked for; None: the default, or the model's diffusion block if that is larger."""
    return max(EngineConfig.page_size, config.block_size or 0) if page_size is None else page_size


def check_model_len(config: ModelConfig, max_model_len: int) -> None:
    """Raise ValueError, naming both lengths, if `max_model_len` exceeds the model's positions."""
    if max_model_len > config.max_position_embeddings and not config.rope.depends_on_length:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the model's max_position_embeddings "
            f"({config.max_position_embeddings})"
        )


def resolve_dtype(name: Any) -> jnp.dtype:
    """Return the dtype of weights and KV called `name`; "auto" is bfloat16 on accelerators and float32 on CPU.

    XLA's bfloat16 matrix-vector product on CPU runs at a quarter of float32's speed.

    Raises:
        ValueError: not a dtype that the engine runs in.
    """
    dtype = parse_dtype(name)
    if dtype is None:
        dtype = jnp.dtype(jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16)
    return dtype


def __getattr__(name: str) -> Any:
    if name == "SpeculativeConfig":  # it was defined here once
        return importlib.import_module("jaxinfer.strategies.draft_options").SpeculativeConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
