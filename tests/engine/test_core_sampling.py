"""Parameters of a request at work in the engine: endings, bans, seeds and the distribution of what is sampled."""

import numpy as np
import pytest

from jaxinfer.scheduling.request import RequestStatus
from tests.builders import make_request, model_config, random_model, random_prompts, run_requests
from tests.oracle import greedy_tokens, next_token_logits, sampled_tokens
from tests.sampling.checker import check_draws
from tests.sampling.reference import Filters, probabilities_of

pytestmark = pytest.mark.optimized

PROMPT = random_prompts([20])[0]
SAMPLING = {"temperature": 1.5, "top_p": 0.95}


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


def run(core, **parameters):
    request = make_request("a", PROMPT, **parameters)
    run_requests(core, [request])
    return request


@pytest.fixture(scope="module")
def greedy(model):
    return greedy_tokens(model, PROMPT, 12)


def test_an_end_of_sequence_token_is_the_last_token_of_its_request(idle_engine, greedy):
    request = run(idle_engine(), max_tokens=12, eos_token_ids=[greedy[4]])
    assert request.output_token_ids == greedy[: greedy.index(greedy[4]) + 1]
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, None)


def test_a_stop_token_ends_its_request_and_is_the_reason(idle_engine, greedy):
    request = run(idle_engine(), max_tokens=12, stop_token_ids=[greedy[4]])
    assert request.output_token_ids == greedy[: greedy.index(greedy[4]) + 1]
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, greedy[4])


def test_ignore_eos_goes_on_to_max_tokens(idle_engine, greedy):
    request = run(idle_engine(), max_tokens=12, eos_token_ids=[greedy[4]], ignore_eos=True)
    assert request.output_token_ids == greedy
    assert request.status is RequestStatus.FINISHED_LENGTH


@pytest.mark.parametrize("min_tokens", [1, 5, 12])
def test_ending_tokens_are_not_chosen_before_min_tokens(min_tokens, model, idle_engine, greedy):
    ending = list(dict.fromkeys(greedy[:3]))
    ids = list(PROMPT)
    while len(ids) < len(PROMPT) + 12:
        logits = next_token_logits(model, ids, len(PROMPT)).copy()
        if len(ids) - len(PROMPT) < min_tokens:
            logits[ending] = -np.inf
        ids.append(int(logits.argmax()))
        if ids[-1] in ending:
            break
    request = run(
        idle_engine(), max_tokens=12, min_tokens=min_tokens, eos_token_ids=ending[:1], stop_token_ids=ending[1:]
    )
    assert request.output_token_ids == ids[len(PROMPT) :]
    assert request.num_output_tokens >= min_tokens


def test_a_ban_in_one_request_leaves_its_neighbours_alone(idle_engine, greedy):
    banned = make_request("banned", PROMPT, max_tokens=12, min_tokens=12, eos_token_ids=greedy[:1])
    free = [make_request(str(i), PROMPT, max_tokens=12) for i in range(2)]
    run_requests(idle_engine(), [free[0], banned, free[1]])
    assert [request.output_token_ids for request in free] == [greedy, greedy]
    assert greedy[0] not in banned.output_token_ids


def sampled(count: int = 6) -> list:
    """Requests with seeds of their own, long enough to be cut, preempted and reordered."""
    prompts = random_prompts((60, 64, 9, 100, 70, 30)[:count])
    return [make_request(str(i), p, max_tokens=15, seed=100 + i, **SAMPLING) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(idle_engine):
    """Tokens of `sampled()` when each request has the engine to itself."""
    return [run_requests(idle_engine(), [request])[0] for request in sampled()]


def test_seeded_tokens_are_not_greedy(idle_engine, alone):
    prompts = [request.prompt_token_ids for request in sampled()]
    greedy = run_requests(idle_engine(), [make_request(str(i), p, max_tokens=15) for i, p in enumerate(prompts)])
    assert all(mine != other for mine, other in zip(alone, greedy, strict=True))


@pytest.mark.parametrize(
    "filters",
    [Filters(1.5), Filters(1.5, top_p=0.93), Filters(0.8, top_k=30, min_p=0.02), Filters(1.2, top_k=80, top_p=0.9)],
    ids=str,
)
def test_seeded_tokens_are_those_of_the_plain_loop(filters, model, idle_engine):
    params = {name: getattr(filters, name) for name in Filters.__dataclass_fields__}
    requests = [make_request(str(i), PROMPT[i:], max_tokens=12, seed=40 + i, **params) for i in range(4)]
    expected = [sampled_tokens(model, r.prompt_token_ids, 12, filters, r.request_key) for r in requests]
    assert run_requests(idle_engine(), requests) == expected


def test_a_seed_gives_the_same_tokens_alone_and_beside_neighbours(idle_engine, alone):
    assert run_requests(idle_engine(), sampled()) == alone


def test_a_seed_gives_the_same_tokens_beside_greedy_neighbours(idle_engine, alone):
    neighbours = [make_request(f"n{i}", prompt, max_tokens=20) for i, prompt in enumerate(random_prompts((5, 50)))]
    requests = sampled()
    run_requests(idle_engine(), [neighbours[0], *requests[:3], neighbours[1], *requests[3:]])
    assert [request.output_token_ids for request in requests] == alone


@pytest.mark.parametrize("seed", range(2))
def test_a_seed_gives_the_same_tokens_in_any_order(seed, idle_engine, alone):
    requests = sampled()
    run_requests(idle_engine(), [requests[i] for i in np.random.default_rng(seed).permutation(len(requests))])
    assert [request.output_token_ids for request in requests] == alone


def test_a_seed_gives_the_same_tokens_under_preemption(idle_engine, alone):
    core = idle_engine()
    preemptions = core.get_metrics().num_preemptions_total
    assert run_requests(core, sampled()) == alone
    assert core.get_metrics().num_preemptions_total > preemptions


def test_a_seed_gives_the_same_tokens_in_chunks(idle_engine, alone):
    assert run_requests(idle_engine(max_num_batched_tokens=33, max_decode_steps=1), sampled()) == alone


def test_other_seeds_give_other_tokens(idle_engine):
    requests = [make_request(str(seed), PROMPT, max_tokens=10, seed=seed, **SAMPLING) for seed in range(6)]
    outputs = run_requests(idle_engine(), requests)
    assert len({tuple(output) for output in outputs}) == 6


def test_two_tokens_in_a_row_have_the_models_joint_distribution(model, idle_engine):
    filters = Filters(temperature=1.6, top_k=4)
    first = probabilities_of(next_token_logits(model, PROMPT), filters)
    vocab = len(first)
    joint = np.zeros(vocab * vocab)
    for token in np.flatnonzero(first):
        second = probabilities_of(next_token_logits(model, [*PROMPT, int(token)], len(PROMPT)), filters)
        joint[token * vocab : (token + 1) * vocab] = first[token] * second
    requests = [
        make_request(str(i), PROMPT, max_tokens=2, seed=i, temperature=filters.temperature, top_k=filters.top_k)
        for i in range(1500)
    ]
    outputs = np.asarray(run_requests(idle_engine(), requests))
    check_draws(outputs[:, 0] * vocab + outputs[:, 1], joint)
