"""The engine's settings, validated where they are made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.attention.backend import ATTENTION_BACKENDS
from jaxinfer.cache.eviction import EVICTION_POLICIES
from jaxinfer.checkpoint.dtypes import parse_dtype
from jaxinfer.limits import BRANCH_MODES, SCHEDULING_POLICIES, SPECULATIVE_METHODS
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


ADAPTIVE = ("cost", "entropy")
# Those of trees are the published ones, whose 60 count the root.
_NUM_SPECULATIVE_TOKENS = {"draft_model": 8, "ngram": 5, "eagle3": 59}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted and how many. It changes how fast tokens come, and never which.

    Attributes:
        method: "draft_model" (a small model with the target's vocabulary), "ngram" (what followed the last time that
            the sequence ended in the same tokens) or "eagle3" (a head on the target's own features, which drafts
            trees).
        model: the draft model, or the head: a converted directory, a Hugging Face directory or a hub id. None: the
            embedded one, for the embedded target.
        num_speculative_tokens: most tokens drafted in a round; of a tree, its nodes besides the root. None: 8 of a
            draft model, 5 of n-grams, 59 of trees.
        tree_depth: of "eagle3", levels of a tree after the first: up to one more token can be accepted. None: 7.
        tree_top_k: of "eagle3", nodes of a level that the next one goes on from, and children of each. 1: a chain.
            None: 10.
        prompt_lookup_min, prompt_lookup_max: tokens that have to agree, at least, and that are compared.
        adaptive: "cost" drafts as many tokens as give the most tokens per second for the batch at hand, none included;
            "entropy" drafts fewer where the draft model is in doubt; None drafts always as many.
        gamma_min, gamma_max: with "entropy", the fewest and the most that are drafted one after the other (None: as
            many as ever are).
        egag_ema_beta: with "entropy", the weight of earlier rounds, in [0, 1).

    Raises:
        ValueError: a field is out of range, named with its value and what is allowed.
    """

    method: str
    model: str | os.PathLike[str] | None = None
    num_speculative_tokens: int | None = None
    tree_depth: int | None = None
    tree_top_k: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    adaptive: str | None = "cost"
    gamma_min: int = 1
    gamma_max: int | None = None
    egag_ema_beta: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in SPECULATIVE_METHODS:
            raise ValueError(f"method must be one of {', '.join(SPECULATIVE_METHODS)}, got {self.method!r}")
        for name in ("tree_depth", "tree_top_k"):
            if self.method != "eagle3" and getattr(self, name) is not None:
                raise ValueError(f"{name} is of method='eagle3', got method={self.method!r}")
        defaults = {"num_speculative_tokens": _NUM_SPECULATIVE_TOKENS[self.method]}
        if self.method == "eagle3":
            defaults |= {"tree_depth": 7, "tree_top_k": 10}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("tree_depth", "tree_top_k") if self.method == "eagle3" else ():
            check_positive_integer(name, getattr(self, name))
        check_positive_integer("num_speculative_tokens", self.num_speculative_tokens)
        longest = self._longest
        if self.gamma_max is None:
            object.__setattr__(self, "gamma_max", longest)
        for name in ("prompt_lookup_min", "prompt_lookup_max", "gamma_min", "gamma_max"):
            check_positive_integer(name, getattr(self, name))
        assert self.gamma_max is not None
        if self.gamma_max > longest:
            raise ValueError(
                f"gamma_max ({self.gamma_max}) must be at most {longest}, the most tokens that are drafted one after "
                "the other"
            )
        if self.adaptive not in (*ADAPTIVE, None):
            raise ValueError(f"adaptive must be one of {', '.join(ADAPTIVE)} or None, got {self.adaptive!r}")
        if self.adaptive == "entropy" and self.method == "ngram":
            raise ValueError("adaptive='entropy' looks at a draft model's distributions, and method='ngram' has none")
        for small, large in (("prompt_lookup_min", "prompt_lookup_max"), ("gamma_min", "gamma_max")):
            if getattr(self, small) > getattr(self, large):
                raise ValueError(f"{small} ({getattr(self, small)}) must be at most {large} ({getattr(self, large)})")
        if not 0 <= self.egag_ema_beta < 1:
            raise ValueError(f"egag_ema_beta must be in [0, 1), got {self.egag_ema_beta!r}")
        if self.model is not None and self.method == "ngram":
            raise ValueError(f"method='ngram' drafts without a model, got model={os.fspath(self.model)!r}")

    @classmethod
    def of(cls, value: SpeculativeConfig | Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration itself, or the one that a dict of its fields says.

        Raises:
            ValueError: as for the class, or a key is no field of it.
        """
        if isinstance(value, cls):
            return value
        given = fields_of(cls, "speculative_config", value)
        if "method" not in given:
            raise ValueError(f"speculative_config needs a method: one of {', '.join(SPECULATIVE_METHODS)}")
        return cls(**given)

    @property
    def most_drafts(self) -> int:
        """Tokens drafted one after the other in a round at most."""
        most = self.gamma_max if self.adaptive == "entropy" else self._longest
        assert most is not None
        return most

    @property
    def num_nodes(self) -> int:
        """Of a tree, besides the root; 0: chains alone are drafted."""
        if self.method != "eagle3" or self.tree_top_k == 1:
            return 0
        assert self.num_speculative_tokens is not None
        return min(self.num_speculative_tokens, self._pool_size)

    @property
    def _pool_size(self) -> int:
        """Nodes of which a tree keeps the best."""
        assert self.tree_depth is not None and self.tree_top_k is not None
        return self.tree_top_k + self.tree_depth * self.tree_top_k**2

    @property
    def _longest(self) -> int:
        """Tokens on one way down what is drafted in a round."""
        assert self.num_speculative_tokens is not None
        if self.method != "eagle3":
            return self.num_speculative_tokens
        assert self.tree_depth is not None
        return min(self.num_speculative_tokens, self.tree_depth + 1)


def fields_of(cls: type, name: str, value: Any) -> dict[str, Any]:
    """The fields of a dataclass that a dict gives.

    Args:
        name: of what the dict was given as, for messages.

    Raises:
        ValueError: it is no dict, or a key is no field.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a {cls.__name__} or a dict, got {value!r}")
    names = [field.name for field in fields(cls)]
    for key in value:
        if key not in names:
            raise ValueError(f"{name} has no field {key!r}; it has {', '.join(names)}")
    return dict(value)


def check_positive_integer(name: str, value: Any) -> None:
    """Raises ValueError, naming the setting and its value, unless it is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


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
