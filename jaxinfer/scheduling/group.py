"""What scheduling uses of the group that a request belongs to."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from jaxinfer.branching.branch_state import BranchLanes


class Group[R](Protocol):
    """The part of a request's group that scheduling uses; see `RequestGroup`."""

    request_id: str
    trunk: R | None
    branches: BranchLanes
    pending: deque[R]  # members that wait for others of the group to end
    max_parallel: int
    num_unfinished: int
    num_running: int  # members that run and begin with the trunk
    has_begun: bool  # whether a member or the trunk has run
