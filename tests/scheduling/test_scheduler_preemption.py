"""What happens when pages run out, and when requests end from outside."""

import pytest

from jaxinfer.scheduling.request import RequestStatus
from tests.builders import make_request
from tests.engine.fake_device import Simulation, expected_output


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def crowded(policy: str = "fcfs", priorities=(0, 0, 0)) -> tuple[Simulation, list]:
    """Three requests that hold all 6 pages: the next token of each needs one more."""
    sim = Simulation(num_pages=6, page_size=4, policy=policy)
    requests = [
        sim.add(make_request(name, prompt(8, first), max_tokens=6, priority=priority))
        for name, first, priority in zip("abc", (0, 100, 200), priorities, strict=True)
    ]
    sim.step()
    assert sim.scheduler.kv.allocator.num_free == 0
    return sim, requests


def test_the_last_comer_is_preempted_when_pages_run_out():
    sim, (first, second, last) = crowded()
    output = sim.step()
    assert output.preempted_req_ids == {"c"}
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.RUNNING)
    assert (last.status, last.pages, last.num_computed_tokens) == (RequestStatus.PREEMPTED, [], 0)


def test_a_preempted_request_keeps_its_tokens_and_computes_them_all_again():
    sim, (_, _, last) = crowded()
    sim.step()
    assert last.num_output_tokens == 1
    while last.status is RequestStatus.PREEMPTED:
        output = sim.step()
    assert output.num_scheduled_tokens["c"] == 9
    assert output.scheduled_cached_reqs.resumed_req_ids == {"c"}
    at = output.scheduled_cached_reqs.req_ids.index("c")
    assert output.scheduled_cached_reqs.new_page_ids[at] == last.pages
    assert output.scheduled_cached_reqs.num_computed_tokens[at] == 0
    assert [new.req_id for new in output.scheduled_new_reqs] == []


def test_preemption_does_not_change_what_requests_get():
    sim, requests = crowded()
    sim.drain()
    assert sim.scheduler.num_preemptions >= 1
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 6)


def test_preemptions_are_counted_for_the_engine_and_for_the_request():
    sim, (first, _, last) = crowded()
    sim.step()
    assert sim.scheduler.num_preemptions == 1
    assert (first.metrics.num_preemptions, last.metrics.num_preemptions) == (0, 1)


def test_a_preempted_request_comes_back_before_requests_that_came_after_it():
    sim, _ = crowded()
    sim.add(make_request("d", prompt(1), max_tokens=1))
    sim.step()
    entered = []
    while sim.scheduler.has_unfinished_requests():
        output = sim.step()
        entered += [*output.scheduled_cached_reqs.resumed_req_ids, *(new.req_id for new in output.scheduled_new_reqs)]
    assert "c" in entered and entered.index("d") == len(entered) - 1


def test_only_as_many_are_preempted_as_pages_are_missing():
    sim, requests = crowded()
    sim.step()
    assert [request.status for request in requests].count(RequestStatus.PREEMPTED) == 1


def test_a_waiting_request_never_preempts_a_running_one():
    sim = Simulation(num_pages=4, page_size=4)
    sim.add(make_request("a", prompt(12), max_tokens=3))
    sim.add(make_request("b", prompt(12), max_tokens=1))
    sim.drain()
    assert sim.scheduler.num_preemptions == 0


def test_with_priorities_the_least_urgent_request_is_preempted():
    sim, requests = crowded("priority", priorities=(0, 7, 3))
    assert sim.step().preempted_req_ids == {"b"}
    sim.drain()
    for request in requests:
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 6)


def test_among_equal_priorities_the_last_comer_is_preempted():
    sim, _ = crowded("priority", priorities=(5, 5, 5))
    assert sim.step().preempted_req_ids == {"c"}


def test_a_victim_that_was_already_in_the_step_leaves_it_and_returns_its_tokens_to_the_budget():
    sim = Simulation(num_pages=4, page_size=4, budget=8, policy="priority")
    sim.add(make_request("slow", prompt(4), max_tokens=12, priority=9))
    sim.step()
    urgent = sim.add(make_request("urgent", prompt(7), max_tokens=9, priority=0))
    sim.step()
    assert sim.step().num_scheduled_tokens == {"slow": 1, "urgent": 1}
    output = sim.step()  # "slow" comes first in the step, and then "urgent" needs a page
    assert output.preempted_req_ids == {"slow"}
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == ({"urgent": 1}, 1)
    sim.drain()
    assert urgent.output_token_ids == expected_output(prompt(7), 9)


def test_a_request_that_preempts_itself_does_not_hold_up_the_others():
    sim = Simulation(num_pages=6, page_size=4, policy="priority")
    sim.add(make_request("a", prompt(4), max_tokens=8, priority=5))
    sim.step()
    sim.add(make_request("b", prompt(8), max_tokens=8, priority=3))
    sim.add(make_request("c", prompt(8), max_tokens=8, priority=1))
    while sim.scheduler.has_unfinished_requests():
        running = {request.request_id for request in sim.scheduler.running}
        output = sim.step()
        assert running - output.preempted_req_ids <= set(output.num_scheduled_tokens)


def test_more_urgent_requests_enter_first_and_equals_by_arrival():
    sim = Simulation(rows=1, policy="priority")
    for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", -2)):
        sim.add(make_request(name, prompt(2), max_tokens=1, priority=priority))
    assert [list(sim.step().num_scheduled_tokens) for _ in range(4)] == [["d"], ["b"], ["a"], ["c"]]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "preempted"])
def test_an_aborted_request_leaves_nothing_behind_and_the_others_go_on(phase, policy):
    sim = Simulation(num_pages=8, page_size=4, budget=8, rows=2, policy=policy)
    other = sim.add(make_request("other", prompt(4), max_tokens=20))
    victim = sim.add(make_request("victim", prompt(12, 50), max_tokens=18, priority=1))
    reached = {
        "waiting": lambda: victim.status is RequestStatus.WAITING,
        "prefilling": lambda: 0 < victim.num_computed_tokens < 12,
        "decoding": lambda: victim.num_output_tokens > 0,
        "preempted": lambda: victim.status is RequestStatus.PREEMPTED,
    }[phase]
    while not reached():
        sim.step()
    sim.end([victim], RequestStatus.FINISHED_ABORTED)
    sim.scheduler.check_integrity()
    assert victim.pages == [] and victim.status is RequestStatus.FINISHED_ABORTED
    got = victim.output_token_ids
    output = sim.step()
    assert "victim" in output.finished_req_ids and "victim" not in output.num_scheduled_tokens
    sim.drain()
    assert other.output_token_ids == expected_output(prompt(4), 20)
    assert victim.output_token_ids == got
    assert sim.scheduler.kv.allocator.num_held == 0


def test_what_a_step_computed_for_a_request_aborted_meanwhile_is_dropped():
    sim = Simulation()
    request = sim.add(make_request("a", prompt(3)))
    output = sim.scheduler.schedule()
    tokens = sim.device.run(output)
    sim.end([request], RequestStatus.FINISHED_ABORTED)
    sim.scheduler.update_from_output(output, tokens)
    sim.scheduler.check_integrity()
    assert request.output_token_ids == [] and not sim.scheduler.has_unfinished_requests()
