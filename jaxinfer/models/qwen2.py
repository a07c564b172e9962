"""Qwen2 and Qwen2.5: the Llama layout with biases on q, k and v."""

from jaxinfer.models.decoder import DecoderLM


class Qwen2ForCausalLM(DecoderLM):
    """Qwen2 and Qwen2.5: the Llama layout with biases on q, k and v."""
