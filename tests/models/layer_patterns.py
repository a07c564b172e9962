"""Configurations for tests of what differs between layers: short patterns of their types, and a reading both ways."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jaxinfer.checkpoint.export import hf_config
from jaxinfer.models.config import ModelConfig, UnsupportedConfigError

FULL, SLIDING = "full_attention", "sliding_attention"


def types(pattern: str) -> list[str]:
    """The types of layers of a pattern such as "SSF"."""
    return [{"F": FULL, "S": SLIDING}[letter] for letter in pattern]


def pattern_of(config: ModelConfig) -> str:
    """Which layers have a window, such as "SSF"."""
    return "".join("F" if layer.window is None else "S" for layer in config.all_layers)


def read(model_type: str, **fields: Any) -> ModelConfig:
    """The configuration of these fields; what is written for it is read as the same, without layers that draft."""
    config = ModelConfig.from_hf({"model_type": model_type, **fields})
    back = ModelConfig.from_hf(json.loads(json.dumps(hf_config(config))))
    assert back == dataclasses.replace(config, num_nextn_layers=0)
    return config


def refusal(model_type: str, **fields: Any) -> str:
    """The message with which these fields are refused."""
    with pytest.raises(UnsupportedConfigError) as error:
        ModelConfig.from_hf({"model_type": model_type, **fields})
    return str(error.value)
