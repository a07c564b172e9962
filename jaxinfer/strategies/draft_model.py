"""The draft model method: checks that a small model fits its target, loads it, and makes its KV pool."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.checkpoint.directory import read_config, read_config_file
from jaxinfer.checkpoint.incoming import assembled_model
from jaxinfer.checkpoint.load import load_checkpoint, module_around
from jaxinfer.checkpoint.tensor_parallel import for_tensor_parallel
from jaxinfer.config import EngineConfig, check_model_len
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.speculative.draft_model import DRAFT_KV, DraftModel
from jaxinfer.speculative.proposer import Proposer
from jaxinfer.speculative.tails import TailPages
from jaxinfer.strategies.draft_methods import StatePlace
from jaxinfer.strategies.draft_options import SpeculativeConfig


class SmallModel:
    """`DraftModule` of a small model."""

    window: int | None = None
    state = DRAFT_KV

    def check(
        self,
        config: SpeculativeConfig,
        target: Path | None,
        target_config: ModelConfig,
        max_model_len: int,
        **options: Any,
    ) -> ModelConfig:
        """Return the draft model's configuration.

        Raises:
            ValueError: its vocabulary is not the target's, or it has fewer positions than `max_model_len`; the message
                says what differs.
        """
        drafter = config.model
        assert drafter is not None
        _, drafter_config = read_config(drafter, **options)
        check_vocabularies(target_config, drafter_config)
        words, others = None if target is None else _vocabulary(target), _vocabulary(Path(drafter))
        if words is not None and others is not None and words != others:
            token = next(token for token in sorted({*words, *others}) if words.get(token) != others.get(token))
            raise ValueError(
                f"the draft model's tokenizer is not the target's: {token!r} is token {others.get(token)} there and "
                f"{words.get(token)} here (None: no token)"
            )
        try:
            check_model_len(drafter_config, max_model_len)
        except ValueError as error:
            raise ValueError(f"the draft model in {drafter} does not reach so far: {error}") from error
        return drafter_config

    def load(
        self, config: SpeculativeConfig, target_config: ModelConfig, checked: ModelConfig, *, dtype: jnp.dtype,
        mesh: Mesh | None, **options: Any,
    ) -> DecoderLM:  # fmt: skip
        assert config.model is not None
        return load_checkpoint(config.model, dtype=dtype, mesh=mesh, config=checked)[1]

    def assembled(
        self, config: SpeculativeConfig, target_config: ModelConfig, checked: ModelConfig,
        tensors: Iterable[tuple[str, Any]], *, dtype: jnp.dtype, mesh: Mesh | None, **options: Any,
    ) -> Iterator[tuple[str, Any]]:  # fmt: skip
        return assembled_model(tensors, checked, dtype, mesh)

    def plan(self, file: Path, target: ModelConfig, **options: Any) -> ModelConfig:
        drafter = read_config_file(file, **options)
        check_vocabularies(target, drafter)
        return drafter

    def abstract(
        self, planned: ModelConfig, shapes: Callable[[Any], Mapping[str, Any]], devices: int, dtype: jnp.dtype
    ) -> DecoderLM:
        config = for_tensor_parallel(planned, devices)
        return module_around(dataclasses.replace(config, dtype=dtype.name), shapes(config))

    def layers(self, configuration: ModelConfig) -> ModelConfig:
        return configuration

    def proposer(self, config: SpeculativeConfig, drafter: DecoderLM, tails: TailPages | None) -> Proposer:
        return DraftModel(drafter, with_entropy=config.adaptive == "entropy")

    def make_state(self, engine: EngineConfig, drafter: DecoderLM, num_pages: int, place: StatePlace) -> KVPool:
        make = KVPool.shapes if place.is_abstract else KVPool.allocate
        return make(
            drafter.config, num_pages=num_pages, page_size=engine.page_size, dtype=place.dtype, sharding=place.pages
        )


def check_vocabularies(target: ModelConfig, drafter: ModelConfig) -> None:
    """Raise ValueError if the configurations show that a drafter's vocabulary is not the target's."""
    if target.vocab_size != drafter.vocab_size:
        raise ValueError(
            f"the draft model has a vocabulary of {drafter.vocab_size} tokens and the target one of "
            f"{target.vocab_size}: a draft model needs the target's"
        )


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Return token -> id of a directory's tokenizer; None: there is no `tokenizer.json`."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab")
    if vocabulary is None:
        raise ValueError(f"{file} has no model.vocab: whether the draft model's tokens are the target's is unknown")
    if not isinstance(vocabulary, dict):  # a list of (token, score)
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}


METHOD = SmallModel()
