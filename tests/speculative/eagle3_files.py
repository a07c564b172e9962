"""Targets and EAGLE-3 heads of numpy, written as files and loaded as the engine loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from jaxinfer.checkpoint import load_checkpoint, load_head
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.models.eagle3 import Eagle3Head


def load_target_and_head(
    folder: Path, checkpoints: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> tuple[DecoderLM, Eagle3Head]:
    """Return a target and its head in float32, given the configuration and the tensors of each."""
    for name, (config, tensors) in zip(("target", "head"), checkpoints, strict=True):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(dict(tensors), folder / name / "model.safetensors")
    config, model = load_checkpoint(folder / "target", dtype="float32")
    return model, load_head(folder / "head", config, dtype="float32")
