"""The n-gram method: it drafts without a model, from the tokens of each sequence on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.speculative.ngram import HISTORY, NgramProposer, history_of
from jaxinfer.speculative.proposer import Proposer
from jaxinfer.speculative.tails import TailPages
from jaxinfer.strategies.draft_methods import StatePlace
from jaxinfer.strategies.draft_options import SpeculativeConfig


class Ngrams:
    """`DraftModule` of n-grams."""

    window: int | None = None
    state = HISTORY

    def check(
        self, config: SpeculativeConfig, target: Path, target_config: ModelConfig, max_model_len: int, **options: Any
    ) -> None:
        return None

    def load(
        self, config: SpeculativeConfig, target_config: ModelConfig, checked: Any, *, dtype: jnp.dtype,
        mesh: Mesh | None, **options: Any,
    ) -> None:  # fmt: skip
        return None

    def assembled(
        self, config: SpeculativeConfig, target_config: ModelConfig, checked: Any, tensors: Iterable[tuple[str, Any]],
        *, dtype: jnp.dtype, mesh: Mesh | None, **options: Any,
    ) -> Iterator[tuple[str, Any]]:  # fmt: skip
        return iter(())

    def plan(self, file: Path, target: ModelConfig, **options: Any) -> None:
        return None

    def abstract(
        self, planned: Any, shapes: Callable[[Any], Mapping[str, Any]], devices: int, dtype: jnp.dtype
    ) -> None:
        return None

    def layers(self, configuration: Any) -> None:
        return None

    def proposer(self, config: SpeculativeConfig, drafter: Any, tails: TailPages | None) -> Proposer:
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)

    def make_state(self, engine: EngineConfig, drafter: Any, num_pages: int, place: StatePlace) -> Any:
        return history_of(engine.max_num_seqs, engine.max_model_len, place.seats, abstract=place.is_abstract)


METHOD = Ngrams()
