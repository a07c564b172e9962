"""New weights while requests run: which of their keys and values still count, and what no request may find any more."""

from __future__ import annotations

from jaxinfer.scheduling.scheduler import Scheduler


def change_weights(scheduler: Scheduler, *, recompute: bool) -> None:
    """Let no request find what was computed with old weights. Nothing may be in flight.

    Running requests continue with the keys and values that they have, and publish them no more; members of their groups
    that do not run yet compute the shared prefix themselves.

    Args:
        recompute: running requests are computed anew, from all of their tokens.
    """
    for request in list(reversed(scheduler.running)):
        # A sequence that would land its tokens again continues, as its strategy says.
        if (recompute and not scheduler.lands_again) or request.is_trunk:  # no member has begun with a trunk that runs
            scheduler.put_back(request)
            scheduler.turned.append(request)
    for trunk in list(scheduler.trunks.held):
        if trunk.group is not None and not trunk.group.num_running:
            scheduler.trunks.release(trunk)
    scheduler.kv.begin_namespace()
