"""Diffusion with a bidirectional model as a strategy: whole sequences and windows around blocks, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.canvas import CANVAS, Canvas
from jaxinfer.diffusion.canvas_rounds import DenoiseCanvas
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.drawing import keeps_credits
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.diffusion.vicinity import Vicinity, vicinity_of
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.strategy import RoundsResult
from jaxinfer.models.config import ModelConfig
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.stand_ins import StandIn
from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds, RowKind, WindowRounds
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.scheduler_output import Continuation, SchedulerLimits, SchedulerOutput
from jaxinfer.scheduling.whole_scheduler import WholeScheduler
from jaxinfer.strategies.diffusion import DiffusionStrategy, DiffusionStrategyMaker


@dataclass
class Progress:
    """Progress of a running sequence."""

    canvas: list[int]  # all tokens that the sequence may come to have, masks included
    start: int  # of its block
    round: int = 0  # rounds that it has had
    has_refresh: bool = False  # keys and values are those that the sequence had in this block, or later

    @classmethod
    def at_the_start(cls, request: Request, mask_token_id: int) -> Progress:
        """Return the progress of a request whose output is masks after what has landed with earlier weights."""
        start = request.num_prompt_tokens + request.versions.latest
        masks = [mask_token_id] * (request.max_total_tokens - start)
        return cls([*request.token_ids[:start], *masks], start)


class BidirectionalDiffusion(DiffusionStrategy):
    """Strategy whose launches are all of rounds. The host reads what each launch found before it builds the next.

    Args:
        vicinity: how sequences are denoised.
        config: bounds the rounds of a launch.
        buckets: shapes of launches, with one token for each row.
        make_state: makes the state on the device, see `Canvas`.
    """

    wants_landing = True

    def __init__(
        self,
        vicinity: Vicinity,
        config: DiffusionConfig,
        buckets: Buckets,
        make_state: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.vicinity, self._config = vicinity, config
        # Launches without windows, then launches of chunks beside windows.
        shapes = [replace(shape, block_size=1) for shape in buckets.all_chunks()]
        shapes += [replace(shape, block_size=vicinity.width) for shape in buckets.all_steps()]
        if vicinity.cache == "dual":
            shapes = [replace(shape, block_size=vicinity.width) for shape in buckets.all_loops()] + shapes
        program = DenoiseCanvas(vicinity, config.maximum_unroll, tuple(dict.fromkeys(shapes)))
        super().__init__(program, vicinity.block_size, vicinity.mask_token_id, buckets, make_state)
        self.progress: dict[str, Progress] = {}

    def make_scheduler(self, limits: SchedulerLimits, kv: KVCacheManager) -> Scheduler:
        return WholeScheduler(limits, kv)

    def choose(self, requests: Sequence[Request], num_waiting: int) -> Rounds:
        config, size = self._config, self.vicinity.block_size
        most = max(1, min(size // config.expected_tpf, config.maximum_unroll))
        return WindowRounds(most=most, most_tokens=size)

    def widened(self, shape: BatchShape, seated: int, stand_in: StandIn) -> BatchShape:
        return stand_in(self.programs[0], replace(shape, block_size=self.vicinity.width if seated else 1))

    def prepare(self, output: SchedulerOutput, built: BuiltBatch, batch: InputBatch, runner: Runner) -> None:
        packed, how = built.packed, self.vicinity
        for index, request in enumerate(output.requests):
            row, query = int(built.rows[index]), int(built.logits_rows[index])
            if request.request_id not in self.progress:
                self.progress[request.request_id] = Progress.at_the_start(request, self.mask_token_id)
            now = self.progress[request.request_id]
            canvas = now.canvas
            packed["block_start"][row], packed["block_round"][row] = now.start, now.round
            if output.kinds[index] is RowKind.PROMPT_CHUNK:
                begin, end = packed["query_start_loc"][row : row + 2]
                computed = output.num_computed[index]
                packed["token_ids"][begin:end] = canvas[computed : computed + end - begin]
                packed["limit"][begin:end] = len(canvas) - 1
                packed["logits_index"][query] = begin + now.start - computed
            else:
                first = max(0, now.start - how.prefix_look)
                window = canvas[first : now.start + how.block_size + how.after_look]
                packed["block_tokens"][row, : len(window)] = window

    def landed(
        self,
        output: SchedulerOutput,
        built: BuiltBatch,
        result: RoundsResult | None,
        steps: int,
        seconds: float,
        metrics: EngineMetrics,
    ) -> Sequence[Continuation]:
        assert result is not None
        details: DenoiseOutput = result.details
        rows = built.logits_rows
        ran, blocks, landed = np.asarray(details.ran), np.asarray(details.blocks), np.asarray(details.tokens) >= 0
        continuations = []
        for request, row, kind in zip(output.requests, rows.tolist(), output.kinds, strict=True):
            rounds = np.flatnonzero(ran[:, row])
            if not request.is_finished and len(rounds):
                block, has_landed = blocks[rounds[-1], row], bool(landed[:, row].any())
                is_chunk = kind is RowKind.PROMPT_CHUNK
                continuations.append(self._take(request, len(rounds), block, has_landed, is_chunk=is_chunk))
        self._tell(list(output.requests), rows, details, metrics)
        return continuations

    def _take(
        self, request: Request, rounds: int, block: np.ndarray, has_landed: bool, *, is_chunk: bool
    ) -> Continuation:
        """Note the progress of a request after a launch, and return where it continues."""
        now, how = self.progress[request.request_id], self.vicinity
        end = min(now.start + how.block_size, len(now.canvas))
        now.canvas[now.start : end] = block[: end - now.start].tolist()
        now.has_refresh |= is_chunk and how.refreshes(now.round)
        now.round += rounds
        if has_landed:
            now.start, now.has_refresh = end, False
        # A window needs the keys and values around it; without them the whole sequence is computed.
        is_window = now.has_refresh and how.cache == "dual"
        keeps_prefix = now.has_refresh and how.cache == "prefix"
        return Continuation(request, max(0, now.start - how.prefix_look) if keeps_prefix else 0, is_window)

    def weights_changed(self, model: str, requests: Sequence[Request]) -> Sequence[Continuation]:
        """Begin the block of every running request again, from masks in a first round."""
        found = []
        for request in requests:
            now = self.progress.get(request.request_id)
            if now is not None:
                now.canvas[now.start :] = [self.mask_token_id] * (len(now.canvas) - now.start)
                now.round, now.has_refresh = 0, False
                found.append(Continuation(request, 0, False))
        return found

    def left(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.progress.pop(request_id, None)

    def start_over(self) -> None:
        self.progress = {}


@dataclass(frozen=True)
class BidirectionalDenoiser(DiffusionStrategyMaker):
    """Maker of the strategy of a bidirectional diffusion model."""

    def check(self, engine: EngineConfig, model: ModelConfig) -> None:
        vicinity_of(self.config, model)

    def _state(
        self,
        engine: EngineConfig,
        model: ModelConfig,
        dtype: jnp.dtype,
        sharding: jax.sharding.Sharding | None = None,
        *,
        abstract: bool,
    ) -> dict[str, Any]:
        vicinity = vicinity_of(self.config, model)
        canvas = Canvas.allocate(
            engine.max_num_seqs,
            engine.max_model_len if self.config.smooths else 0,
            vicinity.block_size,
            model.hidden_size,
            model.vocab_size,
            dtype,
            sharding,
            with_credits=keeps_credits(vicinity.rule),
            abstract=abstract,
        )
        return {CANVAS: canvas}

    def _strategy(
        self, model: ModelConfig, buckets: Buckets, make_state: Callable[[], Mapping[str, Any]]
    ) -> BidirectionalDiffusion:
        return BidirectionalDiffusion(vicinity_of(self.config, model), self.config, buckets, make_state)
