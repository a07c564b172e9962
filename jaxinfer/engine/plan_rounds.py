"""How many rounds a launch runs: as many as nobody needs the host for, and as there are pages for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.launch_plan import LaunchPlan
from jaxinfer.engine.request import Request
from jaxinfer.engine.rounds import Rounds, RowKind


def plan_rounds(
    plan: LaunchPlan,
    rounds: Rounds,
    kv: KVCacheManager,
    running: Sequence[Request],
    *,
    waits: bool,
    shares_lanes: bool,
) -> int:
    """How many rounds one launch may run, if all rows are in their seats; 0: they go on by a plain step.

    More than one if nobody needs the host in between. Requests that wait could not be admitted to this launch, so
    they do not forbid rounds, but the first place that gets free for certain is theirs at once. Takes the pages for
    all rounds; with too few free pages there are fewer, and nobody is preempted for them.

    Args:
        waits: whether anybody does.
        shares_lanes: whether rounds read trunks for several rows at once; plain steps do not.
    """
    limit = rounds.most
    # One round of decoding is a plain step, but for those who share a lane.
    at_least = 2 if rounds.kind is RowKind.DECODE and not shares_lanes else 1
    if limit < at_least or not plan.requests or (plan.prefill_rows and not rounds.takes_prompts):
        return 0
    longest, shortest = 0, sys.maxsize
    for request in running:
        left = request.max_total_tokens - len(request.token_ids) - request.num_sure_in_flight
        if left <= 0:
            continue  # its last token is in flight: it takes no part any more
        if not request.in_seat:
            if not rounds.takes_prompts:
                return 0
            limit = 1
            continue
        if request.may_adjust and (
            request.adjusts_rounds(request.num_known_tokens - request.num_prompt_tokens)
            # Loops of decode steps do not say how probable their tokens were.
            or (rounds.kind is RowKind.DECODE and request.sampling_params.logprobs is not None)
        ):
            return 0
        if request.needs_host:
            limit = 1
        if left > longest:
            longest = left
        if left < shortest:
            shortest = left
    needed = shortest if waits else longest
    limit = min(limit, -(-needed // max(rounds.least_tokens, 1)))
    if rounds.takes_prompts:
        limit = max(limit, 1)  # for prompts, if there is nothing else
    while limit >= at_least:
        if _take_pages(plan, kv, rounds, limit):
            return limit
        limit //= 2
    return 0


def _take_pages(plan: LaunchPlan, kv: KVCacheManager, rounds: Rounds, number: int) -> bool:
    """Pages for so many rounds of every row; False, and no change, where there are too few."""
    wanted = [
        rounds.reach(known, number, request.max_total_tokens) if request.in_seat else 0
        for request, known in zip(plan.requests, plan.known, strict=True)
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
