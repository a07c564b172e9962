"""Maker of an engine's strategy from a speculative configuration, and the memory that it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.attention.tensor_parallel import sharding_of_pages
from jaxinfer.cache.kv_pool import kv_bytes_per_token
from jaxinfer.config import EngineConfig
from jaxinfer.engine.plain_decoding import PlainDecoding
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import everywhere_on
from jaxinfer.speculative.cost_controller import CostController
from jaxinfer.speculative.costs import Estimate, LaunchCosts
from jaxinfer.speculative.gamma import EntropyController, FixedGamma, GammaController
from jaxinfer.speculative.shapes import SpeculationShapes
from jaxinfer.speculative.tails import TailPages
from jaxinfer.strategies.draft_methods import DraftModule, StatePlace
from jaxinfer.strategies.draft_options import SpeculativeConfig
from jaxinfer.strategies.speculation import Speculation, launch_bucket
from kernels_pallas.visibility import MAX_TAIL_TOKENS

logger = logging.getLogger(__name__)

_BELIEF_OF_TREES = 0.8
# Verifications of 8 tokens: 128 rows of them are the most that a round verifies.
_CHAIN_BESIDE_TREES = 7
# A verification of fewer drafts is not worth a program of its own.
_FEWEST_DRAFTS = 2
# Tokens whose computation takes as long as reading the weights.
_KNEES = {"cpu": 16.0}
_KNEE_OF_A_GPU = 256.0


@dataclass(frozen=True)
class Speculator:
    """Speculative configuration and its drafter, from which an engine's strategy is made.

    Attributes:
        drafter: the method's model, with parameters, or with their shapes to plan with; None: it has no model.
    """

    config: SpeculativeConfig
    drafter: Any = None

    @property
    def _device(self) -> DraftModule:
        return self.config.row.device

    @property
    def longest_chain(self) -> int:
        """Drafts of the longest chain: beside trees, as many as leave a program for batches of many rows."""
        return min(self.config.most_drafts, _CHAIN_BESIDE_TREES) if self.config.num_nodes else self.config.most_drafts

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of chain verifications: of all drafts, and of fewer, for more rows or where costs favour that."""
        drafts = [self.longest_chain]
        while drafts[0] // 2 >= _FEWEST_DRAFTS and not self.config.num_nodes:
            drafts.insert(0, drafts[0] // 2)
        return tuple(number + 1 for number in drafts)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the drafter's parameters, over all devices."""
        return 0 if self.drafter is None else sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self.drafter)))

    @property
    def layers(self) -> ModelConfig | None:
        """Layers whose keys and values the drafter keeps."""
        return None if self.drafter is None else self._device.layers(self.drafter.config)

    def state_bytes(self, engine: EngineConfig, model: ModelConfig, dtype: jnp.dtype) -> int:
        """Return the bytes that seats take on each device: too few to count."""
        return 0

    def kv_bytes_per_token(self, dtype: jnp.dtype) -> int:
        """Return the bytes of one slot in all of the drafter's layers, over all devices."""
        return 0 if self.layers is None else kv_bytes_per_token(self.layers, dtype)

    def shapes(self, engine: EngineConfig, buckets: Buckets) -> SpeculationShapes:
        """Return the shapes of its programs."""
        config = self.config
        return SpeculationShapes.of(
            buckets, widths=self.widths, num_widths=2 if config.adaptive == "cost" else 1,
            max_rounds=self.max_rounds(engine), page_size=engine.page_size, num_nodes=config.num_nodes,
            tree_width=config.most_drafts + 1 if config.num_nodes else 0,
        )  # fmt: skip

    def max_rounds(self, engine: EngineConfig) -> int:
        """Return the most rounds of a launch."""
        # A launch should land about as much as a plain one. Rounds that do not run cost a little.
        return max(1, engine.max_decode_steps // (2 if self.drafter is not None else 1))

    def tails(self, engine: EngineConfig) -> TailPages | None:
        """Return the pages of draft trees; None: only chains are drafted."""
        config, size = self.config, engine.page_size
        if not config.num_nodes:
            return None
        assert config.tree_depth is not None and config.tree_top_k is not None
        each = -(-max(config.num_nodes, config.tree_depth * config.tree_top_k) // size)
        # A head reads the page of its first token in a lane as a part of the tail, besides the sequences' own tails.
        per_lane = max(1, (MAX_TAIL_TOKENS - size) // (each * size))
        return TailPages(engine.num_pages, each, size, per_lane)

    def tail_tokens(self, engine: EngineConfig) -> int:
        """Return the number of slots of the pools besides those that requests share."""
        tails = self.tails(engine)
        return 0 if tails is None else self.shapes(engine, Buckets.from_config(engine)).most_in_trees * tails.tokens

    def strategy(
        self,
        engine: EngineConfig,
        target: DecoderLM,
        *,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        whole: jax.sharding.Sharding | None = None,
        abstract: bool = False,
    ) -> Callable[[EnginePrograms, Buckets], Speculation]:
        """Return the function with which an `EngineCore` makes its strategy.

        Args:
            whole: sharding of the seats, if it is not the mesh's.
            abstract: make a state of shapes only, to compile for.
        """

        def make(programs: EnginePrograms, buckets: Buckets) -> Speculation:
            plain = PlainDecoding(programs.decode_loop, buckets)
            shapes, tails = self.shapes(engine, buckets), self.tails(engine)
            if self.config.num_nodes and not shapes.most_in_trees:
                logger.warning(
                    "trees of %d drafts do not fit into max_num_batched_tokens=%d: chains are drafted",
                    self.config.num_nodes, engine.max_num_batched_tokens,
                )  # fmt: skip
            return Speculation(
                self._device.proposer(self.config, self.drafter, tails),
                self._controller(engine, target, plain, shapes),
                plain,
                shapes,
                max_rounds=self.max_rounds(engine),
                make_state=lambda: self._state(engine, dtype, mesh, whole or everywhere_on(mesh), abstract),
                num_pages=engine.num_pages,
                page_size=engine.page_size,
                num_seats=engine.max_num_seqs,
                max_catch_up=engine.max_num_batched_tokens,
                window=self._device.window,
                tails=tails,
            )

        return make

    def _state(
        self,
        engine: EngineConfig,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        whole: jax.sharding.Sharding | None,
        abstract: bool,
    ) -> dict[str, Any]:
        place = StatePlace(dtype, sharding_of_pages(mesh), whole, abstract)
        num_pages = engine.num_pages + self.tail_tokens(engine) // engine.page_size
        return {self._device.state: self._device.make_state(engine, self.drafter, num_pages, place)}

    def _controller(
        self, engine: EngineConfig, target: DecoderLM, plain: PlainDecoding, shapes: SpeculationShapes
    ) -> GammaController:
        config = self.config
        if config.adaptive is None:
            return FixedGamma(config.most_drafts, config.num_nodes)
        if config.adaptive == "entropy":
            return EntropyController(
                engine.max_num_seqs, target.config.vocab_size, gamma_min=config.gamma_min,
                gamma_max=config.most_drafts, ema_beta=config.egag_ema_beta, scale=config.entropy_scale,
                num_nodes=config.num_nodes,
            )  # fmt: skip
        estimate = Estimate(
            target=_num_parameters(target),
            drafter=0.0 if self.drafter is None else _num_parameters(self.drafter),
            knee=_KNEES.get(jax.default_backend(), _KNEE_OF_A_GPU),
        )
        costs = LaunchCosts(launch_bucket(plain, shapes), estimate)
        drafts, accepted = config.row.beliefs
        most, accepted = {0: self.longest_chain}, {0: accepted}
        if config.num_nodes:
            most[config.num_nodes], accepted[config.num_nodes] = config.most_drafts, _BELIEF_OF_TREES
        return CostController(engine.max_num_seqs, most, costs, drafts=drafts, accepted=accepted)


def _num_parameters(model: nnx.Module) -> float:
    return float(sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))))
