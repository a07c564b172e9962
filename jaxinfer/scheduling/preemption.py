"""Which running request gives its pages to others."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.scheduling.request import Request


def victim_among(running: Sequence[Request], policy: str) -> Request:
    """Return the running request that is preempted when pages run out, by the scheduling policy."""
    held = [request for request in running if request.is_held]
    if held:
        return held[-1]  # nothing that has landed is lost, and the others of its search need not wait for its pages
    if policy == "priority":
        return max(running, key=lambda request: (request.priority, request.arrival))
    return running[-1]
