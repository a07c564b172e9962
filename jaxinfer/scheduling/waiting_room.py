"""Where unfinished requests wait: in the queue, beside it for their search, or aside while only some may run."""

from __future__ import annotations

from collections.abc import Iterator

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_queue import make_request_queue


class WaitingRoom:
    """The queue of requests that may be admitted, and those that may not join it yet. Length and order are the queue's.

    Args:
        policy: the scheduling policy of the queue.

    Attributes:
        parked: held requests without pages. At the head of the queue they would block the request for which their
            pages were taken, so they join it when they are steered.
        only: ids of the requests that may run; None: all.
        admits_new: whether requests of which nothing has run may run.
        aside: requests that may not run for now.
    """

    def __init__(self, policy: str) -> None:
        self._queue = make_request_queue(policy)
        self.parked: list[Request] = []
        self.only: frozenset[str] | None = None
        self.admits_new = True
        self.aside: list[Request] = []

    def add(self, request: Request, *, first: bool = False) -> None:
        """Let a request wait where it belongs.

        Args:
            first: before requests that have never run, if it joins the queue.
        """
        is_left_out = self.only is not None and request.request_id not in self.only
        if is_left_out or not (self.admits_new or request.has_begun):
            self.aside.append(request)
        elif request.is_held:
            self.parked.append(request)
        elif first:
            self._queue.prepend_request(request)
        else:
            self._queue.add_request(request)

    def remove(self, request: Request) -> None:
        """Take out a request that waits somewhere in here."""
        for beside in (self.parked, self.aside):
            if request in beside:
                beside.remove(request)
                return
        self._queue.remove_request(request)

    def steered(self, request: Request) -> None:
        """Let a request that is no longer held join the queue, if it is parked."""
        if request in self.parked:
            self.parked.remove(request)
            self.add(request, first=True)

    def let_all_run(self) -> None:
        """Let every request join the queue that `only` left out."""
        self.only = None
        self._let_join()

    def hold_new(self) -> None:
        """Put requests of which nothing has run aside, until `admit_new`."""
        self.admits_new = False
        for request in [each for each in self._queue if not each.has_begun]:
            self._queue.remove_request(request)
            self.aside.append(request)

    def admit_new(self) -> None:
        """Let requests run of which nothing has run."""
        self.admits_new = True
        self._let_join()

    def _let_join(self) -> None:
        left, self.aside = self.aside, []
        for request in left:
            self.add(request)

    def peek_request(self) -> Request:
        return self._queue.peek_request()

    def pop_request(self) -> Request:
        return self._queue.pop_request()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def check_integrity(self) -> None:
        """Raise AssertionError if a request waits with pages, or where it does not belong."""
        for request in (*self, *self.parked, *self.aside):
            assert not request.pages, "a waiting request holds pages"
        assert all([request.is_held for request in self.parked]), "a request is parked that no search holds"
        is_limited = self.only is not None or not self.admits_new
        assert is_limited or not self.aside, "requests are aside while all may run"
