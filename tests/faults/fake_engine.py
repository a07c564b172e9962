"""An engine in plain Python: the real transactions, scheduler, KV manager and cache over a fake device."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.engine.host_state import requeue
from jaxinfer.engine.suspects import Suspects
from jaxinfer.engine.transactions import Transactions
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.rounds import Rounds
from tests.branching.builders import make_group
from tests.branching.lane_device import GroupSimulation
from tests.builders import make_request


class FakeEngine:
    """Steps as `EngineCore` does, with one launch in flight at most."""

    def __init__(self, rounds: Rounds, num_pages: int) -> None:
        self._rounds, self._num_pages = rounds, num_pages
        self.transactions = Transactions(self._advance, self._blame, self._recover)
        self.suspects = Suspects()
        self._concerned: Sequence[Request] = ()
        self.arrivals = 0
        self._make()

    def _make(self) -> None:
        self.sim = GroupSimulation(num_pages=self._num_pages, rounds=self._rounds, caching=True, budget=16, rows=3)

    def add(self, item: Request | RequestGroup) -> None:
        members = item.order if isinstance(item, RequestGroup) else [item]
        for member in members:
            member.arrival = self.arrivals
            self.arrivals += 1

        def enter() -> None:
            self.transactions.requests.update({member.request_id: member for member in members})
            if members[0].request_id in self.sim.scheduler.requests:
                return
            if isinstance(item, RequestGroup):
                self.sim.scheduler.add_group(item)
            else:
                self.sim.scheduler.add_request(item)

        self.transactions.note(enter)

    def _advance(self) -> None:
        self.transactions.notes.take()
        if self.suspects.clear(self.transactions.requests):
            self.sim.scheduler.waiting.let_all_run()
        self._concerned = list(self.sim.scheduler.requests.values())
        launched = bool(self.sim.launch().requests)
        while len(self.sim.in_flight) > launched:
            output, results = self.sim.in_flight[0]
            self._concerned = output.requests
            self.sim.scheduler.update_from_output(output, results, None, self.transactions.news.append)
            self.sim.in_flight.popleft()
            self.sim.scheduler.check_integrity()

    def _blame(self, error: Exception) -> None:
        if not self.suspects.failed(error, self._concerned, self.transactions.requests):
            raise error

    def _recover(self) -> None:
        for request in self.transactions.requests.values():
            request.start_over()
        self._make()
        unfinished = [request for request in self.transactions.requests.values() if not request.is_finished]
        requeue(self.sim.scheduler, unfinished, self.suspects.only(self.transactions.requests))


def items() -> dict[int, list[Request | RequestGroup]]:
    """What arrives before which step: requests that share prefixes, a group, more than the pool holds at once."""
    story = list(range(100, 130))
    return {
        0: [
            make_request("a", story[:14], max_tokens=9, eos_token_ids=(3,)),
            make_group("g", story[:9], [[1], [2]], max_tokens=6),
        ],
        2: [make_request("b", [*story[:14], 7], max_tokens=5)],
        3: [make_request("c", story, max_tokens=8), make_request("d", [5, 6], max_tokens=3)],
    }  # fmt: skip


def tokens_of(found: dict[int, list[Request | RequestGroup]]) -> dict[str, tuple[list[int], str]]:
    """Request id -> its output tokens and how it has ended."""
    requests = [
        request
        for arrived in found.values()
        for item in arrived
        for request in (item.members if isinstance(item, RequestGroup) else [item])
    ]
    return {request.request_id: (request.output_token_ids, request.status.value) for request in requests}
