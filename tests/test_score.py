"""`LLM.score`: log probabilities of given tokens, however they are computed."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import load_checkpoint
from jaxinfer.checkpoint.directory import embedded_checkpoint
from tests.oracle import next_token_logits
from tests.sampling.reference import log_softmax

LIMITS = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_tokens": 512, "page_size": 8}
PROMPT = "The old lighthouse stood on a hill above the harbour"


@pytest.fixture(scope="module")
def llm():
    return LLM(**LIMITS)


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(embedded_checkpoint(), dtype="float32")[1]


def expected(model, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    tokens = [*prompt, *completion]
    return [
        log_softmax(next_token_logits(model, tokens[:place], len(prompt)) / temperature)[tokens[place]]
        for place in range(len(prompt), len(tokens))
    ]


def check(scores: np.ndarray, model, prompts, completions, temperature: float = 1.0) -> None:
    assert scores.dtype == np.float32 and scores.shape == (len(prompts), max(map(len, completions)))
    for row, prompt, completion in zip(scores, prompts, completions, strict=True):
        wanted = expected(model, prompt, completion, temperature)
        np.testing.assert_allclose(row[: len(completion)], wanted, atol=1e-4)
        assert not row[len(completion) :].any()


def test_they_are_those_of_the_model_whatever_is_cached(llm, model):
    rng = np.random.default_rng(0)
    prompt = llm.tokenizer.encode(PROMPT)
    others = [prompt, prompt[:9], prompt[:9], prompt[:1], prompt]
    completions = [rng.integers(0, 2000, n).tolist() for n in (21, 1, 40, 5, 0)]
    before = llm.get_metrics().prefix_cache_hits
    for temperature in (1.0, 0.7):
        check(llm.score(others, completions, temperature, use_tqdm=False), model, others, completions, temperature)
    assert llm.get_metrics().prefix_cache_hits > before, "nothing came from the cache"


def test_one_token_after_a_cached_prompt_is_scored(llm, model):
    prompt = llm.tokenizer.encode(PROMPT)[:9]  # a page and the token after it
    llm.generate([prompt], SamplingParams(max_tokens=4), use_tqdm=False)
    check(llm.score([prompt], [[77]], use_tqdm=False), model, [prompt], [[77]])


def test_what_was_sampled_has_the_score_that_it_was_sampled_with(llm):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
    prompts = [PROMPT, "Once upon a time", "Two plus two is"]
    completions = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    scores = llm.score(prompts, [completion.token_ids for completion in completions], use_tqdm=False)
    sampled = [[next(iter(entry.values())).logprob for entry in completion.logprobs] for completion in completions]
    np.testing.assert_allclose(scores, sampled, atol=2e-5)


def test_a_sequence_of_the_greatest_length_is_scored_in_a_pool_that_just_holds_it(model):
    llm = LLM(**{**LIMITS, "kv_cache_tokens": 96})
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 2000, n).tolist() for n in (40, 3, 90)]
    completions = [rng.integers(0, 2000, 96 - len(prompt)).tolist() for prompt in prompts]
    check(llm.score(prompts, completions, use_tqdm=False), model, prompts, completions)


def test_preempted_ones_have_each_token_once(model):
    llm = LLM(**{**LIMITS, "kv_cache_tokens": 144, "max_num_batched_tokens": 8})
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 2000, 10).tolist() for _ in range(4)]
    completions = [rng.integers(0, 2000, 70).tolist() for _ in range(4)]
    for _ in range(2):  # they grow meanwhile
        llm.add_request(rng.integers(0, 2000, 8).tolist(), SamplingParams(max_tokens=80, ignore_eos=True))
    check(llm.score(prompts, completions, use_tqdm=False), model, prompts, completions)
    assert llm.get_metrics().num_preemptions_total > 0


def test_texts_and_arrays_are_completions_too(llm):
    text = " by the sea"
    tokens = llm.tokenizer.encode(text, add_special_tokens=False)
    of_text = llm.score(PROMPT, text, use_tqdm=False)
    of_array = llm.score([llm.tokenizer.encode(PROMPT)], np.asarray([tokens]), use_tqdm=False)
    assert of_text.shape == (1, len(tokens))
    np.testing.assert_allclose(of_text, of_array, atol=2e-5)


def test_nothing_to_score_has_no_width(llm):
    assert llm.score([PROMPT], [[]], use_tqdm=False).shape == (1, 0)
    assert llm.score([], [], use_tqdm=False).shape == (0, 0)


@pytest.mark.parametrize(
    ("prompts", "completions", "options", "message"),
    [
        ([[1], [2]], [[1]], {}, "1 completions for 2 prompts"),
        ([[]], [[1]], {}, "prompt 0 is empty"),
        ([[1]], [[1, 5000]], {}, "completion 0 has token id 5000, outside the vocabulary"),
        ([[1]], [[1.5]], {}, "completion 0"),
        ([[1] * 50], [[1] * 47], {}, "have 97 tokens, more than max_model_len=96"),
        ([[1]], [[1]], {"temperature": 0.0}, "temperature must be a number above 0, got 0.0"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(llm, prompts, completions, options, message):
    with pytest.raises(ValueError, match=message):
        llm.score(prompts, completions, use_tqdm=False, **options)


def test_a_diffusion_model_gives_no_scores():
    llm = LLM("tiny-diffusion", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64, kv_cache_tokens=256)
    with pytest.raises(ValueError, match="score is not for .*, a diffusion model"):
        llm.score([[1]], [[1]], use_tqdm=False)
