"""What routing by prefix saves: hit rates of ways to choose a replica, on a trace of chats with shared beginnings.

Each replica has the engine's own prefix cache over a pool; there is no model, and a request takes as long as its tokens
say. All replicas are loaded alike: sessions are as many for each, however many replicas there are. Hit rates are shares
of prompt tokens that were cached.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxinfer.cache.radix_node import TOKEN_BYTES
from routing.policies import Asked, CacheAware, Policy, at_random, consistent_hash, power_of_two
from routing.replicas import Replica, Running
from routing.traces import Session, Workload, sessions

PAGE_SIZE = 16
PREFILL, DECODE = 8000.0, 40.0  # tokens a second of one request


@dataclass
class Found:
    """What one simulation has counted."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    waited: int = 0  # requests that found no free pages when they came
    peaks: list[float] = field(default_factory=list)  # of each request: requests of the fullest replica over the mean


class Simulation:
    """Chats over replicas, in order of time.

    Args:
        policy: chooses the replica of a request.
        num_sessions: chats at any time, of all replicas together.
    """

    def __init__(
        self, workload: Workload, policy: Policy, *, num_replicas: int, pages: int, num_sessions: int, seed: int
    ) -> None:
        self.workload, self.policy = workload, policy
        self.replicas = [Replica(pages, PAGE_SIZE) for _ in range(num_replicas)]
        self.loads = [0] * num_replicas
        self.waiting: list[deque[tuple[Session, bytes, bytes]]] = [deque() for _ in range(num_replicas)]
        self.found = Found()
        self._rng = np.random.default_rng(seed + 1)
        self._trace = sessions(workload, seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for session in itertools.islice(self._trace, num_sessions):
            self._later(self._think(0.0), session)

    def run(self, num_requests: int, *, warm_up: int) -> Found:
        """Return what was counted over so many requests, after others that are not."""
        while self.found.requests < warm_up:
            self._next()
        self.found = Found()
        while self.found.requests < num_requests:
            self._next()
        return self.found

    def _next(self) -> None:
        time, _, event = heapq.heappop(self._events)
        event(time)

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _think(self, time: float) -> float:
        return time + float(self._rng.exponential(self.workload.think_seconds))

    def _later(self, time: float, session: Session) -> None:
        self._at(time, lambda now: self._ask(now, session))

    def _ask(self, time: float, session: Session) -> None:
        question, answer = session.turns.pop()
        prompt = session.known + question
        session.known = prompt + answer
        number = self.policy(Asked(session.number, prompt), self.loads)
        self.loads[number] += 1
        self.found.requests += 1
        self.found.peaks.append(max(self.loads) / statistics.fmean(self.loads))
        if not self._begin(time, number, session, prompt, session.known):
            self.found.waited += 1
            self.waiting[number].append((session, prompt, session.known))

    def _begin(self, time: float, number: int, session: Session, prompt: bytes, whole: bytes) -> bool:
        running = self.replicas[number].begin(prompt, whole)
        if running is None:
            return False
        tokens, cached = len(prompt) // TOKEN_BYTES, running.match.num_cached_tokens
        self.found.prompt_tokens += tokens
        self.found.cached_tokens += cached
        seconds = (tokens - cached) / PREFILL + (len(whole) - len(prompt)) / TOKEN_BYTES / DECODE
        self._at(time + seconds, lambda now: self._end(now, number, session, running, whole))
        return True

    def _end(self, time: float, number: int, session: Session, running: Running, whole: bytes) -> None:
        self.replicas[number].end(running, whole)
        self.loads[number] -= 1
        waiting = self.waiting[number]
        while waiting and self._begin(time, number, *waiting[0]):
            waiting.popleft()
        self._later(self._think(time), session if session.turns else next(self._trace))


def policies(num_replicas: int, pages: int, seed: int) -> dict[str, Policy]:
    return {
        "random": at_random(seed),
        "power of two": power_of_two(seed),
        "consistent hash": consistent_hash(num_replicas),
        "cache-aware": CacheAware(num_replicas, PAGE_SIZE, pages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 64, 1000])
    parser.add_argument("--pages", type=int, default=8192, help="of each pool, 16 tokens each (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=48, help="for each replica (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="counted for each replica (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table("replicas", "policy", "prompt tokens", "cached", "fullest replica", "waited")
    rows: list[dict[str, Any]] = []
    for count in args.replicas:
        for name, policy in policies(count, args.pages, args.seed).items():
            simulation = Simulation(
                Workload(), policy, num_replicas=count, pages=args.pages, num_sessions=count * args.sessions,
                seed=args.seed,
            )  # fmt: skip
            found = simulation.run(count * args.requests, warm_up=count * args.requests // 2)
            share, peak = found.cached_tokens / found.prompt_tokens, statistics.fmean(found.peaks)
            rows.append({
                "replicas": count, "policy": name, "prompt_tokens": found.prompt_tokens, "cached": share,
                "peak": peak, "waited": found.waited,
            })  # fmt: skip
            table.add_row(
                str(count), name, f"{found.prompt_tokens:,}", f"{share:.1%}", f"{peak:.2f}x", str(found.waited)
            )
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
