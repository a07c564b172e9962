"""Draft models and heads of targets: which one, whether it fits, and loading it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Unpack

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.checkpoint.directory import (
    EMBEDDED_DRAFT,
    EMBEDDED_EAGLE3,
    embedded_checkpoint,
    find_checkpoint,
    read_config,
)
from jaxinfer.checkpoint.eagle3 import load_head
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.config import SpeculativeConfig, check_model_len
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.unknown_fields import ConfigOptions
from jaxinfer.strategies.speculator import Speculator, check_vocabularies

_EMBEDDED = {"draft_model": ("draft model", EMBEDDED_DRAFT), "eagle3": ("head", EMBEDDED_EAGLE3)}


def with_drafter(config: SpeculativeConfig, target: Path) -> SpeculativeConfig:
    """The configuration with a draft model or head: its own, or the embedded one if `target` is the embedded target.

    Raises:
        ValueError: it names none, and the target is another one.
        FileNotFoundError: there is no such model.
    """
    if config.method == "ngram":
        return config
    if config.model is None:
        what, embedded = _EMBEDDED[config.method]
        if target.resolve() != embedded_checkpoint().resolve():
            raise ValueError(
                f"method={config.method!r} needs model=...: the embedded {what} belongs to the embedded target, not to "
                f"{target}"
            )
        return dataclasses.replace(config, model=embedded_checkpoint(embedded))
    return dataclasses.replace(config, model=find_checkpoint(config.model))


def check_drafter(
    config: SpeculativeConfig,
    target: Path,
    of_target: ModelConfig,
    max_model_len: int,
    **options: Unpack[ConfigOptions],
) -> ModelConfig | None:
    """Return a draft model's configuration, once it is known to fit; None for other methods.

    Of a head, its configuration says whose it is: `load_head` compares.

    Args:
        of_target: the configuration in `target`.
        options: as for `read_config`.

    Raises:
        ValueError: the draft model lacks the target's tokens, or its positions as far as requests reach; says what
            differs.
    """
    if config.method != "draft_model":
        return None
    drafter = config.model
    assert drafter is not None
    _, of_drafter = read_config(drafter, **options)
    check_vocabularies(of_target, of_drafter)
    words, others = _vocabulary(target), _vocabulary(Path(drafter))
    if words is not None and others is not None and words != others:
        token = next(token for token in sorted({*words, *others}) if words.get(token) != others.get(token))
        raise ValueError(
            f"the draft model's tokenizer is not the target's: {token!r} is token {others.get(token)} there and "
            f"{words.get(token)} here (None: no token)"
        )
    try:
        check_model_len(of_drafter, max_model_len)
    except ValueError as error:
        raise ValueError(f"the draft model in {drafter} does not reach so far: {error}") from error
    return of_drafter


def load_speculator(
    config: SpeculativeConfig,
    target: ModelConfig,
    drafter: ModelConfig | None,
    *,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    **options: Unpack[ConfigOptions],
) -> Speculator:
    """What speculates as the configuration says; a draft model or a head is loaded.

    Args:
        drafter: the draft model's configuration, as `check_drafter` has returned it.
        options: as for `load_head`.

    Raises:
        FileNotFoundError, CheckpointError, UnsupportedConfigError, ValueError: as for `load_checkpoint`, `load_head`.
    """
    if config.model is None:
        return Speculator(config)
    if config.method == "eagle3":
        return Speculator(config, load_head(config.model, target, dtype=dtype, mesh=mesh, **options))
    return Speculator(config, load_checkpoint(config.model, dtype=dtype, mesh=mesh, config=drafter)[1])


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Token -> id of a directory's tokenizer; None: it has no tokenizer file that says so."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # a list of (token, score)
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}
