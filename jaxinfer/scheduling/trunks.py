"""Computed trunks, the shared prefixes of groups: which of them hold pages, and when they are released."""

from __future__ import annotations

from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.request import Request, RequestStatus


class Trunks:
    """Computed trunks, which have left their seats and keep their pages for members that begin with them."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.held: list[Request] = []

    def keep(self, trunk: Request) -> None:
        self.held.append(trunk)

    def give_up_idle(self, wanted: Request) -> bool:
        """Release the latest trunk without running members, other than that of `wanted`; False: there is none."""
        for trunk in reversed(self.held):
            if trunk.group is not None and not trunk.group.num_running and trunk is not wanted.trunk:
                self.release(trunk)
                return True
        return False

    def release(self, trunk: Request) -> None:
        """Return a trunk's pages to the pool; a member that needs it has it computed again."""
        self.held.remove(trunk)
        self._kv.release(trunk)
        trunk.status = RequestStatus.PREEMPTED
        trunk.num_computed_tokens = 0
        trunk.is_computed = False
