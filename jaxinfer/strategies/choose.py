"""Choice between the two diffusion strategies: blocks that see what is before them, or a whole canvas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.diffusion.config import DiffusionConfig
from jaxinfer.diffusion.vicinity import vicinity_of
from jaxinfer.models.config import ModelConfig
from jaxinfer.strategies.bidirectional import BidirectionalDenoiser
from jaxinfer.strategies.block_diffusion import Denoiser, denoising_of
from jaxinfer.strategies.diffusion import DiffusionStrategyMaker


def diffusion_of(
    model: ModelConfig, given: DiffusionConfig | Mapping[str, Any] | None, speculative: Any
) -> DiffusionConfig | None:
    """Return the configuration of a diffusion model; None: it is another kind of model.

    Args:
        speculative: a speculative configuration, or None.

    Raises:
        ValueError: a configuration is given that does not fit the model, or that has invalid values.
    """
    if model.mask_token_id is None:
        if given is not None:
            raise ValueError(f"diffusion_config is given, but {model.architecture} is no diffusion model")
        return None
    if speculative is not None:
        raise ValueError(f"speculative_config is given, but {model.architecture} denoises blocks: nothing is drafted")
    config = DiffusionConfig() if given is None else DiffusionConfig.of(given)
    round_width(config, model)
    return config


def round_width(config: DiffusionConfig, model: ModelConfig) -> int:
    """Return the least number of tokens that a round computes of a sequence.

    Raises:
        ValueError: the configuration is not for this model.
    """
    return vicinity_of(config, model).window if model.is_bidirectional else denoising_of(config, model).block_size


def most_sequences(config: DiffusionConfig, model: ModelConfig, wanted: int, max_num_batched_tokens: int) -> int:
    """Return the most sequences that run at once: a step computes a round of each."""
    return min(wanted, max(1, max_num_batched_tokens // round_width(config, model)))


def denoiser_of(config: DiffusionConfig, model: ModelConfig) -> DiffusionStrategyMaker:
    """Return the maker of a diffusion model's strategy."""
    return BidirectionalDenoiser(config) if model.is_bidirectional else Denoiser(config)
