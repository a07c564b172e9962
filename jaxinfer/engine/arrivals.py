"""Requests before they are queued: checks, and numbers in the order of arrival."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxinfer.config import EngineConfig
from jaxinfer.models.rope import RopeConfig
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.scoring import given_length
from jaxinfer.scheduling.turning import begin_short


def members_of(item: Request | RequestGroup) -> list[Request]:
    """Return the requests of a group in the order in which they arrive, or the request alone."""
    return item.order if isinstance(item, RequestGroup) else [item]


class Arrivals:
    """Checks and numbers the requests of one engine."""

    def __init__(self, config: EngineConfig, rope: RopeConfig) -> None:
        self._config, self._rope = config, rope
        self._count = 0

    def check(self, requests: Sequence[Request], scheduler: Scheduler, known: Iterable[str]) -> None:
        """Raise ValueError for requests that cannot run. Changes nothing.

        Args:
            known: ids that are in use.
        """
        ids = set(known)
        for request in requests:
            if request.request_id in ids:
                raise ValueError(f"request_id {request.request_id!r} is in use")
            ids.add(request.request_id)
            if request.num_prompt_tokens == 0:
                raise ValueError(f"request {request.request_id!r} has an empty prompt: it needs at least 1 token")
            if request.max_total_tokens > self._config.max_model_len:
                raise ValueError(
                    f"request {request.request_id!r} may grow to {request.max_total_tokens} tokens, more than "
                    f"max_model_len={self._config.max_model_len}"
                )
            scheduler.check(request)

    def number(self, item: Request | RequestGroup) -> None:
        """Number requests, and keep apart cached prefixes that they may not share. Numbers only grow."""
        rope, members = self._rope, members_of(item)
        for request in members:
            request.logprobs_are_processed = self._config.processes_logprobs
            num_prompt = given_length(request.num_prompt_tokens, request.scoring)
            if rope.depends_on_length and num_prompt > rope.max_position_embeddings:
                # The rotation of its tokens, and so their cached keys, depend on the length of the whole prompt.
                request.rope_length = num_prompt
            if rope.turning_length is not None:
                begin_short(request, rope.turning_length)
            request.arrival = self._count
            self._count += 1
        if isinstance(item, RequestGroup):
            if any([request.rope_length for request in members]):
                item.share_nothing()
            if item.trunk is not None:
                item.trunk.arrival = members[0].arrival


def unfinished(requests: Mapping[str, Request], request_ids: Sequence[str]) -> list[Request]:
    """Return the unfinished requests of these ids, or of groups of these ids, among registered ones."""
    found: list[Request] = []
    for name in request_ids:
        request = requests.get(name)
        if request is not None:
            found.append(request)
        else:
            found += [one for one in requests.values() if one.group and one.group.request_id == name]
    return [request for request in found if not request.is_finished]
