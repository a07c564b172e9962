"""Computed beginnings that members of groups share: who holds their pages, and when they are given up."""

from __future__ import annotations

from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.request import Request, RequestStatus


class Trunks:
    """Trunks that are computed. They have left their seats and keep their pages, for members that begin with them."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.held: list[Request] = []

    def keep(self, trunk: Request) -> None:
        self.held.append(trunk)

    def give_up_idle(self, wanted: Request) -> bool:
        """Let go of the latest trunk of which no member runs, other than that of `wanted`; False: there is none."""
        for trunk in reversed(self.held):
            if trunk.group is not None and not trunk.group.num_running and trunk is not wanted.trunk:
                self.release(trunk)
                return True
        return False

    def release(self, trunk: Request) -> None:
        """Its pages return to the pool; whoever needs it lets it be computed again."""
        self.held.remove(trunk)
        self._kv.release(trunk)
        trunk.status = RequestStatus.PREEMPTED
        trunk.num_computed_tokens = 0
        trunk.is_computed = False
