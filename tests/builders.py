"""What tests are made of: tiny random models of every family, random prompts, requests and engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.config import EngineConfig
from jaxinfer.constraints.automaton import TokenAutomaton
from jaxinfer.engine.core import EngineCore
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.models.registry import build_model
from jaxinfer.models.rope import RopeConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request

_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
# Each family with the features that it has and the others lack.
_FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "rope": RopeConfig(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
        "o_bias": True,
        "mlp_bias": True,
        "num_kv_heads": 1,
    },
    "Qwen2ForCausalLM": {"qkv_bias": True, "tie_word_embeddings": True, "num_kv_heads": 4},
    "Qwen3ForCausalLM": {"qk_norm": True, "rope": RopeConfig("linear", factor=2.0)},
}
FAMILIES = tuple(_FAMILIES)
_LING_2: dict[str, Any] = {
    "qk_norm": True, "num_layers": 3, "rope": RopeConfig(partial_rotary_factor=0.5),
    "experts": ExpertsConfig(
        num_experts=16, experts_per_token=4, intermediate_size=24, shared_size=24, dense_layers=(0,), score="sigmoid",
        has_bias=True, scaling=2.5, num_groups=4, kept_groups=2,
    ),
}  # fmt: skip
SPARSE_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"qk_norm": True, "experts": ExpertsConfig(8, 2, 40, normalizes=False)},
    "BailingMoeV2ForCausalLM": _LING_2,
}
_DIFFUSION_FAMILIES: dict[str, dict[str, Any]] = {"SDARForCausalLM": {"qk_norm": True}, "LLaDA2MoeModelLM": _LING_2}
BIDIRECTIONAL_FAMILIES: dict[str, dict[str, Any]] = {
    "LLaDAModelLM": {},
    "LLaDAMoEModelLM": {"qk_norm": True, "experts": ExpertsConfig(8, 2, 40, normalizes=False)},
}


_ALL = {**_FAMILIES, **SPARSE_FAMILIES, **_DIFFUSION_FAMILIES, **BIDIRECTIONAL_FAMILIES}


def model_config(family: str = "Qwen3ForCausalLM", **overrides: Any) -> ModelConfig:
    """A small configuration of `family` with its own features switched on."""
    return ModelConfig(family, **{**_SHAPE, **_ALL[family], **overrides})


def random_model(config: ModelConfig, *, seed: int = 3, dtype: jnp.dtype = jnp.float32) -> DecoderLM:
    """A model all of whose weights matter: wide kernels, biases that are not 0 and norm scales that are not 1.

    Freshly initialised weights would leave biases and scales untested, and a tied model would repeat its last token.
    They are drawn on the host: on the device, every shape would be one more program to compile.
    """
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        name, noise = ".".join(map(str, path)), rng.standard_normal(leaf.shape)
        if name.endswith("scale"):
            values = np.exp(0.4 * noise)
        elif name.endswith("bias"):
            values = 0.3 * noise
        else:
            # What a kernel maps from: its last axis, or for the attention's output all axes of the heads.
            inputs = math.prod(leaf.shape[1:]) if ".attention.o." in name else leaf.shape[-1]
            values = (1 if name.startswith("embed") else 2) * inputs**-0.5 * noise
        return jnp.asarray(values.astype(leaf.dtype))

    graph, state = nnx.split(nnx.eval_shape(lambda: build_model(config, dtype=dtype, rngs=nnx.Rngs(0))))
    flat = {path: leaf.replace(draw(path, leaf)) for path, leaf in nnx.to_flat_state(state)}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def random_prompts(lengths: Iterable[int], *, vocab_size: int = 101, seed: int = 0) -> list[list[int]]:
    """Prompts of the given lengths with uniformly random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    eos_token_ids: Iterable[int] = (),
    priority: int = 0,
    request_key: tuple[int, int] | None = None,
    bad_token_ids: Iterable[Sequence[int]] = (),
    stream: bool = False,
    constraint: TokenAutomaton[Any] | None = None,
    **sampling: Any,
) -> Request:
    """A request, greedy unless a temperature is given; its random bits follow from `seed` or `request_key`."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        max_total_tokens=len(prompt) + max_tokens,
        eos_token_ids=frozenset(eos_token_ids),
        request_key=request_key or (0, params.seed or 0),
        priority=priority,
        bad_token_ids=tuple(tuple(sequence) for sequence in bad_token_ids),
        stream=stream,
        constraint=constraint,
    )


def make_engine(model: DecoderLM, *, dtype: jnp.dtype = jnp.float32, **limits: Any) -> EngineCore:
    """An engine with few batch shapes: 4 rows, 64 tokens a step, a pool too small for 4 long requests."""
    defaults: dict[str, Any] = {
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "page_size": 4,
        "kv_cache_tokens": 256,
    }
    return EngineCore(model, EngineConfig(**{**defaults, **limits}), dtype=dtype)


def drain(core: EngineCore, *, max_steps: int = 10_000) -> None:
    """Step until nothing is left to do, checking after every step that each page is in exactly one state."""
    for _ in range(max_steps):
        if not core.has_unfinished_requests():
            core.step()  # what was launched for requests that ended meanwhile lands too
            return
        core.step()
        core.check_integrity()
    raise AssertionError(f"requests are unfinished after {max_steps} steps")


def run_requests(core: EngineCore, requests: Sequence[Request]) -> list[list[int]]:
    """Output tokens of requests that are added in this order and run together to their end."""
    for request in requests:
        core.add_request(request)
    drain(core)
    return [request.output_token_ids for request in requests]


def one_by_one(core: EngineCore, requests: Iterable[Request]) -> list[list[int]]:
    """Output tokens of requests each of which is alone: it needs the fewest programs."""
    return [run_requests(core, [request])[0] for request in requests]
