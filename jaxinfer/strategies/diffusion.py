"""Base of the diffusion strategies: every launch runs rounds, and listeners receive what landed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.engine.input_batch import BuiltBatch
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.plain_decoding import UsualStrategy
from jaxinfer.engine.strategy import LandedRounds, RoundsResult
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.outputs import DenoisedBlock
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import Program, everywhere_on
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.stand_ins import StandIn
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import Rounds
from jaxinfer.scheduling.scheduler_output import SchedulerOutput


class DiffusionStrategy(UsualStrategy, ABC):
    """Strategy that launches one program of rounds and passes the landed rounds to listeners.

    Args:
        size: most tokens that a round lands for a row.
        mask_token_id: id in places that have no token yet.
        buckets: shapes of launches, with one token for each row.
        make_state: makes the device's state.
    """

    takes_prompts = True

    def __init__(
        self,
        program: Program,
        size: int,
        mask_token_id: int,
        buckets: Buckets,
        make_state: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.programs: Sequence[Program] = [program]
        self.mask_token_id, self._make_state = mask_token_id, make_state
        self._size, self._buckets = size, buckets
        self.listeners: list[Callable[[LandedRounds[DenoiseOutput]], None]] = []  # called with each landed launch

    def make_state(self) -> Mapping[str, Any]:
        return self._make_state()

    @abstractmethod
    def choose(self, requests: Sequence[Request], num_waiting: int) -> Rounds: ...

    def shape_for(self, rounds: Rounds, *, rows: int, pages_per_row: int, lanes: bool, stand_in: StandIn) -> BatchShape:
        assert not lanes, "what generates by blocks does not share lanes"
        return self.widened(self._buckets.loop_for(decode_rows=rows, pages_per_row=pages_per_row), rows, stand_in)

    def launch(self, output: SchedulerOutput, built: BuiltBatch, runner: Runner) -> RoundsResult:
        result: DenoiseOutput = runner.launch(self.programs[0], built.packed.shape, built.packed.buffer)
        return RoundsResult(result.tokens, self._size, details=result, ran=result.ran, logprobs=result.logprobs)

    def _tell(
        self, requests: Sequence[Request], rows: np.ndarray, output: DenoiseOutput, metrics: EngineMetrics
    ) -> None:
        """Show the rounds of requests in these rows, int32, and count them."""
        self._show(LandedRounds(requests, rows, output))
        metrics.count_rounds(
            forwards=int(np.asarray(output.ran)[:, rows].sum()),
            tokens=int((np.asarray(output.tokens)[:, rows] >= 0).sum()),
        )

    def _show(self, landed: LandedRounds[DenoiseOutput]) -> None:
        """Pass landed rounds to the listeners, and to requests that return blocks."""
        for request, row in zip(landed.requests, landed.rows.tolist(), strict=True):
            if request.sampling_params.return_blocks:
                ran, starts, blocks = (
                    np.asarray(x)[:, row] for x in (landed.output.ran, landed.output.start, landed.output.blocks)
                )
                request.blocks += [
                    self._denoised(request, int(starts[number]), blocks[number].tolist())
                    for number in np.flatnonzero(ran)
                ]
        for listen in list(self.listeners):
            listen(landed)

    def _denoised(self, request: Request, start: int, tokens: list[int]) -> DenoisedBlock:
        """Return the part of a block, from its position `start` on, that is the request's output."""
        given, end = max(0, request.num_prompt_tokens - start), request.max_total_tokens - start
        places = [None if token == self.mask_token_id else token for token in tokens[given:end] if token >= 0]
        return DenoisedBlock(start + given - request.num_prompt_tokens, places)


@dataclass(frozen=True)
class DiffusionStrategyMaker(ABC):
    """Maker of the strategy of a diffusion model, which needs no second model."""

    config: DiffusionConfig
    layers: ModelConfig | None = None
    weights_bytes: int = 0

    def kv_bytes_per_token(self, dtype: jnp.dtype) -> int:
        return 0

    def tail_tokens(self, engine: EngineConfig) -> int:
        return 0

    def state_bytes(self, engine: EngineConfig, model: ModelConfig, dtype: jnp.dtype) -> int:
        (seats,) = self._state(engine, model, dtype, abstract=True).values()
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(seats))

    def strategy(
        self,
        engine: EngineConfig,
        target: DecoderLM,
        *,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        whole: jax.sharding.Sharding | None = None,
        abstract: bool = False,
    ) -> Callable[[EnginePrograms, Buckets], DiffusionStrategy]:
        """See `StrategyMaker`.

        Raises:
            ValueError: the configuration is not for this model, or not for this engine.
        """
        self.check(engine, target.config)

        def make(programs: EnginePrograms, buckets: Buckets) -> DiffusionStrategy:
            sharding = whole or everywhere_on(mesh)
            return self._strategy(
                target.config,
                buckets,
                lambda: self._state(engine, target.config, dtype, sharding, abstract=abstract),
            )

        return make

    @abstractmethod
    def check(self, engine: EngineConfig, model: ModelConfig) -> None:
        """Raise ValueError unless the configuration fits the model and the engine."""

    @abstractmethod
    def _state(
        self,
        engine: EngineConfig,
        model: ModelConfig,
        dtype: jnp.dtype,
        sharding: jax.sharding.Sharding | None = None,
        *,
        abstract: bool,
    ) -> dict[str, Any]:
        """Return the device's state of each seat, under its name."""

    @abstractmethod
    def _strategy(
        self, model: ModelConfig, buckets: Buckets, make_state: Callable[[], Mapping[str, Any]]
    ) -> DiffusionStrategy: ...
