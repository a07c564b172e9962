"""Tiny bidirectional diffusion models, engines and requests for tests, and the rounds of both engine and loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.strategy import LandedRounds
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.scheduling.request import Request
from jaxinfer.strategies.bidirectional import BidirectionalDiffusion
from tests.builders import drain, make_request, model_config, random_prompts
from tests.diffusion import vicinity_numpy as loop
from tests.diffusion.builders import MASK, diffusion_engine
from tests.diffusion.oracle import Rule, by_factor, by_hierarchy, by_threshold
from tests.sampling.reference import Filters

BLOCK, THRESHOLD = 6, 0.25
CACHES = {
    "none": {"cache": "none"},
    "prefix": {"cache": "prefix", "prefix_look": 2},
    "dual": {"cache": "dual"},
    "vicinity": {"cache": "dual", "prefix_look": 5, "after_look": 3},
    "wider than the sequence": {"cache": "dual", "prefix_look": 40, "after_look": 40},
}
SMOOTH = {"cont_weight": 0.3, "warmup_steps": 3, "threshold_decay": 0.2}


def bidirectional_config(**overrides: Any):
    return model_config("LLaDAModelLM", **{"mask_token_id": MASK, **overrides})


def diffusion_config(**more: Any) -> DiffusionConfig:
    return DiffusionConfig(**{"block_size": BLOCK, "threshold": THRESHOLD, "expected_tpf": 2, **more})


def engine_of(model: DecoderLM, config: DiffusionConfig, **limits: Any) -> EngineCore:
    return diffusion_engine(model, config, **{"max_model_len": 80, "kv_cache_tokens": 160, **limits})


def strategy_of(core: EngineCore) -> BidirectionalDiffusion:
    assert isinstance(core.strategy, BidirectionalDiffusion)
    return core.strategy


def requests(**more: Any) -> list[Request]:
    """Requests of different lengths, greedy and sampled, whose last block is whole or not."""
    return [
        make_request(str(i), prompt, max_tokens=20 - 2 * i, seed=i, temperature=i % 3 / 2, **more)
        for i, prompt in enumerate(random_prompts((30, 7, 41, 1, 22, 15), vocab_size=MASK))
    ]


def decoded(model: DecoderLM, request: Request, config: DiffusionConfig, bug: str = "", **more: Any) -> loop.Decoded:
    """What the loop makes of a request."""
    params = request.sampling_params
    rules: dict[str, Any] = {
        "threshold": by_threshold,
        "credit": by_threshold,
        "hierarchy": lambda tau: by_hierarchy(tau, config.low_threshold),
        "factor": lambda tau: by_factor(config.factor),
    }

    def rule(tau: float) -> Rule:
        return rules[config.unmask](tau)

    smooth = loop.Smooth(
        config.warmup_steps, config.cont_weight, config.cont_weight_init, config.cont_weight_growth,
        config.threshold_decay,
    )  # fmt: skip
    credit = loop.Credit(config.credit_alpha, config.boost_gamma, config.decay_beta)
    return loop.generate(
        model, request.prompt_token_ids, params.max_tokens or 0, block_size=config.block_size or 0, rule=rule,
        threshold=config.threshold, cache="dual" if config.cache == "auto" else config.cache,
        prefix_look=config.prefix_look, after_look=config.after_look, smooth=smooth if config.smooths else None,
        eos=sorted(request.ending_token_ids),
        filters=Filters(params.temperature, params.top_k, params.top_p, params.min_p), request_key=request.request_key,
        credit=credit if config.unmask == "credit" else None, bug=bug, **more,
    )  # fmt: skip


def rounds_of(core: EngineCore, request: Request) -> list[tuple[int, tuple[int, ...]]]:
    """The start of the block and its tokens after each round of a request that is alone."""
    found: list[tuple[int, tuple[int, ...]]] = []

    def listen(landed: LandedRounds[DenoiseOutput]) -> None:
        for row in landed.rows.tolist():
            for number in np.flatnonzero(np.asarray(landed.output.ran)[:, row]):
                start = int(landed.output.start[number, row])
                end = min(start + BLOCK, request.max_total_tokens)
                found.append((start, tuple(np.asarray(landed.output.blocks[number, row])[: end - start].tolist())))

    strategy_of(core).listeners.append(listen)
    core.add_request(request)
    drain(core)
    strategy_of(core).listeners.remove(listen)
    return found


def rounds_in(found: loop.Decoded, request: Request) -> list[tuple[int, tuple[int, ...]]]:
    return [(each.block, each.tokens[each.block : each.block + BLOCK]) for each in found.rounds]
