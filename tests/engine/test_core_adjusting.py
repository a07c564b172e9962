"""Penalties, biases, allowed sets and log probabilities in the engine, against the oracle's logits."""

import numpy as np
import pytest

from tests.builders import make_request, model_config, random_model, random_prompts, run_requests
from tests.oracle import next_token_logits
from tests.sampling.reference import adjusted, log_softmax

TOKENS = 10
PROMPT = random_prompts([20])[0]
VOCAB = 101


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


def adjusted_greedy(model, prompt, **adjustments) -> list[int]:
    """The oracle's greedy tokens when each choice is made from adjusted logits; `biases` may be a function."""
    ids = list(prompt)
    biases = adjustments.pop("biases", None)
    for _ in range(TOKENS):
        logits = next_token_logits(model, ids, len(prompt))
        output = ids[len(prompt) :]
        now = biases(output) if callable(biases) else biases
        ids.append(int(adjusted(logits, prompt=prompt, output=output, biases=now, **adjustments).argmax()))
    return ids[len(prompt) :]


def bad_sequence_bans(output: list[int], first: int, second: int) -> dict[int, float]:
    return {second: -np.inf} if output[-1:] == [first] else {}


@pytest.fixture(scope="module")
def cases(model):
    """Name -> (parameters of the request, the tokens that it must get)."""
    plain = adjusted_greedy(model, PROMPT)
    pair = (plain[0], plain[1])
    allowed = sorted(set(plain[2:5]) | {50, 60, 70})
    bias = {plain[0]: -100.0, 42: 3.0}
    return {
        "presence": ({"presence_penalty": 2.0}, {"presence": 2.0}),
        "frequency": ({"frequency_penalty": 2.0}, {"frequency": 2.0}),
        "repetition": ({"repetition_penalty": 1.8}, {"repetition": 1.8}),
        "bias": ({"logit_bias": bias}, {"biases": bias}),
        "allowed": ({"allowed_token_ids": allowed}, {"allowed": allowed}),
        "bad_token": ({"bad_token_ids": [(plain[0],)]}, {"biases": {plain[0]: -np.inf}}),
        "bad_pair": ({"bad_token_ids": [pair]}, {"biases": lambda output: bad_sequence_bans(output, *pair)}),
        "all": (
            {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": bias},
            {"presence": 0.5, "frequency": 0.5, "repetition": 1.3, "biases": bias},
        ),
    }


NAMES = ["presence", "frequency", "repetition", "bias", "allowed", "bad_token", "bad_pair", "all"]


@pytest.mark.parametrize("name", NAMES)
def test_an_adjusted_request_gets_the_tokens_of_the_adjusted_oracle(name, cases, model, idle_engine):
    parameters, reference = cases[name]
    expected = adjusted_greedy(model, PROMPT, **reference)
    request = make_request("a", PROMPT, max_tokens=TOKENS, **parameters)
    assert run_requests(idle_engine(), [request]) == [expected]
    assert expected != adjusted_greedy(model, PROMPT), "the adjustment changes nothing: choose a stronger one"


def test_adjusted_requests_beside_each_other_and_plain_ones_get_their_own_tokens(cases, model, idle_engine):
    requests = [make_request("plain", PROMPT, max_tokens=TOKENS)]
    requests += [make_request(name, PROMPT, max_tokens=TOKENS, **cases[name][0]) for name in NAMES]
    expected = [adjusted_greedy(model, PROMPT)] + [adjusted_greedy(model, PROMPT, **cases[name][1]) for name in NAMES]
    assert run_requests(idle_engine(), requests) == expected


def test_adjusted_requests_under_preemption_get_the_same_tokens(cases, model, idle_engine):
    core = idle_engine()
    prompts = random_prompts((62, 62, 62, 62))
    preemptions = core.get_metrics().num_preemptions_total
    requests = [make_request(str(i), p, max_tokens=TOKENS, presence_penalty=2.0) for i, p in enumerate(prompts)]
    expected = [adjusted_greedy(model, prompt, presence=2.0) for prompt in prompts]
    assert run_requests(core, requests) == expected
    assert core.get_metrics().num_preemptions_total > preemptions


def check_logprobs(found: dict, logprobs: np.ndarray, token: int, count: int) -> None:
    order = np.argsort(-logprobs, kind="stable")
    assert set(found) == {token, *order[:count].tolist()}
    for other, entry in found.items():
        np.testing.assert_allclose(entry.logprob, logprobs[other], atol=1e-4)
        assert entry.rank == np.flatnonzero(order == other)[0] + 1


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_of_outputs_are_those_of_the_oracle(count, model, idle_engine):
    sampling = {"temperature": 1.5, "seed": 3, "logprobs": count, "logit_bias": {7: 4.0}}
    request = make_request("a", PROMPT, max_tokens=TOKENS, **sampling)
    plain = make_request("plain", PROMPT, max_tokens=TOKENS)
    run_requests(idle_engine(), [plain, request])
    assert len(request.logprobs) == TOKENS and plain.logprobs == []
    for at, found in enumerate(request.logprobs, start=len(PROMPT)):
        logprobs = log_softmax(next_token_logits(model, request.token_ids[:at], len(PROMPT)))
        check_logprobs(found, logprobs, request.token_ids[at], count)


@pytest.mark.parametrize("budget", [64, 16])
def test_log_probabilities_of_a_prompt_are_those_of_the_oracle_however_it_is_cut(budget, model, idle_engine):
    limits = {} if budget == 64 else {"max_num_batched_tokens": budget, "max_decode_steps": 1}
    request = make_request("a", PROMPT, max_tokens=2, prompt_logprobs=2)
    others = [make_request(str(i), prompt, max_tokens=2) for i, prompt in enumerate(random_prompts((9, 3)))]
    run_requests(idle_engine(**limits), [others[0], request, others[1]])
    assert request.prompt_logprobs[0] is None and len(request.prompt_logprobs) == len(PROMPT)
    for at, found in enumerate(request.prompt_logprobs[1:], start=1):
        logprobs = log_softmax(next_token_logits(model, PROMPT[:at], len(PROMPT)))
        check_logprobs(found, logprobs, PROMPT[at], 2)
    assert others[0].prompt_logprobs == others[1].prompt_logprobs == []
