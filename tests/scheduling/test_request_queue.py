"""The two orders in which waiting requests enter."""

import pytest

from jaxinfer.scheduling.request_queue import make_request_queue
from tests.builders import make_request


def filled(policy: str, priorities: list[int]):
    queue = make_request_queue(policy)
    requests = []
    for arrival, priority in enumerate(priorities):
        request = make_request(str(arrival), [1], priority=priority)
        request.arrival = arrival
        queue.add_request(request)
        requests.append(request)
    return queue, requests


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


def popped(queue) -> list[str]:
    return [queue.pop_request().request_id for _ in range(len(queue))]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "0123"), ("priority", "1302")])
def test_requests_leave_in_the_order_of_the_policy(policy, order):
    queue, _ = filled(policy, [3, 0, 3, 1])
    assert ids(queue) == popped(queue) == list(order)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_peeked_request_is_the_next_to_leave_and_stays(policy):
    queue, _ = filled(policy, [3, 0, 2])
    peeked = queue.peek_request()
    assert len(queue) == 3
    assert queue.pop_request() is peeked


def test_a_request_put_back_goes_to_the_front_where_the_first_comer_is_served_first():
    queue, _ = filled("fcfs", [0, 0, 0])
    first = queue.pop_request()
    queue.prepend_request(first)
    assert popped(queue) == ["0", "1", "2"]


def test_a_request_put_back_keeps_its_place_among_priorities():
    queue, requests = filled("priority", [3, 0, 3])
    queue.remove_request(requests[2])
    queue.prepend_request(requests[2])
    assert popped(queue) == ["1", "0", "2"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("removed", [0, 2, 4])
def test_a_removed_request_is_gone_and_the_order_of_the_others_stays(policy, removed):
    queue, requests = filled(policy, [4, 1, 3, 0, 2])
    expected = [name for name in ids(queue) if name != str(removed)]
    queue.remove_request(requests[removed])
    assert popped(queue) == expected


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="scheduling_policy must be one of fcfs, priority, got 'lifo'"):
        make_request_queue("lifo")
