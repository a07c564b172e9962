"""Prefixes that were computed are not computed again, and the tokens are the same."""

import pytest

from jaxinfer.models.rope import RopeConfig
from jaxinfer.scheduling.request import RequestStatus
from tests.builders import drain, make_engine, make_request, model_config, random_model, random_prompts, run_requests
from tests.oracle import greedy_tokens

PAGE = 4  # of `make_engine`
[STEM, OTHER] = random_prompts((50, 50), seed=5)


def computed_tokens(core, requests) -> int:
    """Tokens that the engine computes while it serves the requests."""
    before = core.metrics.scheduled_tokens_total
    run_requests(core, requests)
    return core.metrics.scheduled_tokens_total - before


def test_a_prompt_that_was_seen_is_computed_from_its_last_page_on(idle_engine):
    core = idle_engine()
    first, again = (make_request(name, STEM, max_tokens=6) for name in ("first", "again"))
    [expected], [got] = run_requests(core, [first]), run_requests(core, [again])
    assert got == expected
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)


def test_a_whole_prompt_in_the_cache_still_gets_its_last_token_computed(idle_engine):
    core = idle_engine()
    prompt = STEM[:48]
    [expected] = run_requests(core, [make_request("first", prompt, max_tokens=6)])
    again = make_request("again", prompt, max_tokens=6)
    assert run_requests(core, [again]) == [expected]
    assert again.num_cached_tokens == 44


def test_a_conversation_finds_its_own_answers_again(idle_engine):
    core = idle_engine()
    first = make_request("first", STEM, max_tokens=20)
    run_requests(core, [first])
    history = first.token_ids + OTHER[:10]
    second = make_request("second", history, max_tokens=6)
    [got] = run_requests(core, [second])
    # The last sampled token was never computed.
    assert second.num_cached_tokens == (len(first.token_ids) - 1) // PAGE * PAGE
    core.reset_prefix_cache()
    assert run_requests(core, [make_request("alone", history, max_tokens=6)]) == [got]


def test_prompts_share_a_stem_that_no_request_ended_at(idle_engine):
    core = idle_engine()
    run_requests(core, [make_request("first", STEM[:23] + OTHER[:20], max_tokens=2)])
    second = make_request("second", STEM[:23] + OTHER[20:40], max_tokens=2)
    run_requests(core, [second])
    assert second.num_cached_tokens == 20


def test_equal_prompts_that_arrive_together_are_computed_once(idle_engine):
    core = idle_engine()
    # The first one computes all, the others the two tokens beyond the last whole page.
    assert computed_tokens(core, [make_request(str(i), STEM, max_tokens=1) for i in range(4)]) == 50 + 3 * 2
    core.reset_prefix_cache()
    requests = [make_request(str(i), STEM, max_tokens=6) for i in range(4)]
    run_requests(core, requests)
    assert [request.num_cached_tokens for request in requests] == [0, 48, 48, 48]
    core.reset_prefix_cache()
    [alone] = run_requests(core, [make_request("alone", STEM, max_tokens=6)])
    assert [request.output_token_ids for request in requests] == [alone] * 4


def test_outputs_are_the_same_with_and_without_a_cache_under_pressure():
    model = random_model(model_config())
    # Four of them at once are more than the pool holds: cached pages are evicted, and requests are preempted.
    prompts = [STEM[: 10 + 3 * i] + OTHER[: 5 * (i % 4)] for i in range(10)]

    def run(enabled: bool):
        core = make_engine(model, enable_prefix_caching=enabled)
        requests = [make_request(str(i), prompt, max_tokens=48 + i) for i, prompt in enumerate(prompts)]
        outputs = run_requests(core, requests)
        assert core.scheduler.kv.allocator.num_held == 0
        return outputs, core.get_metrics()

    (expected, plain), (got, cached) = run(False), run(True)
    assert got == expected
    assert plain.num_preemptions_total > 0 and cached.num_preemptions_total > 0
    assert plain.prefix_cache_queries == plain.num_cached_tokens == 0
    assert cached.prefix_cache_hits > 0 and cached.scheduled_tokens_total < plain.scheduled_tokens_total


def test_a_preempted_request_finds_its_pages_again():
    core = make_engine(random_model(model_config()), overlap=False)
    first, second = (make_request(n, p, max_tokens=100) for n, p in zip("ab", random_prompts((60, 60)), strict=True))
    core.add_request(first)
    core.add_request(second)
    while second.status is not RequestStatus.PREEMPTED:
        core.step()
    first.max_total_tokens = len(first.token_ids) + 1  # it makes room at once
    while second.num_computed_tokens == 0:
        core.step()
    assert core.prefix_cache is not None
    assert core.prefix_cache.stats.tokens_reused > 0
    drain(core)
    assert len(second.output_token_ids) == 100


def test_salts_keep_users_apart(idle_engine):
    core = idle_engine()
    requests = [make_request(str(i), STEM, max_tokens=2) for i in range(3)]
    requests[0].cache_key, requests[1].cache_key, requests[2].cache_key = "one", "two", "one"
    for request in requests:
        run_requests(core, [request])
    assert [request.num_cached_tokens for request in requests] == [0, 0, 48]


@pytest.mark.parametrize("option", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}])
def test_a_request_may_have_all_of_its_prompt_computed(option, idle_engine):
    core = idle_engine()
    expected = run_requests(core, [make_request("first", STEM, max_tokens=3)])
    whole = make_request("whole", STEM, max_tokens=3, **option)
    assert run_requests(core, [whole]) == expected
    assert whole.num_cached_tokens == 0
    core.check_integrity()


def test_a_reset_forgets_everything_but_what_is_in_use(idle_engine):
    core = idle_engine()
    running = make_request("running", STEM, max_tokens=30)
    run_requests(core, [make_request("done", OTHER, max_tokens=3)])
    core.add_request(running)
    for _ in range(3):
        core.step()
    assert not core.reset_prefix_cache()
    assert 48 <= core.get_metrics().num_cached_tokens <= len(running.token_ids)
    drain(core)
    assert core.reset_prefix_cache()
    assert core.get_metrics().num_cached_tokens == 0


def test_prompts_beyond_a_dynamic_rotary_limit_share_with_equal_lengths_only():
    # The model and the limits of a test of `test_core_greedy`, which has their programs compiled too.
    model = random_model(model_config(rope=RopeConfig("dynamic", factor=2.0, max_position_embeddings=24)))
    core = make_engine(model, max_num_batched_tokens=16, max_decode_steps=1)
    prompts = [STEM[:23], STEM[:40], STEM[:44], STEM[:40]]
    requests = [make_request(str(i), prompt, max_tokens=6) for i, prompt in enumerate(prompts)]
    for request, prompt in zip(requests, prompts, strict=True):
        assert run_requests(core, [request]) == [greedy_tokens(model, prompt, 6)]
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 36]


def test_what_is_looked_for_and_found_is_counted(idle_engine):
    core = idle_engine()
    before = core.get_metrics()
    queries, hits = before.prefix_cache_queries, before.prefix_cache_hits
    for name in ("first", "again"):
        run_requests(core, [make_request(name, STEM, max_tokens=2)])
    after = core.get_metrics()
    assert (after.prefix_cache_queries - queries, after.prefix_cache_hits - hits) == (100, 48)
    assert after.kv_cache_usage_perc == 0
