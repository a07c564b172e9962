"""What a drafter has of each running sequence and of each page, kept by the host: pages are the target's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import RowKind
from jaxinfer.scheduling.scheduler_output import SchedulerOutput


class DrafterLanes:
    """Follows launches in the order in which the device runs them.

    A drafter *follows* a sequence in its seat while it has all of its tokens but the last two at most, whatever is in
    flight: rounds begin with these two. Where a launch went without the drafter it is behind, and `length` says how
    many tokens it has for certain.

    A drafter that goes on from what the target computed (`window` is given) sees the last tokens of a sequence and need
    not have the first ones: token 0 never, because nothing was computed before it. It goes on where it *continues*,
    that is, has what belongs to the last token; elsewhere that token is computed once more.

    Args:
        knows_pages: whether it has what others computed in pages that a sequence shares with them.
        window: the most tokens that the target computes again for it; None: it goes on from tokens alone, all of them.

    Attributes:
        filled: bool [num_pages], whether the drafter has computed all of what is in a page.
        length: int64 [num_seats + 1], leading tokens that it has of the sequence in a seat, from `start` on; of one
            that it follows, maybe more.
        start: int64 [num_seats + 1], the first token that it sees.
        follows: bool [num_seats + 1].
        continues: bool [num_seats + 1], of a sequence that it does not follow, whether a chunk can follow on its
            `length`.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, num_seats: int, knows_pages: bool = True, window: int | None = None
    ) -> None:
        self.page_size, self.window = page_size, window
        self._knows_pages = knows_pages
        self.filled = np.zeros(num_pages, bool)
        # With an entry for NO_SEAT, which stays as it is: the drafter has nothing of a sequence without a seat.
        self.length = np.zeros(num_seats + 1, np.int64)
        self.start = np.zeros(num_seats + 1, np.int64)
        self.follows = np.zeros(num_seats + 1, bool)
        self.continues = np.zeros(num_seats + 1, bool)
        self._running: dict[str, Request] = {}

    @property
    def _first(self) -> int:
        """The first token of a sequence that it can have."""
        return 0 if self.window is None else 1

    def launched(self, output: SchedulerOutput, *, with_drafter: bool) -> None:
        """A launch, whose new pages were taken already; `with_drafter`: the drafter takes in what it computes."""
        for index, request in enumerate(output.requests):
            if output.kinds[index] is RowKind.PROMPT_CHUNK:
                start, count = output.num_computed[index], output.num_tokens[index]
                if with_drafter and self._goes_on(request.seat, start):
                    self.computed(request, start + count)
                    self.follows[request.seat] = request.in_seat
                else:
                    self.continues[request.seat] = False
            elif not with_drafter:
                self.continues[request.seat] = False
                if self.follows[request.seat]:
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
                self._enter(request.seat, self.filled[pages[:cached]])
            self.filled[pages[cached:]] = False
            if arrivals and with_drafter:
                self._will_fill(output, index)

    def _will_fill(self, output: SchedulerOutput, index: int) -> None:
        request, start = output.requests[index], output.num_computed[index]
        if output.kinds[index] is RowKind.PROMPT_CHUNK and self._goes_on(request.seat, start):
            last = (start + output.num_tokens[index]) // self.page_size
            self.filled[request.pages[self._first_whole(request.seat, start) : last]] = True

    def _enter(self, seat: int, filled: np.ndarray) -> None:
        """A sequence begins with pages of which the drafter has those that are `filled`."""
        self.follows[seat] = False
        if self.window is None:
            self.length[seat] = (len(filled) if filled.all() else int(filled.argmin())) * self.page_size
            return
        missing = np.flatnonzero(~filled)
        self.length[seat] = len(filled) * self.page_size
        self.start[seat] = max((int(missing[-1]) + 1) * self.page_size if len(missing) else 0, self._first)
        self.continues[seat] = not len(filled)

    def _first_whole(self, seat: int, length: int) -> int:
        """The first page of a sequence that is filled, once it is full, with the token behind the first `length`."""
        page = length // self.page_size
        return page + bool(self.start[seat] > max(page * self.page_size, self._first))

    def _goes_on(self, seat: int, start: int) -> bool:
        """Whether the drafter can take in a chunk that begins so."""
        return bool(self.length[seat] == start and (self.window is None or self.continues[seat]))

    def has(self, seat: int, length: int) -> bool:
        """Whether it can follow a sequence whose first `length` tokens are computed."""
        return self.length[seat] >= length if self.window is None else self._goes_on(seat, length)

    def missing(self, request: Request, end: int, budget: int) -> tuple[int, int] | None:
        """What has to be computed for the drafter to have the first `end` tokens: the first, and how many; None:
        nothing, or more than the budget."""
        length = int(self.length[request.seat])
        if self.window is None:
            return (length, min(end - length, budget)) if end > length and budget else None
        if end == 0 or self._goes_on(request.seat, end):
            return None
        first = max(length - 1, end - min(self.window, budget), 0)
        if request.trunk is not None:  # what it sees begins at the same token as for all who share the lane
            first = max(0, min(first, request.trunk.num_tokens - 2))
        return (first, end - first) if 0 < end - first <= budget else None

    def computed(self, request: Request, length: int, first: int | None = None) -> None:
        """The drafter has the first `length` tokens of a sequence; `first`: for that the target computed tokens from
        this one on, whose own part the drafter has from before, or lacks."""
        seat = request.seat
        if first is not None and self.window is not None and first > max(self.length[seat] - 1, 0):
            self.length[seat] = self.start[seat] = first + 1
        begin, last = self._first_whole(seat, int(self.length[seat])), length // self.page_size
        self.filled[request.pages[begin:last]] = True
        self.length[seat], self.continues[seat] = length, True

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
                first, last = (
                    self._first_whole(seat, int(self.length[seat])),
                    (request.num_tokens - 2) // self.page_size,
                )
                self.filled[page_table[seat, first:last]] = True
            self.follows[seat] = False
