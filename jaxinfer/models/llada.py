"""LLaDA, dense and as a mixture of experts: diffusion models all of whose tokens see each other."""

from jaxinfer.models.decoder import DecoderLM


class LLaDAModelLM(DecoderLM):
    """LLaDA: Llama's layers over tokens that all see each other."""


class LLaDAMoEModelLM(DecoderLM):
    """LLaDA-MoE: heads with norms, and experts that a softmax scores, over tokens that all see each other."""
