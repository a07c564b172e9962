"""How many rounds of a launch each of its rows takes part in: as many as the host leaves it, and as there are pages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.launch_plan import LaunchPlan
from jaxinfer.engine.pace import Pace
from jaxinfer.engine.request import Request
from jaxinfer.engine.rounds import Rounds, RowKind

# A token of a stream comes so much later at most than if each launch had one round.
_STREAM_SECONDS = 0.05


def plan_rounds(
    plan: LaunchPlan,
    rounds: Rounds,
    kv: KVCacheManager,
    running: Sequence[Request],
    pace: Pace,
    *,
    waits: bool,
    shares_lanes: bool,
) -> list[int]:
    """How many rounds one launch runs for each row, if all are in their seats; none: they go on by a plain step.

    Rows that the host has to look at, or to prepare, after each token take part in one round; the others in as many as
    pay. Requests that wait could not be admitted to this launch, so they do not forbid rounds, but the first place that
    gets free for certain is theirs at once. Takes the pages for all rounds; with too few free pages there are fewer,
    and nobody is preempted for them.

    Args:
        pace: of launches.
        waits: whether anybody does.
        shares_lanes: whether rounds read trunks for several rows at once; plain steps do not.
    """
    most = rounds.most
    # One round of decoding is a plain step, but for those who share a lane.
    at_least = 2 if rounds.kind is RowKind.DECODE and not shares_lanes else 1
    if most < at_least or not plan.requests or (plan.prefill_rows and not rounds.takes_prompts):
        return []
    if not rounds.takes_prompts and any([not request.in_seat and not request.is_held for request in running]):
        return []
    if not rounds.holds(len(plan.requests), max([len(request.pages) for request in plan.requests]), shares_lanes):
        return []
    longest, shortest, num_of_one, num_alone, streams = 0, sys.maxsize, 0, 0, False
    for request in plan.requests:
        if not request.in_seat:
            most = 1
            continue
        if request.takes_one_round:
            num_of_one += 1
            num_alone += request.draws_alone
            continue
        left = request.num_tokens_left
        longest, shortest = max(longest, left), min(shortest, left)
        streams |= request.stream
    num_rows = len(plan.requests) - num_of_one
    if num_alone == len(plan.requests) and not rounds.takes_prompts:
        return []  # without drafts, a round is a step
    if streams:
        most = min(most, pace.within(rounds.kind, _STREAM_SECONDS))
    if num_of_one:
        most = pace.beside_one_round(rounds.kind, most, num_rows=num_rows, num_of_one_round=num_of_one)
    needed = shortest if waits else longest
    limit = min(most, max(-(-needed // max(rounds.least_tokens, 1)), int(num_of_one > 0)))
    if rounds.takes_prompts:
        limit = max(limit, 1)  # for prompts, if there is nothing else
    while limit >= at_least:
        of_rows = [limit] * len(plan.requests)
        if num_of_one:
            of_rows = [1 if request.takes_one_round else limit for request in plan.requests]
        if _take_pages(plan, kv, rounds, of_rows):
            return of_rows
        limit //= 2
    return []


def _take_pages(plan: LaunchPlan, kv: KVCacheManager, rounds: Rounds, of_rows: Sequence[int]) -> bool:
    """Pages for so many rounds of each row; False, and no change, where there are too few."""
    wanted = [
        rounds.reach(known, number, request.max_total_tokens) if request.in_seat else 0
        for request, known, number in zip(plan.requests, plan.known, of_rows, strict=True)
    ]
    missing = list(map(kv.missing_pages, plan.requests, wanted))
    if sum(missing) > kv.num_available:
        return False
    for index, count in enumerate(missing):
        if count:
            pages = kv.grow(plan.requests[index], wanted[index])
            assert pages is not None, "pages were counted as available"
            plan.new_pages[index] = plan.new_pages[index] + pages
    return True
