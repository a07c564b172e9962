"""What scheduling uses of the group that a request belongs to."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from jaxinfer.branching.branch_state import BranchLanes
    from jaxinfer.scheduling.request import Request


class Group(Protocol):
    """The part of a request's group that scheduling uses; see `RequestGroup`."""

    request_id: str
    trunk: Request | None
    branches: BranchLanes
    pending: deque[Request]  # members that wait for others of the group to end
    max_parallel: int
    num_unfinished: int
    num_running: int  # members that run and begin with the trunk
