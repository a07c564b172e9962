"""Qwen3-MoE: Qwen3's attention, and experts in place of the MLP of most layers."""

from jaxinfer.models.decoder import DecoderLM


class Qwen3MoeForCausalLM(DecoderLM):
    """Qwen3-MoE: Qwen3's attention, and experts in place of the MLP of most layers."""
