"""Log probabilities of drawn tokens: in every way of decoding those of each request alone, one step at a time."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.outputs import Logprob
from tests.builders import drain, make_request, model_config, random_model, random_prompts
from tests.oracle import next_token_logits
from tests.sampling.reference import log_softmax
from tests.speculative.builders import made_in

LIMITS = {"max_num_batched_tokens": 20, "kv_cache_tokens": 400}


def engine(way: str) -> EngineCore:
    return made_in(way, random_model(model_config(num_layers=2)), **LIMITS)


@pytest.mark.parametrize("way", ["plain", "ngram", "draft_model", "eagle3"])
def test_they_are_those_of_the_oracle(way):
    core = engine(way)
    prompts = random_prompts((21, 9, 14, 6), seed=7)
    requests = [
        make_request(str(i), prompt, max_tokens=16, temperature=i % 2, seed=i, logprobs=logprobs)
        for i, (prompt, logprobs) in enumerate(zip(prompts, (0, 0, 3, None), strict=True))
    ]
    for request in requests:
        core.add_request(request)
    drain(core)
    model = random_model(model_config(num_layers=2))
    for request in requests[:3]:
        assert len(request.logprobs) == 16
        for number, entry in enumerate(request.logprobs):
            place = request.num_prompt_tokens + number
            token = request.token_ids[place]
            logits = next_token_logits(model, request.token_ids[:place], request.num_prompt_tokens)
            expected = logits[token] - np.logaddexp.reduce(logits)
            first = next(iter(entry.items()))
            assert first[0] == token and abs(first[1].logprob - expected) < 1e-4
            assert abs(first[1].rank - (1 + (logits > logits[token]).sum())) <= 1
            check_list(entry, request.sampling_params.logprobs, log_softmax(logits))
    assert requests[3].logprobs == []


def check_list(entry: dict[int, Logprob], count: int, logprobs: np.ndarray) -> None:
    """The chosen token comes first, then the most likely ones, with the model's log probabilities."""
    _, *others = [each.rank for each in entry.values()]
    assert {each.rank for each in entry.values()} >= set(range(1, count + 1)) and others == sorted(others)
    assert len(entry) == max(1, count + (next(iter(entry.values())).rank > count))
    for token, each in entry.items():
        assert abs(each.logprob - logprobs[token]) < 1e-4


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_a_request_that_wants_them_runs_loops(logprobs):
    core = engine("plain")
    for _ in range(2):
        before = core.get_metrics().num_launches_total
        core.add_request(make_request("a", random_prompts((9,), seed=3)[0], max_tokens=32, logprobs=logprobs))
        drain(core)
        launches = core.get_metrics().num_launches_total - before
        assert launches < 16
