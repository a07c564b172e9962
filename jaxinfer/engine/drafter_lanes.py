"""What a drafter has of each running sequence and of each page, kept by the host: pages are the target's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.engine.request import Request
from jaxinfer.engine.rounds import RowKind
from jaxinfer.engine.scheduler_output import SchedulerOutput


class DrafterLanes:
    """Follows launches in the order in which the device runs them.

    A drafter *follows* a sequence in its seat while it has all of its tokens but the last two at most, whatever is in
    flight: rounds begin with these two. Where a launch went without the drafter it is behind, and `length` says how
    many tokens it has for certain.

    Args:
        knows_pages: whether it has what others computed in pages that a sequence shares with them.

    Attributes:
        filled: bool [num_pages], whether the drafter has computed all of what is in a page.
        length: int64 [num_seats], leading tokens that it has of the sequence in a seat; of one that it follows, maybe
            more.
        follows: bool [num_seats].
    """

    def __init__(self, *, num_pages: int, page_size: int, num_seats: int, knows_pages: bool = True) -> None:
        self.page_size = page_size
        self._knows_pages = knows_pages
        self.filled = np.zeros(num_pages, bool)
        self.length = np.zeros(num_seats, np.int64)
        self.follows = np.zeros(num_seats, bool)
        self._running: dict[str, Request] = {}

    def launched(self, output: SchedulerOutput, *, with_drafter: bool) -> None:
        """A launch, whose new pages were taken already; `with_drafter`: the drafter takes in what it computes."""
        for index, request in enumerate(output.requests):
            if output.kinds[index] is RowKind.PROMPT_CHUNK:
                start, count = output.num_computed[index], output.num_tokens[index]
                if with_drafter and self.length[request.seat] == start:
                    self.computed(request, start + count)
                    self.follows[request.seat] = request.in_seat
            elif not with_drafter and self.follows[request.seat]:
                self.follows[request.seat] = False
                self.length[request.seat] = max(self.length[request.seat], request.num_tokens - 2)

    def take_pages(self, output: SchedulerOutput, *, with_drafter: bool = False) -> None:
        """Arrivals begin with what the drafter has of their cached pages; in other new pages it has nothing.

        Args:
            with_drafter: as for `launched`. Arrivals that begin with what rows before them compute in this very launch,
                as members of a group do with their trunk, have the drafter's part of that too.
        """
        arrivals = output.first_scheduled or output.resumed
        for index, pages in enumerate(output.new_pages):
            request, cached = output.requests[index], 0
            if not pages:
                if arrivals and with_drafter:
                    self._will_fill(output, index)
                continue
            if arrivals and request.request_id not in self._running:
                self._running[request.request_id] = request
                cached = output.num_computed[index] // self.page_size if self._knows_pages else 0
                filled = self.filled[pages[:cached]]
                self.follows[request.seat] = False
                self.length[request.seat] = (cached if filled.all() else int(filled.argmin())) * self.page_size
            self.filled[pages[cached:]] = False
            if arrivals and with_drafter:
                self._will_fill(output, index)

    def _will_fill(self, output: SchedulerOutput, index: int) -> None:
        request, start = output.requests[index], output.num_computed[index]
        if output.kinds[index] is RowKind.PROMPT_CHUNK and self.length[request.seat] == start:
            last = (start + output.num_tokens[index]) // self.page_size
            self.filled[request.pages[start // self.page_size : last]] = True

    def computed(self, request: Request, length: int) -> None:
        """The drafter has the first `length` tokens of a sequence."""
        first, last = self.length[request.seat] // self.page_size, length // self.page_size
        self.filled[request.pages[first:last]] = True
        self.length[request.seat] = length

    def behind(self, requests: Sequence[Request]) -> list[Request]:
        """Those in their seats that the drafter does not follow."""
        follows = self.follows
        return [request for request in requests if request.in_seat and not follows[request.seat]]

    def left(self, request_ids: Iterable[str], page_table: np.ndarray) -> None:
        """Sequences leave their seats, whose rows of the page table are as they were."""
        for request_id in request_ids:
            request = self._running.pop(request_id, None)
            if request is None:
                continue
            seat = request.seat
            if self.follows[seat]:
                first, last = self.length[seat] // self.page_size, (request.num_tokens - 2) // self.page_size
                self.filled[page_table[seat, first:last]] = True
            self.follows[seat] = False
