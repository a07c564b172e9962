"""The host's side of log probabilities: which of them a launch has to give, and how they return to requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxinfer.engine.input_batch import BuiltBatch
from jaxinfer.outputs import Logprob
from jaxinfer.programs.batch_layout import LISTS, NOTES
from jaxinfer.sampling.logprobs import TokenLogprobs
from jaxinfer.sampling.noted import Noted
from jaxinfer.scheduling.landing import LogprobsOf
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler_output import SchedulerOutput
from jaxinfer.scheduling.scoring import given_length


def wants_logprobs(output: SchedulerOutput) -> int:
    """Return which log probabilities of drawn tokens rows ask for: LISTS, NOTES, or the sum of both; 0: none."""
    wanted = {request.sampling_params.logprobs for request in output.requests} - {None}
    return LISTS * (len(wanted - {0}) > 0) + NOTES * (0 in wanted)


def logprobs_of_launch(
    built: BuiltBatch,
    lists: TokenLogprobs | None,
    width: int = 1,
    noted: Noted | None = None,
    landed: np.ndarray | None = None,
) -> LogprobsOf:
    """Return the maker of log probabilities of a launch's landed tokens.

    Args:
        lists: `width` entries for each row, of those that landed last.
        noted: [N * width, Q] of all tokens, for rows that want no lists; None: `lists` are of all.
        landed: bool [N * width, rows], where tokens landed.
    """
    arrays = jax.tree.map(np.asarray, lists)
    notes = None if noted is None else jax.tree.map(lambda x: np.asarray(x)[:, built.logits_rows], noted)

    def entries(request: Request, index: int, tokens: Sequence[int]) -> list[dict[int, Logprob]]:
        wanted = request.sampling_params.logprobs
        if wanted is None:
            return []
        if notes is not None and not wanted:
            assert landed is not None
            there = landed[:, index]
            found = zip(tokens, notes.logprob[there, index].tolist(), notes.rank[there, index].tolist(), strict=False)
            return [{token: Logprob(logprob, rank)} for token, logprob, rank in found]
        row = int(built.logits_rows[index]) * width
        return [_as_dict(arrays, row + place, token, wanted) for place, token in enumerate(tokens)]

    return entries


def seats_of_lists(output: SchedulerOutput, built: BuiltBatch, width: int = 1) -> dict[int, int]:
    """Return the seats whose masks bind the lists of rows that a search steers, by the places of their entries."""
    return {
        int(built.logits_rows[index]) * width: request.seat
        for index, request in enumerate(output.requests)
        if request.is_steered and request.guard is not None
    }


def known_targets(output: SchedulerOutput, built: BuiltBatch) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the known token after each token of the launch, int32 [T], and what its logits are divided by, float32
    [T]; None if no log probabilities of such are wanted."""
    found = None
    for request, start, positions in _known_spans(output, built):
        if found is None:
            count = built.packed.shape.num_tokens
            found = np.zeros(count, np.int32), np.ones(count, np.float32)
        targets, temperatures = found
        following = request.token_ids[positions.start + 1 : positions.stop + 1]
        if request.scoring is not None:
            following = [*following, request.scoring.last][: len(positions)]
            temperatures[start : start + len(following)] = request.scoring.temperature
        targets[start : start + len(following)] = following
    return found


def take_known_logprobs(output: SchedulerOutput, built: BuiltBatch, logprobs: TokenLogprobs) -> None:
    """Give log probabilities of tokens that were not drawn to the requests that want them: of prompts, of which
    recomputed ones keep the first, and of awaited tokens."""
    arrays = jax.tree.map(np.asarray, logprobs)
    epochs = {request.request_id: epoch for request, epoch in zip(output.requests, output.epochs, strict=True)}
    for request, start, positions in _known_spans(output, built):
        params, num_prompt = request.sampling_params, request.num_prompt_tokens
        if request.scoring is not None:
            first_scored = given_length(num_prompt, request.scoring)
            of_span = arrays.logprob[start : start + len(positions)].tolist()
            request.scoring.take(positions.start + 1 - first_scored, of_span)
            continue
        is_awaited = request.awaits_logprobs and request.epoch == epochs[request.request_id]
        last = request.num_tokens if is_awaited else num_prompt
        for index, row in enumerate(positions, start=start):
            following = row + 1
            if following < num_prompt:
                known, wanted, number = request.prompt_logprobs, params.prompt_logprobs, following
            else:
                known, wanted, number = request.logprobs, params.logprobs, following - num_prompt
            if wanted is not None and len(known) == number and following < last:
                known.append(_as_dict(arrays, index, request.token_ids[following], wanted))


def _known_spans(output: SchedulerOutput, built: BuiltBatch) -> list[tuple[Request, int, range]]:
    """Return (request, first index in T, positions of its tokens) of rows that want log probabilities of tokens that
    are not drawn."""
    starts = built.packed["query_start_loc"]
    return [
        (request, int(starts[built.rows[index]]), range(first, first + output.num_tokens[index]))
        for index, (request, first) in enumerate(zip(output.requests, output.num_computed, strict=True))
        if request.awaits_logprobs
        or request.scoring is not None
        or (first + 1 < request.num_prompt_tokens and request.sampling_params.prompt_logprobs is not None)
    ]


def _as_dict(logprobs: TokenLogprobs, index: int, token: int, count: int) -> dict[int, Logprob]:
    """Return the `count` most likely tokens and the chosen one, as users get them."""
    found = {token: Logprob(float(logprobs.logprob[index]), int(logprobs.rank[index]))}
    top = zip(logprobs.top_token[index].tolist(), logprobs.top_logprob[index].tolist(), strict=True)
    for rank, (other, logprob) in enumerate(list(top)[:count], start=1):
        if logprob > -math.inf:  # a list with a mask may be shorter
            found.setdefault(other, Logprob(logprob, rank))
    return found
