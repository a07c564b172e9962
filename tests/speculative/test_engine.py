"""Speculation in the engine changes no token, whatever drafts, however much, and whatever else runs."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.core import EngineCore
from jaxinfer.scheduling.request import Request
from jaxinfer.speculative.gamma import FixedGamma
from jaxinfer.speculative.ngram import HISTORY
from tests.builders import drain, make_request, model_config, random_model, random_prompts, run_requests
from tests.speculative.builders import (
    NUM_DRAFTS,
    AnyGamma,
    disturbed,
    random_head,
    speculating_engine,
    speculation_of,
)

DRAFTERS = ("itself", pytest.param("disturbed", marks=pytest.mark.slow), "ngram", "eagle3")
NUM_NODES = 12
FIELDS = {"eagle3": {"num_speculative_tokens": NUM_NODES, "tree_depth": NUM_DRAFTS - 1, "tree_top_k": 4}}


@pytest.fixture(scope="module")
def model():
    return random_model(model_config())


@pytest.fixture
def plain(idle_engine) -> EngineCore:
    return idle_engine()


@pytest.fixture(scope="module")
def engines(model):
    """(drafter, **limits) -> an engine that speculates, compiled once for all tests, with nothing cached."""
    made: dict[tuple, EngineCore] = {}
    drafters = {
        "itself": model, "disturbed": disturbed(model, 0.1), "ngram": None, "eagle3": random_head(model.config)
    }  # fmt: skip

    def get(drafter: str, controller=None, **limits) -> EngineCore:
        key = (drafter, *sorted(limits.items()))
        if key not in made:
            made[key] = speculating_engine(model, drafters[drafter], speculative=FIELDS.get(drafter), **limits)
        core = made[key]
        controller = speculation_of(core).controller = controller or FixedGamma(NUM_DRAFTS)
        controller.num_nodes = NUM_NODES if drafter == "eagle3" else 0
        assert not core.has_unfinished_requests() and core.reset_prefix_cache()
        return core

    return get


def requests_of_all_kinds() -> list[Request]:
    """Greedy and sampled, short and long, repetitive; that stream, are adjusted, have log probabilities or few tokens
    to go."""
    prompts = random_prompts((60, 64, 9, 100, 70, 30, 2))
    requests = [make_request(str(i), p, max_tokens=24, seed=i, temperature=i % 3 / 2) for i, p in enumerate(prompts)]
    repeating = [17, 4, 42, 8] * 6
    return [
        *requests,
        make_request("stream", prompts[2], max_tokens=9, stream=True),
        make_request("penalty", prompts[4], max_tokens=9, frequency_penalty=0.5, temperature=0.7, seed=3),
        make_request("truncated", prompts[5], max_tokens=20, temperature=1.3, top_k=20, top_p=0.8, seed=4),
        make_request("min_p", repeating, max_tokens=20, temperature=0.9, min_p=0.1, seed=5),
        make_request("least", repeating, max_tokens=20, min_tokens=6, eos_token_ids=range(0, 100, 7)),
        make_request("bias", prompts[6], max_tokens=12, logit_bias={5: 3.0, 6: -4.0}),
        make_request("logprobs", prompts[2], max_tokens=20, logprobs=3, temperature=0.5, seed=6),
        make_request("one", prompts[2], max_tokens=1),
        make_request("two", prompts[2], max_tokens=2),
    ]


@pytest.mark.parametrize("controller", [pytest.param(FixedGamma, marks=pytest.mark.slow), AnyGamma])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_get_the_tokens_of_plain_decoding(drafter, controller, engines, plain):
    """In a pool too small for all of them, with chunks of prompts between rounds."""
    core = engines(drafter, controller(NUM_DRAFTS))
    before = core.get_metrics()
    preemptions, drafts = before.num_preemptions_total, before.spec_decode_num_drafts
    got = run_requests(core, requests_of_all_kinds())
    assert got == run_requests(plain, requests_of_all_kinds())
    after = core.get_metrics()
    assert after.num_preemptions_total > preemptions and after.spec_decode_num_drafts > drafts


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_request_alone_gets_the_tokens_of_plain_decoding(drafter, engines, plain):
    core = engines(drafter)
    for request, same in zip(requests_of_all_kinds()[:7], requests_of_all_kinds()[:7], strict=True):
        assert run_requests(core, [request]) == run_requests(plain, [same])


def test_more_rows_than_can_verify_as_many_drafts_get_fewer(model, plain):
    """With 20 tokens a step, 2 rows can verify 8 drafts each, and 4 of them 4."""
    limits = {"max_num_batched_tokens": 20, "kv_cache_tokens": 640}
    core = speculating_engine(model, disturbed(model, 0.1), speculative={"num_speculative_tokens": 8}, **limits)
    prompts = [prompt[:20] for prompt in random_prompts((60, 64, 29, 100))]
    strategy, wanted = speculation_of(core), {}
    launched = strategy.launch

    def launch(output, built, runner):
        found = int(built.packed["max_drafts"].max())
        wanted.setdefault(len(output.requests), set()).add(found)
        return launched(output, built, runner)

    strategy.launch = launch
    got = run_requests(core, [make_request(str(i), p, max_tokens=40 - 10 * i) for i, p in enumerate(prompts)])
    assert got == run_requests(plain, [make_request(str(i), p, max_tokens=40 - 10 * i) for i, p in enumerate(prompts)])
    assert wanted[4] == {4} and wanted[1] == {8}, wanted


@pytest.mark.parametrize(
    "limits",
    [
        {"enable_prefix_caching": False},
        {"overlap": False},
        pytest.param({"max_decode_steps": 1}, marks=pytest.mark.slow),
        pytest.param({"page_size": 16}, marks=pytest.mark.slow),
    ],
    ids=lambda limits: next(iter(limits)),
)
def test_settings_of_the_engine_do_not_change_tokens(limits, engines, plain):
    core = engines("disturbed", AnyGamma(NUM_DRAFTS, seed=1), **limits)
    assert run_requests(core, requests_of_all_kinds()) == run_requests(plain, requests_of_all_kinds())


def test_tokens_of_a_cached_prefix_can_be_looked_up(engines):
    core = engines("ngram")
    prefix, others = random_prompts([60, 70])
    run_requests(core, [make_request("first", prefix, max_tokens=2)])
    run_requests(core, [make_request("in the same seat", others, max_tokens=2)])
    again = make_request("again", [*prefix, 3, 1, 4], max_tokens=20)
    run_requests(core, [again])
    assert again.num_cached_tokens > 50
    assert np.asarray(core.runner.state[HISTORY])[again.seat, :63].tolist() == again.prompt_token_ids


@pytest.mark.parametrize("drafter", ["itself", "ngram"])
def test_a_stop_within_an_accepted_run_ends_the_request_there(drafter, engines, plain):
    prompts = [*random_prompts((20, 33)), [9, 8, 7] * 9]
    whole = run_requests(plain, [make_request(str(i), p, max_tokens=40) for i, p in enumerate(prompts)])
    for last in range(1, 9):
        requests = [
            make_request(f"{i}", prompt, max_tokens=40, eos_token_ids=[tokens[last]])
            for i, (prompt, tokens) in enumerate(zip(prompts, whole, strict=True))
        ]
        got = run_requests(engines(drafter), requests)
        assert got == [tokens[: tokens.index(tokens[last]) + 1] for tokens in whole]


def test_log_probabilities_of_accepted_tokens_are_those_of_plain_decoding(engines, plain):
    def requests() -> list[Request]:
        prompts = random_prompts((20, 33))
        return [make_request(str(i), p, max_tokens=15, logprobs=4) for i, p in enumerate(prompts)]

    core = engines("itself")
    before = core.get_metrics().spec_decode_num_accepted_tokens
    ours, theirs = requests(), requests()
    assert run_requests(core, ours) == run_requests(plain, theirs)
    assert core.get_metrics().spec_decode_num_accepted_tokens > before
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine.logprobs) == len(other.logprobs) == 15
        for found, expected in zip(mine.logprobs, other.logprobs, strict=True):
            assert {token: entry.rank for token, entry in found.items()} == {
                token: entry.rank for token, entry in expected.items()
            }
            np.testing.assert_allclose(
                [entry.logprob for entry in found.values()], [entry.logprob for entry in expected.values()], atol=1e-4
            )


def test_a_request_that_streams_gets_some_tokens_after_every_round(engines):
    core = engines("itself")
    before, landed = core.get_metrics().num_launches_total, []
    core.add_request(make_request("a", random_prompts([20])[0], max_tokens=17, stream=True))
    while core.has_unfinished_requests():
        landed += [landing.last - landing.first for landing in core.step()]
    # What was ready at once lands at once. Each launch has one round: four of four tokens after the prompt's.
    assert set(landed) <= {1, 4, 5, 8} and sum(landed) == 17
    assert core.get_metrics().num_launches_total - before >= 5


def test_an_aborted_request_leaves_the_others_alone(engines, plain):
    prompts = random_prompts((20, 33, 41))
    core = engines("itself")
    requests = [make_request(str(i), p, max_tokens=30) for i, p in enumerate(prompts)]
    for request in requests:
        core.add_request(request)
    for _ in range(4):
        core.step()
    core.abort("1")
    drain(core)
    expected = run_requests(plain, [make_request(str(i), p, max_tokens=30) for i, p in enumerate(prompts)])
    assert [requests[i].output_token_ids for i in (0, 2)] == [expected[i] for i in (0, 2)]
    assert requests[1].output_token_ids == expected[1][: requests[1].num_output_tokens]


def test_entropy_decides_how_much_is_drafted(model, plain):
    fields = {"adaptive": "entropy", "gamma_min": 1, "gamma_max": NUM_DRAFTS}
    core = speculating_engine(model, disturbed(model, 0.1), speculative=fields, max_num_seqs=1)

    def requests() -> list[Request]:
        return [make_request(str(i), p, max_tokens=30) for i, p in enumerate(random_prompts((9, 20)))]

    assert run_requests(core, requests()) == run_requests(plain, requests())
    metrics = core.get_metrics()
    assert 1 < metrics.spec_decode_num_draft_tokens / metrics.spec_decode_num_drafts < NUM_DRAFTS


def test_metrics_count_drafts_by_position_and_by_request(engines):
    core = engines("disturbed")
    metrics = core.metrics
    metrics.spec_decode_num_drafts = metrics.spec_decode_num_draft_tokens = metrics.spec_decode_num_accepted_tokens = 0
    metrics.spec_decode_num_accepted_tokens_per_pos = []
    requests = [make_request(str(i), p, max_tokens=24) for i, p in enumerate(random_prompts((20, 33)))]
    run_requests(core, requests)
    assert metrics.spec_decode_num_drafts == sum(r.metrics.num_drafts for r in requests) > 0
    assert metrics.spec_decode_num_draft_tokens == sum(r.metrics.num_draft_tokens for r in requests)
    assert metrics.spec_decode_num_accepted_tokens == sum(r.metrics.num_accepted_tokens for r in requests) > 0
    per_position = metrics.spec_decode_num_accepted_tokens_per_pos
    assert sum(per_position) == metrics.spec_decode_num_accepted_tokens
    assert per_position == sorted(per_position, reverse=True) and len(per_position) == NUM_DRAFTS
    # Each request's first token comes from its prompt; the others are one a round and those that were accepted.
    assert (
        sum(r.num_output_tokens - 1 - r.metrics.num_accepted_tokens for r in requests) >= metrics.spec_decode_num_drafts
    )
    assert 'spec_decode_num_accepted_tokens_per_pos{position="0"}' in metrics.prometheus()
