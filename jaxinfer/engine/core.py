"""The engine: requests in, tokens out, one launch ahead of the results that it reads."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from jaxinfer.attention.backend import select_backend
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.cache.prefix_cache import PrefixCache
from jaxinfer.config import EngineConfig
from jaxinfer.constraints.workers import Workers
from jaxinfer.engine.arrivals import Arrivals, members_of, unfinished
from jaxinfer.engine.compile_count import CompileCount
from jaxinfer.engine.device_state import make_device_state
from jaxinfer.engine.engine_warm_up import EngineWarmUp
from jaxinfer.engine.errors import CompileAfterWarmUpError, ProcessError, StalledError
from jaxinfer.engine.host_state import HostState, requeue
from jaxinfer.engine.input_batch import InputBatch
from jaxinfer.engine.launcher import Launcher, LaunchListener
from jaxinfer.engine.metrics import EngineMetrics, ProgressLog
from jaxinfer.engine.pausing import Pausing
from jaxinfer.engine.plain_decoding import PlainDecoding
from jaxinfer.engine.search import Search, advance_all
from jaxinfer.engine.sleeping import Sleeping
from jaxinfer.engine.strategy import Strategy
from jaxinfer.engine.suspects import Suspects
from jaxinfer.engine.transactions import Transactions
from jaxinfer.engine.weights import EngineWeights
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.commit_tail import packed_moves
from jaxinfer.programs.compiles import hearing_of_compiles
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import KV, TARGET
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.weights import detached, hollow
from jaxinfer.scheduling.request import Request, RequestStatus
from jaxinfer.scheduling.request_group import RequestGroup
from jaxinfer.scheduling.scheduler import Landing, Scheduler

__all__ = ["CompileAfterWarmUpError", "EngineCore", "Landing", "StalledError"]

logger = logging.getLogger(__name__)

# The longest that a step waits before it returns.
_WAIT_SECONDS = 0.2


class EngineCore:
    """Continuous batching of one model over one KV pool. One thread drives it.

    While the device runs a launch, the host prepares the next one; results are read one launch late. Requests whose
    next draw needs their latest token on the host (beams, constraints that refuse most tokens) sit out the launches
    until it has landed; the others continue.

    A step is a transaction. Registered requests and their landed tokens are the only truth; if a step is interrupted or
    raises, everything else is first rebuilt from them, and what had not landed is computed again, to the same tokens.
    Arrivals and aborts are notes, which are taken at the start of a step, or at once if none runs.

    Args:
        lent: whether a caller holds the model's arrays too, or of each leaf; those are never written over.
        drafter_is_lent: the same of a drafter.

    Attributes:
        weights: of its models, and their updates.
        compile_listeners, launch_listeners: called with each compile, in words, and with each launch, before it runs.
        landing_listeners: called within the step with what has landed or ended; after an interruption maybe twice.
        searches: searches that steer some of the requests.
    """

    def __init__(
        self,
        model: DecoderLM,
        config: EngineConfig,
        *,
        dtype,
        mesh=None,
        lent: bool | Sequence[bool] = True,
        drafter_is_lent: bool = True,
        make_runner: type[Runner] = Runner,
        make_strategy: Callable[[EnginePrograms, Buckets], Strategy] = lambda programs, buckets: PlainDecoding(
            programs.decode_loop, buckets
        ),
    ) -> None:
        self.config = config
        model = detached(model)
        self.model_config = model.config
        self.metrics = EngineMetrics()
        self.compiles = CompileCount(self.metrics, is_strict=config.strict_compiles)
        self.compile_listeners = self.compiles.listeners
        self.buckets = Buckets.from_config(config)
        self.programs = EnginePrograms.of(
            self.buckets, vocab_size=model.config.vocab_size, max_decode_steps=config.max_decode_steps,
            page_size=config.page_size, processed=config.processes_logprobs,
        )  # fmt: skip
        self.strategy = make_strategy(self.programs, self.buckets)
        self.programs = self.programs.followed_by(self.strategy.follower)
        self.make_state = partial(make_device_state, config, model.config, self.strategy, dtype=dtype, mesh=mesh)
        self.runner = make_runner(
            {TARGET: model, **self.strategy.models}, self.make_state(), select_backend(config.attention_backend),
            programs=[*(() if self.strategy.takes_prompts else self.programs.all), *self.strategy.programs],
            mesh=mesh, on_compile=self.compiles.traced,
            lent={TARGET: lent, **dict.fromkeys(self.strategy.models, drafter_is_lent)},
        )  # fmt: skip
        hollow(model, *self.strategy.models.values())
        self.transactions = Transactions(self._advance, self._blame, self._recover)
        self._requests = self.transactions.requests
        self.landing_listeners = self.transactions.listeners
        self.launch_listeners: list[LaunchListener] = []
        self.workers = Workers()
        self._host = self._make_host()
        self.weights, self.pausing, self.sleeping = EngineWeights(self), Pausing(self), Sleeping(self)
        self.searches: list[Search] = []
        self._waits_for: set[str] = set()
        self._suspects = Suspects()
        self._progress_log = ProgressLog()
        self._warm_up = EngineWarmUp(self.runner, self.compiles)
        self._arrivals = Arrivals(config, model.config.rope)

    def _make_host(self, before: HostState | None = None) -> HostState:
        return HostState(
            self.config, self.buckets, self.strategy, self.programs, self.runner, self.metrics, self.workers,
            self.transactions.news.append, self.launch_listeners, before,
        )  # fmt: skip

    @property
    def scheduler(self) -> Scheduler:
        return self._host.scheduler

    @property
    def input_batch(self) -> InputBatch:
        return self._host.input_batch

    @property
    def launcher(self) -> Launcher:
        return self._host.launcher

    @property
    def prefix_cache(self) -> PrefixCache | None:
        return self._host.prefix_cache

    @property
    def kv(self) -> KVPool:  # as the latest launch leaves it
        return self.runner.state[KV]

    def warm_up(self, *, progress: bool = True) -> int:
        """Compile every program that requests can need, and return how many there are.

        From then on a compile is counted, logged and, with `strict_compiles`, an error. Raises RuntimeError if weights
        or KV are not on the device.
        """
        if reason := self.sleeping.reason() or self.weights.obstacle():
            raise RuntimeError(reason)
        count = self._warm_up.run(progress=progress)
        if not self.has_unfinished_requests():
            self.strategy.measure(self.runner, self.scheduler.kv.allocator)
        self.compiles.is_warm = True
        return count

    def warm_up_in_background(self) -> None:
        """Compile these programs in background threads, while steps run.

        A step that needs a program that is not ready compiles it, or waits for the thread that does.
        """
        self._warm_up.begin()
        weakref.finalize(self, self._warm_up.cancel)

    def add_request(self, request: Request) -> None:
        """Queue a request; see `add`."""
        self.add([request])

    def add_group(self, group: RequestGroup) -> None:  # see `add`
        self.add([group])

    def add(self, items: Sequence[Request | RequestGroup], *, search: Search | None = None) -> None:
        """Queue requests and groups, all of them or none; they take part from the next step on.

        Args:
            search: the search that steers them.

        Raises:
            ValueError: one of them has no prompt, may grow beyond max_model_len or the pool, or has an id that is in
                use; nothing is queued then.
        """
        self.check(items)
        self.transactions.note(partial(self._enter, list(items), search))

    def check(self, items: Sequence[Request | RequestGroup]) -> None:
        """Raise the ValueError with which `add` would refuse these. Changes nothing."""
        requests = [request for item in items for request in members_of(item)]
        self._arrivals.check(requests, self.scheduler, self._requests)

    def abort(self, *request_ids: str) -> list[Request]:
        """End requests, or the unfinished members of groups, by id; ids without unfinished requests are ignored.

        Returns:
            The requests that end: now or, if a step runs, at the start of the next one.
        """
        found = unfinished(self._requests, request_ids)
        self.transactions.note(partial(self._abort, request_ids))
        return found

    def pause(self, reason: str) -> None:
        """Launch nothing, from the next step on, until `resume` is called for every reason. Steps wait meanwhile."""
        self.transactions.note(partial(self._waits_for.add, reason))

    def resume(self, reason: str) -> None:  # see `pause`
        self.transactions.note(partial(self._waits_for.discard, reason))

    def why_idle(self) -> str | None:
        """Return why nothing is launched, for a person; None: launches run."""
        if self._waits_for:
            return f"nothing is launched: {'; '.join(sorted(self._waits_for))}"
        return self.sleeping.reason() or self.pausing.reason() or self.weights.obstacle()

    def _enter(self, items: Sequence[Request | RequestGroup], search: Search | None) -> None:
        """Register requests, which recoveries restore from then on, and queue them."""
        if search is not None and not search.beams:
            return  # it was dropped before it began
        requests = [request for item in items for request in members_of(item)]
        self.weights.note(requests)
        for item in items:
            self._arrivals.number(item)
        if search is not None and search not in self.searches:
            self.searches.append(search)
        self._requests.update({request.request_id: request for request in requests})
        for item in items:
            if members_of(item)[0].request_id in self.scheduler.requests:
                continue  # a recovery has queued it
            if isinstance(item, RequestGroup):
                self.scheduler.add_group(item)
            else:
                self.scheduler.add_request(item)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request in unfinished(self._requests, request_ids):
            self.finish(request, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        """Whether steps have something left to do or to hand out."""
        return self.transactions.is_pending or bool(self.searches)

    def step(self) -> list[Landing]:
        """Launch the next step and account for the results of the one before.

        If the step before was interrupted, or has raised, the engine is rebuilt first.

        Returns:
            What has landed since the last step that returned; a request that has ended has a finished status.

        Raises:
            CompileAfterWarmUpError: with `strict_compiles`.
            StalledError: requests are unfinished, and nothing can be done for them.
        """
        with hearing_of_compiles(self.compiles.compiled):
            return self.transactions.step()

    def _advance(self) -> None:
        moved = self.transactions.take_notes()
        if may_launch := self.why_idle() is None:
            self._warm_up.go_on()
        if self._suspects.clear(self._requests):
            self.scheduler.waiting.let_all_run()
            moved = True
        moved |= advance_all(self.searches)
        scheduler, launcher = self.scheduler, self.launcher
        moved |= launcher.land_walked()
        launcher.concerned = scheduler.running
        rounds = self.strategy.choose(scheduler.running, len(scheduler.waiting))
        if self.strategy.wants_landing or scheduler.awaits_tokens(rounds):
            moved |= self._land(leave=0)
        launched, stalls = False, self.runner.num_stalls
        if may_launch:
            launched = launcher.launch(rounds)
            moved |= launcher.has_moved
        # A launch that waited for its compile is read at once: the next one may have to be compiled too.
        overlaps = self.config.overlap and self.runner.num_stalls == stalls
        landed = self._land(leave=int(launched and overlaps))
        self._progress_log.tick(self.get_metrics, time.perf_counter())
        if moved or launched or landed or not (scheduler.requests or self.searches):
            return
        if launcher.num_walking:
            launcher.land_walked(seconds=_WAIT_SECONDS)
            return
        if may_launch:
            raise StalledError(f"no request can run, and nothing is in flight: {self._host.in_words()}")
        self.transactions.notes.wait(_WAIT_SECONDS)

    def _land(self, *, leave: int) -> bool:
        """Read launches until `leave` are in flight; return whether there were any to read."""
        launcher = self.launcher
        found = launcher.num_in_flight > leave
        while launcher.num_in_flight > leave:
            launcher.land()
            advance_all(self.searches)
        return found

    def land_all(self) -> None:
        """Read every launch in flight, and let all walks end."""
        self._land(leave=0)
        while self.launcher.num_walking:
            self.launcher.land_walked(seconds=_WAIT_SECONDS)

    def _blame(self, error: Exception) -> None:
        """Note that a step has failed; raise the error if no request can be its cause, or if it is for the caller."""
        if isinstance(error, (CompileAfterWarmUpError, ProcessError, StalledError)):
            raise error
        self.metrics.num_step_failures_total += 1
        if not self._suspects.failed(error, self.launcher.concerned, self._requests):
            raise error

    def _recover(self) -> None:
        """Rebuild everything from registered requests and their landed tokens. If interrupted, it is begun again."""
        self.metrics.num_recoveries_total += 1
        self.rebuild()

    def rebuild(self) -> None:
        """Let all requests start over, with a host state and, where it is lost, a device state that know none."""
        self.searches[:] = [search for search in self.searches if search.beams]
        for search in self.searches:
            search.restore()
            self._requests.update({beam.request_id: beam for beam in search.beams})
        steered = {beam for search in self.searches for beam in search.beams}
        for request in list(self._requests.values()):
            if request.is_steered and request not in steered:
                request.finish(RequestStatus.FINISHED_ABORTED)  # a beam that no search names
            request.start_over()
        self.launcher.drop()
        if self.sleeping.has_state:
            self.runner.salvage(self.make_state)
        self.strategy.start_over()
        unfinished = [request for request in self._requests.values() if not request.is_finished]
        host = self._make_host(self._host)
        requeue(host.scheduler, unfinished, self._suspects.only(self._requests))
        self._host = host

    def finish(
        self,
        request: Request,
        status: RequestStatus,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """End a request now, whatever it is doing; its pages return to the pool and what is in flight is dropped.

        For notes, listeners and searches. A request that has ended already gets this end instead: a stop string may
        have come before it.

        Args:
            num_output_tokens: how many output tokens it keeps; None: all.
        """
        before = request.status
        self.transactions.news.append(request)
        request.finish(status, stop_reason=stop_reason, error=error, num_output_tokens=num_output_tokens)
        if not before.is_finished:
            self.scheduler.release(request, was_running=before is RequestStatus.RUNNING)

    def number(self, child: Request) -> None:
        """Number a request that will be forked. A recovery may find it as soon as a search names it, so this comes
        before."""
        self._arrivals.number(child)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child`, which has its number, continue from `parent`, whose tokens have all landed; see
        `Scheduler.fork`."""
        self._requests[child.request_id] = child
        moves = self.scheduler.fork(parent, child)
        program = self.programs.commit_tail
        for ends in packed_moves(moves, program.shapes[0]):
            self.runner.launch(program, program.shapes[0], ends)

    def drop_search(self, search: Search) -> None:
        """Let a search steer no longer, if it does."""
        if search in self.searches:
            self.searches.remove(search)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; False if running requests still use some of it, which stays."""
        if self.prefix_cache is None:
            return True
        self.transactions.make_whole()
        self.prefix_cache.clear()
        return self.prefix_cache.num_pages == 0

    def get_metrics(self) -> EngineMetrics:
        """Return a copy of the metrics, with current gauges."""
        self.transactions.make_whole()
        self._host.set_gauges(self.metrics)
        return self.metrics.copy()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is in exactly one state."""
        self.transactions.make_whole()
        self.scheduler.check_integrity()
