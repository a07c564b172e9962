"""Tiny models of tunix, and a tokenizer whose tokens are letters."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np
from flax import nnx

VOCAB, PAD, EOS, BOS = 64, 0, 1, 2
SIZES: dict[str, Any] = {
    "num_layers": 2, "vocab_size": VOCAB, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 8,
    "num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-5,
}  # fmt: skip


class Letters:
    """Token n + 3 is letter n; tokens 0 to 2 are padding, end and beginning."""

    def __init__(self, *, pads_with_end: bool = False, has_bos: bool = True) -> None:
        self._pad, self._bos = EOS if pads_with_end else PAD, BOS if has_bos else 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return [3 + (ord(letter) - 32) % (VOCAB - 3) for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(32 + token - 3) for token in ids if token > 2)

    def bos_id(self) -> int:
        return self._bos

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return self._pad


def tiny_model(family: str, *, ties: bool = False, seed: int = 0) -> nnx.Module:
    """A model of tunix with random weights, all of which matter."""
    module: Any = importlib.import_module(f"tunix.models.{family}.model")
    tie = {"weight_tying" if family == "llama3" else "use_tied_embedding": ties}
    made = getattr(module, {"llama3": "Llama3", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family])(
        module.ModelConfig(**SIZES, **tie), rngs=nnx.Rngs(seed)
    )
    graph, state = nnx.split(made)
    rng = np.random.default_rng(seed)
    wide = jax.tree.map(lambda x: x + 0.15 * rng.standard_normal(x.shape).astype(x.dtype), state)
    return nnx.merge(graph, wide)
