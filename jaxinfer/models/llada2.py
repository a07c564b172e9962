"""LLaDA2: the layers of Ling 2.0 over blocks of tokens that see each other, a block-diffusion model."""

from jaxinfer.models.decoder import DecoderLM


class LLaDA2MoeModelLM(DecoderLM):
    """LLaDA2: the layers of Ling 2.0 over blocks of tokens that see each other, a block-diffusion model."""
