"""Requests come, end and are aborted in every phase: nothing leaks, nothing compiles twice, garbage stays unseen."""

import gc
import logging
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.engine.core import EngineCore
from jaxinfer.scheduling.request import RequestStatus
from tests.builders import drain, make_request, random_prompts, run_requests


def short_requests(count: int, seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    prompts = random_prompts(rng.integers(1, 25, count), seed=seed)
    return [make_request(str(i), prompt, max_tokens=int(rng.integers(1, 7))) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_that_steps_return_are_the_outputs_of_the_requests(stream, idle_engine):
    core = idle_engine()
    requests = [
        make_request(str(i), prompt, max_tokens=9, stream=stream) for i, prompt in enumerate(random_prompts((3, 9, 30)))
    ]
    for request in requests:
        core.add_request(request)
    landed = defaultdict(list)
    while core.has_unfinished_requests():
        for landing in core.step():
            landed[landing.request.request_id] += landing.request.token_ids[landing.first : landing.last]
    assert landed == {request.request_id: request.output_token_ids for request in requests}
    assert all(request.status is RequestStatus.FINISHED_LENGTH for request in requests)


def test_a_step_without_requests_does_nothing(idle_engine):
    core = idle_engine()
    steps = core.get_metrics().num_steps_total
    assert core.step() == []
    assert core.get_metrics().num_steps_total == steps


def test_what_is_launched_ahead_of_a_sequence_that_has_ended_counts_no_step(idle_engine):
    core, [prompt] = idle_engine(), random_prompts([9])
    [tokens] = run_requests(core, [make_request("a", prompt, max_tokens=40)])
    last = next(index for index in range(20, 40) if tokens[index] not in tokens[:index])
    core.reset_prefix_cache()
    steps = core.get_metrics().num_steps_total
    [again] = run_requests(core, [make_request("b", prompt, max_tokens=100, eos_token_ids=[tokens[last]])])
    assert again == tokens[: last + 1]
    assert core.get_metrics().num_steps_total - steps == len(again)


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "preempted"])
def test_an_abort_in_any_phase_frees_the_pages_and_leaves_the_others_alone(phase, idle_engine):
    core = idle_engine()
    prompts = random_prompts((90, 100))
    (undisturbed,) = run_requests(core, [make_request("other", prompts[0], max_tokens=60)])
    other, victim = (make_request(n, p, max_tokens=60) for n, p in zip(("other", "victim"), prompts, strict=True))
    core.add_request(other)
    core.add_request(victim)
    reached = {
        "waiting": lambda: victim.status is RequestStatus.WAITING,
        "prefilling": lambda: 0 < victim.num_computed_tokens < 100,
        "decoding": lambda: victim.num_output_tokens > 2,
        "preempted": lambda: victim.status is RequestStatus.PREEMPTED,
    }[phase]
    while not reached():
        core.step()
    assert core.abort("victim") == [victim]
    core.check_integrity()
    drain(core)
    assert victim.status is RequestStatus.FINISHED_ABORTED and victim.pages == []
    assert other.output_token_ids == undisturbed
    assert core.scheduler.kv.allocator.num_held == 0


def test_aborting_what_is_not_there_does_nothing(idle_engine):
    core = idle_engine()
    request = make_request("done", [1, 2, 3], max_tokens=1)
    run_requests(core, [request])
    assert core.abort("never") == core.abort("done") == []
    assert request.status is RequestStatus.FINISHED_LENGTH


def test_aborting_everything_again_and_again_loses_no_room(idle_engine):
    core = idle_engine()
    for _ in range(3):
        requests = short_requests(4)
        for request in requests:
            core.add_request(request)
        core.step()
        for request in requests:
            if not request.is_finished:
                core.abort(request.request_id)
        core.step()
    run_requests(core, short_requests(8))
    assert core.scheduler.kv.allocator.num_held == 0


def test_a_request_longer_than_max_model_len_is_refused_and_the_engine_lives_on(idle_engine):
    core = idle_engine()
    with pytest.raises(ValueError, match="'long' may grow to 161 tokens, more than max_model_len=160"):
        core.add_request(make_request("long", [1] * 100, max_tokens=61))
    assert len(run_requests(core, [make_request("short", [1, 2], max_tokens=3)])[0]) == 3


