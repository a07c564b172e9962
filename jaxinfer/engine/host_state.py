"""The state that an engine keeps on the host beside its requests. A recovery rebuilds all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jaxinfer.cache.kv_pool import kv_bytes_per_token
from jaxinfer.cache.page_log import make_page_allocator
from jaxinfer.cache.prefix_cache import CacheConfig, PrefixCache
from jaxinfer.config import EngineConfig
from jaxinfer.constraints.workers import Workers
from jaxinfer.engine.input_batch import InputBatch
from jaxinfer.engine.launcher import Launcher, LaunchListener
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.seat_entries import SeatEntries
from jaxinfer.engine.strategy import Strategy
from jaxinfer.engine.walkers import Walkers
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import KV, TARGET
from jaxinfer.programs.runner import Runner
from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.scheduler_output import SchedulerLimits


class HostState:
    """Pages, prefix cache, queues, seats and launches of one engine, without any request.

    Args:
        workers: threads for walks along the tokens of constrained requests.
        landing: called with each request before its tokens land.
        launching: called with each launch before it runs.
        before: an earlier state, whose counters continue; None: counters start at 0.
    """

    def __init__(
        self,
        config: EngineConfig,
        buckets: Buckets,
        strategy: Strategy,
        programs: EnginePrograms,
        runner: Runner,
        metrics: EngineMetrics,
        workers: Workers,
        landing: Callable[[Request], None],
        launching: Sequence[LaunchListener],
        before: HostState | None = None,
    ) -> None:
        slot_bytes = kv_bytes_per_token(runner.models[TARGET].config, runner.state[KV].k[0].dtype)
        allocator = make_page_allocator(config.num_pages, slot_bytes * config.page_size)
        self.prefix_cache: PrefixCache | None = None
        if config.enable_prefix_caching:
            settings = CacheConfig(config.page_size, config.prefix_cache_policy, config.prefix_cache_tokens)
            known = None if before is None or before.prefix_cache is None else before.prefix_cache.stats
            self.prefix_cache = PrefixCache(settings, allocator, known)
            if before is not None and before.prefix_cache is not None:
                self.prefix_cache.continue_events(before.prefix_cache.events)
        self.scheduler = strategy.make_scheduler(
            SchedulerLimits(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                prefill_room=buckets.prefill_room,
                scheduling_policy=config.scheduling_policy,
                step_shape=buckets.shape_for,
                block_size=strategy.block_size,
            ),
            KVCacheManager(allocator, config.page_size, self.prefix_cache, strategy.block_size),
        )
        if before is not None:
            self.scheduler.num_preemptions = before.scheduler.num_preemptions
            self.scheduler.pace = before.scheduler.pace
            self.scheduler.waiting.admits_new = before.scheduler.waiting.admits_new
        num_pages = config.num_pages + strategy.num_tail_pages
        self.input_batch = InputBatch(
            buckets, strategy, page_size=config.page_size, num_pages=num_pages, step=programs.step,
            stand_in=runner.stand_ins,
        )  # fmt: skip
        entries = None
        if not strategy.takes_prompts:
            vocab = runner.models[TARGET].config.vocab_size
            entries = SeatEntries(
                programs.entry, runner, num_seats=config.max_num_seqs, vocab=vocab, is_known=before is None
            )
        walkers = Walkers(workers, runner.models[TARGET].config.vocab_size)
        self.launcher = Launcher(
            self.scheduler, self.input_batch, entries, strategy, programs, runner, metrics, walkers, landing, launching
        )

    def set_gauges(self, metrics: EngineMetrics) -> None:
        """Update gauges, and the counters that are kept here."""
        scheduler, allocator = self.scheduler, self.scheduler.kv.allocator
        running = [request for request in scheduler.running if not request.is_trunk]
        metrics.num_requests_running = len(running)
        metrics.num_requests_waiting = len(scheduler.requests) - len(running)
        metrics.branch_count = sum(request.group is not None for request in running)
        metrics.kv_cache_usage_perc = 1 - scheduler.kv.num_available / allocator.num_pages
        metrics.num_cached_tokens = allocator.num_cached * scheduler.kv.page_size
        if self.prefix_cache is not None:
            stats = self.prefix_cache.stats
            metrics.prefix_cache_queries = stats.total_tokens_processed
            metrics.prefix_cache_hits = stats.tokens_reused
        metrics.num_preemptions_total = scheduler.num_preemptions

    def in_words(self) -> str:
        """Describe which requests wait where, for the message of an error."""
        scheduler, waiting, kv = self.scheduler, self.scheduler.waiting, self.scheduler.kv
        groups = {id(r.group): r.group for r in scheduler.requests.values() if r.group is not None}.values()
        lists = {
            "running": scheduler.running,
            "held among them": [request for request in scheduler.running if request.is_held],
            "waiting": list(waiting),
            "parked": waiting.parked,
            "aside": waiting.aside,
            "pending in groups": [request for group in groups for request in group.pending],
        }
        words = [f"{name}: {', '.join(r.request_id for r in found)}" for name, found in lists.items() if found]
        return "; ".join([*words, f"{kv.num_available} of {kv.allocator.num_pages} pages available"])


def requeue(scheduler: Scheduler, requests: Iterable[Request], only: frozenset[str] | None = None) -> None:
    """Queue requests that have started over in a scheduler without any: first those that have run, then by arrival.

    Their groups' counters are recomputed. Places up to `max_parallel` are given in the same order.

    Args:
        requests: unfinished requests.
        only: ids of requests that may run; the others wait until `waiting.let_all_run`.
    """
    order = sorted(requests, key=lambda request: (request.status is RequestStatus.WAITING, request.arrival))
    for group in {id(request.group): request.group for request in order if request.group is not None}.values():
        group.pending.clear()
        group.num_unfinished = group.num_running = 0
        if group.trunk is not None:
            group.trunk.start_over()
    scheduler.waiting.only = only
    scheduler.requests = {request.request_id: request for request in order}
    for request in order:
        if scheduler.lands_again:
            request.num_to_skip = request.num_output_tokens - request.versions.latest
        group = request.group
        if group is not None:
            group.num_unfinished += 1
            if group.num_unfinished > group.max_parallel:
                group.pending.append(request)
                continue
        scheduler.waiting.add(request)
