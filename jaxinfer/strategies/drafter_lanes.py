"""Host record of what a drafter has of each running sequence and of each page. Its pages are the target's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import RowKind
from jaxinfer.scheduling.scheduler_output import SchedulerOutput


class DrafterLanes:
    """Record that is updated with each launch, in the order in which the device runs them.

    A drafter *follows* a seated sequence while it has all tokens but the last two at most, whatever is in flight:
    rounds begin with these two. After a launch without the drafter it does not follow, and `length` is the number of
    tokens that it has for certain.

    A drafter that reads the target's features (`window` is given) sees the last tokens of a sequence and need not have
    the first ones. It never has token 0, because no feature precedes it. It takes in a chunk where it *continues*, that
    is, where it has the features of the last token; elsewhere the target computes that token once more.

    Args:
        knows_pages: whether the drafter's data is in pages, so that a sequence finds it in pages that it shares.
        window: the most tokens that the target computes again for it; None: it reads tokens alone, all of them.

    Attributes:
        filled: bool [num_pages], whether the drafter has computed every token of a page.
        length: int64 [num_seats + 1], leading tokens that it has of the sequence in a seat, from `start` on; a lower
            bound where it follows.
        start: int64 [num_seats + 1], the first token that it sees.
        follows: bool [num_seats + 1].
        continues: bool [num_seats + 1], whether a chunk can start at the `length` of a sequence that it does not
            follow.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, num_seats: int, knows_pages: bool = True, window: int | None = None
    ) -> None:
        self.page_size, self.window = page_size, window
        self._knows_pages = knows_pages
        self.filled = np.zeros(num_pages, bool)
        # The last entry is for NO_SEAT and never changes: the drafter has nothing of a sequence without a seat.
        self.length = np.zeros(num_seats + 1, np.int64)
        self.start = np.zeros(num_seats + 1, np.int64)
        self.follows = np.zeros(num_seats + 1, bool)
        self.continues = np.zeros(num_seats + 1, bool)
        self._running: dict[str, Request] = {}
        self._epochs: dict[str, int] = {}  # of running requests, as of the latest launch that they took part in

    @property
    def _first(self) -> int:
        """First token of a sequence that the drafter can have."""
        return 0 if self.window is None else 1

    def forget(self) -> None:
        """Note that nothing that the drafter has computed counts."""
        for known in (self.filled, self.length, self.follows, self.continues):
            known[...] = False
        self.start[...] = self._first

    def reenter(self, requests: Sequence[Request]) -> None:
        """Note before a launch which sequences continue from other tokens than were drawn: what the drafter has after
        these is void, in its pages too."""
        for request in requests:
            known = self._epochs.get(request.request_id)
            if known is None or known == request.epoch:
                continue
            self._epochs[request.request_id] = request.epoch
            # While it follows it lacks the last two at most of the drawn tokens.
            seat, kept = request.seat, max(0, request.num_computed_tokens - (not request.drops_drawn))
            if not self.follows[seat]:
                kept = min(kept, int(self.length[seat]))
            self.filled[request.pages[kept // self.page_size :]] = False
            self.length[seat], self.follows[seat], self.continues[seat] = kept, False, False
            self.start[seat] = min(int(self.start[seat]), max(kept, self._first))

    def launched(self, output: SchedulerOutput, *, with_drafter: bool) -> None:
        """Note a launch, after `take_pages`; `with_drafter`: the drafter takes in the tokens that it computes."""
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
        """Note new pages: an arrival starts with what the drafter has of its cached pages; all others are not filled.

        Args:
            with_drafter: as for `launched`. If an arrival's prefix is computed by earlier rows of the same launch, as
                the trunk of a group is, the arrival has the drafter's part of it too.
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
                self._epochs[request.request_id] = request.epoch
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
        """Start a sequence with cached pages, of which the drafter has those that are `filled`."""
        self.follows[seat] = False
        if self.window is None:
            self.length[seat] = (len(filled) if filled.all() else int(filled.argmin())) * self.page_size
            return
        missing = np.flatnonzero(~filled)
        self.length[seat] = len(filled) * self.page_size
        self.start[seat] = max((int(missing[-1]) + 1) * self.page_size if len(missing) else 0, self._first)
        self.continues[seat] = not len(filled)

    def _first_whole(self, seat: int, length: int) -> int:
        """Return the first page, from that of token `length` on, of which the drafter sees every token."""
        page = length // self.page_size
        return page + bool(self.start[seat] > max(page * self.page_size, self._first))

    def _goes_on(self, seat: int, start: int) -> bool:
        """Return whether the drafter can take in a chunk that starts at token `start`."""
        return bool(self.length[seat] == start and (self.window is None or self.continues[seat]))

    def has(self, seat: int, length: int) -> bool:
        """Return whether it can follow a sequence whose first `length` tokens are computed."""
        return self.length[seat] >= length if self.window is None else self._goes_on(seat, length)

    def missing(self, request: Request, end: int, budget: int) -> tuple[int, int] | None:
        """Return what to compute next for the drafter to have the first `end` tokens: the first, and how many; None:
        nothing is missing, or the budget is too small."""
        length = int(self.length[request.seat])
        if self.window is None:
            return (length, min(end - length, budget)) if end > length and budget else None
        if end == 0 or self._goes_on(request.seat, end):
            return None
        first = max(length - 1, end - min(self.window, budget), 0)
        if request.trunk is not None:  # all sequences of a lane have the same first token that it sees
            first = max(0, min(first, request.trunk.num_tokens - 2))
        return (first, end - first) if 0 < end - first <= budget else None

    def computed(self, request: Request, length: int, first: int | None = None) -> None:
        """Note that the drafter has the first `length` tokens of a sequence; `first`: the target computed tokens again
        from this one on, of which the drafter has the first one from before, or never."""
        seat = request.seat
        if first is not None and self.window is not None and first > max(self.length[seat] - 1, 0):
            self.length[seat] = self.start[seat] = first + 1
        begin, last = self._first_whole(seat, int(self.length[seat])), length // self.page_size
        self.filled[request.pages[begin:last]] = True
        self.length[seat], self.continues[seat] = length, True

    def behind(self, requests: Sequence[Request]) -> list[Request]:
        """Return the seated requests that the drafter does not follow."""
        follows = self.follows
        return [request for request in requests if request.in_seat and not follows[request.seat]]

    def left(self, request_ids: Iterable[str], page_table: np.ndarray) -> None:
        """Note that sequences leave their seats; their rows of the page table are still unchanged."""
        for request_id in request_ids:
            request = self._running.pop(request_id, None)
            self._epochs.pop(request_id, None)
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
