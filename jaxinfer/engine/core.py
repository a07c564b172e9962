"""The engine: requests in, tokens out, one launch ahead of the results that it reads."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.attention.backend import select_backend
from jaxinfer.attention.tensor_parallel import sharding_of_pages
from jaxinfer.branching.vocabulary import Vocabulary
from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.prefix_cache import PrefixCache, PrefixCacheConfig
from jaxinfer.config import EngineConfig
from jaxinfer.engine.adjusting import (
    adjustments_of,
    prompt_targets,
    take_logprobs,
    take_prompt_logprobs,
    wants_logprobs,
)
from jaxinfer.engine.constraints import DeviceConstraints
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.metrics import EngineMetrics, ProgressLog
from jaxinfer.engine.plain_decoding import PlainDecoding
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.request_group import RequestGroup
from jaxinfer.engine.scheduler import Landing, SchedulerLimits, SchedulerOutput
from jaxinfer.engine.strategy import RoundsResult, Strategy
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.adjusted_sampling import SamplingShape
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.commit_tail import packed_moves
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import CONSTRAINT, KV, TARGET, everywhere_on
from jaxinfer.programs.runner import Runner, initial_state
from jaxinfer.programs.step import StepOutput
from jaxinfer.programs.warm_up import warm_up
from jaxinfer.sampling.logprobs import TokenLogprobs

logger = logging.getLogger(__name__)


class CompileAfterWarmUpError(RuntimeError):
    """A step needed a program that warm-up had not compiled, and the engine was told to treat that as an error."""


# A result that was there already when the host asked for it does not tell how long the device took.
_WAITED = 20e-6


@dataclass
class _Launch:
    """A step on its way."""

    output: SchedulerOutput
    built: BuiltBatch
    token_ids: jax.Array  # int32 [N * width, Q], those of a row in order; -1: none
    width: int = 1  # the most tokens that a step lands for a row
    rounds: RoundsResult | None = None  # None: a plain step
    logprobs: TokenLogprobs | None = None  # [width * Q]
    prompt_logprobs: TokenLogprobs | None = None
    begin: float | None = None  # when it was launched; None: programs were compiled for it


def _rounds_run(launch: _Launch, landed: np.ndarray) -> int:
    """In how many rounds of a launch any row took part, or landed something: bool [N * width, rows]."""
    assert launch.rounds is not None
    if launch.rounds.ran is None:
        return int(landed[:: launch.width].any(axis=1).sum())
    return int(np.asarray(launch.rounds.ran)[:, launch.built.logits_rows].any(axis=1).sum())


class EngineCore:
    """Continuous batching of one model over one KV pool. Not thread-safe: one caller drives it.

    While the device runs a launch, the host prepares the next one; results are read one launch late. Requests whose
    next sampling depends on their latest token through the host (penalties, bad words) make it wait for each result.

    Args:
        vocabulary: where requests are to be held to automata on the device; else the host does that.
    """

    def __init__(
        self,
        model: DecoderLM,
        config: EngineConfig,
        *,
        dtype,
        mesh=None,
        vocabulary: Vocabulary | None = None,
        make_strategy: Callable[[EnginePrograms, Buckets], Strategy] = lambda programs, buckets: PlainDecoding(
            programs.decode_loop, buckets
        ),
    ) -> None:
        self.config = config
        self.model_config = model.config
        self.metrics = EngineMetrics()
        self.buckets = Buckets.from_config(config)
        self.programs = EnginePrograms.of(
            self.buckets, vocab_size=model.config.vocab_size, max_decode_steps=config.max_decode_steps,
            page_size=config.page_size,
        )  # fmt: skip
        self.strategy = make_strategy(self.programs, self.buckets)
        self.programs = self.programs.followed_by(self.strategy.follower)
        num_pages = config.num_pages + self.strategy.num_tail_pages
        cache = KVCache.allocate(
            model.config, num_pages=num_pages, page_size=config.page_size, dtype=dtype, sharding=sharding_of_pages(mesh)
        )
        allocator = PageAllocator(config.num_pages)
        self.prefix_cache = None
        if config.enable_prefix_caching:
            self.prefix_cache = PrefixCache(
                PrefixCacheConfig(config.page_size, eviction_policy=config.prefix_cache_policy), allocator
            )
        self.scheduler = self.strategy.make_scheduler(
            SchedulerLimits(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                prefill_room=self.buckets.prefill_room,
                scheduling_policy=config.scheduling_policy,
                block_size=self.strategy.block_size,
            ),
            KVCacheManager(allocator, config.page_size, self.prefix_cache, self.strategy.block_size),
        )
        self.input_batch = InputBatch(self.buckets, self.strategy, page_size=config.page_size, num_pages=num_pages)
        self.constraints = None if vocabulary is None else DeviceConstraints(vocabulary, mesh)
        of_constraints = {} if self.constraints is None else {CONSTRAINT: self.constraints.model}
        self.runner = Runner(
            {TARGET: model, **of_constraints, **self.strategy.models},
            {**initial_state(cache, config.max_num_seqs, everywhere_on(mesh)), **self.strategy.state},
            select_backend(config.attention_backend),
            programs=[*(() if self.strategy.takes_prompts else self.programs.all), *self.strategy.programs],
            mesh=mesh,
            on_compile=self._count_compile,
        )
        self.warm = False
        self.compile_listeners: list[Callable[[str], None]] = []  # are told what is compiled, in words, before it is
        self.landing_listeners: list[Callable[[list[Landing]], None]] = []  # may change how requests go on
        self._in_flight: deque[_Launch] = deque()
        self._ready = 0.0  # when the results that were read last were there
        self._progress_log = ProgressLog()
        self._arrivals = 0

    @property
    def kv(self) -> KVCache:
        """The pool, as the latest launch leaves it."""
        return self.runner.state[KV]

    def warm_up(self, *, progress: bool = True) -> int:
        """Compile every program that requests can need; from then on a compile is counted, logged and, with
        `strict_compiles`, an error.

        Returns:
            The number of programs.
        """
        count = warm_up(self.runner, progress=progress)
        if not self.has_unfinished_requests():
            self.strategy.measure(self.runner, self.scheduler.kv.allocator)
        self.warm = True
        return count

    def add_request(self, request: Request) -> None:
        """Queue a request; it takes part from the next step on.

        Raises:
            ValueError: it has no prompt, may grow beyond max_model_len, or its id is in use.
        """
        self._check(request)
        self._number(request)
        self.scheduler.add_request(request)

    def add_group(self, group: RequestGroup) -> None:
        """Queue the members of a group.

        Raises:
            ValueError: as for `add_request`; nothing is queued then.
        """
        for member in group.members:
            self._check(member)
        rope = self.model_config.rope
        if rope.depends_on_length and any(m.num_prompt_tokens > rope.max_position_embeddings for m in group.members):
            group.share_nothing()
        for member in group.order:
            self._number(member)
        if group.trunk is not None:
            group.trunk.arrival = group.order[0].arrival
        self.scheduler.add_group(group)

    def _check(self, request: Request) -> None:
        if request.num_prompt_tokens == 0:
            raise ValueError(f"request {request.request_id!r} has an empty prompt: it needs at least 1 token")
        if request.max_total_tokens > self.config.max_model_len:
            raise ValueError(
                f"request {request.request_id!r} may grow to {request.max_total_tokens} tokens, more than "
                f"max_model_len={self.config.max_model_len}"
            )

    def _number(self, request: Request) -> None:
        rope = self.model_config.rope
        if rope.depends_on_length and request.num_prompt_tokens > rope.max_position_embeddings:
            # What such a prompt's tokens are turned by, and so what is cached of them, depends on its whole length.
            request.cache_key = (request.cache_key, request.num_prompt_tokens)
        if self.constraints is not None:
            self.constraints.enter(request, self.runner)
        request.arrival = self._arrivals
        self._arrivals += 1

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[Landing]:
        """Launch the next step and account for the results of the one before.

        Returns:
            The tokens that landed; a request that ended with them has a finished status.
        """
        landings = []
        self.scheduler.rounds = self.strategy.choose(self.scheduler.running, len(self.scheduler.waiting))
        if self.scheduler.num_adjusting_by_output or self.strategy.wants_landing:
            landings = self._land_all()
        launched = self._launch()
        if not launched or not self.config.overlap:
            return landings + self._land_all()
        while len(self._in_flight) > 1:
            landings += self._land()
        return landings

    def _launch(self) -> bool:
        """Schedule and launch; whether there was anything to run."""
        begin, compiles = time.perf_counter(), self.metrics.num_compiles_total
        output = self.scheduler.schedule()
        left = output.finished_req_ids | output.preempted_req_ids
        if left:
            self.strategy.left(left)
            self.input_batch.remove(left)
        if not output.requests:
            return False
        built = self.input_batch.build(output)
        self.strategy.prepare(output, built, self.input_batch, self.runner)
        launch_begin = time.perf_counter()
        launched = self._launch_rounds(output, built) if output.num_rounds else self._launch_step(output, built)
        metrics = self.metrics
        metrics.num_launches_total += 1
        metrics.scheduled_tokens_total += output.total_num_scheduled_tokens
        if metrics.num_compiles_total == compiles:  # a compile is not the host's everyday work
            metrics.host_seconds_total += time.perf_counter() - begin
            launched.begin = launch_begin
        self._in_flight.append(launched)
        return True

    def _launch_rounds(self, output: SchedulerOutput, built: BuiltBatch) -> _Launch:
        result = self.strategy.launch(built, self.runner)
        launched = _Launch(output, built, result.token_ids, result.width, result)
        if result.sampled_after is not None and wants_logprobs(output):
            hidden, sampled = result.sampled_after
            launched.logprobs = self.runner.launch(self.programs.prompt_logprobs, hidden.shape[0], hidden, sampled)
        if result.logprobs is not None and wants_logprobs(output):
            launched.logprobs = result.logprobs
        return launched

    def _launch_step(self, output: SchedulerOutput, built: BuiltBatch) -> _Launch:
        """A step, and what its rows need besides: adjusted sampling and log probabilities."""
        programs, launch = self.programs, self.runner.launch
        result: StepOutput = launch(programs.step, built.packed.shape, built.packed.buffer)
        tokens, logprobs, prompt_logprobs = result.token_ids, None, None
        adjustments = adjustments_of(output, built, programs.adjusted_sampling)
        if adjustments is not None:
            shape = SamplingShape(built.packed.shape.num_logits, adjustments.row.shape[0])
            tokens, logprobs = launch(programs.adjusted_sampling, shape, result.logits, result.samples, adjustments)
        targets = prompt_targets(output, built)
        if targets is not None:
            positions = result.hidden.shape[0]
            targets = np.pad(targets, (0, positions - len(targets)))
            prompt_logprobs = launch(programs.prompt_logprobs, positions, result.hidden, targets)
        return _Launch(output, built, tokens[None], logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _land_all(self) -> list[Landing]:
        landings = []
        while self._in_flight:
            landings += self._land()
        return landings

    def _land(self) -> list[Landing]:
        """Read the oldest launch's results and account for them."""
        launch = self._in_flight.popleft()
        waits = time.perf_counter()
        tokens = np.asarray(launch.token_ids)[:, launch.built.logits_rows]  # waits for the device
        begin = time.perf_counter()
        seconds = 0.0
        if launch.begin is not None and begin - waits > _WAITED:
            seconds = begin - max(launch.begin, self._ready)
        self._ready = begin
        landed = tokens >= 0
        # What is launched ahead of rows that have ended runs no round at all, and a step that lands nothing runs.
        steps = 1 if launch.rounds is None else _rounds_run(launch, landed)
        by_request = tokens.T.tolist()
        if not landed.all():
            by_request = [[token for token in row if token >= 0] for row in by_request]
        if launch.prompt_logprobs is not None:
            take_prompt_logprobs(launch.output, launch.built, launch.prompt_logprobs)
        landings = self.scheduler.update_from_output(launch.output, by_request)
        if launch.logprobs is not None:
            take_logprobs(landings, launch.built, launch.logprobs, launch.width)
        for listen in list(self.landing_listeners):
            listen(landings)
        self.strategy.landed(launch.output, launch.built, launch.rounds, max(1, steps), seconds, self.metrics)
        shape = launch.built.packed.shape
        if launch.rounds is not None and launch.rounds.details is None and seconds and steps:
            self.scheduler.costs.observe(shape.num_logits, seconds / steps, lanes=shape.lane_pages > 0)
        metrics = self.metrics
        metrics.num_steps_total += steps
        metrics.scheduled_rows_total += steps * len(launch.output.requests)
        now = time.perf_counter()
        metrics.count_landings(landings, now)
        metrics.host_seconds_total += time.perf_counter() - begin
        self._progress_log.tick(self.get_metrics, now)
        return landings

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request now, whatever it is doing; its pages return to the pool and what is in flight is dropped."""
        self.scheduler.finish_requests([request], status)

    def fork(self, parent: Request, child: Request) -> None:
        """Let a sequence go on beside `parent`, whose tokens have all landed; see `Scheduler.fork`."""
        self._number(child)
        moves = self.scheduler.fork(parent, child)
        program = self.programs.commit_tail
        for ends in packed_moves(moves, program.shapes[0]):
            self.runner.launch(program, program.shapes[0], ends)

    def abort(self, request_id: str) -> list[Request]:
        """End a request, or what is unfinished of a group, by id; none where there is no such unfinished request."""
        requests = self.scheduler.requests
        found = [requests[request_id]] if request_id in requests else []
        if not found:
            found = [
                request for request in requests.values() if request.group and request.group.request_id == request_id
            ]
        for request in found:
            self.finish(request, RequestStatus.FINISHED_ABORTED)
        return found

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; False if running requests still use some of it, which stays."""
        if self.prefix_cache is None:
            return True
        self.prefix_cache.clear()
        return self.prefix_cache.num_pages == 0

    def draw_prefix_cache(self, show: Callable[[list[int]], str] | None = None) -> str:
        """The tree of cached prefixes; `show` says what to write of a node's tokens."""
        return "prefix caching is off" if self.prefix_cache is None else self.prefix_cache.dump(show)

    def get_metrics(self) -> EngineMetrics:
        """The metrics, gauges brought up to date."""
        metrics, scheduler, allocator = self.metrics, self.scheduler, self.scheduler.kv.allocator
        running = [request for request in scheduler.running if not request.is_trunk]
        metrics.num_requests_running = len(running)
        metrics.num_requests_waiting = len(scheduler.requests) - len(running)
        metrics.branch_count = sum(request.group is not None for request in running)
        metrics.kv_cache_usage_perc = 1 - scheduler.kv.num_available / allocator.num_pages
        metrics.num_cached_tokens = allocator.num_cached * self.config.page_size
        if self.prefix_cache is not None:
            stats = self.prefix_cache.stats
            metrics.prefix_cache_queries = stats.total_tokens_processed
            metrics.prefix_cache_hits = stats.tokens_reused
        metrics.num_preemptions_total = scheduler.num_preemptions
        return metrics

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is in exactly one state."""
        self.scheduler.check_integrity()

    def _count_compile(self, program: str) -> None:
        self.metrics.num_compiles_total += 1
        for tell in self.compile_listeners:
            tell(program)
        if not self.warm:
            logger.debug("compiling: %s", program)
            return
        self.metrics.num_compiles_after_warm_up_total += 1
        if self.config.strict_compiles:
            raise CompileAfterWarmUpError(f"compiled after warm-up: {program}")
        logger.warning("compiled after warm-up, which delays running requests: %s", program)
