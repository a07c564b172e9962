"""One recorded fixture as data, and the sizes, layer types and rotations that most fixtures share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_parity.routers import Routing

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 9  # shorter than most prompts, so that it acts

# Heads are not as wide as hidden_size / num_attention_heads, and the vocabulary is a multiple of nothing.
SMALL: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 40, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def default_rope(theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """Rotary parameters without scaling."""
    return {"rope_type": "default", "rope_theta": theta, **more}


@dataclass(frozen=True)
class Case:
    """How to make one fixture.

    Attributes:
        model_type: as transformers names it.
        fields: of the configuration; of a wrapper, with those of the text model in `text_config`.
        routing: how routers choose; None without experts.
        max_shard_size: such as "60KB"; None for a single file.
        old_format: write `config.json` in the words of transformers before version 5.
        unused: name -> shape of tensors that published checkpoints have besides and that nothing reads.
        is_mxfp4: store the experts as MXFP4 blocks and scales.
    """

    model_type: str
    fields: dict[str, Any]
    routing: Routing | None = None
    max_shard_size: str | None = None
    old_format: bool = False
    unused: dict[str, tuple[int, ...]] = field(default_factory=dict)
    is_mxfp4: bool = False

    @property
    def vocab_size(self) -> int:
        return self.fields.get("text_config", self.fields)["vocab_size"]
