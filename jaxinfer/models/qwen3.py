"""Qwen3 dense: the Llama layout with an RMS norm on every head of q and k before the rotation."""

from jaxinfer.models.decoder import DecoderLM


class Qwen3ForCausalLM(DecoderLM):
    """Qwen3 dense: the Llama layout with an RMS norm on every head of q and k before the rotation."""
