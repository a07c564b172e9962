"""The order in which waiting requests enter: first come first served, or by priority."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from jaxinfer.limits import SCHEDULING_POLICIES
from jaxinfer.scheduling.request import Request


class RequestQueue(Protocol):
    """Waiting requests."""

    def add_request(self, request: Request) -> None: ...
    def pop_request(self) -> Request: ...
    def peek_request(self) -> Request: ...
    def prepend_request(self, request: Request) -> None: ...
    def remove_request(self, request: Request) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue:
    """First come, first served; preempted requests come back to the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        self._requests.append(request)

    def pop_request(self) -> Request:
        return self._requests.popleft()

    def peek_request(self) -> Request:
        return self._requests[0]

    def prepend_request(self, request: Request) -> None:
        self._requests.appendleft(request)

    def remove_request(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityRequestQueue:
    """Lowest priority number first, then order of arrival; preempted requests keep their place in that order."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []

    def add_request(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority, request.arrival, request))

    def pop_request(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def peek_request(self) -> Request:
        return self._heap[0][2]

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def remove_request(self, request: Request) -> None:
        self._heap.remove((request.priority, request.arrival, request))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2]))


def make_request_queue(policy: str) -> RequestQueue:
    """Make the queue of a scheduling policy.

    Raises:
        ValueError: `policy` is not one of SCHEDULING_POLICIES.
    """
    if policy not in SCHEDULING_POLICIES:
        raise ValueError(f"scheduling_policy must be one of {', '.join(SCHEDULING_POLICIES)}, got {policy!r}")
    return FCFSRequestQueue() if policy == "fcfs" else PriorityRequestQueue()
