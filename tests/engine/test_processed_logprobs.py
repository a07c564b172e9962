"""Processed log probabilities: of the distribution that each token was drawn from, in every way of decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxinfer.scheduling.request import Request
from tests.builders import make_request, model_config, random_model, random_prompts, run_requests
from tests.constraints.toys import automata
from tests.oracle import next_token_logits
from tests.sampling.reference import Filters, adjusted, log_softmax, probabilities_of
from tests.speculative.builders import WAYS, engine_of

VOCAB, EOS = 101, 100
_, HALF, _, RUNS = automata(VOCAB, EOS)
BIAS = {5: 4.0, 6: 3.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, bound": {"logit_bias": BIAS, "frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "warm": {"temperature": 0.7, "seed": 1, "top_k": 5},
    "hot": {"temperature": 1.3, "seed": 2, "top_p": 0.8, "min_p": 0.01},
    "bound": {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.8, "logit_bias": BIAS, "top_k": 20},
    "few": {"temperature": 1.1, "seed": 4, "allowed_token_ids": [*range(40), EOS], "min_tokens": 9},
    "constrained": {"temperature": 1.0, "seed": 5, "constraint": HALF},
    "constrained, runs": {"temperature": 0.8, "seed": 6, "constraint": RUNS, "repetition_penalty": 1.1},
}


@pytest.fixture(scope="module")
def model():
    return random_model(model_config(num_layers=2))


def distribution(model, request: Request, place: int) -> np.ndarray:
    """float64 [vocab]: the log probabilities that the token at `place` was drawn from, without its grammar."""
    params, start = request.sampling_params, request.num_prompt_tokens
    logits = next_token_logits(model, request.token_ids[:place], start)
    biases = dict(params.logit_bias or {})
    if place - start < params.min_tokens:
        biases[EOS] = -np.inf
    logits = adjusted(
        logits, prompt=request.prompt_token_ids, output=request.token_ids[start:place],
        allowed=params.allowed_token_ids, biases=biases, presence=params.presence_penalty,
        frequency=params.frequency_penalty, repetition=params.repetition_penalty,
    )  # fmt: skip
    if not params.temperature:
        return log_softmax(logits)
    filters = Filters(params.temperature, params.top_k, params.top_p, params.min_p)
    with np.errstate(divide="ignore"):
        return np.log(probabilities_of(logits, filters))


@pytest.mark.parametrize(
    "way",
    ["loops", "trees", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way not in ("loops", "trees"))],
)
def test_they_are_of_the_distribution_that_a_token_was_drawn_from(way, model):
    core = engine_of(way, model, logprobs_mode="processed_logprobs", kv_cache_tokens=256)
    prompts = random_prompts((12, 30, 9, 5, 17, 22, 8, 14), seed=3)
    requests = [
        make_request(f"{name} {count}", prompt, max_tokens=14, eos_token_ids=[EOS], logprobs=count, **kind)
        for count in (0, 3)
        for (name, kind), prompt in zip(KINDS.items(), prompts, strict=True)
    ]
    run_requests(core, requests)
    for request in requests:
        count = request.sampling_params.logprobs
        assert count is not None and len(request.logprobs) == request.num_output_tokens > 0
        for number, found in enumerate(request.logprobs):
            place = request.num_prompt_tokens + number
            expected, (first, *others) = distribution(model, request, place), found
            token = request.token_ids[place]
            assert first == token, request.request_id
            np.testing.assert_allclose(found[token].logprob, expected[token], atol=2e-4, err_msg=request.request_id)
            assert found[token].rank == 1 + (expected > expected[token] + 1e-9).sum()
            if request.guard is None:  # the lists of a constrained one have what its grammar allows
                likely = np.argsort(-expected, kind="stable")[:count]
                assert {*others, token} == {token, *likely[np.isfinite(expected[likely])].tolist()}
            for other in others:
                np.testing.assert_allclose(found[other].logprob, expected[other], atol=2e-4)


def test_they_change_no_token(model):
    found = []
    for mode in ("raw_logprobs", "processed_logprobs"):
        core = engine_of("chains", model, logprobs_mode=mode)
        prompts = random_prompts((12, 30, 9, 5, 17, 22, 8, 14), seed=3)
        requests = [
            make_request(name, prompt, max_tokens=14, eos_token_ids=[EOS], logprobs=number % 3, **kind)
            for number, ((name, kind), prompt) in enumerate(zip(KINDS.items(), prompts, strict=True))
        ]
        found.append(run_requests(core, requests))
    assert found[0] == found[1]
