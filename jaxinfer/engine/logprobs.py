"""The host's side of log probabilities: which of them a launch has to give, and how they return to requests."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxinfer.engine.input_batch import BuiltBatch
from jaxinfer.outputs import Logprob
from jaxinfer.sampling.logprobs import Likely, TokenLogprobs
from jaxinfer.scheduling.landing import LogprobsOf
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler_output import SchedulerOutput
from jaxinfer.scheduling.scoring import given_length


def ask_for_logprobs(output: SchedulerOutput, built: BuiltBatch) -> bool:
    """Ask the device for the log probabilities of drawn tokens that rows want; return whether any does."""
    if all([request.sampling_params.logprobs is None for request in output.requests]):
        return False
    rows = zip(output.requests, output.samples, strict=True)
    wanted = [request.sampling_params.logprobs if samples else None for request, samples in rows]
    if all([number is None for number in wanted]):
        return False
    built.packed["wants_logprobs"][...] = 1
    built.packed["wants_list"][built.logits_rows] = [bool(number) for number in wanted]
    return True


def logprobs_of_launch(built: BuiltBatch, logprobs: TokenLogprobs, landed: np.ndarray) -> LogprobsOf:
    """Return the maker of log probabilities of a launch's landed tokens.

    Args:
        logprobs: [N * width, Q].
        landed: bool [N * width, rows], where tokens landed.
    """
    chosen, ranks = (np.asarray(x)[:, built.logits_rows] for x in (logprobs.logprob, logprobs.rank))

    @functools.cache
    def likely() -> Likely:
        return jax.tree.map(np.asarray, logprobs.likely)

    def entries(request: Request, index: int, tokens: Sequence[int]) -> list[dict[int, Logprob]]:
        wanted = request.sampling_params.logprobs
        if wanted is None:
            return []
        there = landed[:, index]
        found = zip(tokens, chosen[there, index].tolist(), ranks[there, index].tolist(), strict=False)
        known = [{token: Logprob(logprob, rank)} for token, logprob, rank in found]
        if wanted:
            row = int(built.logits_rows[index])
            others, theirs = (x[there, row, :wanted].tolist() for x in (likely().token, likely().logprob))
            for entry, *of_entry in zip(known, others, theirs, strict=False):
                _add_likely(entry, *of_entry)
        return known

    return entries


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
    likely = logprobs.likely
    _add_likely(found, likely.token[index, :count].tolist(), likely.logprob[index, :count].tolist())
    return found


def _add_likely(found: dict[int, Logprob], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    """Add the most likely tokens, in order, to an entry that has the chosen one."""
    for rank, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=1):
        if logprob > -math.inf:  # a list with a mask may be shorter
            found.setdefault(token, Logprob(logprob, rank))
