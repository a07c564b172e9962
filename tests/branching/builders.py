"""Groups for tests: a random beginning with random branches, and the same sequences as requests of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.core import EngineCore
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.request_group import RequestGroup
from tests.builders import drain, make_request


def make_group(
    group_id: str,
    prefix: Sequence[int],
    suffixes: Sequence[Sequence[int]],
    *,
    page_size: int = 4,
    branch_mode: str = "in_one_sequence",
    max_parallel: int | None = None,
    predicted: Sequence[int] | None = None,
    each: Sequence[dict[str, Any]] | None = None,
    **params: Any,
) -> RequestGroup:
    """A group whose members' seeds count up from `seed`.

    Args:
        each: parameters of each member, besides those of all.
    """
    members = alone(group_id, prefix, suffixes, each=each, **params)
    return RequestGroup(
        group_id, None, list(prefix), members, page_size=page_size, branch_mode=branch_mode, max_parallel=max_parallel,
        predicted=predicted,
    )  # fmt: skip


def alone(
    group_id: str,
    prefix: Sequence[int],
    suffixes: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    each: Sequence[dict[str, Any]] | None = None,
    **params: Any,
) -> list[Request]:
    """The members as requests that have nothing to do with each other."""
    return [
        make_request(
            f"{group_id}-{index}", [*prefix, *suffix], seed=seed + index, **{**params, **(each[index] if each else {})}
        )
        for index, suffix in enumerate(suffixes)
    ]


def run_groups(core: EngineCore, groups: Sequence[RequestGroup], others: Sequence[Request] = ()) -> list[list[int]]:
    """Output tokens of all members, and of other requests, that are added in this order and run to their end."""
    for group in groups:
        core.add_group(group)
    for request in others:
        core.add_request(request)
    drain(core)
    return [r.output_token_ids for group in groups for r in group.members] + [r.output_token_ids for r in others]
