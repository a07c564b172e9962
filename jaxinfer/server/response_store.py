"""Responses that are kept: the latest ones of each key, bounded in number and bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class StoredResponse:
    """A response that has ended.

    Attributes:
        status: of the response.
        body: the response as JSON.
        input: the items of its own input, as JSON.
        previous: the response that it continues.
        is_background: whether it ran without a client.
        num_users: entries of the store and later responses that need it.
    """

    status: str
    body: bytes
    input: bytes
    previous: StoredResponse | None = None
    is_background: bool = False
    num_users: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input)

    def conversation(self) -> Iterator[StoredResponse]:
        """The responses of its conversation, itself last."""
        found: list[StoredResponse] = []
        each: StoredResponse | None = self
        while each is not None:
            found.append(each)
            each = each.previous
        return reversed(found)


class _Shelf:
    """Responses of one key. What a later response continues stays with it, although it is no entry any more."""

    def __init__(self, most_responses: int, most_bytes: int) -> None:
        self._most_responses, self._most_bytes = most_responses, most_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()  # the least recently used one first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, response: StoredResponse) -> None:
        self.drop(response_id)
        if sum(each.num_bytes for each in response.conversation()) > self._most_bytes:
            return  # all others would be dropped for it in vain
        self._entries[response_id] = response
        self._hold(response)
        while len(self._entries) > self._most_responses or self.num_bytes > self._most_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._release(oldest)

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._entries.get(response_id)
        if found is not None:
            self._entries.move_to_end(response_id)
        return found

    def drop(self, response_id: str) -> bool:
        found = self._entries.pop(response_id, None)
        if found is not None:
            self._release(found)
        return found is not None

    def _hold(self, response: StoredResponse) -> None:
        each: StoredResponse | None = response
        while each is not None:
            each.num_users += 1
            if each.num_users > 1:
                return  # what it continues is counted already
            self.num_bytes += each.num_bytes
            each = each.previous

    def _release(self, response: StoredResponse) -> None:
        each: StoredResponse | None = response
        while each is not None:
            each.num_users -= 1
            if each.num_users:
                return
            self.num_bytes -= each.num_bytes
            each = each.previous


class ResponseStore:
    """Responses of all keys, none of which sees those of another one.

    Args:
        most_responses, most_bytes: of each key; the least recently used responses make room for others.
    """

    def __init__(self, most_responses: int, most_bytes: int) -> None:
        self._bounds = most_responses, most_bytes
        self._shelves: dict[str, _Shelf] = {}

    def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Keep a response, unless its conversation is greater than all that may be kept.

        Args:
            owner: of the key.
        """
        self._shelves.setdefault(owner, _Shelf(*self._bounds)).put(response_id, response)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response of this id, which is now the latest used one; None: this owner has none."""
        shelf = self._shelves.get(owner)
        return None if shelf is None else shelf.get(response_id)

    def drop(self, owner: str, response_id: str) -> bool:
        """Forget a response; returns whether it was there."""
        shelf = self._shelves.get(owner)
        return shelf is not None and shelf.drop(response_id)

    def size(self, owner: str) -> tuple[int, int]:
        """Entries of an owner, and bytes of all that they need."""
        shelf = self._shelves.get(owner)
        return (0, 0) if shelf is None else (len(shelf), shelf.num_bytes)
