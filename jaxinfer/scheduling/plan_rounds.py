"""The launches that a plan becomes, and the rounds of each row: as many as pay, and as there are pages for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.launch_plan import LaunchPlan
from jaxinfer.scheduling.pace import Pace
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds, RowKind

# The most seconds by which rounds may delay a streamed token, compared with launches of one round.
_STREAM_SECONDS = 0.05


def plan_launches(
    plan: LaunchPlan,
    rounds: Rounds,
    kv: KVCacheManager,
    running: Sequence[Request],
    pace: Pace,
    *,
    waits: bool,
    shares_lanes: bool,
    goes_on: bool,
) -> list[tuple[LaunchPlan, Rounds, list[int]]]:
    """Return the launches of a plan in order: for each its rows, its rounds, and how many rounds each row takes part in
    (none: it is a plain step).

    With chunks of prompts there is one step for all rows, or a step of the chunks alone and then a launch of rounds, in
    which rows whose last chunk is in the step take part too. No launch reads what a later one writes. Without chunks
    there are rounds, plain ones if there is no program or no page for the others; only one round while some running
    requests are not in their seats yet. Seated requests with guards have a launch of their own if the rounds have such
    launches, see `Rounds.constrained`.

    Takes the pages for all rounds; with too few free pages there are fewer rounds, and no request is preempted.

    Args:
        pace: the measured pace of launches.
        waits: whether requests wait for admission. The rounds then end when the first row is certain to finish, so that
            its place is free at once.
        shares_lanes: whether rounds read trunks for several rows at once; plain steps do not.
        goes_on: whether chunks of prompts were in the launches before too.
    """
    if not plan.requests:
        return [(plan, rounds, [])]
    if rounds.constrained is not None and any([request.guard is not None for request in plan.requests]):
        return _beside_constrained(plan, rounds, rounds.constrained, kv, pace, waits=waits, shares_lanes=shares_lanes)
    if not plan.prefill_rows or rounds.takes_prompts:
        are_seated = rounds.takes_prompts or all([request.in_seat or request.is_held for request in running])
        for way in (rounds, rounds.plain or rounds):
            most = way.most if are_seated else 1
            rounds_of = _rounds_of_rows(plan, way, kv, pace, most, waits=waits, shares_lanes=shares_lanes)
            if rounds_of:
                return [(plan, way, rounds_of)]
        raise AssertionError("every row has a page for its next token, and plain rounds have programs for all")
    if not plan.decode_rows:
        return [(plan, rounds, [])]
    chunks, seated = plan.split(kv.num_in_chunks)
    most = pace.beside_chunks(
        rounds.kind, rounds.most, rounds.tokens, mixed=plan.step_kind, alone=chunks.step_kind, waits=waits,
        goes_on=goes_on or chunks.leaves_chunks(kv.num_in_chunks),
    )  # fmt: skip
    # A step for all rows decodes one token of each too, so a single round of decoding gains nothing.
    least = 1 + (rounds.kind is RowKind.DECODE)
    if most >= least:
        rounds_of = _rounds_of_rows(seated, rounds, kv, pace, most, waits=waits, shares_lanes=shares_lanes, least=least)
        if rounds_of:
            return [(chunks, rounds, []), (seated, rounds, rounds_of)]
    return [(plan, rounds, [])]


def _beside_constrained(
    plan: LaunchPlan,
    rounds: Rounds,
    constrained: Rounds,
    kv: KVCacheManager,
    pace: Pace,
    *,
    waits: bool,
    shares_lanes: bool,
) -> list[tuple[LaunchPlan, Rounds, list[int]]]:
    """Return the launches of a plan with requests with guards, of which those in their seats have one round, in a
    launch of their own.

    It is the first, so that the other one runs while the host walks along its draws; but chunks of prompts precede it,
    because it may read what they write.
    """
    launches = []
    for part, way in zip(plan.split_constrained(), (rounds, constrained), strict=True):
        if part.requests:
            rounds_of = _rounds_of_rows(part, way, kv, pace, way.most, waits=waits, shares_lanes=shares_lanes)
            assert rounds_of, "every row has the pages of its block"
            launches.append((part, way, rounds_of))
    return launches if plan.prefill_rows else launches[::-1]


def _rounds_of_rows(
    plan: LaunchPlan,
    rounds: Rounds,
    kv: KVCacheManager,
    pace: Pace,
    most: int,
    *,
    waits: bool,
    shares_lanes: bool,
    least: int = 1,
) -> list[int]:
    """Return how many rounds, up to `most`, each row of a launch takes part in, and take their pages; none, and no
    change: it cannot run these rounds, no row would draft in them, or none would take part in `least`.

    Rows that need the host after each token take part in one round, the others in as many as pay.
    """
    if not rounds.holds(len(plan.requests), max([len(request.pages) for request in plan.requests]), shares_lanes):
        return []
    longest, shortest, num_alone, streams, expects_refusals = 0, sys.maxsize, 0, False, False
    for request, is_chunk in zip(plan.requests, plan.are_chunks, strict=True):
        if is_chunk:
            most = 1
            continue
        if request.draws_alone:
            num_alone += 1
            continue
        if request.guard is not None and request.refusals.expects_breaks:
            expects_refusals = True
        if most == 1:
            continue
        left = request.num_tokens_left
        if left > longest:
            longest = left
        if left < shortest:
            shortest = left
        if request.stream:
            streams = True
    num_rows = len(plan.requests) - num_alone
    if not num_rows and rounds.plain is not None:
        return []  # no row would draft
    if streams:
        most = min(most, pace.within(rounds.kind, _STREAM_SECONDS))
    if num_alone:
        most = pace.beside_one_round(rounds.kind, most, num_rows=num_rows, num_of_one_round=num_alone)
    limit = 1
    if most > 1:
        needed = shortest if waits else longest
        limit = max(1, min(most, -(-needed // max(rounds.least_tokens, 1))))
    while limit:
        rounds_of = [limit] * len(plan.requests)
        if num_alone:
            rounds_of = [1 if request.draws_alone else limit for request in plan.requests]
        if expects_refusals:
            # What is drawn after a refused token is lost.
            rounds_of = [
                number if request.guard is None else min(number, request.refusals.most_rounds(rounds.tokens))
                for number, request in zip(rounds_of, plan.requests, strict=True)
            ]
        if max(rounds_of) < least:
            return []
        if _take_pages(plan, kv, rounds, rounds_of):
            return rounds_of
        limit //= 2
    return []


def _take_pages(plan: LaunchPlan, kv: KVCacheManager, rounds: Rounds, rounds_of: Sequence[int]) -> bool:
    """Take the pages for so many rounds of each row; False, and no change, if there are too few."""
    page_size, missing, lacking = kv.page_size, 0, list[tuple[int, int]]()
    computed = {number: rounds.most_computed_in(number) for number in {*rounds_of}}
    rows = zip(plan.requests, plan.are_chunks, plan.known, rounds_of, strict=True)
    for index, (request, is_chunk, known, number) in enumerate(rows):
        if is_chunk or known + computed[number] <= len(request.pages) * page_size:
            continue
        wanted = rounds.reach(known, number, request.max_total_tokens)
        if wanted > len(request.pages) * page_size:
            lacking.append((index, wanted))
            missing += kv.missing_pages(request, wanted)
    if missing > kv.num_available:
        return False
    for index, wanted in lacking:
        pages = kv.grow(plan.requests[index], wanted)
        assert pages is not None, "pages were counted as available"
        plan.new_pages[index] = plan.new_pages[index] + pages
    return True
