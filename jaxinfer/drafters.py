"""Draft models of targets: which one, whether it fits, and loading it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.checkpoint.directory import EMBEDDED_DRAFT, embedded_checkpoint, find_checkpoint, read_config
from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.config import SpeculativeConfig, check_model_len
from jaxinfer.engine.speculator import Speculator, check_vocabularies


def with_drafter(config: SpeculativeConfig, target: Path) -> SpeculativeConfig:
    """The configuration with a draft model: its own, or the embedded one if `target` is the embedded target.

    Raises:
        ValueError: it names none, and the target is another one.
        FileNotFoundError: there is no such model.
    """
    if config.model is None:
        if target.resolve() != embedded_checkpoint().resolve():
            raise ValueError(
                "method='draft_model' needs model=...: the embedded draft model belongs to the embedded target, not to "
                f"{target}"
            )
        return dataclasses.replace(config, model=embedded_checkpoint(EMBEDDED_DRAFT))
    return dataclasses.replace(config, model=find_checkpoint(config.model))


def check_drafter(target: Path, drafter: str | os.PathLike[str] | None, max_model_len: int) -> None:
    """Raises ValueError, which says what differs, unless the drafter's tokens are the target's, and its positions reach
    as far as requests."""
    assert drafter is not None
    (_, of_target), (_, of_drafter) = read_config(target), read_config(drafter)
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


def load_speculator(config: SpeculativeConfig, *, dtype: jnp.dtype, mesh: Mesh | None) -> Speculator:
    """What speculates as the configuration says; a draft model is loaded.

    Raises:
        FileNotFoundError, CheckpointError, UnsupportedConfigError, ValueError: as for `load_checkpoint`.
    """
    if config.method != "draft_model":
        return Speculator(config)
    assert config.model is not None
    return Speculator(config, load_checkpoint(config.model, dtype=dtype, mesh=mesh)[1])


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
