"""Models with experts in the engine: tokens are those of the oracles, however requests are batched and decoded."""

from __future__ import annotations

import pytest

from tests.builders import (
    SPARSE_FAMILIES,
    make_engine,
    make_request,
    model_config,
    one_by_one,
    random_model,
    random_prompts,
    run_requests,
)
from tests.diffusion.builders import MASK, diffusion_engine, diffusion_model_config, generated
from tests.oracle import greedy_tokens, sampled_tokens
from tests.sampling.reference import Filters
from tests.speculative.builders import speculating_engine

LENGTHS, TOKENS = (1, 17, 40, 65), 12


# Of what one family has, another has as much and more.
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "Qwen3MoeForCausalLM" else []) for name in SPARSE_FAMILIES
]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return random_model(model_config(request.param))


@pytest.fixture(scope="module")
def wanted(model):
    return [
        sampled_tokens(model, prompt, TOKENS, Filters(0.7), (0, i)) if i % 2 else greedy_tokens(model, prompt, TOKENS)
        for i, prompt in enumerate(random_prompts(LENGTHS))
    ]


def requests():
    return [
        make_request(str(i), prompt, max_tokens=TOKENS, seed=i, temperature=i % 2 * 0.7)
        for i, prompt in enumerate(random_prompts(LENGTHS))
    ]


def test_requests_get_the_oracles_tokens_alone_together_and_from_the_cache(model, wanted):
    """Prompts are cut into chunks, beside others that decode, in a pool that is too small for all."""
    core = make_engine(model)
    assert all(len(set(tokens)) > TOKENS // 3 for tokens in wanted)
    assert one_by_one(core, requests()) == wanted
    assert core.reset_prefix_cache()
    assert run_requests(core, requests()) == wanted
    hits = core.get_metrics().prefix_cache_hits
    assert run_requests(core, requests()) == wanted
    assert core.get_metrics().prefix_cache_hits > hits


def test_requests_that_speculate_get_the_same_tokens(model, wanted):
    core = speculating_engine(model, model)
    assert run_requests(core, requests()) == wanted
    assert core.get_metrics().spec_decode_num_accepted_tokens > 20


def test_blocks_of_a_model_with_experts_get_the_tokens_of_the_loop():
    model = random_model(diffusion_model_config("LLaDA2MoeModelLM"))
    core = diffusion_engine(model)
    prompts = random_prompts((30, 9, 50, 2), vocab_size=MASK)
    each = [make_request(str(i), prompt, max_tokens=16 + i) for i, prompt in enumerate(prompts)]
    found = run_requests(core, each)
    assert found == [generated(model, request).tokens for request in each]
    alone = make_request("alone", prompts[0], max_tokens=16)
    assert core.reset_prefix_cache() and run_requests(core, [alone]) == found[:1]
