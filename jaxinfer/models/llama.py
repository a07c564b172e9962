"""Llama 2 and 3.x: grouped-query attention, optional biases, linear, llama3 or yarn rotary scaling."""

from jaxinfer.models.decoder import DecoderLM


class LlamaForCausalLM(DecoderLM):
    """Llama 2 and 3.x: grouped-query attention, optional biases, linear, llama3 or yarn rotary scaling."""
