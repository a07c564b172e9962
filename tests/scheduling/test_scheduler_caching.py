"""What the scheduler may publish: only pages all of whose tokens a launch computes."""

import pytest

from jaxinfer.scheduling.request import RequestStatus
from tests.builders import make_request
from tests.engine.fake_device import Simulation, expected_output

PAGE_SIZE, ENDING = 4, (3, 7)


def prompt_that_ends_with_a_page(num_outputs: range) -> list[int]:
    """A prompt whose output ends by itself, after so many tokens, just where a page is full."""
    for first in range(1000):
        for length in range(5, 9):
            prompt = list(range(first, first + length))
            output = expected_output(prompt, num_outputs.stop, ENDING)
            if output[-1] in ENDING and len(output) in num_outputs and (length + len(output)) % PAGE_SIZE == 0:
                return prompt
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("max_decode_steps", [1, 16])
def test_the_token_that_ends_a_sequence_is_not_taken_for_computed(max_decode_steps):
    sim = Simulation(page_size=PAGE_SIZE, caching=True, max_decode_steps=max_decode_steps)
    prompt = prompt_that_ends_with_a_page(range(3, 9))
    first = sim.add(make_request("first", prompt, max_tokens=20, eos_token_ids=ENDING))
    sim.drain()
    assert first.status is RequestStatus.FINISHED_STOPPED and first.num_tokens % PAGE_SIZE == 0
    history = [*first.token_ids, 500, 501]
    second = sim.add(make_request("second", history, max_tokens=5))
    sim.drain()
    assert second.num_cached_tokens == first.num_tokens - PAGE_SIZE
    assert second.output_token_ids == expected_output(history, 5)


def test_a_victim_publishes_what_was_launched_and_not_what_was_planned():
    sim = Simulation(page_size=PAGE_SIZE, caching=True, num_pages=12, budget=12, rows=3)
    prompts = [list(range(100 * i, 100 * i + 20)) for i in range(3)]
    requests = [sim.add(make_request(str(i), prompt, max_tokens=12)) for i, prompt in enumerate(prompts)]
    sim.drain()
    assert sim.scheduler.num_preemptions > 0
    assert [request.output_token_ids for request in requests] == [expected_output(p, 12) for p in prompts]


def test_requests_that_wait_for_room_count_their_query_once():
    sim = Simulation(page_size=PAGE_SIZE, caching=True, num_pages=8, rows=2)
    for i in range(3):
        sim.add(make_request(str(i), list(range(100 * i, 100 * i + 15)), max_tokens=10))
    sim.drain()
    stats = sim.scheduler.kv.cache.stats
    assert stats.total_requests == 3 + sim.scheduler.num_preemptions


def test_a_page_that_two_requests_compute_at_once_is_kept_once():
    sim = Simulation(page_size=PAGE_SIZE, caching=True, budget=64)
    shared = list(range(8))
    first = sim.add(make_request("first", shared, max_tokens=9, eos_token_ids=()))
    sim.launch()
    history = first.token_ids + expected_output(shared, 9)
    # It is given what the first one is about to say, and so both compute the same pages side by side.
    second = sim.add(make_request("second", history[:15], max_tokens=6))
    sim.drain()
    assert second.output_token_ids == expected_output(history[:15], 6)
    allocator = sim.scheduler.kv.allocator
    assert allocator.num_held == 0 and allocator.num_cached == sim.scheduler.kv.num_available - allocator.num_free


def test_a_request_that_computes_what_is_cached_fits_into_a_pool_of_its_own_size():
    # 42 tokens are all of the pool's 11 pages; the second request comes to compute a page that the first has cached.
    sim = Simulation(page_size=PAGE_SIZE, caching=True, num_pages=11, budget=4, rows=1)
    prompt = list(range(35))
    for name, max_tokens in (("first", 2), ("second", 7)):
        request = sim.add(make_request(name, prompt, max_tokens=max_tokens))
        sim.drain()
        assert request.output_token_ids == expected_output(prompt, max_tokens)
    assert sim.scheduler.num_preemptions == 0