def test_a_request_without_prompt_tokens_is_refused_and_the_engine_lives_on(idle_engine):
    core = idle_engine()
    with pytest.raises(ValueError, match="'empty' has an empty prompt"):
        core.add_request(make_request("empty", []))
    assert len(run_requests(core, [make_request("short", [1, 2], max_tokens=3)])[0]) == 3


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_five_hundred_requests_leave_no_page_no_byte_and_no_seat_behind(idle_engine):
    core = idle_engine()
    run_requests(core, short_requests(40))
    before, pool = live_bytes(), core.kv.nbytes
    assert pool == 256 * 2 * 2 * 2 * 16 * 4  # tokens, k and v, layers, heads, head_dim, bytes of a float32
    run_requests(core, short_requests(500, seed=1))
    assert live_bytes() == before
    assert core.kv.nbytes == pool
    metrics = core.get_metrics()
    assert (metrics.num_requests_running, metrics.num_requests_waiting, metrics.kv_cache_usage_perc) == (0, 0, 0)
    assert core.scheduler.requests == {}


def test_a_second_run_of_the_same_work_compiles_nothing(idle_engine, caplog):
    core = idle_engine()
    run_requests(core, short_requests(30))
    compiles = core.get_metrics().num_compiles_total
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run_requests(core, short_requests(30))
        assert [record for record in caplog.records if "Compiling" in record.getMessage()] == []
        jax.jit(lambda x: x * 2)(jnp.ones(3))  # a compile would have been seen
        assert [record for record in caplog.records if "Compiling" in record.getMessage()] != []
    assert core.get_metrics().num_compiles_total == compiles


def poison_free_pages(core: EngineCore) -> None:
    """NaN into every page that no request holds and no prefix is cached in."""
    used = np.ones(core.config.num_pages, bool)
    used[core.scheduler.kv.allocator._free] = False
    mask = jnp.asarray(used)[:, None, None, None]
    cache = core.kv
    k, v = (tuple(jnp.where(mask, array, jnp.nan) for array in arrays) for arrays in (cache.k, cache.v))
    core.runner.state["kv"] = KVPool(k=k, v=v)


def test_what_stands_in_free_pages_never_reaches_an_output(idle_engine):
    core = idle_engine()
    prompts = random_prompts((40, 64, 9, 100, 17, 30))
    clean = run_requests(core, [make_request(str(i), p, max_tokens=15) for i, p in enumerate(prompts)])
    requests = [make_request(str(i), p, max_tokens=15) for i, p in enumerate(prompts)]
    for request in requests:
        core.add_request(request)
    poison_free_pages(core)
    while core.has_unfinished_requests():
        core.step()
        poison_free_pages(core)
    assert [request.output_token_ids for request in requests] == clean
    assert core.reset_prefix_cache()
    poison_free_pages(core)
    assert all(np.isnan(np.asarray(array)).all() for array in core.kv.k), "the poison did not reach the pool"


def test_counters_count_what_was_computed(idle_engine):
    core = idle_engine()
    before = vars(core.get_metrics()).copy()
    first_tokens, gaps = core.metrics.time_to_first_token_seconds.count, core.metrics.inter_token_latency_seconds.count
    requests = [make_request(str(i), prompt, max_tokens=5) for i, prompt in enumerate(random_prompts((7, 80)))]
    run_requests(core, requests)
    after = vars(core.get_metrics())
    grown = {name: after[name] - before[name] for name in after if name.endswith("_total")}
    assert grown["prompt_tokens_total"] == 87
    assert grown["generation_tokens_total"] == 10
    assert grown["num_preemptions_total"] == 0
    assert grown["num_steps_total"] >= 6 > grown["num_launches_total"] >= 3
    assert core.metrics.time_to_first_token_seconds.count - first_tokens == 2
    assert core.metrics.inter_token_latency_seconds.count - gaps == 8


def test_gauges_show_what_is_running_waiting_and_held(idle_engine):
    core = idle_engine()
    for i, prompt in enumerate(random_prompts([8] * 6)):
        core.add_request(make_request(str(i), prompt, max_tokens=9))
    core.step()
    metrics = core.get_metrics()
    assert (metrics.num_requests_running, metrics.num_requests_waiting) == (4, 2)
    assert 4 * 2 / 64 <= metrics.kv_cache_usage_perc <= 4 * 3 / 64
    drain(core)
