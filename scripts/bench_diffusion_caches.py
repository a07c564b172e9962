"""KV caches and unmasking rules of bidirectional diffusion on a random model: tokens per forward, and speed relative to
no cache.

All combinations alternate on the same prompts. The scale of its output head decides how confident a random model is;
what its tokens are does not matter here, but what a forward costs does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from cpu_bench.random_models import random_model
from jaxinfer.bench.environment import describe_environment
from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts_config import ExpertsConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scheduling.request import Request
from jaxinfer.strategies.bidirectional import BidirectionalDenoiser

LOOKS = {"prefix_look": 16, "after_look": 16}
CACHES: dict[str, dict[str, Any]] = {
    "none": {"cache": "none"},
    "prefix": {"cache": "prefix"},
    "dual": {"cache": "dual"},
    "dual, 16 tokens around": {"cache": "dual", **LOOKS},
    "the same, smoothed": {"cache": "dual", **LOOKS, "cont_weight": 0.3, "warmup_steps": 4},
}
RULES: dict[str, dict[str, Any]] = {
    "threshold 0.9": {},
    "hierarchy 0.9, 0.4": {"unmask": "hierarchy"},
    "factor 1": {"unmask": "factor"},
    "credit 0.9": {"unmask": "credit"},
}
VOCAB, MASK = 4096, 4095
# How steep the output head is: a forward then commits several tokens, as one of a trained model does.
STEEPNESS = 6.0


@dataclass(frozen=True)
class Measured:
    """One cache with one rule; speeds are medians of rounds."""

    cache: str
    rule: str
    tokens_a_forward: float
    tokens_per_second: float
    against_none: float = 0.0


def model_config() -> ModelConfig:
    """LLaDA-MoE's layers, small."""
    return ModelConfig(
        "LLaDAMoEModelLM", vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8,
        num_kv_heads=8, head_dim=32, max_position_embeddings=1024, qk_norm=True, mask_token_id=MASK,
        experts=ExpertsConfig(16, 4, 128, normalizes=False),
    )  # fmt: skip


def run(core: EngineCore, prompts: list[list[int]], length: int) -> tuple[int, float]:
    """Tokens and seconds of all prompts, one after the other."""
    begin, tokens = time.perf_counter(), 0
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=length - len(prompt))
        request = Request(str(number), prompt, params, max_total_tokens=length)
        core.add_request(request)
        while core.has_unfinished_requests():
            core.step()
        tokens += request.num_output_tokens
    return tokens, time.perf_counter() - begin


def measure(length: int, prompt_tokens: int, prompts: int, rounds: int) -> list[Measured]:
    """All caches with all rules."""
    config = model_config()
    model = random_model(config)
    assert model.lm_head is not None
    model.lm_head.kernel[...] = model.lm_head.kernel[...] * STEEPNESS
    engine = EngineConfig(
        max_model_len=length, max_num_seqs=1, max_num_batched_tokens=length + 16, kv_cache_tokens=length,
        enable_prefix_caching=False,
    )  # fmt: skip
    dtype = jnp.dtype(jnp.float32)
    some = np.random.default_rng(0).integers(0, MASK, (prompts, prompt_tokens)).tolist()
    cores = {
        (cache, rule): EngineCore(
            model, engine, dtype=dtype,
            make_strategy=BidirectionalDenoiser(DiffusionConfig(**CACHES[cache], **RULES[rule])).strategy(
                engine, model, dtype=dtype, mesh=None
            ),
        )
        for rule in RULES for cache in CACHES
    }  # fmt: skip
    speeds: dict[tuple[str, str], list[float]] = {name: [] for name in cores}
    for number in range(rounds + 1):
        for name, core in cores.items():
            tokens, seconds = run(core, some, length)
            if number:  # the first time compiles
                speeds[name].append(tokens / seconds)
    found = [
        Measured(cache, rule, core.get_metrics().diffusion_tokens_per_forward, statistics.median(speeds[cache, rule]))
        for (cache, rule), core in cores.items()
    ]
    none = {each.rule: each.tokens_per_second for each in found if each.cache == "none"}
    return [replace(each, against_none=each.tokens_per_second / none[each.rule]) for each in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=384, help="of these, of its prompt (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    options = parser.parse_args()
    found = measure(options.length, options.prompt, options.prompts, options.rounds)
    table = Table("rule", "cache", "tokens a forward", "against none")
    for column in table.columns[2:]:
        column.justify = "right"
    for each in found:
        table.add_row(each.rule, each.cache, f"{each.tokens_a_forward:.2f}", f"{each.against_none:.2f}x")
    Console(width=100).print(table)
    if options.json is not None:
        report = {"environment": describe_environment(), "ways": [asdict(each) for each in found]}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
