"""What layers the textbook's caches hold: of one geometry, all of which see everything before a token."""

from __future__ import annotations

from jaxinfer.models.config import ModelConfig


def check_plain_layers(config: ModelConfig) -> None:
    """Raise ValueError, naming it, for what a model's layers have that these caches do not."""
    kinds = config.kinds
    for name, is_there in (
        ("windows", config.has_windows),
        ("heads by layer", len(kinds) > 1),
        ("keys of other layers", len(config.kv_layers) < config.num_layers),
        (f"rope_type={config.rope.rope_type!r}", config.rope.turning_length is not None),
    ):
        if is_there:
            raise ValueError(f"model: {config.architecture} has {name}, which only the engine computes")
