"""Branches, samples and points of plans, on the embedded checkpoint: the same tokens in both modes, and alone.

As a script it runs its tests.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.limits import BRANCH_MODES
from jaxinfer.skeleton.answer import SkeletonOfThought

pytestmark = pytest.mark.measured

LIMITS = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_tokens": 2048}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24),
}
PREFIX = "How to repair a bicycle\n1. Find the fault: Before you touch the bicycle, find out where the damage is.\n"
SUFFIXES = ("2. Collect the tools:", "", "2. Take off the wheels: Loosen", "2.", "2. Clean the inside:")
QUESTION = "Make a plan with five points: repair a bicycle."


@pytest.fixture(scope="module")
def engines() -> dict[str, LLM]:
    return {mode: LLM(**LIMITS, branch_mode=mode) for mode in BRANCH_MODES}


@pytest.fixture(params=PARAMS)
def params(request) -> SamplingParams:
    return PARAMS[request.param]


def seeds_of(params: SamplingParams, count: int) -> list[SamplingParams]:
    """The parameters of each of several sequences that have one set of parameters together."""
    return [params if params.seed is None else dataclasses.replace(params, seed=params.seed + i) for i in range(count)]


def alone(llm: LLM, prompts: list, params: SamplingParams) -> list[list[int]]:
    """The tokens of each prompt, one after the other."""
    each = zip(prompts, seeds_of(params, len(prompts)), strict=True)
    return [llm.generate(prompt, own, use_tqdm=False)[0].outputs[0].token_ids for prompt, own in each]


def test_branches_have_the_same_tokens_in_both_modes_and_alone(engines, params):
    llm = engines["batching"]
    encode = llm.get_tokenizer().encode
    prefix, suffixes = encode(PREFIX), [encode(suffix, add_special_tokens=False) for suffix in SUFFIXES]
    expected = alone(llm, [[*prefix, *suffix] for suffix in suffixes], params)
    for mode in BRANCH_MODES:
        llm.reset_prefix_cache()
        output = llm.generate_branches(prefix, suffixes, params, mode, use_tqdm=False)
        assert [branch.token_ids for branch in output.outputs] == expected


@pytest.mark.parametrize("mode", BRANCH_MODES)
def test_samples_have_the_tokens_of_requests_with_their_seeds(mode, engines, params):
    llm = engines[mode]
    llm.reset_prefix_cache()
    (output,) = llm.generate(PREFIX, dataclasses.replace(params, n=4), use_tqdm=False)
    got = [sample.token_ids for sample in output.outputs]
    assert got == alone(engines["batching"], [PREFIX] * 4, params)
    assert (len(set(map(tuple, got))) == 1) == (params.seed is None)


def test_points_have_the_same_tokens_in_both_modes_and_alone(engines, params):
    llm = engines["in_one_sequence"]
    answers = []
    for mode in BRANCH_MODES:
        llm.reset_prefix_cache()
        answers.append(llm.skeleton_of_thought(QUESTION, params, branch_mode=mode))
    first, second = answers
    assert (first.written, first.text) == (second.written, second.text)
    method = SkeletonOfThought(llm)
    prompts = [
        method.prompts.ask_point(QUESTION, first.written, first.skeleton, point, {}) for point in first.skeleton.points
    ]
    each = seeds_of(method.params_of_points(params), len(prompts))
    expected = [
        llm.chat(prompt, own, use_tqdm=False)[0].outputs[0].token_ids for prompt, own in zip(prompts, each, strict=True)
    ]
    assert len(prompts) > 2
    assert [point.token_ids for point in first.points] == [point.token_ids for point in second.points] == expected


def test_how_many_points_run_at_once_changes_no_token(engines):
    params = PARAMS["sampled"]
    texts = {
        llm.skeleton_of_thought(QUESTION, params, max_parallel_branches=most).text
        for llm in engines.values()
        for most in (1, None)
    }
    assert len(texts) == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
