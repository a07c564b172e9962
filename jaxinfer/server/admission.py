"""Which requests are taken: so many may run, and so many wait."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from jaxinfer.server.errors import ApiError

_RETRY_AFTER = 1


@dataclass(eq=False)
class Ticket:
    """A request that was taken."""

    num_sequences: int
    num_tokens: int  # of its prompts


class Admission:
    """Counts requests between their arrival and their end. Those beyond the engine's seats wait.

    Args:
        num_seats: sequences that run at once.
        most_waiting: requests that may wait.
        most_tokens: tokens of their prompts; None: any number.
    """

    def __init__(self, num_seats: int, most_waiting: int, most_tokens: int | None) -> None:
        self._num_seats, self._most_waiting, self._most_tokens = num_seats, most_waiting, most_tokens
        self._tickets: dict[Ticket, None] = {}
        self._num_sequences = 0
        self.num_refused = 0

    @property
    def num_taken(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    def enter(self, num_sequences: int, num_tokens: int) -> Ticket:
        """Take a request.

        Raises:
            ApiError: too many wait already.
        """
        ticket = Ticket(num_sequences, num_tokens)
        if self._tickets and self._num_sequences + num_sequences > self._num_seats:
            num_waiting, tokens = self._waiting()
            too_many = num_waiting >= self._most_waiting
            if too_many or (self._most_tokens is not None and tokens + num_tokens > self._most_tokens):
                self.num_refused += 1
                what = f"{num_waiting} requests" if too_many else f"{tokens} tokens of prompts"
                raise ApiError(503, f"the queue is full: {what} wait", code="queue_full", retry_after=_RETRY_AFTER)
        self._tickets[ticket] = None
        self._num_sequences += num_sequences
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Note the end of a request; a second time has no effect."""
        if ticket in self._tickets:
            del self._tickets[ticket]
            self._num_sequences -= ticket.num_sequences

    def _waiting(self) -> tuple[int, int]:
        """The requests that wait, and the tokens of their prompts: the first ones have the seats."""
        seats = itertools.accumulate(ticket.num_sequences for ticket in self._tickets)
        waiting = [ticket for ticket, taken in zip(self._tickets, seats, strict=True) if taken > self._num_seats]
        return len(waiting), sum(ticket.num_tokens for ticket in waiting)
