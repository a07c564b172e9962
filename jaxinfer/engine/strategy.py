"""Strategies: ways to decode once prompts are computed, as the scheduler and the engine see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.config import EngineConfig
from jaxinfer.constraints.block_walk import BlockWalk
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import Program
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.stand_ins import StandIn
from jaxinfer.programs.step import Follower
from jaxinfer.sampling.logprobs import TokenLogprobs
from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.scheduler_output import Continuation, SchedulerLimits, SchedulerOutput


@dataclass(frozen=True)
class RoundsResult:
    """The results of a launch of rounds, on the device."""

    token_ids: jax.Array  # int32 [N * W, Q], a row's tokens in order; -1: none
    width: int = 1  # W, the most tokens that a round lands for a row
    details: Any = None  # the strategy's own
    was_redrawn: jax.Array | None = None  # bool [Q], first tokens that masks have changed; None: there are no masks
    ran: jax.Array | None = None  # bool [N, Q], rounds in which rows took part; None: those that landed something
    logprobs: TokenLogprobs | None = None  # [N * W, Q], of these tokens, where the batch wants them; None: of none
    num_accepted: jax.Array | None = None  # int32 [N, Q], tokens of rounds that were accepted drafts; None: no drafts


@dataclass(frozen=True)
class LandedRounds[T]:
    """A launch of rounds that was read, for observers."""

    requests: Sequence[Request]
    rows: np.ndarray  # int32, the row of each request in the output
    output: T


class Strategy(Protocol):
    """A way to decode in rounds. What it chooses may change from launch to launch, and changes no token."""

    @property
    def programs(self) -> Sequence[Program]:
        """Programs that the engine compiles for it, besides those of plain decoding."""
        ...

    @property
    def models(self) -> Mapping[str, Any]:
        """Models that its programs read, besides the target."""
        ...

    @property
    def num_tail_pages(self) -> int:
        """Pages of the pool after those of requests: its programs write there what they do not keep."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens that see each other and are computed at once; 1: every token sees those before it."""
        ...

    @property
    def takes_prompts(self) -> bool:
        """Whether its rounds compute prompts too: then no plain step ever runs."""
        ...

    def make_state(self) -> Mapping[str, Any]:
        """Make the parts of the device's state that its programs change, besides the target's pool and the seats."""
        ...

    @property
    def follower(self) -> Follower | None:
        """The follower that takes in the tokens of plain steps."""
        ...

    def choose(self, requests: Sequence[Request], num_waiting: int) -> Rounds:
        """Choose the rounds of the next launch: for these running requests, if all are in their seats then, or if none
        runs, for those that wait. The choice comes back with the launches planned by it, plain steps too."""
        ...

    @property
    def wants_landing(self) -> bool:
        """Whether the choice needs to know all tokens that are in flight."""
        ...

    def shape_for(self, rounds: Rounds, *, rows: int, pages_per_row: int, lanes: bool, stand_in: StandIn) -> BatchShape:
        """Return the smallest shape of a packed batch that holds a launch, or its stand-in.

        Args:
            rounds: the chosen rounds.
            rows: rows of the launch or, with `lanes`, its sequences.
            stand_in: chooses a larger shape where that alone is compiled.

        Raises:
            ValueError: no shape holds it.
        """
        ...

    def widened(self, shape: BatchShape, seated: int, stand_in: StandIn) -> BatchShape:
        """Return the shape of one round beside chunks of prompts, given that of a step.

        Args:
            seated: number of rows that are in their seats.
            stand_in: see `shape_for`.
        """
        ...

    def make_scheduler(self, limits: SchedulerLimits, kv: KVCacheManager) -> Scheduler:
        """Make the scheduler that decides which requests take part."""
        ...

    def prepare(self, output: SchedulerOutput, built: BuiltBatch, batch: InputBatch, runner: Runner) -> None:
        """Take part in a launch, of rounds or of a plain step, before it runs."""
        ...

    def launch(self, output: SchedulerOutput, built: BuiltBatch, runner: Runner) -> RoundsResult:
        """Run `built.packed["num_steps"]` of the chosen rounds, which are `output.rounds`."""
        ...

    def landed(
        self,
        output: SchedulerOutput,
        built: BuiltBatch,
        result: RoundsResult | None,
        steps: int,
        seconds: float,
        metrics: EngineMetrics,
    ) -> Sequence[Continuation]:
        """Note a launch whose tokens have landed; `result` None: it was a plain step.

        Args:
            steps: number of steps or rounds that ran, at least 1.
            seconds: time that the device worked on it, or 0 if that is not known.
            metrics: metrics to count in.

        Returns:
            Where requests continue, for those that do not simply continue after what has landed.
        """
        ...

    def walked(self, request: Request, walk: BlockWalk, metrics: EngineMetrics) -> None:
        """Note a round of a constrained request's block, once the host has committed its tokens."""
        ...

    def measure(self, runner: Runner, allocator: PageAllocator) -> None:
        """Time launches, once all programs are compiled and while there are no requests."""
        ...

    def left(self, request_ids: Iterable[str]) -> None:
        """Note that requests have left their seats, because they finished or were preempted."""
        ...

    def weights_changed(self, model: str, requests: Sequence[Request]) -> Sequence[Continuation]:
        """Note that a model has other weights: what was computed with the old ones does not count.

        Args:
            requests: those that run.

        Returns:
            As `landed` does.
        """
        ...

    def start_over(self) -> None:
        """Forget all that is noted of requests, seats and pages. What was measured stays."""
        ...


class StrategyMaker(Protocol):
    """The maker of an engine's strategy, and the memory that the strategy takes."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the parameters of models besides the target, over all devices."""
        ...

    @property
    def layers(self) -> ModelConfig | None:
        """Configuration of the layers for which such a model keeps keys and values; None: it keeps none."""
        ...

    def kv_bytes_per_token(self, dtype: jnp.dtype) -> int:
        """Return the bytes that one slot takes in all of these layers, over all devices."""
        ...

    def tail_tokens(self, engine: EngineConfig) -> int:
        """Return how many slots the pools have besides those of requests."""
        ...

    def state_bytes(self, engine: EngineConfig, model: ModelConfig, dtype: jnp.dtype) -> int:
        """Return the bytes that seats take on each device, if they are worth counting."""
        ...

    def strategy(
        self,
        engine: EngineConfig,
        target: DecoderLM,
        *,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        whole: jax.sharding.Sharding | None = None,
        abstract: bool = False,
    ) -> Callable[[EnginePrograms, Buckets], Strategy]:
        """Return the function by which an `EngineCore` makes its strategy.

        Args:
            whole: sharding of seats, if it is not the mesh's.
            abstract: whether the state consists of shapes only, to compile for.
        """
        ...
