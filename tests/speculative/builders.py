"""Speculating engines for tests: drafters of several qualities, and controllers that choose anything."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.eagle3 import Eagle3Head
from jaxinfer.models.eagle3_config import Eagle3Config
from jaxinfer.models.rope import RopeConfig
from jaxinfer.speculative.gamma import Choice, FixedGamma, GammaController
from jaxinfer.strategies.draft_options import SpeculativeConfig
from jaxinfer.strategies.speculation import Speculation
from jaxinfer.strategies.speculator import Speculator
from tests.builders import make_engine

NUM_DRAFTS = 3


class AnyGamma(FixedGamma):
    """Chooses at random in every launch, 0 included."""

    def __init__(self, num_drafts: int, seed: int = 0, num_nodes: int = 0) -> None:
        super().__init__(num_drafts, num_nodes)
        self._rng = np.random.default_rng(seed)
        self.chosen: list[int] = []

    def choose(self, seats: np.ndarray, pages_per_row: int) -> Choice:
        self.chosen.append(int(self._rng.integers(0, self.num_drafts + 1)))
        drafts = np.minimum(self._rng.integers(1, self.num_drafts + 1, len(seats)), self.chosen[-1])
        return Choice(drafts, self.num_nodes * int(self._rng.integers(0, 4) > 0))


def disturbed(model: DecoderLM, scale: float, seed: int = 3) -> DecoderLM:
    """A copy whose weights differ by a share of their size: it agrees with the model now and then."""
    graph, state = nnx.split(model)
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda x: x * (1 + scale * rng.standard_normal(x.shape)).astype(np.float32), state)
    return nnx.merge(graph, state)


def random_head(target: ModelConfig, seed: int = 5, *, capture: tuple[int, ...] = (0, 1)) -> Eagle3Head:
    """A head that knows nothing: of its many guesses one is right now and then."""
    layer = ModelConfig(
        "LlamaForCausalLM", target.vocab_size, target.hidden_size, intermediate_size=64, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=16, max_position_embeddings=256,
        rope=RopeConfig(max_position_embeddings=256, original_max_position_embeddings=256),
    )  # fmt: skip
    config = Eagle3Config(layer, target.vocab_size - 1, target.hidden_size, capture=capture)
    return Eagle3Head(config, rngs=nnx.Rngs(seed))


def speculating_engine(
    model: DecoderLM,
    drafter: DecoderLM | Eagle3Head | None = None,
    controller: GammaController | None = None,
    *,
    speculative: dict[str, Any] | None = None,
    method: str | None = None,
    mesh: Any = None,
    **limits: Any,
) -> EngineCore:
    """`tests.builders.make_engine` that speculates, with n-grams where there is no drafter.

    Its pool holds one request of max_model_len.

    Args:
        controller: in the place of the configuration's.
        speculative: fields of the configuration; by default NUM_DRAFTS drafts in every round.
        method: by default the one that the drafter belongs to.
    """
    config = SpeculativeConfig(
        method or ("ngram" if drafter is None else "draft_model" if isinstance(drafter, DecoderLM) else "eagle3"),
        **{"num_speculative_tokens": NUM_DRAFTS, "adaptive": None, **(speculative or {})},
    )
    engine = EngineConfig(
        **{
            "max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 4,
            "kv_cache_tokens": 160, **limits,
        }
    )  # fmt: skip
    dtype = jnp.dtype(jnp.float32)
    make_strategy = Speculator(config, drafter).strategy(engine, model, dtype=dtype, mesh=mesh)
    core = EngineCore(model, engine, dtype=dtype, mesh=mesh, make_strategy=make_strategy)
    if controller is not None:
        speculation_of(core).controller = controller
    return core


WAYS = ("loops", "ngram", "draft model", "chains", "trees")
TREES = {"num_speculative_tokens": 12, "tree_depth": NUM_DRAFTS - 1, "tree_top_k": 4}


def engine_of(way: str, model: DecoderLM, **limits: Any) -> EngineCore:
    """An engine that decodes in one of WAYS, with drafts that the model agrees with now and then."""
    if way == "loops":
        return make_engine(model, **limits)
    drafter = {"ngram": None, "draft model": disturbed(model, 0.1)}.get(way, random_head(model.config))
    nodes = TREES["num_speculative_tokens"] if way == "trees" else 0
    return speculating_engine(
        model, drafter, AnyGamma(NUM_DRAFTS, seed=2, num_nodes=nodes),
        speculative=TREES if way == "trees" else None, **limits,
    )  # fmt: skip


SMALL_TREES = {"num_speculative_tokens": 4, "tree_depth": 2, "tree_top_k": 2}


def made_in(way: str, model: DecoderLM, **limits: Any) -> EngineCore:
    """An engine that is "plain", or drafts by "ngram", "draft_model" or "eagle3", in small trees."""
    if way == "plain":
        return make_engine(model, **limits)
    if way == "eagle3":
        head = random_head(model.config, capture=(0,))
        return speculating_engine(model, head, speculative=SMALL_TREES, **limits)
    return speculating_engine(model, disturbed(model, 0.1) if way == "draft_model" else None, **limits)


def speculation_of(core: EngineCore) -> Speculation:
    """The strategy of a speculating engine."""
    assert isinstance(core.strategy, Speculation)
    return core.strategy
