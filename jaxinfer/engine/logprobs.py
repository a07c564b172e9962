"""The host's side of log probabilities: which of them a launch has to give, and how they return to requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from jaxinfer.engine.input_batch import BuiltBatch
from jaxinfer.outputs import Logprob
from jaxinfer.sampling.logprobs import TokenLogprobs
from jaxinfer.scheduling.landing import LogprobsOf
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler_output import SchedulerOutput


def wants_logprobs(output: SchedulerOutput) -> bool:
    """Whether any row's request asks for log probabilities of its output."""
    return any([request.sampling_params.logprobs is not None for request in output.requests])


def logprobs_of_launch(built: BuiltBatch, logprobs: TokenLogprobs, width: int = 1) -> LogprobsOf:
    """Return the maker of log probabilities of a launch's landed tokens; there are `width` entries for each row."""
    arrays = jax.tree.map(np.asarray, logprobs)

    def entries(request: Request, index: int, tokens: Sequence[int]) -> list[dict[int, Logprob]]:
        wanted = request.sampling_params.logprobs
        if wanted is None:
            return []
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


def prompt_targets(output: SchedulerOutput, built: BuiltBatch) -> np.ndarray | None:
    """int32 [T]: the prompt token after each token of the launch; None if no request wants log probabilities of it."""
    targets = None
    for request, start, positions in _prompt_spans(output, built):
        if targets is None:
            targets = np.zeros(built.packed.shape.num_tokens, np.int32)
        following = request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
        targets[start : start + len(following)] = following
    return targets


def take_prompt_logprobs(output: SchedulerOutput, built: BuiltBatch, logprobs: TokenLogprobs) -> None:
    """Give prompt tokens' log probabilities to the requests that want them; recomputed prompts keep the first ones."""
    arrays = jax.tree.map(np.asarray, logprobs)
    for request, start, positions in _prompt_spans(output, built):
        known = request.prompt_logprobs
        for offset, position in enumerate(positions):
            if len(known) == position + 1 and position + 1 < request.num_prompt_tokens:
                token = request.prompt_token_ids[position + 1]
                wanted = request.sampling_params.prompt_logprobs or 0
                known.append(_as_dict(arrays, start + offset, token, wanted))


def _prompt_spans(output: SchedulerOutput, built: BuiltBatch) -> list[tuple[Request, int, range]]:
    """Return (request, first index in T, positions of its tokens) of rows that want prompt log probabilities."""
    starts = built.packed["query_start_loc"]
    return [
        (request, int(starts[built.rows[index]]), range(first, first + output.num_tokens[index]))
        for index, (request, first) in enumerate(zip(output.requests, output.num_computed, strict=True))
        if first + 1 < request.num_prompt_tokens and request.sampling_params.prompt_logprobs is not None
    ]


def _as_dict(logprobs: TokenLogprobs, index: int, token: int, count: int) -> dict[int, Logprob]:
    """Return the `count` most likely tokens and the chosen one, as users get them."""
    found = {token: Logprob(float(logprobs.logprob[index]), int(logprobs.rank[index]))}
    top = zip(logprobs.top_token[index].tolist(), logprobs.top_logprob[index].tolist(), strict=True)
    for rank, (other, logprob) in enumerate(list(top)[:count], start=1):
        if logprob > -math.inf:  # a list with a mask may be shorter
            found.setdefault(other, Logprob(logprob, rank))
    return found
