"""The EAGLE-3 method: loads a head of the target, and makes its proposer and its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.checkpoint.directory import read_json
from jaxinfer.checkpoint.eagle3 import assembled_head, load_head
from jaxinfer.checkpoint.layout import head_layout
from jaxinfer.checkpoint.load import around
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel
from jaxinfer.config import EngineConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3 import Eagle3Head
from jaxinfer.models.eagle3_config import Eagle3Config
from jaxinfer.speculative.eagle3 import EAGLE3_STATE, Eagle3, eagle3_state
from jaxinfer.speculative.proposer import Proposer
from jaxinfer.speculative.tails import TailPages
from jaxinfer.strategies.draft_methods import StatePlace
from jaxinfer.strategies.draft_options import SpeculativeConfig


class Head:
    """`DraftModule` of an EAGLE-3 head."""

    window: int | None = 128
    state = EAGLE3_STATE

    def check(
        self,
        config: SpeculativeConfig,
        target: Path | None,
        target_config: ModelConfig,
        max_model_len: int,
        **options: Any,
    ) -> None:
        """Check nothing: the head's configuration describes its target, and `load` compares the two."""

    def load(
        self, config: SpeculativeConfig, target_config: ModelConfig, checked: None, *, dtype: jnp.dtype,
        mesh: Mesh | None, **options: Any,
    ) -> Eagle3Head:  # fmt: skip
        assert config.model is not None
        return load_head(config.model, target_config, dtype=dtype, mesh=mesh, **options)

    def assembled(
        self, config: SpeculativeConfig, target_config: ModelConfig, checked: None, tensors: Iterable[tuple[str, Any]],
        *, dtype: jnp.dtype, mesh: Mesh | None, **options: Any,
    ) -> Iterator[tuple[str, Any]]:  # fmt: skip
        assert config.model is not None
        return assembled_head(tensors, config.model, target_config, dtype=dtype, mesh=mesh, **options)

    def plan(self, file: Path, target: ModelConfig, **options: Any) -> Eagle3Config:
        return Eagle3Config.from_hf(read_json(file), target, **options)

    def abstract(
        self, planned: Eagle3Config, shapes: Callable[[Any], Mapping[str, Any]], devices: int, dtype: jnp.dtype
    ) -> Eagle3Head:
        layer = dataclasses.replace(for_tensor_parallel(planned.layer, devices), dtype=dtype.name)
        config = dataclasses.replace(planned, layer=layer)
        abstract = nnx.eval_shape(lambda: Eagle3Head(config, dtype=dtype, rngs=nnx.Rngs(0)))
        return around(abstract, shapes(head_layout(config)))

    def layers(self, configuration: Eagle3Config) -> ModelConfig:
        return configuration.layer

    def proposer(self, config: SpeculativeConfig, drafter: Eagle3Head, tails: TailPages | None) -> Proposer:
        assert config.tree_depth is not None and config.tree_top_k is not None
        return Eagle3(
            drafter, tails, depth=config.tree_depth, top_k=config.tree_top_k,
            with_entropy=config.adaptive == "entropy",
        )  # fmt: skip

    def make_state(self, engine: EngineConfig, drafter: Eagle3Head, num_pages: int, place: StatePlace) -> Any:
        make = KVPool.shapes if place.is_abstract else KVPool.allocate
        kv = make(
            drafter.config.layer, num_pages=num_pages, page_size=engine.page_size, dtype=place.dtype,
            sharding=place.pages,
        )  # fmt: skip
        return eagle3_state(kv, drafter.config, engine.max_num_seqs, place.seats)


METHOD = Head()
