"""Ways to choose a replica for a request."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxinfer.cache.radix_node import TOKEN_BYTES

# Points of each replica on the ring of a consistent hash.
_POINTS = 100
# Below this share of a prompt, a match says nothing, and the load decides.
_LEAST_MATCH = 0.1
# A replica with so many more requests than the emptiest, and so many times as many, takes no more for its prefixes.
_MOST_AHEAD, _MOST_RATIO = 16, 1.5


@dataclass
class Asked:
    """What a router sees of a request: its session, and the key of its prompt."""

    session: int
    prompt: bytes


type Policy = Callable[[Asked, Sequence[int]], int]
"""(request, requests that run on each replica) -> replica."""


def at_random(seed: int) -> Policy:
    """Any replica."""
    rng = random.Random(seed)
    return lambda asked, loads: rng.randrange(len(loads))


def power_of_two(seed: int) -> Policy:
    """The one with fewer requests of two that are drawn."""
    rng = random.Random(seed)

    def choose(asked: Asked, loads: Sequence[int]) -> int:
        first, second = rng.randrange(len(loads)), rng.randrange(len(loads))
        return first if loads[first] <= loads[second] else second

    return choose


def consistent_hash(num_replicas: int) -> Policy:
    """The replica on which a hash of the session falls. A new replica moves few sessions."""
    ring = sorted(
        (_place(f"{replica}/{point}"), replica) for replica in range(num_replicas) for point in range(_POINTS)
    )
    places = [place for place, _ in ring]

    def choose(asked: Asked, loads: Sequence[int]) -> int:
        return ring[bisect.bisect(places, _place(str(asked.session))) % len(ring)][1]

    return choose


@dataclass
class CacheAware:
    """The one that was sent the longest prefix of the prompt, as the router remembers; the emptiest one if the match is
    short, or if that replica has far more requests than others.

    It does not know what replicas have evicted: it forgets by itself what was not sent for long.

    Args:
        remembered: pages of each replica that the router keeps in mind.
    """

    num_replicas: int
    page_size: int
    remembered: int
    _holders: dict[bytes, OrderedDict[int, None]] = field(default_factory=dict)
    _sent: list[OrderedDict[bytes, None]] = field(init=False)

    def __post_init__(self) -> None:
        self._sent = [OrderedDict() for _ in range(self.num_replicas)]

    def __call__(self, asked: Asked, loads: Sequence[int]) -> int:
        pages = self._pages(asked.prompt)
        chosen = self._with_longest(pages, loads)
        self._note(pages, chosen)
        return chosen

    def _with_longest(self, pages: Sequence[bytes], loads: Sequence[int]) -> int:
        emptiest = min(range(len(loads)), key=loads.__getitem__)
        for count in range(len(pages), 0, -1):
            if count < _LEAST_MATCH * len(pages):
                break
            if holders := self._holders.get(pages[count - 1]):
                best = min(holders, key=loads.__getitem__)
                is_far_ahead = (
                    loads[best] > loads[emptiest] + _MOST_AHEAD and loads[best] > _MOST_RATIO * loads[emptiest]
                )
                return emptiest if is_far_ahead else best
        return emptiest

    def _note(self, pages: Sequence[bytes], replica: int) -> None:
        sent = self._sent[replica]
        for page in reversed(pages):  # the first ones are forgotten last
            self._holders.setdefault(page, OrderedDict())[replica] = None
            sent[page] = None
            sent.move_to_end(page)
        while len(sent) > self.remembered:
            page, _ = sent.popitem(last=False)
            holders = self._holders[page]
            del holders[replica]
            if not holders:
                del self._holders[page]

    def _pages(self, prompt: bytes) -> list[bytes]:
        """Return a digest of each whole page and all before it."""
        width, digest, found = self.page_size * TOKEN_BYTES, b"", []
        for end in range(width, len(prompt) + 1, width):
            digest = hashlib.blake2b(digest + prompt[end - width : end], digest_size=12).digest()
            found.append(digest)
        return found


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
