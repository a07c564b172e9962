"""Landing: the tokens of a launch are appended to their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from jaxinfer.outputs import Logprob
from jaxinfer.sampling.greatest import NO_SCORE
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.scheduler_output import Landing, SchedulerOutput

NO_SCORE_ERROR = "the model gave no finite score for any token that may follow"

type LogprobsOf = Callable[[Request, int, Sequence[int]], Sequence[dict[int, Logprob]]]
"""(request, its index in the launch, landed tokens) -> an entry for each token, or none if the request wants none."""


def land(
    output: SchedulerOutput,
    sampled: Sequence[Sequence[int]],
    logprobs_of: LogprobsOf | None = None,
    before: Callable[[Request], None] | None = None,
) -> Iterator[Landing]:
    """Land the tokens of a launch's rows, each request whole before the next.

    Args:
        sampled: for each of `output.requests` its tokens, any number of them; read only for rows that may land some. A
            last one of NO_SCORE ends the request with an error.
        logprobs_of: makes the entries of landed tokens; None: no request of the launch wants any.
        before: called with each request before its tokens land.
    """
    running = RequestStatus.RUNNING
    rows = zip(output.requests, output.most_tokens, output.least_tokens, output.epochs, sampled, strict=True)
    for index, (request, most, least, epoch, tokens) in enumerate(rows):
        if not most or request.epoch != epoch or request.status is not running:
            continue  # a chunk of a prompt; or preempted, aborted or finished since the launch
        request.num_in_flight -= most
        request.num_sure_in_flight -= least
        if not tokens:
            continue
        if before is not None:
            before(request)
        error = None
        if tokens[-1] == NO_SCORE:
            tokens, error = tokens[:-1], NO_SCORE_ERROR
        entries = () if logprobs_of is None else logprobs_of(request, index, tokens)
        if request.num_to_skip:
            skipped = min(request.num_to_skip, len(tokens))
            request.num_to_skip -= skipped
            tokens, entries = tokens[skipped:], entries[skipped:]
        first = len(request.token_ids)
        request.extend(tokens, entries, error=error)
        yield Landing(request, first, len(request.token_ids))
