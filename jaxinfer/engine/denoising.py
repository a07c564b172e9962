"""Block diffusion as a strategy: prompts by whole blocks, then rounds of denoising, whoever stands where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.config import EngineConfig
from jaxinfer.diffusion.blocks import BLOCKS, Blocks
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.denoise import Denoise, DenoiseOutput, Denoising
from jaxinfer.diffusion.drawing import keeps_credits
from jaxinfer.diffusion.unmask import rule_of
from jaxinfer.engine.adjusting import wants_logprobs
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.kv_cache_manager import KVCacheManager
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.request import Request
from jaxinfer.engine.rounds import BlockRounds, Rounds, RowKind
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.scheduler_output import SchedulerLimits, SchedulerOutput
from jaxinfer.engine.strategy import RoundsResult
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import Program, everywhere_on
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.step import Follower


def denoising_of(config: DiffusionConfig, model: ModelConfig) -> Denoising:
    """How a diffusion model's blocks are denoised.

    Raises:
        ValueError: it has blocks of another size, or the configuration is for bidirectional models.
    """
    assert model.block_size is not None and model.mask_token_id is not None
    if config.cache not in ("auto", "prefix"):
        raise ValueError(
            f"cache={config.cache!r}: tokens of {model.architecture} see no later block, so that keys and values of "
            "earlier ones are exact; allowed are 'auto', 'prefix'"
        )
    for name in ("prefix_look", "after_look", "cont_weight"):
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)} is for bidirectional models, not {model.architecture}")
    if config.block_size not in (None, model.block_size):
        raise ValueError(f"block_size={config.block_size}: the model was trained with blocks of {model.block_size}")
    return Denoising(
        model.block_size, model.mask_token_id, rule_of(config), config.edit_threshold, config.max_post_edit_steps,
        config.early_stop,
    )  # fmt: skip


@dataclass
class LandedRounds:
    """What the rounds of a launch have made of blocks, once it was read."""

    requests: list[Request]
    rows: np.ndarray  # int32, of each request in the arrays; no rounds ran for chunks of prompts
    output: DenoiseOutput


class BlockDiffusion:
    """Every launch is of rounds: one beside chunks of prompts, else as many as the configuration says.

    Args:
        denoising: of blocks.
        config: bounds the rounds of a launch.
        buckets: shapes of launches, with one token for each row.
        state: the device's, see `Blocks`.
    """

    models: Mapping[str, Any] = {}
    num_tail_pages = 0
    most_in_lane: int | None = None
    follower: Follower | None = None
    wants_landing = False
    takes_prompts = True

    def __init__(
        self, denoising: Denoising, config: DiffusionConfig, buckets: Buckets, state: Mapping[str, Any]
    ) -> None:
        self.denoising, self.state = denoising, state
        self.block_size = denoising.block_size
        self._config, self._buckets = config, buckets
        mixed = [shape for shape in buckets.all_shapes() if shape.prefill_tokens]
        shapes = [replace(shape, block_size=self.block_size) for shape in (*buckets.all_loops(), *mixed)]
        self._program = Denoise(denoising, config.maximum_unroll, tuple(shapes))
        self._entered: set[str] = set()  # requests whose block is in their seat
        self.listeners: list[Callable[[LandedRounds], None]] = []  # are told of each launch that was read

    @property
    def programs(self) -> Sequence[Program]:
        return [self._program]

    def choose(self, requests: Sequence[Request], num_waiting: int) -> Rounds:
        config = self._config
        left = max([request.num_tokens_left for request in requests], default=1)
        most = max(1, min(left // config.expected_tpf, config.maximum_unroll))
        return BlockRounds(most=most, most_tokens=self.block_size)

    def shape_for(self, *, rows: int, pages_per_row: int, lanes: bool) -> BatchShape:
        assert not lanes, "blocks of one answer do not share lanes"
        shape = self._buckets.loop_for(decode_rows=rows, pages_per_row=pages_per_row)
        return self.widened(shape, rows)

    def widened(self, shape: BatchShape, seated: int) -> BatchShape:
        return replace(shape, block_size=self.block_size)

    def make_scheduler(self, limits: SchedulerLimits, kv: KVCacheManager) -> Scheduler:
        return Scheduler(limits, kv)

    def prepare(self, output: SchedulerOutput, built: BuiltBatch, batch: InputBatch, runner: Runner) -> None:
        packed, size, mask = built.packed, self.block_size, self.denoising.mask_token_id
        # What chunks of prompts see: all of their blocks, of which there are whole ones only.
        limit = packed["limit"][packed.shape.decode_rows :]
        limit[:] = np.where(limit >= 0, limit // size * size + size - 1, -1)
        packed["wants_logprobs"][...] = wants_logprobs(output)
        for index, request in enumerate(output.requests):
            if output.kinds[index] is RowKind.PROMPT_CHUNK or request.request_id in self._entered:
                continue
            self._entered.add(request.request_id)
            row, start = int(built.rows[index]), request.num_tokens // size * size
            known = request.token_ids[start:]
            packed["block_tokens"][row] = mask
            packed["block_tokens"][row, : len(known)] = known
            packed["block_start"][row] = start

    def launch(self, built: BuiltBatch, runner: Runner) -> RoundsResult:
        result: DenoiseOutput = runner.launch(self._program, built.packed.shape, built.packed.buffer)
        return RoundsResult(result.tokens, self.block_size, details=result, ran=result.ran, logprobs=result.noted)

    def landed(
        self,
        output: SchedulerOutput,
        built: BuiltBatch,
        result: RoundsResult | None,
        steps: int,
        seconds: float,
        metrics: EngineMetrics,
    ) -> None:
        assert result is not None
        details: DenoiseOutput = result.details
        seated = [index for index, kind in enumerate(output.kinds) if kind is not RowKind.PROMPT_CHUNK]
        rows = built.rows[seated]
        found = LandedRounds([output.requests[index] for index in seated], rows, details)
        for listen in list(self.listeners):
            listen(found)
        metrics.count_rounds(
            forwards=int(np.asarray(details.ran)[:, rows].sum()),
            tokens=int((np.asarray(details.tokens)[:, rows] >= 0).sum()),
        )

    def measure(self, runner: Runner, allocator: PageAllocator) -> None:
        pass

    def left(self, request_ids: Iterable[str]) -> None:
        self._entered.difference_update(request_ids)


@dataclass(frozen=True)
class Denoiser:
    """What makes the strategy of a diffusion model; it takes no memory worth counting."""

    config: DiffusionConfig
    layers: ModelConfig | None = None  # of other models
    weights_bytes: int = 0

    def kv_bytes_per_token(self, dtype: jnp.dtype) -> int:
        return 0

    def tail_tokens(self, engine: EngineConfig) -> int:
        return 0

    def state_bytes(self, engine: EngineConfig, model: ModelConfig, dtype: jnp.dtype) -> int:
        if self.config.unmask != "credit":
            return 0
        return engine.max_num_seqs * (model.block_size or 0) * model.vocab_size * 4

    def strategy(
        self,
        engine: EngineConfig,
        target: DecoderLM,
        *,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        whole: jax.sharding.Sharding | None = None,
        abstract: bool = False,
    ) -> Callable[[EnginePrograms, Buckets], BlockDiffusion]:
        """See `StrategyMaker`.

        Raises:
            ValueError: as for `denoising_of`; or pages do not hold whole blocks.
        """
        denoising = denoising_of(self.config, target.config)
        if engine.page_size % denoising.block_size:
            raise ValueError(f"page_size ({engine.page_size}) must be a multiple of blocks of {denoising.block_size}")

        def make(programs: EnginePrograms, buckets: Buckets) -> BlockDiffusion:
            blocks = Blocks.allocate(
                engine.max_num_seqs, denoising.block_size, target.config.vocab_size, whole or everywhere_on(mesh),
                with_credits=keeps_credits(denoising.rule), abstract=abstract,
            )  # fmt: skip
            return BlockDiffusion(denoising, self.config, buckets, {BLOCKS: blocks})

        return make
