"""Longrope: a sequence that grows beyond the original length is computed anew, once, with the factors of long ones.

The factors are one choice for a whole sequence. Up to the original length its keys have the short ones. Until then its
`max_total_tokens` is one more than that length, so that nothing is launched beyond it; with the token that comes after,
all keys change, and the request starts over as one of a long sequence, in a namespace of the prefix cache of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxinfer.scheduling.request_status import Landed


class LengthOf(Protocol):
    """What a request says of its length; see `Request`."""

    max_total_tokens: int
    later_total_tokens: int
    rope_length: int
    landed: Landed
    trunk: Any
    shares_lane: bool

    @property
    def num_tokens(self) -> int: ...

    @property
    def is_finished(self) -> bool: ...


def begin_short(request: LengthOf, length: int) -> None:
    """Let a new request begin with the factors of sequences of up to `length` tokens, if it does."""
    if request.num_tokens > length:
        request.rope_length = length + 1
    elif request.max_total_tokens > length + 1:
        request.later_total_tokens, request.max_total_tokens = request.max_total_tokens, length + 1


def turns(request: LengthOf) -> bool:
    """Whether an unfinished request has more tokens than its keys are for."""
    if not request.later_total_tokens or request.is_finished:
        return False
    return request.landed.num_tokens >= request.max_total_tokens


def turn_if_due(request: LengthOf) -> None:
    """Let a request that `turns` be one of a long sequence; nothing that it has computed counts, and it shares no
    trunk."""
    if not turns(request):
        return
    request.rope_length = request.max_total_tokens
    request.max_total_tokens, request.later_total_tokens = request.later_total_tokens, 0
    request.trunk, request.shares_lane = None, False
