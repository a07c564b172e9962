"""The simulation of routing: what its caches hold is sound, and a router that knows prefixes finds more of them."""

from __future__ import annotations

import pytest

from jaxinfer.cache.radix_node import page_key
from routing.policies import Asked, CacheAware, consistent_hash, power_of_two
from routing.replicas import Replica
from routing.traces import Workload
from simulate_routing import Simulation, policies

SMALL = Workload(num_systems=8, system_tokens=(100, 300), user_tokens=(5, 40), answer_tokens=(5, 40))


def simulated(name: str, *, replicas: int, pages: int = 400) -> Simulation:
    policy = policies(replicas, pages, 0)[name]
    return Simulation(SMALL, policy, num_replicas=replicas, pages=pages, num_sessions=6 * replicas, seed=0)


@pytest.mark.parametrize("name", policies(2, 10, 0))
@pytest.mark.parametrize("pages", [60, 400])
def test_pools_stay_sound_and_a_request_waits_where_all_pages_are_in_use(name, pages):
    simulation = simulated(name, replicas=3, pages=pages)
    found = simulation.run(400, warm_up=10)
    assert 0 < found.cached_tokens < found.prompt_tokens
    assert (found.waited > 0) == (pages == 60)
    for replica in simulation.replicas:
        replica.cache.check_integrity()
        replica.allocator.check_integrity()


def test_one_replica_is_the_same_for_every_policy():
    found = {simulated(name, replicas=1).run(300, warm_up=50).cached_tokens for name in policies(1, 400, 0)}
    assert len(found) == 1


def test_a_router_that_knows_prefixes_finds_more_of_them():
    share = {}
    for name in policies(1, 400, 0):
        found = simulated(name, replicas=8).run(2000, warm_up=400)
        share[name] = found.cached_tokens / found.prompt_tokens
    assert min(share["cache-aware"], share["consistent hash"]) > max(share["random"], share["power of two"]) + 0.1


def test_an_answer_is_found_again_and_what_all_requests_use_is_not_given_away():
    replica = Replica(num_pages=8, page_size=16)
    prompt, whole = page_key(list(range(40))), page_key(list(range(70)))
    running = replica.begin(prompt, whole)
    assert running is not None and running.match.num_cached_tokens == 0
    assert replica.begin(page_key(list(range(100, 200))), page_key(list(range(100, 200)))) is None
    replica.end(running, whole)
    again = replica.begin(whole, whole)
    assert again is not None and again.match.num_cached_tokens == 64
    replica.cache.check_integrity()


def test_a_replica_far_ahead_takes_no_more_for_its_prefixes():
    policy = CacheAware(3, 16, 100)
    asked = Asked(0, page_key(list(range(64))))
    first = policy(asked, [1, 0, 1])
    assert first == 1 and policy(asked, [0, 9, 0]) == 1
    assert policy(asked, [5, 40, 3]) == 2
    short = Asked(1, page_key([*range(16), *range(1000, 2000)]))
    assert policy(short, [4, 9, 7]) == 0  # one page of 63 says nothing


def test_what_was_not_sent_for_long_is_forgotten():
    policy = CacheAware(2, 16, 4)
    first = Asked(0, page_key(list(range(64))))
    assert policy(first, [0, 1]) == 0
    for number in range(3):
        assert policy(Asked(1, page_key(list(range(1000 * number, 1000 * number + 64)))), [0, 1]) == 0
    assert policy(first, [3, 1]) == 1


def test_few_sessions_move_when_a_replica_comes():
    before, after = consistent_hash(8), consistent_hash(9)
    places = [(before(Asked(n, b""), [0] * 8), after(Asked(n, b""), [0] * 9)) for n in range(2000)]
    moved = [new for old, new in places if old != new]
    assert set(moved) == {8} and 0.05 < len(moved) / 2000 < 0.2


def test_the_emptier_of_two_is_taken():
    choose = power_of_two(0)
    found = [choose(Asked(0, b""), [5, 1]) for _ in range(200)]
    assert 0.65 < found.count(1) / 200 < 0.85
