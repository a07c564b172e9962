"""Denoising of sequences whose tokens all see each other: tokens that a round computes, additions to embeddings.

Keys and values are those of the whole sequence as it was when its block began (a refresh), except in a window around
the block, which every round recomputes (dInfer's vicinity cache). A mask's embedding may include the mean embedding of
the tokens that the previous round expected in its place (dInfer's IterSmooth).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.drawing import logits_without
from jaxinfer.diffusion.unmask import UnmaskRule, rule_of
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM

BLOCK_SIZE = 32  # for models that were not trained with a fixed block size
# Rows of distributions over the vocabulary in a block, and most blocks; for more rows, blocks are larger.
_AT_ONCE, _MOST_BLOCKS = 64, 16


@dataclass(frozen=True)
class Smoothing:
    """Addition of expected embeddings to masks; rounds i are counted from 0 through a whole sequence.

    Attributes:
        first, growth, most: the weight of the expected embedding is first + i * growth, and `most` at most.
        decay: a threshold is at least 1 - i * decay.
        warmup_rounds: number of first rounds, which compute the whole sequence.
    """

    first: float
    growth: float
    most: float
    decay: float
    warmup_rounds: int = 0

    def weight(self, number: jax.typing.ArrayLike) -> jax.Array:
        """Weights float32 of expected embeddings in rounds int32."""
        return jnp.minimum(self.first + self.growth * jnp.asarray(number, jnp.float32), self.most)

    def least_threshold(self, number: jax.typing.ArrayLike) -> jax.Array:
        """Lower bounds float32 of thresholds in rounds int32."""
        return 1.0 - self.decay * jnp.asarray(number, jnp.float32)


@dataclass(frozen=True)
class Vicinity:
    """Settings of denoising sequences whose tokens all see each other, of bidirectional models or others.

    Attributes:
        block_size: tokens of a block; the first one starts after the prompt.
        mask_token_id: placeholder of a token that is not known yet; it is never drawn.
        rule: chooses the tokens that a round commits.
        cache: what rounds compute after a block's refresh. "none": the whole sequence; "prefix": everything from the
            block on; "dual": the block.
        prefix_look, after_look: tokens before and after the block that are computed with it.
    """

    block_size: int
    mask_token_id: int
    rule: UnmaskRule
    cache: str = "dual"
    prefix_look: int = 0
    after_look: int = 0
    smoothing: Smoothing | None = None

    @property
    def window(self) -> int:
        """Number of tokens of a block and its vicinity."""
        return self.prefix_look + self.block_size + self.after_look

    @property
    def width(self) -> int:
        """Most tokens of a row that is not a chunk; 1 where every round reaches the sequence's end."""
        return self.window if self.cache == "dual" else 1

    def refreshes(self, number: int) -> bool:
        """Whether later rounds may reuse keys and values of round `number` of a sequence: after the warm-up."""
        return self.cache != "none" and (self.smoothing is None or number >= self.smoothing.warmup_rounds)


def vicinity_of(config: DiffusionConfig, model: ModelConfig) -> Vicinity:
    """Return the settings of denoising a diffusion model's sequences without a mask of blocks.

    Layers have no mask of their own: what a token sees is part of each launch, and the launches of a canvas let it see
    its whole sequence. A bidirectional model was trained so; a block-causal one, with the size of its blocks, may run
    so too.

    Raises:
        ValueError: the configuration asks for token editing.
    """
    assert model.mask_token_id is not None
    if config.edit_threshold is not None:
        raise ValueError(f"edit_threshold is for models that were trained to edit: {model.architecture} was not")
    smoothing = None
    if config.smooths:
        smoothing = Smoothing(
            config.cont_weight_init, config.cont_weight_growth, config.cont_weight, config.threshold_decay,
            config.warmup_steps,
        )  # fmt: skip
    return Vicinity(
        config.block_size or model.block_size or BLOCK_SIZE, model.mask_token_id, rule_of(config),
        "dual" if config.cache == "auto" else config.cache, config.prefix_look, config.after_look, smoothing,
    )  # fmt: skip


def expected_embeddings(model: DecoderLM, hidden: jax.Array, mask_token_id: int) -> jax.Array:
    """Return the mean embeddings float32 [T, hidden] of the tokens that hidden states [T, hidden] predict. The product
    with the table is done in blocks of rows, so that no array is [T, vocab]."""
    table = model.embed.embedding[...]
    size = max(_AT_ONCE, -(-len(hidden) // _MOST_BLOCKS))

    def mean(some: jax.Array) -> jax.Array:
        shares = jax.nn.softmax(logits_without(model, some, mask_token_id)).astype(table.dtype)
        return jnp.einsum("nv,vh->nh", shares, table, preferred_element_type=jnp.float32)

    # Unrolled: a GPU would ask the host about the end of a loop inside the conditional that skips idle rounds.
    return jnp.concatenate([mean(hidden[first : first + size]) for first in range(0, len(hidden), size)])
