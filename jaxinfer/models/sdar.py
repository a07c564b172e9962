"""SDAR: Qwen3's layers over blocks of tokens that see each other, a block-diffusion model."""

from jaxinfer.models.decoder import DecoderLM


class SDARForCausalLM(DecoderLM):
    """SDAR: Qwen3's layers over blocks of tokens that see each other, a block-diffusion model."""
