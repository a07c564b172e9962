"""A follower of the prefix cache's events finds what the engine finds, through preemption, failures and updates."""

from __future__ import annotations

import itertools
import random

import pytest

from jaxinfer.cache.page_events import AllCleared, PageEvents
from jaxinfer.checkpoint.incoming import leaves_of_tree
from jaxinfer.engine.launcher import Launcher
from jaxinfer.models.rope import RopeConfig
from tests.builders import drain, make_engine, make_request, model_config, random_model, random_prompts
from tests.cache.event_follower import Follower

PAGE = 4  # of `make_engine`
PROMPTS = random_prompts((30, 22, 14, 40), seed=3)


@pytest.fixture(scope="module")
def model():
    rope = RopeConfig(max_position_embeddings=256, original_max_position_embeddings=256)
    return random_model(model_config(num_layers=2, rope=rope), seed=3)


def following(core) -> tuple[PageEvents, Follower]:
    events = PageEvents(PAGE, lambda namespace: isinstance(namespace, tuple) and namespace[0] is None)
    core.prefix_cache.continue_events(events)
    return events, Follower(PAGE)


def finds(core, tokens) -> int:
    match = core.prefix_cache.match_and_lock(tokens, (None, 0, core.scheduler.kv.num_weights))
    core.prefix_cache.cancel(match)
    return match.num_cached_tokens


def test_a_follower_finds_what_the_engine_finds(model, monkeypatch):
    core = make_engine(model, kv_cache_tokens=160, max_num_batched_tokens=16)
    events, follower = following(core)
    rng, launch_rounds, sequences, launches = random.Random(0), Launcher._launch_rounds, [], itertools.count()

    def failing(self, *arguments):
        if next(launches) % 9 == 5:
            raise RuntimeError("a launch fails")
        return launch_rounds(self, *arguments)

    monkeypatch.setattr(Launcher, "_launch_rounds", failing)
    found = 0
    for turn in range(8):
        requests = [
            make_request(f"{turn}/{i}", prompt[: rng.randrange(8, 40)], max_tokens=40, temperature=1.0, seed=turn)
            for i, prompt in enumerate(PROMPTS)
        ]
        requests[turn % 4].cache_key = "salt"
        for request in requests:
            core.add_request(request)
        while core.has_unfinished_requests():
            core.step()
            follower.follow(events.take())
        sequences += [request.token_ids for request in requests if request.cache_key is None]
        for tokens in sequences:
            found += finds(core, tokens)
            assert follower.find(tokens) == finds(core, tokens)
    assert found and core.metrics.num_step_failures_total and core.get_metrics().num_preemptions_total
    core.check_integrity()


def test_nothing_of_earlier_weights_is_found_after_an_update(model):
    core = make_engine(model)
    events, follower = following(core)
    first, running = (make_request(name, PROMPTS[i], max_tokens=30) for i, name in enumerate(("first", "running")))
    core.add_request(first)
    drain(core)
    core.add_request(running)
    core.step()
    follower.follow(events.take())
    assert follower.find(first.token_ids) == finds(core, first.token_ids) > 0
    core.weights.update(leaves_of_tree(model), "again", "target", is_lent=True)
    follower.follow(events.take())
    assert follower.known == {}
    drain(core)
    follower.follow(told := events.take())
    assert follower.known == {} and not any(isinstance(event, AllCleared) for event in told)
    again = make_request("again", PROMPTS[0], max_tokens=30)
    core.add_request(again)
    drain(core)
    follower.follow(events.take())
    assert again.num_cached_tokens == 0 and follower.find(again.token_ids) == finds(core, again.token_ids) > 0
