"""The engine: requests in, tokens out, one device step at a time."""

from __future__ import annotations

import logging
import time

import numpy as np

from jaxinfer.attention.backend import select_backend
from jaxinfer.cache.kv_cache import KVCache
from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.config import EngineConfig
from jaxinfer.engine.buckets import Buckets
from jaxinfer.engine.input_batch import InputBatch
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.request import Request, RequestStatus
from jaxinfer.engine.scheduler import Scheduler, SchedulerLimits
from jaxinfer.engine.step import StepRunner
from jaxinfer.engine.step_batch import BatchShape
from jaxinfer.models.decoder import DecoderLM

logger = logging.getLogger(__name__)


class EngineCore:
    """Continuous batching of one model over one KV pool. Not thread-safe: one caller drives it."""

    def __init__(self, model: DecoderLM, config: EngineConfig, *, dtype, mesh=None) -> None:
        self.config = config
        self.model_config = model.config
        self.metrics = EngineMetrics()
        buckets = Buckets.from_limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
        )
        cache = KVCache.allocate(
            model.config, num_pages=config.num_pages, page_size=config.page_size, dtype=dtype, mesh=mesh
        )
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                max_prefill_rows=buckets.max_prefill_rows,
                page_size=config.page_size,
                scheduling_policy=config.scheduling_policy,
            ),
            PageAllocator(config.num_pages),
        )
        self.input_batch = InputBatch(buckets, page_size=config.page_size, num_pages=config.num_pages)
        self.runner = StepRunner(model, cache, select_backend(config.attention_backend), self._count_compile)
        self._arrivals = 0

    def add_request(self, request: Request) -> None:
        """Queue a request; it takes part from the next step on."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self.scheduler.add_request(request)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[tuple[Request, int]]:
        """Schedule, run and account for one device step.

        Returns:
            (request, new token) for every request that got a token in this step.
        """
        output = self.scheduler.schedule()
        self.input_batch.remove(output.finished_req_ids | output.preempted_req_ids)
        if not output.requests:
            return []
        built = self.input_batch.build(output)
        result = self.runner.run(built.packed)
        sampled = np.asarray(result.token_ids)[built.rows].tolist()
        landed = self.scheduler.update_from_output(output, sampled)
        metrics = self.metrics
        metrics.num_steps_total += 1
        metrics.scheduled_rows_total += len(output.requests)
        metrics.scheduled_tokens_total += output.total_num_scheduled_tokens
        metrics.generation_tokens_total += len(landed)
        for request, _ in landed:
            if request.num_output_tokens == 1:
                metrics.prompt_tokens_total += request.num_prompt_tokens
                request.metrics.first_token_time = time.perf_counter()
        return landed

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request now, whatever it is doing; its pages return to the pool."""
        self.scheduler.finish_requests([request], status)

    def abort(self, request_id: str) -> Request | None:
        """End a request by id; None where there is no such unfinished request."""
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            self.finish(request, RequestStatus.FINISHED_ABORTED)
        return request

    def get_metrics(self) -> EngineMetrics:
        """The metrics, gauges brought up to date."""
        metrics, scheduler = self.metrics, self.scheduler
        metrics.num_requests_running = len(scheduler.running)
        metrics.num_requests_waiting = len(scheduler.waiting)
        metrics.kv_cache_usage_perc = scheduler.allocator.num_held / scheduler.allocator.num_pages
        metrics.num_preemptions_total = scheduler.num_preemptions
        return metrics

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is in exactly one state."""
        self.scheduler.check_integrity()

    def _count_compile(self, shape: BatchShape) -> None:
        self.metrics.num_compiles_total += 1
        logger.debug("compiling a step for %s", shape)
