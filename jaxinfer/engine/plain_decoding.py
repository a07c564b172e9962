"""Plain decoding, and the defaults that most strategies share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.constraints.block_walk import BlockWalk
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.strategy import RoundsResult
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.decode_loop import DecodeLoop, LoopOutput
from jaxinfer.programs.program import Program
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.stand_ins import StandIn
from jaxinfer.programs.step import Follower
from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds, RowKind
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.scheduler_output import Continuation, SchedulerLimits, SchedulerOutput


class UsualStrategy:
    """The defaults of a `Strategy`: no models, no state, no notes."""

    models: Mapping[str, Any] = {}
    num_tail_pages = 0
    block_size = 1
    takes_prompts = False
    follower: Follower | None = None
    wants_landing = False

    def make_state(self) -> Mapping[str, Any]:
        return {}

    def widened(self, shape: BatchShape, seated: int, stand_in: StandIn) -> BatchShape:
        return shape

    def make_scheduler(self, limits: SchedulerLimits, kv: KVCacheManager) -> Scheduler:
        return Scheduler(limits, kv)

    def prepare(self, output: SchedulerOutput, built: BuiltBatch, batch: InputBatch, runner: Runner) -> None:
        pass

    def landed(
        self,
        output: SchedulerOutput,
        built: BuiltBatch,
        result: RoundsResult | None,
        steps: int,
        seconds: float,
        metrics: EngineMetrics,
    ) -> Sequence[Continuation]:
        return ()

    def walked(self, request: Request, walk: BlockWalk, metrics: EngineMetrics) -> None:
        pass

    def measure(self, runner: Runner, allocator: PageAllocator) -> None:
        pass

    def left(self, request_ids: Iterable[str]) -> None:
        pass

    def weights_changed(self, model: str, requests: Sequence[Request]) -> Sequence[Continuation]:
        return ()

    def start_over(self) -> None:
        pass


class PlainDecoding(UsualStrategy):
    """One token after the other, several steps in a launch."""

    programs: Sequence[Program] = ()

    def __init__(self, program: DecodeLoop, buckets: Buckets) -> None:
        self.program = program
        self.shapes = tuple(shape for shape in program.shapes if not shape.lane_pages)
        self._lanes = [shape for shape in program.shapes if shape.lane_pages]
        self.rounds = Rounds(RowKind.DECODE, most=program.max_steps)
        self._buckets = buckets

    def choose(self, requests: Sequence[Request], num_waiting: int) -> Rounds:
        return self.rounds

    def shape_for(self, rounds: Rounds, *, rows: int, pages_per_row: int, lanes: bool, stand_in: StandIn) -> BatchShape:
        if lanes:
            return stand_in(self.program, smallest_of_lanes(self._lanes, rows, pages_per_row))
        return stand_in(self.program, self._buckets.loop_for(decode_rows=rows, pages_per_row=pages_per_row))

    def launch(self, output: SchedulerOutput, built: BuiltBatch, runner: Runner) -> RoundsResult:
        result: LoopOutput = runner.launch(self.program, built.packed.shape, built.packed.buffer)
        return RoundsResult(result.tokens, was_redrawn=result.was_redrawn, logprobs=result.logprobs)


def smallest_of_lanes(shapes: Sequence[BatchShape], sequences: int, pages_per_row: int) -> BatchShape:
    """Return the smallest of these shapes that holds a launch of so many sequences in lanes.

    Raises:
        ValueError: no shape holds it.
    """
    holding = [shape for shape in shapes if shape.num_tokens >= sequences and shape.pages_per_row >= pages_per_row]
    if not holding:
        raise ValueError(f"{sequences} sequences in lanes of {pages_per_row} pages exceed the limits")
    return min(holding, key=lambda shape: (shape.pages_per_row, shape.num_tokens))
