"""Ways for rows to go on once their prompts are computed: what the scheduler and the engine need to know of them."""

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
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import Program
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.step import Follower
from jaxinfer.sampling.logprobs import TokenLogprobs
from jaxinfer.scheduling.kv_cache_manager import KVCacheManager
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.scheduler_output import SchedulerLimits, SchedulerOutput


@dataclass(frozen=True)
class RoundsResult:
    """What a launch of rounds leaves on the device."""

    token_ids: jax.Array  # int32 [N * W, Q], those of a row in order; -1: none
    width: int = 1  # W, the most tokens that a round lands for a row
    # Of each row's last round, if it can say and the batch wants it, hidden states [T, hidden] of Q * W tokens and
    # padding, and what was sampled after each, int32 [T].
    sampled_after: tuple[jax.Array, jax.Array] | None = None
    details: Any = None  # the strategy's own
    ran: jax.Array | None = None  # bool [N, Q], rounds of rows; None: those that landed something
    logprobs: TokenLogprobs | None = None  # [Q * W], of what each row landed last, where it can say


@dataclass(frozen=True)
class LandedRounds[T]:
    """A launch of rounds that was read, for whoever wants to see what became of it."""

    requests: Sequence[Request]
    rows: np.ndarray  # int32, where each stands in the output
    output: T


class Strategy(Protocol):
    """A way to decode in rounds. What it chooses may change from launch to launch, and changes no token."""

    @property
    def programs(self) -> Sequence[Program]:
        """What the engine compiles for it, besides the programs of plain decoding."""
        ...

    @property
    def models(self) -> Mapping[str, Any]:
        """Models that its programs read, besides the target."""
        ...

    @property
    def num_tail_pages(self) -> int:
        """Pages of the pool behind those that requests share: its programs write there what they do not keep."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens that see each other, which are computed at once; 1: every token sees those before it."""
        ...

    @property
    def takes_prompts(self) -> bool:
        """Whether its rounds compute prompts too: then no plain step ever runs."""
        ...

    def make_state(self) -> Mapping[str, Any]:
        """Parts of the device's state that its programs change, besides the target's pool and the seats: new ones."""
        ...

    @property
    def follower(self) -> Follower | None:
        """What takes in the tokens of plain steps."""
        ...

    def choose(self, requests: Sequence[Request], num_waiting: int) -> Rounds:
        """What the next launch of rounds may be, if all of these running requests are in their seats then, or of those
        that wait, if none runs. It comes back with the launches that are planned by it, plain steps too."""
        ...

    @property
    def wants_landing(self) -> bool:
        """Whether the choice needs to know all tokens that are in flight."""
        ...

    def shape_for(self, rounds: Rounds, *, rows: int, pages_per_row: int, lanes: bool) -> BatchShape:
        """The smallest shape of a packed batch that holds a launch.

        Args:
            rounds: what was chosen.
            rows: of the launch, or with `lanes`, its sequences.

        Raises:
            ValueError: there is none.
        """
        ...

    def widened(self, shape: BatchShape, seated: int) -> BatchShape:
        """The shape of one round beside chunks of prompts, given that of a step.

        Args:
            seated: rows that are in their seats.
        """
        ...

    def make_scheduler(self, limits: SchedulerLimits, kv: KVCacheManager) -> Scheduler:
        """What decides which requests take part."""
        ...

    def prepare(self, output: SchedulerOutput, built: BuiltBatch, batch: InputBatch, runner: Runner) -> None:
        """Take part in a launch, of rounds or of a plain step, before it runs."""
        ...

    def launch(self, output: SchedulerOutput, built: BuiltBatch, runner: Runner) -> RoundsResult:
        """Run `built.packed["num_steps"]` rounds of what was chosen, which is `output.rounds`."""
        ...

    def landed(
        self,
        output: SchedulerOutput,
        built: BuiltBatch,
        result: RoundsResult | None,
        steps: int,
        seconds: float,
        metrics: EngineMetrics,
    ) -> None:
        """Take note of a launch whose tokens were read and appended; `result` None: it was a plain step.

        Args:
            steps: steps or rounds in which anything landed.
            seconds: that the device worked on it, or 0 where that is not known.
            metrics: to count in.
        """
        ...

    def measure(self, runner: Runner, allocator: PageAllocator) -> None:
        """Time launches, once all programs are compiled and while there are no requests."""
        ...

    def left(self, request_ids: Iterable[str]) -> None:
        """Requests that finished or were preempted leave their seats."""
        ...

    def start_over(self) -> None:
        """Forget all that is noted of requests, seats and pages. What was measured stays."""
        ...


class StrategyMaker(Protocol):
    """What makes the strategy of an engine, and what that takes of memory."""

    @property
    def weights_bytes(self) -> int:
        """Of the parameters of models besides the target, over all devices."""
        ...

    @property
    def layers(self) -> ModelConfig | None:
        """Of what such a model keeps keys and values."""
        ...

    def kv_bytes_per_token(self, dtype: jnp.dtype) -> int:
        """Bytes that one slot takes in all of these layers, over all devices."""
        ...

    def tail_tokens(self, engine: EngineConfig) -> int:
        """Slots of the pools besides those that requests share."""
        ...

    def state_bytes(self, engine: EngineConfig, model: ModelConfig, dtype: jnp.dtype) -> int:
        """What seats take on each device, where that is worth counting."""
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
        """What an `EngineCore` makes its strategy with.

        Args:
            whole: where seats lie, if not as the mesh says.
            abstract: with a state of shapes alone, to compile for.
        """
        ...
