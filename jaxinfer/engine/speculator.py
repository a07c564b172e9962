"""From a speculative configuration to the strategy of an engine, and what it takes of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.attention.tensor_parallel import sharding_of_pages
from jaxinfer.cache.kv_cache import kv_bytes_per_token
from jaxinfer.config import EngineConfig, SpeculativeConfig
from jaxinfer.engine.speculation import Speculation, launch_bucket
from jaxinfer.engine.strategy import PlainDecoding
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.buckets import Buckets
from jaxinfer.programs.engine_programs import EnginePrograms
from jaxinfer.programs.program import everywhere_on
from jaxinfer.speculative.cost_controller import CostController
from jaxinfer.speculative.costs import Estimate, LaunchCosts
from jaxinfer.speculative.draft_model import DRAFT_STATE, DraftModel, draft_state
from jaxinfer.speculative.gamma import EntropyController, FixedGamma, GammaController
from jaxinfer.speculative.ngram import HISTORY, NgramProposer, history_of
from jaxinfer.speculative.proposer import Proposer
from jaxinfer.speculative.shapes import SpeculationShapes

# The share of rounds with drafts and that of drafts that are accepted, until some were seen.
_BELIEFS = {"draft_model": (1.0, 0.6), "ngram": (0.5, 0.5)}
# Tokens whose computing takes as long as reading the weights.
_KNEES = {"cpu": 16.0}
_KNEE_OF_A_GPU = 256.0


@dataclass(frozen=True)
class Speculator:
    """What speculates beside a target.

    Attributes:
        drafter: the draft model, if the method has one; of shapes alone, to plan with.
    """

    config: SpeculativeConfig
    drafter: DecoderLM | None = None

    def __post_init__(self) -> None:
        assert (self.drafter is not None) == (self.config.method == "draft_model")

    @property
    def proposer(self) -> Proposer:
        if self.drafter is not None:
            return DraftModel(self.drafter, with_entropy=self.config.adaptive == "entropy")
        return NgramProposer(self.config.prompt_lookup_min, self.config.prompt_lookup_max)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of verifications: who chooses by costs has a small one too."""
        most = self.config.most_drafts
        return (most // 2 + 1, most + 1) if self.config.adaptive == "cost" and most > 2 else (most + 1,)

    @property
    def weights_bytes(self) -> int:
        """Of the drafter's parameters, over all devices."""
        return 0 if self.drafter is None else sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self.drafter)))

    def kv_bytes_per_token(self, dtype: jnp.dtype) -> int:
        """Bytes that one slot takes in all of the drafter's layers, over all devices."""
        return 0 if self.drafter is None else kv_bytes_per_token(self.drafter.config, dtype)

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
        """What an `EngineCore` makes its strategy with.

        Args:
            whole: where seats lie, if not as the mesh says.
            abstract: with a state of shapes alone, to compile for.
        """

        def make(programs: EnginePrograms, buckets: Buckets) -> Speculation:
            plain = PlainDecoding(programs.decode_loop, buckets)
            # Launches are to land about as much as plain ones. Rounds that do not run cost a little.
            max_rounds = max(1, engine.max_decode_steps // (2 if self.drafter is not None else 1))
            shapes = SpeculationShapes.of(
                buckets, self.config.most_drafts, widths=self.widths, max_rounds=max_rounds, page_size=engine.page_size
            )
            return Speculation(
                self.proposer,
                self._controller(engine, target, plain, shapes),
                plain,
                shapes,
                max_rounds=max_rounds,
                hidden_sizes=programs.prompt_logprobs.shapes,
                state=self._state(engine, dtype, mesh, whole or everywhere_on(mesh), abstract),
                num_pages=engine.num_pages,
                page_size=engine.page_size,
                num_seats=engine.max_num_seqs,
                max_catch_up=engine.max_num_batched_tokens,
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
        if self.drafter is None:
            return {HISTORY: history_of(engine.max_num_seqs, engine.max_model_len, whole, abstract=abstract)}
        return {
            DRAFT_STATE: draft_state(
                self.drafter.config, num_pages=engine.num_pages, page_size=engine.page_size,
                num_seats=engine.max_num_seqs, dtype=dtype, pages=sharding_of_pages(mesh), whole=whole,
                abstract=abstract,
            )
        }  # fmt: skip

    def _controller(
        self, engine: EngineConfig, target: DecoderLM, plain: PlainDecoding, shapes: SpeculationShapes
    ) -> GammaController:
        config = self.config
        if config.adaptive is None:
            return FixedGamma(config.most_drafts)
        if config.adaptive == "entropy":
            return EntropyController(
                engine.max_num_seqs, target.config.vocab_size, gamma_min=config.gamma_min,
                gamma_max=config.most_drafts, ema_beta=config.egag_ema_beta,
            )  # fmt: skip
        estimate = Estimate(
            target=_num_parameters(target),
            drafter=0.0 if self.drafter is None else _num_parameters(self.drafter),
            knee=_KNEES.get(jax.default_backend(), _KNEE_OF_A_GPU),
        )
        costs = LaunchCosts(launch_bucket(plain, shapes), estimate)
        drafts, accepted = _BELIEFS[config.method]
        return CostController(engine.max_num_seqs, config.most_drafts, costs, drafts=drafts, accepted=accepted)


def check_vocabularies(target: ModelConfig, drafter: ModelConfig) -> None:
    """Raises ValueError, which says what differs, unless a drafter's token ids mean what the target's do, as far as
    configurations tell."""
    if target.vocab_size != drafter.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {drafter.vocab_size} tokens and the target one of "
            f"{target.vocab_size}: a draft model needs the target's"
        )


def _num_parameters(model: DecoderLM) -> float:
    return float(sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))))
