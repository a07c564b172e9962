"""Block-diffusion strategy: prefills whole blocks, then denoises rows that may be at different blocks and rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.constraints.block_walk import BlockWalk
from jaxinfer.diffusion.blocks import BLOCKS, Blocks
from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.constrained import ConstrainedOutput, ConstrainedRound
from jaxinfer.diffusion.denoise import Denoise, Denoising
from jaxinfer.diffusion.drawing import keeps_credits
from jaxinfer.diffusion.rounds import DenoiseOutput
from jaxinfer.diffusion.unmask import rule_of
from jaxinfer.engine.input_batch import BuiltBatch, InputBatch
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.engine.strategy import LandedRounds, RoundsResult
from jaxinfer.models.config import ModelConfig
from jaxinfer.programs.batch_layout import BatchShape
from jaxinfer.programs.buckets import Buckets, shape_of
from jaxinfer.programs.runner import Runner
from jaxinfer.programs.stand_ins import StandIn
from jaxinfer.sampling.bounds import num_words
from jaxinfer.scheduling.constrained_blocks import block_of
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.rounds import BlockRounds, ConstrainedRounds, Rounds, RowKind
from jaxinfer.scheduling.scheduler_output import Continuation, SchedulerOutput
from jaxinfer.strategies.diffusion import DiffusionStrategy, DiffusionStrategyMaker

# Numbers of rows of constrained rounds, besides 1 and the greatest: few, because every engine compiles them.
_FEW_ROWS = (8, 64)


def denoising_of(config: DiffusionConfig, model: ModelConfig) -> Denoising:
    """Return how the blocks of a diffusion model are denoised.

    Raises:
        ValueError: the model has blocks of another size, or the configuration is for bidirectional models.
    """
    assert model.block_size is not None and model.mask_token_id is not None
    if config.cache not in ("auto", "prefix"):
        raise ValueError(
            f"cache={config.cache!r}: tokens of {model.architecture} see no later block, so that keys and values of "
            "earlier ones are exact; allowed are 'auto', 'prefix'"
        )
    for name in ("prefix_look", "after_look", "cont_weight"):
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)} is for bidirectional models, not {model.architecture}, whose keys and "
                "values are exact in LLM; jaxinfer.diffusion.DiffusionWorker, of the textbook, denoises such a model "
                "without its mask of blocks, and takes it"
            )
    if config.block_size not in (None, model.block_size):
        raise ValueError(f"block_size={config.block_size}: the model was trained with blocks of {model.block_size}")
    return Denoising(
        model.block_size, model.mask_token_id, rule_of(config), config.edit_threshold, config.max_post_edit_steps,
        config.early_stop,
    )  # fmt: skip


class BlockDiffusion(DiffusionStrategy):
    """Strategy whose launches all run rounds: one beside prompt chunks, else up to as many as the configuration allows.

    Constrained requests have launches of one round of their own. The host commits their tokens, and sends their blocks
    with each launch.

    Args:
        denoising: how blocks are denoised.
        config: bounds the rounds of a launch.
        buckets: shapes of launches, with one token for each row.
        make_state: makes the device's state, see `Blocks`.
        vocab: size of the vocabulary.
    """

    def __init__(
        self,
        denoising: Denoising,
        config: DiffusionConfig,
        buckets: Buckets,
        make_state: Callable[[], Mapping[str, Any]],
        vocab: int,
    ) -> None:
        self.block_size, self._config = denoising.block_size, config
        shapes = [replace(shape, block_size=self.block_size) for shape in (*buckets.all_loops(), *buckets.all_steps())]
        program = Denoise(denoising, config.maximum_unroll, tuple(shapes))
        super().__init__(program, denoising.block_size, denoising.mask_token_id, buckets, make_state)
        self._entered: set[str] = set()  # requests whose seat has their block
        self._vocab = vocab
        self._constrained = ConstrainedRound(denoising, _constrained_shapes(buckets, self.block_size))
        self._constrained_rounds: ConstrainedRounds | None = None
        if denoising.edit_threshold is None:  # no grammar could take back what an edit replaces
            self.programs = [program, self._constrained]
            self._constrained_rounds = ConstrainedRounds(
                most_tokens=self.block_size, block_size=self.block_size, mask_token_id=self.mask_token_id
            )

    def choose(self, requests: Sequence[Request], num_waiting: int) -> Rounds:
        config = self._config
        left = max([request.num_tokens_left for request in requests], default=1)
        most = max(1, min(left // config.expected_tpf, config.maximum_unroll))
        return BlockRounds(most=most, most_tokens=self.block_size, constrained=self._constrained_rounds)

    def shape_for(self, rounds: Rounds, *, rows: int, pages_per_row: int, lanes: bool, stand_in: StandIn) -> BatchShape:
        if not rounds.walks_blocks:
            return super().shape_for(rounds, rows=rows, pages_per_row=pages_per_row, lanes=lanes, stand_in=stand_in)
        holding = [
            shape
            for shape in self._constrained.shapes
            if shape.decode_rows >= rows and shape.pages_per_row >= pages_per_row
        ]
        return stand_in(self._constrained, min(holding, key=lambda shape: (shape.decode_rows, shape.pages_per_row)))

    def widened(self, shape: BatchShape, seated: int, stand_in: StandIn) -> BatchShape:
        return stand_in(self.programs[0], replace(shape, block_size=self.block_size))

    def prepare(self, output: SchedulerOutput, built: BuiltBatch, batch: InputBatch, runner: Runner) -> None:
        if output.rounds.walks_blocks:
            self._prepare_constrained(output, built)
            return
        packed, size = built.packed, self.block_size
        # A token of a prompt chunk sees its whole block; chunks consist of whole blocks.
        limit = packed["limit"][packed.shape.decode_rows :]
        limit[:] = np.where(limit >= 0, limit // size * size + size - 1, -1)
        for index, request in enumerate(output.requests):
            if output.kinds[index] is RowKind.PROMPT_CHUNK or request.request_id in self._entered:
                continue
            assert request.guard is None, "the tokens of constrained requests are not edited"
            self._entered.add(request.request_id)
            row, start = int(built.rows[index]), request.num_tokens // size * size
            known = request.token_ids[start:]
            packed["block_tokens"][row] = self.mask_token_id
            packed["block_tokens"][row, : len(known)] = known
            packed["block_start"][row] = start

    def _prepare_constrained(self, output: SchedulerOutput, built: BuiltBatch) -> None:
        rounds, packed = output.rounds, built.packed
        assert isinstance(rounds, ConstrainedRounds)
        for row, request in zip(built.rows.tolist(), output.requests, strict=True):
            block = block_of(request, rounds, self._vocab)
            packed["block_tokens"][row] = self.mask_token_id
            packed["block_tokens"][row, : len(block.tokens)] = block.tokens
            packed["block_start"][row], packed["block_round"][row] = block.start, block.round

    def launch(self, output: SchedulerOutput, built: BuiltBatch, runner: Runner) -> RoundsResult:
        if not output.rounds.walks_blocks:
            return super().launch(output, built, runner)
        shape = built.packed.shape
        masks = np.full((shape.decode_rows, num_words(self._vocab)), np.uint32(0xFFFFFFFF))
        for row, request in zip(built.rows.tolist(), output.requests, strict=True):
            if request.block is not None and request.block.mask is not None:
                masks[row] = request.block.mask
        result: ConstrainedOutput = runner.launch(self._constrained, shape, built.packed.buffer, masks)
        return RoundsResult(result.tokens, self.block_size, ran=result.ran, was_redrawn=result.was_redrawn)

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
        if output.rounds.walks_blocks:
            metrics.count_rounds(forwards=len(output.requests), tokens=0)  # those that land are counted with their walk
            return ()
        # No round ran for a prompt chunk.
        seated = [index for index, kind in enumerate(output.kinds) if kind is not RowKind.PROMPT_CHUNK]
        self._tell([output.requests[index] for index in seated], built.rows[seated], result.details, metrics)
        return ()

    def walked(self, request: Request, walk: BlockWalk, metrics: EngineMetrics) -> None:
        metrics.count_rounds(forwards=0, tokens=len(walk.tokens))
        block = walk.walked
        if block is None or not (self.listeners or request.sampling_params.return_blocks):
            return
        masks = [self.mask_token_id] * (self.block_size - len(block.tokens))
        landed = np.full((2 * self.block_size, 1), -1, np.int32)
        landed[: len(walk.tokens), 0] = walk.tokens
        arrays: dict[str, Any] = {
            "tokens": landed, "ran": np.ones((1, 1), bool), "start": np.asarray([[block.start]], np.int32),
            "blocks": np.asarray([[[*block.tokens, *masks]]], np.int32),
            "logprobs": None,  # constrained requests have none
        }  # fmt: skip
        self._show(LandedRounds([request], np.zeros(1, np.int32), DenoiseOutput(**arrays)))

    def left(self, request_ids: Iterable[str]) -> None:
        self._entered.difference_update(request_ids)

    def start_over(self) -> None:
        self._entered = set()


@dataclass(frozen=True)
class Denoiser(DiffusionStrategyMaker):
    """Maker of the strategy of a block-diffusion model, whose blocks see what is before them."""

    def check(self, engine: EngineConfig, model: ModelConfig) -> None:
        size = denoising_of(self.config, model).block_size
        if engine.page_size % size:
            raise ValueError(f"page_size ({engine.page_size}) must be a multiple of blocks of {size}")

    def _state(
        self,
        engine: EngineConfig,
        model: ModelConfig,
        dtype: jnp.dtype,
        sharding: jax.sharding.Sharding | None = None,
        *,
        abstract: bool,
    ) -> dict[str, Any]:
        denoising = denoising_of(self.config, model)
        blocks = Blocks.allocate(
            engine.max_num_seqs, denoising.block_size, model.vocab_size, sharding,
            with_credits=keeps_credits(denoising.rule), abstract=abstract,
        )  # fmt: skip
        return {BLOCKS: blocks}

    def _strategy(
        self, model: ModelConfig, buckets: Buckets, make_state: Callable[[], Mapping[str, Any]]
    ) -> BlockDiffusion:
        return BlockDiffusion(denoising_of(self.config, model), self.config, buckets, make_state, model.vocab_size)


def _constrained_shapes(buckets: Buckets, block_size: int) -> tuple[BatchShape, ...]:
    """Return the shapes of constrained rounds."""
    most = buckets.max_num_seqs
    rows = {1, *(count for count in _FEW_ROWS if count < most), most}
    return tuple(
        shape_of(count, 0, 0, pages, block_size=block_size) for pages in buckets.pages_per_row for count in sorted(rows)
    )
