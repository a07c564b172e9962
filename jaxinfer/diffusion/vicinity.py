"""How a bidirectional model's sequence is denoised: what a round computes, and what masks' embeddings say.

Keys and values are those of the whole sequence as it was when its block began (a refresh), but for a window around the
block, which every round computes anew (dInfer's vicinity cache). A mask's embedding may carry what the round before
expected in its place (dInfer's IterSmooth).
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

BLOCK_SIZE = 32  # of models that were not trained with blocks of one size
# Distributions over the vocabulary that exist at once: those of so many tokens, or more if there are more blocks else.
_AT_ONCE, _MOST_BLOCKS = 64, 16


@dataclass(frozen=True)
class Smoothing:
    """What masks' embeddings carry; rounds are counted through a whole sequence, from 0.

    Attributes:
        first, growth, most: the weight of what is expected in round i is first + i * growth, and `most` at most.
        decay: a threshold is at least 1 - i * decay.
        warmup_rounds: these compute the whole sequence.
    """

    first: float
    growth: float
    most: float
    decay: float
    warmup_rounds: int = 0

    def weight(self, number: jax.typing.ArrayLike) -> jax.Array:
        """float32, of rounds int32."""
        return jnp.minimum(self.first + self.growth * jnp.asarray(number, jnp.float32), self.most)

    def least_threshold(self, number: jax.typing.ArrayLike) -> jax.Array:
        """float32, of rounds int32."""
        return 1.0 - self.decay * jnp.asarray(number, jnp.float32)


@dataclass(frozen=True)
class Vicinity:
    """How sequences are denoised.

    Attributes:
        block_size: tokens of a block; the first one begins behind the prompt.
        mask_token_id: what stands where no token is yet; it is never drawn.
        rule: which tokens a round commits.
        cache: "none": rounds compute the whole sequence; "prefix": once a block has its refresh, all from the block on;
            "dual": the block.
        prefix_look, after_look: tokens before and behind the block that are computed with it.
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
        """Tokens of a block and of what is looked at around it."""
        return self.prefix_look + self.block_size + self.after_look

    @property
    def width(self) -> int:
        """The most tokens of a row that is no chunk; 1 where all rounds go as far as the sequence's end."""
        return self.window if self.cache == "dual" else 1

    def refreshes(self, number: int) -> bool:
        """Whether round `number` of a sequence may leave keys and values for others: after the warm-up."""
        return self.cache != "none" and (self.smoothing is None or number >= self.smoothing.warmup_rounds)


def vicinity_of(config: DiffusionConfig, model: ModelConfig) -> Vicinity:
    """How a bidirectional model's sequences are denoised.

    Raises:
        ValueError: the configuration says what such a model cannot do.
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
        config.block_size or BLOCK_SIZE, model.mask_token_id, rule_of(config),
        "dual" if config.cache == "auto" else config.cache, config.prefix_look, config.after_look, smoothing,
    )  # fmt: skip


def expected_embeddings(model: DecoderLM, hidden: jax.Array, mask_token_id: int) -> jax.Array:
    """float32 [T, hidden]: the mean embedding of what may stand where hidden states [T, hidden] are. The product with
    the table is made in blocks of rows, so that no array has all tokens and all words."""
    table = model.embed.embedding[...]
    size = max(_AT_ONCE, -(-len(hidden) // _MOST_BLOCKS))

    def mean(some: jax.Array) -> jax.Array:
        shares = jax.nn.softmax(logits_without(model, some, mask_token_id)).astype(table.dtype)
        return jnp.einsum("nv,vh->nh", shares, table, preferred_element_type=jnp.float32)

    # Written out: for a loop inside the choice whether anybody runs, a GPU would ask the host how to go on.
    return jnp.concatenate([mean(hidden[first : first + size]) for first in range(0, len(hidden), size)])
