"""Account of what the scheduler decides, launch by launch, and of what lands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from jaxinfer.engine.core import EngineCore
from jaxinfer.scheduling.rounds import RowKind
from jaxinfer.scheduling.scheduler_output import Landing, SchedulerOutput


class ScheduleTrace:
    """Writer of a line for each launch, with a line for each of its rows, and one for each landing.

    Args:
        out: where to write; None: stderr.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out: TextIO = sys.stderr if out is None else out
        self.num_launches = 0

    def launched(self, output: SchedulerOutput) -> None:
        """Write what a launch computes."""
        self.num_launches += 1
        rounds = f", up to {output.num_rounds} rounds" if output.num_rounds > 1 else ""
        self._line(
            f"launch {self.num_launches}: {output.total_num_scheduled_tokens} tokens of {len(output.requests)} requests"
            f"{rounds}"
        )
        rows = zip(output.requests, output.kinds, output.num_tokens, output.num_computed, strict=True)
        for request, kind, count, computed in rows:
            how = "new" if request.request_id in output.first_scheduled else "running"
            if request.request_id in output.resumed:
                how = "resumed"
            what = kind.value
            if kind is RowKind.PROMPT_CHUNK:
                what += f", tokens {computed} to {computed + count} of {request.num_prompt_tokens}"
            self._line(f"  {request.request_id} ({how}): {what}, {len(request.pages)} pages")
        for words, ids in (("left", output.finished_req_ids), ("preempted", output.preempted_req_ids)):
            if ids:
                self._line(f"  {words}: {', '.join(sorted(ids))}")

    def landed(self, landings: Sequence[Landing]) -> None:
        """Write which tokens have landed, and which requests have ended."""
        for request, first, last in landings:
            ended = f", ended ({request.status.value})" if request.is_finished else ""
            tokens = request.token_ids[max(first, request.num_prompt_tokens) : last]
            if tokens or ended:
                self._line(f"  landed for {request.request_id}: {len(tokens)} tokens {tokens}{ended}")

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")


@contextlib.contextmanager
def tracing(core: EngineCore, out: TextIO | None = None) -> Iterator[ScheduleTrace]:
    """Trace the launches of an engine."""
    trace = ScheduleTrace(out)
    core.launch_listeners.append(trace.launched)
    core.landing_listeners.append(trace.landed)
    try:
        yield trace
    finally:
        core.launch_listeners.remove(trace.launched)
        core.landing_listeners.remove(trace.landed)
