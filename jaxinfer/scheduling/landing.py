"""Landing: the tokens of a launch are appended to their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from jaxinfer.constraints.block_walk import BlockWalk
from jaxinfer.constraints.guard import Walk
from jaxinfer.constraints.guard import walk as walk_along
from jaxinfer.outputs import Logprob
from jaxinfer.sampling.greatest import NO_SCORE
from jaxinfer.scheduling.constrained_blocks import land_block
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.scheduler_output import Landing, SchedulerOutput

NO_SCORE_ERROR = "the model gave no finite score for any token that may follow"
NOTHING_LEFT_ERROR = (
    "no token may follow: the constraint allows none that allowed_token_ids, bad_words, min_tokens and logit_bias leave"
)

type LogprobsOf = Callable[[Request, int, Sequence[int]], Sequence[dict[int, Logprob]]]
"""(request, its index in the launch, landed tokens) -> an entry for each token, or none if the request wants none."""

type DraftsOf = Callable[[int], Sequence[int]]
"""Index of a request in the launch -> the places of accepted drafts among its tokens, ascending."""


def land(
    output: SchedulerOutput,
    sampled: Sequence[Sequence[int]],
    logprobs_of: LogprobsOf | None = None,
    before: Callable[[Request], None] | None = None,
    walks: Mapping[int, Walk | None] | None = None,
    drafts_of: DraftsOf | None = None,
) -> Iterator[Landing]:
    """Land the tokens of a launch's rows, each request whole before the next.

    Args:
        sampled: for each of `output.requests` its tokens, any number of them; read only for rows that may land some. A
            last one of NO_SCORE ends the request with an error.
        logprobs_of: makes the entries of landed tokens; None: no request of the launch wants any.
        before: called with each request before its tokens land.
        walks: for the rows of requests with guards, by their index, the walks along their tokens; None: the walk is not
            done, and the row lands later.
        drafts_of: finds accepted drafts; None: no request of the launch wants to know of any.
    """
    rows = zip(output.requests, output.most_tokens, output.least_tokens, output.epochs, sampled, strict=True)
    for index, (request, most, least, epoch, tokens) in enumerate(rows):
        walk = None
        if walks is not None and index in walks:
            walk = walks[index]
            if walk is None:
                continue
        if not most or not is_awaited(request, epoch):
            continue  # a chunk of a prompt, or a row whose tokens are void
        request.num_in_flight -= most
        request.num_sure_in_flight -= least
        if not tokens:
            # It would wait for ever; the failed step is recovered from. While walks are late, it may have ended.
            assert not least or request.num_walking, f"request {request.request_id!r} was sure to land a token"
            continue
        of_block = walk if walk is not None and isinstance(walk, BlockWalk) else None
        if of_block is not None and not of_block.lands:
            land_block(request, of_block)
            continue
        if before is not None:
            before(request)
        if of_block is not None:
            first = len(request.token_ids)
            land_block(request, of_block)
            yield Landing(request, first, len(request.token_ids))
            continue
        error = None
        if tokens[-1] == NO_SCORE:
            tokens, error = tokens[:-1], NO_SCORE_ERROR
            if request.guard is not None:
                error = request.guard_error or NOTHING_LEFT_ERROR
        entries = () if logprobs_of is None else logprobs_of(request, index, tokens)
        drafts: Sequence[int] = ()
        if drafts_of is not None and request.sampling_params.return_token_sources:
            drafts = drafts_of(index)
        if request.num_to_skip:
            skipped = min(request.num_to_skip, len(tokens))
            request.num_to_skip -= skipped
            tokens, entries = tokens[skipped:], entries[skipped:]
            drafts = [place - skipped for place in drafts if place >= skipped]
        first = request.landed.num_tokens
        if not request.is_walked:
            if drafts:
                _mark_accepted(request, drafts, len(tokens))
            request.extend(tokens, entries, error)
        else:
            _land_walked(request, tokens, entries, walk or walk_of(request, tokens), error, drafts)
        yield Landing(request, first, request.landed.num_tokens)


def is_awaited(request: Request, epoch: int) -> bool:
    """Whether tokens of a launch in this epoch of a request still count: it was not preempted, aborted or finished
    since, and has not continued from other tokens."""
    return request.epoch == epoch and request.status is RequestStatus.RUNNING


def walk_of(request: Request, tokens: Sequence[int], vocab: int = 0) -> Walk:
    """Walk along drawn tokens that follow those that have landed for a request with a guard, in this thread.

    Args:
        vocab: size of the vocabulary; 0: the mask that the next draw may need is left out.
    """
    guard, state = request.guard, request.guard_state
    assert guard is not None and state is not None
    return walk_along(guard, state, tokens, request.walk_limits(vocab))


def _land_walked(
    request: Request,
    tokens: Sequence[int],
    entries: Sequence[dict[int, Logprob]],
    walk: Walk,
    error: str | None,
    drafts: Sequence[int],
) -> None:
    """Land the tokens that a walk has kept, and those that follow in any case."""
    had_mask = request.mask is not None
    assert walk.num_kept or not (walk.is_refused and had_mask), "a token that was drawn with a mask is refused"
    kept = list(tokens[: walk.num_kept])
    request.drops_drawn = False
    _mark_accepted(request, drafts, walk.num_kept)
    _mark_walked(request, walk)
    # All but the last drawn one are computed; those that follow in any case are not.
    request.num_computed_tokens = len(request.token_ids) + walk.num_kept - 1
    if error is not None and not walk.error and not walk.is_refused and _is_whole(request, walk):
        walk, error = replace(walk, is_complete=True), None  # its end could not be drawn
    error = walk.error or (None if walk.is_refused else error)
    awaits = bool(walk.forced) and request.sampling_params.logprobs is not None
    status = request.extend(kept if awaits else [*kept, *walk.forced], entries[: walk.num_kept], error=error, walk=walk)
    if awaits and status is None:
        assert walk.state_before_forced is not None
        request.await_logprobs(walk.forced, walk.state_before_forced)
    # A second draw is no token more: its first one is noted as refused.
    num_first = max(0, walk.num_kept - walk.was_redrawn)
    request.note_refusals(num_first, is_refused=walk.is_refused, is_forced=bool(walk.forced))
    if status is None and walk.reenters:
        request.reenter(is_refused=walk.is_refused)
    elif not request.has_masks:
        request.mask = None  # the walk has made one, but since these tokens draws have none


def _is_whole(request: Request, walk: Walk) -> bool:
    """Whether nothing may follow a walk's tokens but an end."""
    return request.guard is not None and request.guard.ends(walk.state) is not None


def _mark_accepted(request: Request, drafts: Sequence[int], num_kept: int) -> None:
    """Mark accepted drafts at these places of tokens that are about to land, of which the first ones are kept."""
    count = request.num_output_tokens
    request.marks.accepted_at += [count + place for place in drafts if place < num_kept]


def _mark_walked(request: Request, walk: Walk) -> None:
    """Mark which of the tokens that are about to land were drawn again or not drawn at all."""
    marks, count = request.marks, request.num_output_tokens
    if walk.was_redrawn and walk.num_kept:
        marks.redrawn_at.append(count)
    marks.forced_at += range(count + walk.num_kept, count + walk.num_kept + len(walk.forced))
