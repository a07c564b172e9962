"""Greedy tokens of the engine are those of the oracle, however requests are batched, cut and ordered."""

import numpy as np
import pytest

from jaxinfer.models.rope import RopeConfig
from tests.builders import (
    FAMILIES,
    drain,
    make_engine,
    make_request,
    model_config,
    one_by_one,
    random_model,
    random_prompts,
    run_requests,
)
from tests.oracle import greedy_tokens

pytestmark = pytest.mark.optimized

LENGTHS = (1, 3, 16, 17, 40, 64, 65, 100)
TOKENS = 12
# Decode loops and four rows for one family; programs that the others would only compile once more are left out.
FEW_PROGRAMS = {"max_decode_steps": 1, "max_num_seqs": 2}
LIMITS = {family: {} if family == "Qwen3ForCausalLM" else FEW_PROGRAMS for family in FAMILIES}


@pytest.fixture(scope="module")
def models():
    return {family: random_model(model_config(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def truth(models):
    """(family, prompts) -> the oracle's tokens; computed once per prompt."""
    known: dict[tuple, list[int]] = {}

    def get(family: str, prompts: list[list[int]], num_tokens: int = TOKENS) -> list[list[int]]:
        for prompt in prompts:
            if (family, *prompt) not in known:
                known[family, *prompt] = greedy_tokens(models[family], prompt, TOKENS)
        return [known[family, *prompt][:num_tokens] for prompt in prompts]

    return get


def requests_for(prompts: list[list[int]]) -> list:
    return [make_request(str(i), prompt, max_tokens=TOKENS) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracles_tokens_vary_so_that_equality_means_something(family, truth):
    for tokens in truth(family, random_prompts(LENGTHS)):
        assert len(set(tokens)) > TOKENS // 3


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_alone_get_the_oracles_tokens(family, idle_engine, truth):
    prompts = random_prompts(LENGTHS)
    core = idle_engine(family, **LIMITS[family])
    assert one_by_one(core, requests_for(prompts)) == truth(family, prompts)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_in_one_batch_get_the_oracles_tokens(family, idle_engine, truth):
    prompts = random_prompts(LENGTHS)
    core = idle_engine(family, **LIMITS[family])
    assert run_requests(core, requests_for(prompts)) == truth(family, prompts)


# Every budget for one family, and a budget that cuts prompts for each of the others.
@pytest.mark.parametrize(
    ("family", "budget"),
    [
        ("Qwen3ForCausalLM", 16),
        ("Qwen3ForCausalLM", 33),
        ("LlamaForCausalLM", 16),
        ("Qwen2ForCausalLM", 16),
    ],
)
def test_prompts_cut_into_chunks_get_the_oracles_tokens(family, budget, idle_engine, truth):
    prompts = random_prompts(LENGTHS)
    core = idle_engine(family, **LIMITS[family] | {"max_num_batched_tokens": budget, "max_decode_steps": 1})
    assert run_requests(core, requests_for(prompts)) == truth(family, prompts)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_arrival_does_not_matter(seed, idle_engine, truth):
    prompts = random_prompts(LENGTHS)
    order = np.random.default_rng(seed).permutation(len(prompts))
    got = run_requests(idle_engine(), requests_for([prompts[i] for i in order]))
    assert got == truth("Qwen3ForCausalLM", [prompts[i] for i in order])


def test_requests_that_arrive_while_others_run_get_the_oracles_tokens(idle_engine, truth):
    prompts = random_prompts(LENGTHS)
    core, requests = idle_engine(), requests_for(prompts)
    for request in requests:
        core.add_request(request)
        for _ in range(3):
            core.step()
    drain(core)
    assert [request.output_token_ids for request in requests] == truth("Qwen3ForCausalLM", prompts)


def test_requests_of_different_lengths_end_one_by_one_without_disturbing_the_others(idle_engine, truth):
    prompts = random_prompts(LENGTHS[:6])
    requests = [make_request(str(i), prompt, max_tokens=2 * i + 1) for i, prompt in enumerate(prompts)]
    got = run_requests(idle_engine(), requests)
    assert got == [truth("Qwen3ForCausalLM", [p], 2 * i + 1)[0] for i, p in enumerate(prompts)]


def test_preempted_requests_get_the_oracles_tokens(idle_engine, truth):
    prompts = random_prompts((40, 64, 65, 100, 17))
    core = idle_engine()
    preemptions = core.get_metrics().num_preemptions_total
    assert run_requests(core, requests_for(prompts)) == truth("Qwen3ForCausalLM", prompts)
    assert core.get_metrics().num_preemptions_total > preemptions


@pytest.mark.parametrize(
    "limits", [{"overlap": False}, {"max_decode_steps": 1}, {"overlap": False, "max_decode_steps": 1}]
)
def test_launching_ahead_and_decode_loops_do_not_change_the_tokens(limits, idle_engine, truth):
    prompts = random_prompts((5, 16, 17, 20))
    expected = truth("Qwen3ForCausalLM", prompts)
    requests = [
        make_request(str(i), prompt, max_tokens=TOKENS, eos_token_ids=[tokens[4 * i] if i < 3 else 0])
        for i, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True))
    ]
    run_requests(idle_engine(**limits), requests)
    for request, tokens in zip(requests, expected, strict=True):
        (ending,) = request.eos_token_ids
        end = tokens.index(ending) + 1 if ending in tokens else TOKENS
        assert request.output_token_ids == tokens[:end]


@pytest.mark.parametrize("page_size", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_pages_of_other_sizes_give_the_oracles_tokens(page_size, idle_engine, models):
    core = idle_engine(page_size=page_size, max_decode_steps=1)
    request = make_request("a", [17], max_tokens=70)
    assert run_requests(core, [request]) == [greedy_tokens(models["Qwen3ForCausalLM"], [17], 70)]


def test_dynamic_rotary_embeddings_beyond_the_trained_length_do_not_depend_on_chunks():
    rope = RopeConfig("dynamic", factor=2.0, max_position_embeddings=24)
    model = random_model(model_config(rope=rope, max_position_embeddings=24))
    core = make_engine(model, max_num_batched_tokens=16, max_decode_steps=1)
    (prompt,) = random_prompts([50])
    assert run_requests(core, requests_for([prompt])) == [greedy_tokens(model, prompt, TOKENS)]
